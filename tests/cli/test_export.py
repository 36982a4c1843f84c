"""What `telescope export` writes is the model that was trained: transformers gives the trainer's own log-probs."""

from __future__ import annotations

import hashlib
import json
import queue
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Saved
from telescope.backends.fsdp import FSDP
from telescope.backends.fsdp.backend import FSDPBackend
from telescope.cli import export
from telescope.config.run import RunConfig, dump_run, load_run
from telescope.config.sections import EnvironmentEntry, LoraSettings, ModelSettings
from telescope.orchestrator.saved_state import read_state
from telescope.runlog import checkpoints
from telescope.runlog.layout import RunDirectory
from tests.backends.models import random_model
from tests.backends.shards import make_job, make_shard
from tests.cli.doctored import gap
from tests.config.older import as_an_earlier_version_wrote

SHARD = make_shard(3, seed=3)
EARLIER = Path(__file__).parent / "earlier" / "run_with_adapters.tar.gz"
"""Of a run that Telescope 0.1 made: its settings, and a checkpoint whose orchestrator part has format 1."""


class Trained:
    """A run directory with checkpoints of the steps 1 and 2, and the log-probs of step 2's weights."""

    def __init__(self, folder: Path, model: ModelSettings) -> None:
        fsdp = FSDP(mixed_precision_dtype=None, gradient_checkpointing=False)
        backend = FSDPBackend(fsdp, replace(make_job(learning_rate=1e-2), model=model))
        self.run = RunDirectory.create(folder)
        config = RunConfig(
            environments={"countdown": EnvironmentEntry(name="countdown")}, algorithm=GRPO(), backend=fsdp, model=model
        )
        self.run.config_json.write_text(dump_run(config))
        for step in (1, 2):
            backend.train_step(make_shard(step, seed=step))
            partial = checkpoints.begin(self.run.checkpoints, step, "a")
            outcomes: queue.Queue[object] = queue.Queue()
            backend.save(step, checkpoints.trainer_part(partial), outcomes.put)
            assert isinstance(outcomes.get(timeout=100), Saved)
            checkpoints.finish(partial, checkpoints.Complete(1, step, step, "r", "a", "h", 1, True, 0, 0.0, checkpoints.now()))
        self.logprobs = backend.logprobs(SHARD)
        self.weights = {name: tensor.clone() for name, tensor in backend.weights()}
        backend.close()

    def export(self, *arguments: str) -> int:
        return export.main([*arguments, "--run-dir", str(self.run.path)])


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("full") / "run", ModelSettings(name="tiny", chat_template="{{ messages }}"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("lora") / "run", ModelSettings(name="tiny", lora=LoraSettings(rank=4, alpha=16)))


