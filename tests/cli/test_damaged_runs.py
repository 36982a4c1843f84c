"""A finished run of which one file is spoiled: each command names the file in a sentence, or does what it is there for."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from telescope.cli import export, plan, replay, runs, servers, start
from telescope.cli.env import audit
from telescope.cli.show import main as show
from telescope.config.run import config_hash, load_run
from telescope.runlog.layout import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    *("config.json", "config.yaml", "cmdline.txt", "run.json", "plan.json", "summary.json", "exit.json", "status.json"),
    *("holder.json", "attempts.jsonl", "lineage.json", "resume.json", "MANIFEST.jsonl", "journal/core.jsonl"),
    *("blocks/tokens/orchestrator-000000.parquet", "blocks/step_metrics/orchestrator-000000.parquet"),
    *("logs/orchestrator.log", "failures/supervisor.txt"),
    *("checkpoints/step_00000004/complete.json", "checkpoints/step_00000004/orchestrator/rows.json"),
    *("checkpoints/step_00000004/orchestrator/state.msgpack", "checkpoints/step_00000004/trainer/rank-0.json"),
)
LATER = (
    "attempts.jsonl",
    "lineage.json",
    "resume.json",
    "failures/supervisor.txt",
    "blocks/tokens/orchestrator-000000.parquet",
)
"""Files that not every finished run has; they are made where this one has none."""


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: max(1, path.stat().st_size // 2)])


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_unreadable(path: Path) -> None:
    """For root too: a link to itself."""
    path.unlink()
    path.symlink_to(path.name)


def make_huge(path: Path) -> None:
    """1 TB that takes no room on the disk."""
    os.truncate(path, 1 << 40)


SPOILS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "a number": lambda path: path.write_text("7\n"),
    "a list": lambda path: path.write_text("[[]]\n"),
    "deep": lambda path: path.write_text('{"step":' * 100_000),
    "wrong types": lambda path: path.write_text(
        '{"step": [], "exit_code": {}, "format": "x", "pid": null, "exit_reason": 4}\n'
    ),
    "a folder": make_folder,
    "a pipe": make_pipe,
    "unreadable": make_unreadable,
    "huge": make_huge,
}
COMMANDS: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
    "list": (runs.main, ["list", "RUN"]),
    "tail": (runs.main, ["tail", "RUN", "--once"]),
    "stop": (runs.main, ["stop", "RUN", "--timeout", "1"]),
    "servers": (servers.main, ["RUN"]),
    "show": (show.main, ["RUN"]),
    "export": (export.main, ["latest", "--run-dir", "RUN", "--to", "RUN-model"]),
    "replay": (replay.main, ["RUN"]),
    "replay --step": (replay.main, ["RUN", "--step", "2"]),
    "audit": (audit.main, ["RUN"]),
    "plan": (plan.main, ["--calibrate", "RUN", "model=tiny", "env=countdown", "--card", "h100"]),
    "resume": (runs.main, ["resume", "RUN", "number_of_steps=6"]),
}
USES = {
    "list": {
        "run.json",
        "summary.json",
        "exit.json",
        "status.json",
        "holder.json",
        "attempts.jsonl",
        "failures/supervisor.txt",
    },
    "tail": {"logs/orchestrator.log"},
    "show": {
        *("config.json", "cmdline.txt", "run.json", "summary.json", "exit.json", "status.json", "holder.json"),
        *("attempts.jsonl", "lineage.json", "failures/supervisor.txt", "blocks/step_metrics/orchestrator-000000.parquet"),
    },
    "export": {"config.json", *(name for name in FILES if name.startswith("checkpoints/"))},
    "replay": {"journal/core.jsonl"},
    "audit": {"config.json", "lineage.json", "blocks/tokens/orchestrator-000000.parquet"},
    "plan": {"config.json", "journal/core.jsonl", "blocks/step_metrics/orchestrator-000000.parquet"},
}
"""Files whose name must be said where they can't be used at all."""
HOPELESS = ("a folder", "a pipe", "unreadable")
"""Spoils that no kind of file survives."""
PLANNED = ("empty", "binary", "a pipe")
"""Spoils that a plan, which takes a second to compose, is shown."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 steps of the fake engine and backend, with checkpoints."""
    path = tmp_path_factory.mktemp("finished") / "run"
    command = [
        sys.executable,
        "-m",
        "telescope.run",
        "experiment=fake",
        "number_of_steps=4",
        "checkpoint.every=2",
        f"run_dir={path}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for name in LATER:
        if not (path / name).exists():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text("{}\n")
    (path / "attempts.jsonl").write_text("")
    (path / "lineage.json").write_text('{"attempt": 1}\n')
    missing = [name for name in FILES if not (path / name).exists()]
    assert not missing, (missing, sorted(str(each.relative_to(path)) for each in path.rglob("*")))
    return path


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run is made ready, and its processes are not started."""

    def prepare(order: start.RunOrder) -> int:
        return 1 if start.make_directory(order) is None else 0

    monkeypatch.setattr("telescope.cli.resume.run_one", prepare)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(command: str, run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    act, arguments = COMMANDS[command]
    capsys.readouterr()
    with at_most(20.0):
        code = act([word.replace("RUN", str(run)) for word in arguments])
    out, err = capsys.readouterr()
    return code, out + err


def left_of(run: Path) -> list[tuple[str, int]]:
    """All names, and sizes of what is not a folder; `attempts.jsonl` is the lock too."""
    names = (path for path in sorted(run.rglob("*")) if path.name != "attempts.jsonl")
    return [(str(path.relative_to(run)), 0 if path.is_dir() else path.lstat().st_size) for path in names]


@pytest.mark.parametrize("name", FILES)
def test_a_spoiled_file_is_named_or_does_not_matter(
    finished: Path, name: str, tmp_path: Path, prepared: None, capsys: pytest.CaptureFixture[str]
):
    wrong: list[str] = []
    for spoil, spoil_file in SPOILS.items():
        run = tmp_path / spoil.replace(" ", "_")
        shutil.copytree(finished, run)
        spoil_file(run / name)
        before = left_of(run)
        for command in COMMANDS:
            if command == "plan" and (name not in USES["plan"] or spoil not in PLANNED):
                continue
            try:
                code, said = call(command, run, capsys)
            except BaseException as error:  # noqa: BLE001 -- what a user would see as a traceback, all of them at once
                wrong.append(f"{command} with {spoil} {name}: {type(error).__name__}: {error}")
                continue
            named = Path(name).name in said
            if code not in (0, 1) or (command in ("list", "show") and code):
                wrong.append(f"{command} with {spoil} {name}: exit code {code}: {said}")
            # a checkpoint without its complete.json is not whole: `export latest` takes the one before it, by its name
            earlier = command == "export" and name.endswith("complete.json") and "step_00000002" in said
            if spoil in HOPELESS and name in USES.get(command, ()) and not (named or earlier):
                wrong.append(f"{command} with {spoil} {name} does not name it: {said}")
            if command == "resume" and code and (left_of(run) != before or not (named or "step_0" in said)):
                wrong.append(f"resume with {spoil} {name} has moved something, or names nothing: {said}")
            if "Traceback" in said or (len(said) > 20_000 and command != "tail"):  # which shows the log as it is
                wrong.append(f"{command} with {spoil} {name}: {said[:2000]}")
        shutil.rmtree(run)
    assert not wrong, "\n".join(wrong)


def edited(run: Path, place: str, value: Any) -> None:
    settings = json.loads((run / "config.json").read_text())
    *path, last = place.split(".")
    here = settings
    for part in path:
        here = here[part]
    here[last] = value
    (run / "config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("trainer.learning_rate", 0.1, r"\(trainer\.learning_rate was \S+ and is 0\.1\)"),
        ("rollout.group_size", 8, r"\(rollout\.group_size was \d and is 8\)"),
        ("plugin_path", ["/elsewhere"], r"\(plugin_path is another\)"),
        ("seed", 7, r"\(seed was 0 and is 7\)"),
    ],
)
@pytest.mark.parametrize("command", ["resume", "export", "audit", "plan"])
def test_an_edited_configuration_is_refused_by_every_command_that_would_use_it(
    finished: Path, tmp_path: Path, prepared: None, capsys: pytest.CaptureFixture[str],
    command: str, place: str, value: Any, told: str,
):  # fmt: skip
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    edited(run, place, value)
    before = left_of(run)
    code, said = call(command, run, capsys)
    assert code == 1
    assert f"{run}/config.json says hash" in said
    assert re.search(rf"the file was edited {told}\. Put it back as it was, by config\.yaml beside it", said)
    may = "trainer.learning_rate=0.1" if place == "trainer.learning_rate" else "number_of_steps=600"
    assert f"`telescope runs resume {run} {may}`" in said
    assert left_of(run) == before


def test_a_plug_in_of_an_edited_path_does_not_run(finished: Path, tmp_path: Path, prepared: None, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (tmp_path / "mine" / "algorithms").mkdir(parents=True)
    (tmp_path / "mine" / "algorithms" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edited(run, "plugin_path", [str(tmp_path / "mine")])
    edited(run, "algorithm", {"name": "evil"})
    assert call("resume", run, capsys)[0] == 1
    assert not (tmp_path / "ran").exists()


def test_what_is_changed_on_the_command_line_goes_on(finished: Path, tmp_path: Path, prepared: None, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert runs.main(["resume", str(run), "number_of_steps=6", "trainer.learning_rate=0.1"]) == 0
    config = load_run(RunDirectory(run).config_json)
    assert (config.trainer.learning_rate, config.number_of_steps) == (0.1, 6)
    assert config_hash(load_run(run / "attempts/1/config.json")) != config_hash(config)


def test_the_attempts_that_are_known_are_those_whose_files_are_there(finished: Path, tmp_path: Path, prepared: None, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "attempts" / "1").mkdir(parents=True)
    code, said = call("resume", run, capsys)
    assert code == 1
    assert f"{run}/attempts.jsonl does not know attempt 1, whose files are in {run}/attempts/1" in said


def test_a_holder_that_cannot_be_read_may_be_alive(finished: Path, tmp_path: Path, prepared: None, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "exit.json").unlink()
    (run / "holder.json").write_text("{")
    code, said = call("resume", run, capsys)
    assert code == 1
    assert "holder.json is damaged" in said
    assert "see that nothing of the run goes on, then remove the file" in said
    (run / "holder.json").unlink()
    assert call("resume", run, capsys)[0] == 0
