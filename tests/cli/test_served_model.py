"""What `telescope serve` and `chat` serve: which step of a run, which model, and the one server process that has it."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from telescope._launch.process_plan import make_plan, write_plan
from telescope._launch.this_host import inspect_this_host
from telescope.cli import serve, served_model, server_process
from telescope.cli.completion import candidates
from telescope.cli.resume import WrongOverride
from telescope.cli.served_model import ServedModel, find_model, ready_weights
from telescope.cli.server_process import ServerProcess, ServerProcessEnded, list_gpus_of, plan_server, write_curl
from telescope.cli.targets import TargetRefused
from telescope.config.models import model_folder
from telescope.config.run import RunConfig
from telescope.config.sections import LoraSettings
from telescope.runlog.holder import hold
from telescope.wire.process import Interrupted
from tests.cli.test_eval import config, make_run
from tests.product import ROOT


def real(**changes: Any) -> RunConfig:
    """Of a run with an engine that has a model."""
    short = {"inference": {"engine": "vllm", "max_model_len": 256}, "rollout": {"max_tokens": 24}, "model": {"name": "tiny"}}
    return config(**{**short, **changes})


def asked(**given: Any) -> argparse.Namespace:
    plain = {"step": None, "host": "127.0.0.1", "port": None, "key_env": None, "env": None, "config_dir": None}
    return argparse.Namespace(**{**plain, **given})


def served(target: object, *overrides: str, **given: Any) -> ServedModel:
    return find_model(str(target), asked(**given), overrides)


# ---- which weights


def test_of_a_run_the_newest_checkpoint_is_served_under_its_name_and_step(tmp_path: Path):
    run = make_run(tmp_path / "mine", real(rollout={"temperature": 0.7, "max_tokens": 24}), [2, 4])
    newest = served(run.path)
    assert (newest.name, newest.step, newest.label, newest.remark) == ("mine@4", 4, f"{run.path} step 4", "")
    assert (newest.config.rollout.temperature, newest.config.first_version) == (0.7, 4)
    assert served(run.path, step="2").name == "mine@2"
    first = served(run.path, step="0")
    assert (first.name, first.step, first.config.model.name) == ("mine@0", 0, "tiny")
    assert newest.config.inference.http
    assert (newest.config.inference.host, newest.config.inference.base_port) == ("127.0.0.1", 8100)
    assert not newest.config.trains


@pytest.mark.parametrize(
    ("steps", "step", "sentence"),
    [
        ([2, 4], "3", "no checkpoint of step 3; there are 2, 4, and 0 is the model that it began with"),
        ([], "3", "no checkpoint of step 3; there is none, and 0"),
        ([], None, r"no checkpoint to serve: it saves one every 2 steps \(checkpoint.every\)\. --step 0 takes"),
    ],
)
def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, steps: list[int], step: str | None, sentence: str
):
    run = make_run(tmp_path / "mine", real(), steps)
    with pytest.raises(TargetRefused, match=sentence):
        served(run.path, step=step)


def test_a_run_that_saves_nothing_is_told_how_to_save(tmp_path: Path):
    early = make_run(tmp_path / "early", real(checkpoint={}))
    with pytest.raises(TargetRefused, match=r"it saves one at its end \(checkpoint.at_end\).*checkpoint.every=10"):
        served(early.path)
    run = make_run(tmp_path / "mine", real(checkpoint={"at_end": "none"}))
    with pytest.raises(TargetRefused, match=r"it saves none \(checkpoint.at_end\).*checkpoint.every=10"):
        served(run.path)
    with pytest.raises(WrongOverride, match="--step two: give a number, or latest"):
        served(run.path, step="two")


def test_a_run_whose_weights_are_gone_or_never_moved_is_told_so(tmp_path: Path):
    run = make_run(tmp_path / "mine", real(checkpoint={}))
    run.summary_json.write_text('{"steps": 0}')
    with pytest.raises(TargetRefused, match="it ended before its first step was trained"):
        served(run.path)
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(TargetRefused, match="kept the weights of its best point alone"):
        served(run.path)


def test_what_is_no_model_is_refused_with_what_it_is(tmp_path: Path):
    run = make_run(tmp_path / "mine", real(), [40])
    with pytest.raises(TargetRefused, match=rf"is a checkpoint, .* {run.path} --step 40, or .*telescope export 40"):
        served(run.checkpoints / "step_00000040")
    with pytest.raises(TargetRefused, match="neither a run directory"):
        served(tmp_path)
    with pytest.raises(WrongOverride, match="--step names a checkpoint of a run directory, and tiny is none"):
        served("tiny", step="3")
    with pytest.raises(TargetRefused, match=r"ran with inference.engine=fake, which has no model"):
        served(make_run(tmp_path / "fake", config(), [2]).path)


@pytest.mark.parametrize(
    "override", ["run_dir=x", "inference.host=0.0.0.0", "model.name=other", "inference.http=false", "number_of_steps=3"]
)
def test_what_the_command_decides_is_refused(tmp_path: Path, override: str):
    for target in (make_run(tmp_path / "mine", real(), [2]).path, "tiny"):
        with pytest.raises(WrongOverride, match="leave it out"):
            served(target, override)


def test_settings_of_the_engine_are_the_users(tmp_path: Path):
    run = make_run(tmp_path / "mine", real(), [2])
    assert served(run.path, "inference.max_model_len=128").config.inference.max_model_len == 128
    two = served("tiny", "inference.tensor_parallel_size=2", "cluster.device=cpu").config
    assert (two.cluster.inference_num_workers, two.servers) == (2, 1)


def test_other_machines_are_let_in_with_a_key_alone(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(WrongOverride, match=r"--host 0.0.0.0 lets other machines in, .*--key-env SERVE_KEY"):
        served("tiny", host="0.0.0.0")
    with pytest.raises(WrongOverride, match="that variable is not set"):
        served("tiny", host="0.0.0.0", key_env="A_KEY_OF_MINE")
    monkeypatch.setenv("A_KEY_OF_MINE", "sesame")
    inference = served("tiny", host="0.0.0.0", key_env="A_KEY_OF_MINE", port=0).config.inference
    assert (inference.host, inference.base_port, inference.api_key) == ("0.0.0.0", 0, "${oc.env:A_KEY_OF_MINE}")


def test_a_short_models_lengths_are_its_positions(tmp_path: Path):
    folder = tmp_path / "short"
    folder.symlink_to(model_folder("tiny"))
    found = served(folder)
    assert (found.name, found.config.inference.max_model_len, found.config.rollout.max_tokens) == ("short", 256, 128)
    assert served(folder, "inference.max_model_len=200").config.inference.max_model_len == 200


def make_adapters(folder: Path, base: str, **changes: Any) -> Path:
    folder.mkdir()
    facts = {"base_model_name_or_path": base, "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**facts, **changes}))
    return folder


def test_adapters_are_served_over_the_model_that_they_name(tmp_path: Path):
    base = str(model_folder("tiny_reverse"))
    folder = make_adapters(tmp_path / "mine", base)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = served(folder)
    assert (found.adapter, found.name, found.config.model.name) == (folder, "mine", base)
    assert found.config.model.lora == LoraSettings(rank=4, alpha=8, target_modules=("q_proj", "v_proj"))
    assert found.config.model.chat_template == "{{ messages[0].content }}"
    assert found.config.inference.max_model_len == 256
    with pytest.raises(TargetRefused, match="holds adapters over the model /gone, and there is none here"):
        served(make_adapters(tmp_path / "orphans", "/gone"))
    with pytest.raises(TargetRefused, match="is not what peft writes of LoRA adapters"):
        served(make_adapters(tmp_path / "odd", base, r="many"))


def test_of_a_run_with_adapters_these_are_served_over_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "mine", real(model={"name": "tiny", "lora": {"rank": 4}}), [2])
    exported: list[Any] = []
    monkeypatch.setattr(served_model, "export_weights", lambda *given, merge: exported.append((*given[1:3], merge)))
    with ready_weights(served(run.path), print) as ready:
        assert ready.config.model.name == "tiny"
        assert ready.config.model.lora == LoraSettings(rank=4)
        assert exported == [(2, ready.adapter, False)]
    assert served(run.path, step="0").config.model.lora is None


def test_exported_weights_are_there_while_they_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "mine", real(), [2])

    def export(run: Any, step: int, to: Path, say: Any, *, merge: bool) -> None:
        to.mkdir()

    monkeypatch.setattr(served_model, "export_weights", export)
    run.served.mkdir()
    left = run.served / "telescope-tmp-left"
    left.mkdir(mode=0o700)
    (left / ".lock").touch(mode=0o600)  # nobody holds it: its process was killed
    with ready_weights(served(run.path), print) as ready:
        weights = Path(ready.config.model.name)
        assert (weights.name, weights.parent.parent) == ("mine@2", run.served)
        assert weights.is_dir()
        assert not left.exists()
        with ready_weights(served(run.path), print) as other:
            assert other.config.model.name != ready.config.model.name
        assert weights.is_dir()
    assert not run.served.exists()


def test_a_run_that_goes_on_keeps_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = real(cluster={"device": "gpu", "inference_num_workers": 2, "trainer_num_workers": 1})
    run = make_run(tmp_path / "mine", made, [2])
    host = msgspec.structs.replace(inspect_this_host(), gpus=("0", "1", "2", "3"))
    write_plan(make_plan(made, (host,)), run.plan_json)
    assert list_gpus_of(run, host.name) == frozenset()
    hold(run)
    assert list_gpus_of(run, host.name) == {"0", "1", "2"}
    model = served(run.path)
    assert "goes on, and this is its step 2" in model.remark
    monkeypatch.setattr(server_process, "inspect_this_host", lambda: host)
    monkeypatch.setattr(server_process, "find_obstacles", lambda *_: [])
    assert plan_server(model).gpus == ("3",)
    with pytest.raises(TargetRefused, match=r"the run goes on and has 3 of this host's 4 GPUs, which leaves too few"):
        plan_server(served(run.path, "inference.tensor_parallel_size=2"))


# ---- the process


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which the stub says its pids."""
    monkeypatch.setattr(server_process, "PROGRAM", ("-m", "tests.cli.stub_server"))
    monkeypatch.setenv("STUB_PIDS", str(tmp_path / "pids"))
    return tmp_path / "pids"


