"""Processes that have read different facts of the model's folder do not train together: the later one is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from telescope.config import model_facts
from telescope.config.model_facts import read_model_facts
from telescope.config.models import EMBEDDED, ModelBroken
from telescope.config.sections import ClusterSettings, ModelSettings
from telescope.orchestrator.peers import Peers
from telescope.records import ModelFacts
from telescope.wire.messages import Hello

MINE = ModelSettings(name="mine")
TRUSTED = ModelSettings(name="mine", trust_remote_code=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED / "tiny", tmp_path / "there", copy_function=shutil.copyfile))


@pytest.fixture
def other(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.with_name("here"), copy_function=shutil.copyfile))


@pytest.fixture
def peers() -> Peers:
    return Peers.from_config(ClusterSettings(inference_num_workers=2, trainer_num_workers=1, env_num_workers=1))


def hello(name: str, folder: Path, incarnation: str = "first", model: ModelSettings = MINE) -> Hello:
    role: Any = name.rpartition("-")[0]
    facts = read_model_facts(model, folder, weights=role != "worker")
    return Hello(
        role=role,
        name=name,
        run="r",
        attempt="a",
        incarnation=incarnation,
        config_hash="h",
        capacity=1,
        pid=1,
        host=f"host-of-{name}",
        model=facts,
    )


def change(file: str, **values: object) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return plant


def append(file: str, text: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        with (folder / file).open("a") as stream:
            stream.write(text)

    return plant


def change_one_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[0]
    changed = (tensors[name] * np.float32(1.5) + np.float32(0.25)).astype(tensors[name].dtype)
    save_file(tensors | {name: changed}, folder / "model.safetensors")


def move_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    change("tokenizer_config.json", chat_template="{{ messages }}")(folder)


def rename_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


FAULTS = [
    ("end tokens", change("generation_config.json", eos_token_id=[1, 2]), ("1, 2", "1")),
    ("dtype", change("config.json", dtype="bfloat16"), ("bfloat16", "float32")),
    ("generation defaults", change("generation_config.json", temperature=0.6), ('"temperature": 0.6', '{"')),
    ("chat template", append("chat_template.jinja", " "), ("digest ", "digest ")),
    ("chat template", move_the_template, ("tokenizer_config.json digest ", "chat_template.jinja digest ")),
    ("tokenizer", change("tokenizer.json", version="2.0"), ("tokenizer.json digest ", "tokenizer.json digest ")),
    ("tokenizer", append("added_tokens.json", "{}"), ("added_tokens.json digest ", "tokenizer.json digest ")),
    ("tokenizer_config.json", change("tokenizer_config.json", padding_side="right"), ('side: "right"', 'side: "left"')),
    ("config.json", change("config.json", hidden_act="gelu"), ('hidden_act: "gelu"', 'hidden_act: "silu"')),
    ("config.json", change("config.json", layer_types=["full_attention"] * 9), ("layer_types: digest ", "layer_types: [")),
    ("model code", append("modeling_mine.py", "x = 1\n"), ("modeling_mine.py digest ", "none")),
    ("model.safetensors", change_one_tensor, (" bytes, digest ", " bytes, digest ")),
    ("weight files", rename_the_weights, ("weights.safetensors", "model.safetensors")),
]


@pytest.mark.parametrize(("fact", "plant", "values"), FAULTS, ids=[f"{at} {fault[0]}" for at, fault in enumerate(FAULTS)])
def test_a_fault_in_a_fact_is_refused_at_the_join_by_process_fact_both_values_and_remedy(
    peers: Peers, folder: Path, other: Path, fact: str, plant: Callable[[Path], None], values: tuple[str, str]
) -> None:
    for place in (folder, other) if fact == "model code" else ():
        change("config.json", auto_map={"AutoConfig": "modeling_mine.Config"})(place)
    plant(other)
    assert peers.admit("trainer-0", hello("trainer-0", folder, model=TRUSTED)) == ""
    refusal = peers.admit("server-1", hello("server-1", other, model=TRUSTED))
    begin = f"server-1 is refused, because it has read another model.name=mine than trainer-0: {fact} is "
    assert refusal.startswith(begin)
    assert refusal.removeprefix(begin).index(values[0]) < refusal.removeprefix(begin).rindex(values[1])
    for part in (*values, f"in {other} on host-of-server-1", f"in {folder} on host-of-trainer-0", "put the same files there"):
        assert part in refusal


def test_every_fact_has_its_fault(folder: Path) -> None:
    assert set(read_model_facts(MINE, folder, weights=True).facts) == {fact for fact, *_ in FAULTS}


HARMLESS = [
    change("config.json", transformers_version="1.2.3", _name_or_path="/elsewhere"),
    change("config.json", text_config={}, vision_config={"transformers_version": "1.2.3"}),
    append("config.json", "\n"),
    append("tokenizer.json", "\n"),
    append("generation_config.json", "\n"),
    change("tokenizer_config.json", name_or_path="/elsewhere", is_local=True, backend="tokenizers"),
    change("tokenizer_config.json", chat_template="{{ not in force }}"),
    append("convert.py", "x = 1\n"),
    append("mine.tiktoken", "abc"),
    append("vocab.txt", "abc"),
]


@pytest.mark.parametrize("plant", HARMLESS, ids=range(len(HARMLESS)))
@pytest.mark.parametrize("model", [MINE, TRUSTED], ids=["mine", "trusted"])
def test_what_makes_no_other_model_ends_no_run(
    peers: Peers, folder: Path, other: Path, plant: Callable[[Path], None], model: ModelSettings
) -> None:
    for place in (folder, other):
        change("config.json", text_config={}, vision_config={})(place)
    plant(other)
    assert peers.admit("trainer-0", hello("trainer-0", folder, model=model)) == ""
    assert peers.admit("server-1", hello("server-1", other, model=model)) == ""


def test_the_folders_template_counts_for_nothing_beside_that_of_the_settings(folder: Path, other: Path) -> None:
    append("chat_template.jinja", " ")(other)
    own = ModelSettings(name="mine", chat_template="{{ messages }}")
    one, two = (read_model_facts(own, place, weights=False).facts for place in (folder, other))
    assert one == two
    assert one["chat template"] == "model.chat_template"


def test_code_that_nobody_may_run_does_not_count(folder: Path) -> None:
    append("modeling_mine.py", "x = 1\n")(folder)
    change("config.json", auto_map={"AutoConfig": "modeling_mine.Config"})(folder)
    assert read_model_facts(MINE, folder, weights=False).facts["model code"] == "none"
    assert read_model_facts(TRUSTED, folder, weights=False).facts["model code"].startswith("modeling_mine.py digest ")


def test_a_tokenizer_without_tokenizer_json_is_told_by_its_other_files(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    append("mine.tiktoken", "abc")(folder)
    assert read_model_facts(MINE, folder, weights=False).facts["tokenizer"].startswith("mine.tiktoken digest ")


def test_pickled_weights_are_compared_by_name_and_size(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1234)
    (folder / "training_args.bin").write_bytes(b"x")
    facts = read_model_facts(MINE, folder, weights=True).facts
    assert (facts["weight files"], facts["pytorch_model.bin"]) == ("pytorch_model.bin", "1,234 bytes")


def test_of_many_tensors_a_bounded_number_is_read_the_first_and_the_last_among_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    spread = model_facts._spread

    def note(places: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
        found = spread(places, most)
        read.append(len(found))
        assert found[0] == places[0]
        assert found[-1] == places[-1]
        return found

    monkeypatch.setattr(model_facts, "_spread", note)
    tensors = {f"expert.{at:04}": np.full(2, at, dtype=np.float32) for at in range(500)}
    save_file(tensors, folder / "model.safetensors")
    read_model_facts(MINE, folder, weights=True)
    (folder / "model.safetensors").unlink()
    for at in range(100):
        save_file(tensors, folder / f"model-{at:03}.safetensors")
    read_model_facts(MINE, folder, weights=True)
    assert read == [64] + [10] * 100


def test_a_copy_of_the_same_files_is_the_same_model(peers: Peers, folder: Path, other: Path) -> None:
    for name, place in (("worker-0", folder), ("server-0", other), ("server-1", folder), ("trainer-0", other)):
        assert peers.admit(name, hello(name, place)) == ""


def test_a_worker_tells_of_no_weights_and_is_compared_by_what_it_reads(peers: Peers, folder: Path, other: Path) -> None:
    change_one_tensor(other)
    assert peers.admit("server-0", hello("server-0", folder)) == ""
    assert peers.admit("worker-0", hello("worker-0", other)) == ""
    append("chat_template.jinja", " ")(other)
    assert "worker-0 is refused" in peers.admit("worker-0", hello("worker-0", other))


def test_what_the_first_of_all_did_not_read_is_compared_among_those_that_did(peers: Peers, folder: Path, other: Path) -> None:
    change_one_tensor(other)
    assert peers.admit("worker-0", hello("worker-0", folder)) == ""
    assert peers.admit("server-0", hello("server-0", folder)) == ""
    assert "than server-0: model.safetensors is " in peers.admit("trainer-0", hello("trainer-0", other))


def test_a_server_that_is_started_again_on_other_weights_is_refused(peers: Peers, folder: Path) -> None:
    """With adapters, whose base no update replaces, it would sample from another model."""
    assert peers.admit("server-0", hello("server-0", folder)) == ""
    peers.lose("server-0")
    change_one_tensor(folder)
    assert "model.safetensors is " in peers.admit("server-0", hello("server-0", folder, "second"))


def test_each_tensor_counts(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    seen = {read_model_facts(MINE, folder, weights=True).facts["model.safetensors"]}
    for name in sorted(tensors):
        changed = tensors | {name: (tensors[name] * np.float32(1.5) + np.float32(0.25)).astype(tensors[name].dtype)}
        save_file(changed, folder / "model.safetensors")
        seen.add(read_model_facts(MINE, folder, weights=True).facts["model.safetensors"])
    assert len(seen) == 1 + len(tensors)


def test_long_values_are_shown_where_they_part(peers: Peers, folder: Path) -> None:
    files = [f"model-{at:05}-of-00200.safetensors" for at in range(200)]

    def tell(name: str, last: str) -> Hello:
        facts = ModelFacts("mine", str(folder), {"weight files": ", ".join([*files, last])})
        return msgspec.structs.replace(hello(name, folder), model=facts)

    assert peers.admit("server-0", tell("server-0", "one")) == ""
    refusal = peers.admit("server-1", tell("server-1", "two"))
    assert "00000-of-00200" not in refusal
    assert "weight files is …" in refusal
    assert "of-00200.safetensors, two in " in refusal
    assert "of-00200.safetensors, one in " in refusal


def test_a_folder_that_can_not_be_read_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelBroken, match=r"model\.name=mine: .*config\.json can't be read as JSON"):
        read_model_facts(MINE, folder, weights=False)