def logprobs(model) -> np.ndarray:
    """[T] by transformers alone, NaN where nothing was sampled."""
    found, end = np.full(len(SHARD.ids), np.nan, np.float32), 0
    for item in SHARD.items:
        start, end = end, end + item.length
        ids = torch.from_numpy(SHARD.ids[start:end].astype(np.int64))
        with torch.no_grad():
            logp = model(ids[None]).logits[0].float().log_softmax(-1)[:-1]
        found[start + 1 : end] = logp.gather(1, ids[1:, None]).squeeze(1).numpy()
    return np.where(SHARD.mask == 1, found, np.nan)


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def test_transformers_loads_what_was_trained_and_gives_the_same_log_probs(full, tmp_path, capsys):
    assert full.export("2", "--to", str(tmp_path / "out")) == 0
    assert capsys.readouterr().out.startswith("step 2: 0.9 MB in ")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_allclose(logprobs(model), full.logprobs, atol=1e-5)
    modes = {(tmp_path / "out" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1, "who may read the configuration may read the weights"
    held = on_disk(tmp_path / "out")
    assert all(torch.equal(held[name], full.weights[name]) for name in held)
    assert held.keys() == full.weights.keys(), "tied weights are there once"
    assert (
        model.generation_config.eos_token_id
        == AutoModelForCausalLM.from_pretrained(export.model_folder("tiny")).generation_config.eos_token_id
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer("12 + 3").input_ids == AutoTokenizer.from_pretrained(export.model_folder("tiny"))("12 + 3").input_ids


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_vllm_serves_what_was_trained_with_the_same_log_probs(full, tmp_path):
    """The doctor compares vLLM with the trainer's model, both of the exported folder; that this is the trained one is tested
    above."""
    assert full.export("2", "--to", str(tmp_path / "out")) == 0
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "out" / "chat_template.jinja").write_text(template)
    assert gap(tmp_path / "out", timeout_s=380) < 1e-4


def test_bfloat16_in_shards_and_in_one_file(full, tmp_path):
    assert full.export("latest", "--to", str(tmp_path / "many"), "--dtype", "bfloat16", "--shard-gb", "0.0001") == 0
    assert full.export("latest", "--to", str(tmp_path / "one"), "--dtype", "bfloat16", "--single-file") == 0
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert [file.name for file in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    many, one = on_disk(tmp_path / "many"), on_disk(tmp_path / "one")
    assert many.keys() == one.keys() == full.weights.keys()
    for name, tensor in full.weights.items():
        assert torch.equal(many[name], tensor.bfloat16())
        assert torch.equal(one[name], many[name])
    assert json.loads((tmp_path / "one" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_run_that_lacks_a_setting_of_today_is_exported(full, tmp_path):
    """Whoever brings Telescope up to date still gets at what was trained before."""
    run = RunDirectory.create(tmp_path / "run")
    settings = as_an_earlier_version_wrote(load_run(full.run.config_json), "backend.checkpointed_layers")
    run.config_json.write_text(settings)
    arguments = ["2", "--run-dir", str(run.path), "--checkpoints", str(full.run.checkpoints), "--to", str(tmp_path / "model")]
    assert export.main(arguments) == 0
    assert on_disk(tmp_path / "model").keys() == full.weights.keys()


def test_a_checkpoint_that_an_earlier_version_wrote_is_exported_to_the_bit_and_not_gone_on_from(tmp_path):
    with tarfile.open(EARLIER) as packed:
        packed.extractall(tmp_path / "run", filter="data")
    run, model = RunDirectory(tmp_path / "run"), tmp_path / "model"
    assert export.main(["latest", "--run-dir", str(run.path), "--to", str(model)]) == 0
    assert hashlib.sha256((model / "adapter_model.safetensors").read_bytes()).hexdigest()[:16] == "26afa1aaa64965cc"
    with pytest.raises(checkpoints.CheckpointUnreadable, match="has format 1, and this Telescope reads 5"):
        read_state(checkpoints.find(run.checkpoints))


def test_all_steps_get_a_folder_each(full, tmp_path, capsys):
    assert full.export("all", "--to", str(tmp_path)) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
    assert len(capsys.readouterr().out.splitlines()) == 2
    first, second = on_disk(tmp_path / "step_00000001"), on_disk(tmp_path / "step_00000002")
    assert not any(torch.equal(first[name], second[name]) for name in ("model.embed_tokens.weight", "model.norm.weight"))


def test_adapters_merged_are_the_model_that_was_trained(adapters, tmp_path):
    assert adapters.export("2", "--to", str(tmp_path / "out"), "--merge") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_allclose(logprobs(model), adapters.logprobs, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(export.model_folder("tiny")).eval()
    assert np.nanmax(np.abs(logprobs(base) - adapters.logprobs)) > 1e-2


def test_adapters_merged_in_float32_are_not_rounded_to_the_models_own_precision(tmp_path):
    """Of a model in bfloat16: W + 16 / 4 B A to the last bit of float32, and in bfloat16 that, rounded once."""
    model = ModelSettings(name="tiny", dtype="bfloat16", lora=LoraSettings(rank=4, alpha=16))
    trained = Trained(tmp_path / "run", model)
    assert trained.export("2", "--to", str(tmp_path / "wide"), "--merge", "--dtype", "float32") == 0
    assert trained.export("2", "--to", str(tmp_path / "held"), "--merge") == 0
    wide, held = on_disk(tmp_path / "wide"), on_disk(tmp_path / "held")
    base = AutoModelForCausalLM.from_pretrained(export.model_folder("tiny"), dtype=torch.bfloat16).state_dict()
    name = "model.layers.0.mlp.down_proj"
    a, b = (trained.weights[f"base_model.model.{name}.lora_{which}.weight"].float() for which in "AB")
    expected = base[f"{name}.weight"].float() + 16 / 4 * (b @ a)
    assert torch.equal(wide[f"{name}.weight"], expected)
    assert torch.equal(held[f"{name}.weight"], expected.bfloat16())
    assert not torch.equal(expected, expected.bfloat16().float())


def test_a_checkpoint_with_a_flipped_bit_is_not_exported(full, tmp_path, capsys):
    shutil.copytree(full.run.path, tmp_path / "run")
    (file,) = (tmp_path / "run" / "checkpoints" / "step_00000002" / "trainer").glob("*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-1000] ^= 1
    file.write_bytes(damaged)
    assert export.main(["2", "--run-dir", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 1
    assert f"{file} is damaged: its bytes are not those that were written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_adapters_alone_are_those_that_peft_loads(adapters, tmp_path):
    from peft import PeftModel

    assert adapters.export("2", "--to", str(tmp_path / "out")) == 0
    held = on_disk(tmp_path / "out")
    assert held.keys() == adapters.weights.keys()
    assert all(torch.equal(held[name], adapters.weights[name]) for name in held)
    base = AutoModelForCausalLM.from_pretrained(export.model_folder("tiny"))
    model = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    np.testing.assert_allclose(logprobs(model), adapters.logprobs, atol=1e-4)


def test_adapters_load_by_their_folder_alone_with_the_tokenizer(adapters, tmp_path):
    """The embedded model beneath is found though no hub knows its name."""
    assert adapters.export("2", "--to", str(tmp_path / "out")) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_allclose(logprobs(model), adapters.logprobs, atol=1e-4)
    ours, base = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", export.model_folder("tiny")))
    assert ours("12 + 3").input_ids == base("12 + 3").input_ids
    assert ours.chat_template == base.chat_template


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("3",), "no complete checkpoint of step 3; there are those of the steps 1, 2"),
        (("2", "--merge"), "--merge is for runs with model.lora"),
        (("2", "--checkpoints", "/nowhere"), "/nowhere has no complete checkpoint of step 2"),
    ],
)
def test_what_can_not_be_exported_is_said_and_leaves_nothing(full, tmp_path, capsys, arguments, said):
    assert full.export(*arguments, "--to", str(tmp_path / "out")) == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_lacks_a_file_is_never_exported_by_halves(full, tmp_path, capsys):
    shutil.copytree(full.run.path, tmp_path / "run")
    (file,) = (tmp_path / "run" / "checkpoints" / "step_00000002" / "trainer").glob("*.safetensors")
    file.unlink()
    assert export.main(["2", "--run-dir", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 1
    assert f"{file} is missing" in capsys.readouterr().err
    complete = tmp_path / "run" / "checkpoints" / "step_00000002" / "complete.json"
    complete.write_text(json.dumps(json.loads(complete.read_text()) | {"files": {}, "digests": {}}))
    assert export.main(["2", "--run-dir", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 1
    assert "has no weights in safetensors: backend=fsdp saves none to export" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_not_written_to(full, tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    assert full.export("2", "--to", str(tmp_path)) == 1
    assert "is not empty: name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_checkpoint_of_another_model_is_refused_and_leaves_nothing(full, tmp_path, capsys):
    other = random_model(tmp_path / "other", num_hidden_layers=3)
    config = json.loads(full.run.config_json.read_text())
    run = RunDirectory.create(tmp_path / "run")
    made = RunConfig.model_validate_json(
        json.dumps(
            {**{key: value for key, value in config.items() if key not in ("format", "config_hash")}, "model": {"name": other}}
        ),
        strict=True,
    )
    run.config_json.write_text(dump_run(made))
    code = export.main(
        ["2", "--run-dir", str(run.path), "--checkpoints", str(full.run.checkpoints), "--to", str(tmp_path / "o")]
    )
    assert code == 1
    assert "not those of the run's model" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_no_run_directory_and_no_step_are_said(tmp_path, capsys):
    assert export.main(["1", "--run-dir", str(tmp_path), "--to", str(tmp_path / "o")]) == 1
    assert "has no config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        export.main(["0", "--run-dir", str(tmp_path), "--to", "x"])
    assert ended.value.code == 2
    assert "give a number from 1, `latest` or `all`" in capsys.readouterr().err


INTERRUPTED = """
import os, signal, sys
from telescope._launch import terminal
terminal.prepare()
from telescope.cli import export, main

def write_and_interrupt(reader, model, folder, wanted):
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.Signals[sys.argv[1]])
export._write_model = write_and_interrupt
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_export_that_is_interrupted_leaves_nothing(full, tmp_path, name, code):
    """The hidden folder has the model's size."""
    command = [sys.executable, "-c", INTERRUPTED, name, "export", "2", "--run-dir", str(full.run.path), "--to"]
    done = subprocess.run([*command, f"{tmp_path}/out"], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (code, "Interrupted.\n")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_that_one_is_in_is_not_replaced(full, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert full.export("2", "--to", ".") == 1
    assert "--to . is the folder that this command is given in: name a new one" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