def started(*overrides: str) -> ServerProcess:
    model = served("tiny", "cluster.device=cpu", *overrides)
    return ServerProcess(model, plan_server(model))


def test_the_server_is_gone_with_all_below_it_when_the_block_ends(stub: Path):
    with started() as server:
        url = server.wait_until_ready()
        assert url.startswith("http://127.0.0.1:")
        pid, child, model = stub.read_text().split()
        assert model == "tiny"
        assert psutil.pid_exists(int(pid))
        assert psutil.pid_exists(int(child))
        folder = server._folder
    assert not psutil.pid_exists(int(pid))
    assert not psutil.pid_exists(int(child))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("refuse", "^vLLM refuses the model: it is a stub$"),
        (
            "engine",
            "^the engine's process could not start. Its own words:\nValueError: no memory is left\nRuntimeError: it failed$",
        ),
        ("die", r"^the server ended with exit code 3. Its last words:\nits last line$"),
    ],
)
def test_a_server_that_does_not_come_says_why(stub: Path, monkeypatch: pytest.MonkeyPatch, how: str, sentence: str):
    monkeypatch.setenv("STUB", how)
    with started() as server, pytest.raises(ServerProcessEnded, match=sentence):
        server.wait_until_ready()


def test_a_server_that_hangs_is_not_waited_for_without_end(stub: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STUB", "hang")
    monkeypatch.setattr(server_process, "LATE_S", 0.5)
    with started("cluster.placement_timeout_s=1") as server, pytest.raises(ServerProcessEnded, match=r"within 1\.5 s"):
        server.wait_until_ready()


def test_a_start_is_told_on_stderr_while_it_lasts(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("STUB", "slow")
    monkeypatch.setattr("telescope._launch.progress.START_EVERY_S", 0.2)
    with started() as server:
        server.wait_until_ready()
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"(0:0\d · starting the server( · loading weights, 3 of 8 files)?\n)+", told.err)
    assert told.err.count("loading weights") == 1  # as long as nothing changes it is not said again


def test_on_a_terminal_a_start_is_one_line_that_goes_when_it_has_ended(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("STUB", "slow")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with started() as server:
        server.wait_until_ready()
    told = capsys.readouterr().err
    assert "loading weights, 3 of 8 files" in told
    assert "\n" not in told
    assert told.endswith("\r\x1b[K")


def test_a_signal_ends_the_wait_for_the_start(stub: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STUB", "hang")
    with started() as server:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted) as interrupted:
            server.wait_until_ready()
        assert interrupted.value.number == signal.SIGTERM
    assert server._process.gone


def test_serve_prints_the_url_and_the_line_to_type_and_ends_on_ctrl_c(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = ServerProcess.wait_until_ended

    def interrupted(self: ServerProcess, announce: Callable[[], None]) -> int:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return real(self, announce)

    monkeypatch.setattr(ServerProcess, "wait_until_ended", interrupted)
    assert serve.main(["tiny", "cluster.device=cpu"]) == 0
    told = capsys.readouterr()
    first, _, curl, chat = told.out.splitlines()
    url, name = first.split()
    assert name == "tiny"
    assert curl == write_curl(url, "tiny", None, chat=True)
    assert chat == f"telescope chat --url {url}"
    assert "starting a server of tiny on the CPU" in told.err
    assert not psutil.pid_exists(int(stub.read_text().split()[0]))


SERVE = """
import sys
from telescope.cli import serve, server_process
server_process.PROGRAM = ("-m", "tests.cli.stub_server")
sys.exit(serve.main(["tiny", "cluster.device=cpu"]))
"""


def test_serve_ends_though_its_terminal_is_stopped():
    """Ctrl-S, and then it is asked to end: it must not keep its GPU until somebody types Ctrl-Q."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SERVE], cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True)
    try:
        said = b""
        while b"Ctrl-C ends it." not in said:
            said += os.read(ours, 4096)
        termios.tcflow(theirs, termios.TCOOFF)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate(timeout=60)
        os.close(ours)
        os.close(theirs)


def test_serve_says_what_is_wrong(stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("STUB", "refuse")
    assert serve.main(["tiny", "cluster.device=cpu"]) == 1
    assert "telescope serve: vLLM refuses the model: it is a stub" in capsys.readouterr().err
    assert serve.main([]) == 2
    assert serve.main(["tiny", "tiny_turns"]) == 2
    assert serve.main(["tiny", "--step", "2"]) == 2
    assert serve.main(["tiny", "inference.max_model_len=100000"]) == 1
    assert "is above the 256 positions" in capsys.readouterr().err


def test_the_line_to_type_is_one_that_a_shell_takes():
    line = write_curl("http://127.0.0.1:1/v1", "it's", "A_KEY", chat=False)
    said = subprocess.run(
        ["bash", "-c", f'curl() {{ printf "%s\\n" "$@"; }}; A_KEY=sesame; {line}'], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[0] == "http://127.0.0.1:1/v1/completions"
    assert "Authorization: Bearer sesame" in said
    assert json.loads(said[-1]) == {"model": "it's", "prompt": "Hello", "max_tokens": 32}


def test_settings_are_completed_behind_what_is_served():
    assert candidates("telescope serve ") == []
    assert candidates("telescope serve runs/mine inference.max_model") == ["inference.max_model_len="]
    assert candidates("telescope chat runs/mine see") == ["seed="]
