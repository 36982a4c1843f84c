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

from telescope.config.model_facts import read_model_facts
from telescope.config.models import EMBEDDED, ModelBroken
from telescope.config.sections import ClusterSettings
from telescope.orchestrator.peers import Peers
from telescope.records import ModelFacts
from telescope.wire.messages import Hello


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED / "tiny", tmp_path / "there", copy_function=shutil.copyfile))


@pytest.fixture
def other(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.with_name("here"), copy_function=shutil.copyfile))


@pytest.fixture
def peers() -> Peers:
    return Peers.from_config(ClusterSettings(inference_num_workers=2, trainer_num_workers=1, env_num_workers=1))


def hello(name: str, folder: Path, incarnation: str = "first") -> Hello:
    role: Any = name.rpartition("-")[0]
    facts = read_model_facts("mine", folder, weights=role != "worker")
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


def rename_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


FAULTS = [
    ("end tokens", change("generation_config.json", eos_token_id=[1, 2]), ("1, 2", "1")),
    ("dtype", change("config.json", dtype="bfloat16"), ("bfloat16", "float32")),
    ("generation defaults", change("generation_config.json", temperature=0.6), ('"temperature": 0.6', '{"')),
    ("chat template", append("chat_template.jinja", " "), ("digest ", "digest ")),
    ("tokenizer", append("tokenizer.json", "\n"), ("digest ", "digest ")),
    ("tokenizer", change("tokenizer_config.json", add_bos_token=True), ("digest ", "digest ")),
    ("chat template", change("tokenizer_config.json", chat_template="{{ messages }}"), ("digest ", "digest ")),
    ("model code", append("modeling_mine.py", "x = 1\n"), ("digest ", "digest ")),
    ("config.json", append("config.json", "\n"), ("digest ", "digest ")),
    ("model.safetensors", change_one_tensor, (" bytes, digest ", " bytes, digest ")),
    ("weight files", rename_the_weights, ("weights.safetensors", "model.safetensors")),
]


@pytest.mark.parametrize(("fact", "plant", "values"), FAULTS, ids=[f"{at} {fault[0]}" for at, fault in enumerate(FAULTS)])
def test_a_fault_in_a_fact_is_refused_at_the_join_by_process_fact_both_values_and_remedy(
    peers: Peers, folder: Path, other: Path, fact: str, plant: Callable[[Path], None], values: tuple[str, str]
) -> None:
    plant(other)
    assert peers.admit("trainer-0", hello("trainer-0", folder)) == ""
    refusal = peers.admit("server-1", hello("server-1", other))
    begin = f"server-1 is refused, because it has read another model.name=mine than trainer-0: {fact} is "
    assert refusal.startswith(begin)
    assert refusal.removeprefix(begin).index(values[0]) < refusal.removeprefix(begin).rindex(values[1])
    for part in (*values, f"in {other} on host-of-server-1", f"in {folder} on host-of-trainer-0", "put the same files there"):
        assert part in refusal


def test_every_fact_has_its_fault(folder: Path) -> None:
    assert set(read_model_facts("mine", folder, weights=True).facts) == {fact for fact, *_ in FAULTS}


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
    seen = {read_model_facts("mine", folder, weights=True).facts["model.safetensors"]}
    for name in sorted(tensors):
        changed = tensors | {name: (tensors[name] * np.float32(1.5) + np.float32(0.25)).astype(tensors[name].dtype)}
        save_file(changed, folder / "model.safetensors")
        seen.add(read_model_facts("mine", folder, weights=True).facts["model.safetensors"])
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
        read_model_facts("mine", folder, weights=False)
