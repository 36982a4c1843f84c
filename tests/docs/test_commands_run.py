"""What this machine can do of the pages' commands is done: on a run that is trained as the pages say, 40 steps of the embedded
model, each command that reads a run, and each `telescope run` of an embedded model as one step with a fake engine and backend.

What needs a GPU, a cluster, a network or an answer from a person is judged by test_commands.py alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from telescope.compose.load import load_points, places_for
from telescope.config.models import embedded_models
from tests.docs.judging import mine_of
from tests.docs.shown import call, pages, write_files
from tests.product import ROOT

RUN = ("run", "run_dir=runs/mine", "checkpoint.every=20", "checkpoint.keep_last=2", "number_of_steps=40")
KEPT = "trainer.keep_batches_every=12"
"""Step 12, which pages replay, is kept."""
READS = (
    *(("runs", "list"), ("runs", "tail"), ("show",), ("env", "audit"), ("replay",), ("export",)),
    *(("plan",), ("completion",), ("env", "check")),
)
"""Commands that end by themselves and need no server."""
FAKE = (
    "number_of_steps=1",
    "inference=fake",
    "backend=fake",
    "checkpoint.every=0",
    "checkpoint.keep_last=null",
    "run_dir=null",
    "orchestrator.discard_group_zero_advantage=false",  # a fake engine's answers may all be wrong
)
ELSEWHERE = ("gsm8k", "code_generation", "adds_up", "/shared/", "RUN_DIR", "FOLDER", "runs/blind", "runs/first", "--answers")
"""Words of commands that need a data set, a sandbox, another page's run or a file of the reader's own."""
NOT_HERE = ("data_dir=/", "scoring=judge")
"""Of runs that need a reader's own data set, or a judge."""
ONE_COMMAND_S = 180


def telescope(*arguments: str, cwd: Path, limit_s: float = ONE_COMMAND_S) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "telescope", *arguments],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `runs/mine`, trained as docs/checkpoints.md says."""
    folder = tmp_path_factory.mktemp("trained")
    ended = telescope(*RUN, KEPT, cwd=folder, limit_s=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def is_run_here(arguments: Sequence[str]) -> bool:
    words = " ".join(arguments)
    if arguments[:1] == ["plan"] and "cluster=slurm" in arguments:
        return True
    return any(tuple(arguments[: len(head)]) == head for head in READS) and not any(word in words for word in ELSEWHERE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [pytest.param(page, id=mine_of(page)) for page in pages()])
def test_commands_that_read_a_run_do_so(page: Path, trained: Path, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    called, _ = call(page, tmp_path, sys.executable)
    shutil.rmtree(tmp_path / "runs")
    shutil.copytree(trained / "runs", tmp_path / "runs")
    failed = []
    for each in called:
        program, *arguments = each.argv
        if program == "telescope" and is_run_here(arguments):
            ended = telescope(*arguments, cwd=tmp_path)
            if ended.returncode:
                failed.append(f"{each}: exit code {ended.returncode}\n{ended.stdout[-500:]}{ended.stderr[-1500:]}")
            for made in (tmp_path / name for name in ("model", "my-model", "my-models")):
                shutil.rmtree(made, ignore_errors=True)  # the next command of the page exports to it, too
    assert failed == [], "\n".join(failed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [pytest.param(page, id=mine_of(page)) for page in pages()])
def test_runs_of_embedded_models_train_a_step(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, tmp_path)
    called, _ = call(page, tmp_path, sys.executable)
    monkeypatch.chdir(tmp_path)
    failed, played = [], set[tuple[str, ...]]()
    for each in called:
        program, *arguments = each.argv
        if program not in ("telescope", "./scripts/run"):
            continue
        shortened = shorten(["run", *arguments] if program == "./scripts/run" else arguments)
        if shortened is not None and shortened not in played:
            played.add(shortened)
            ended = telescope(*shortened, cwd=tmp_path)
            if ended.returncode:
                failed.append(f"{each}: exit code {ended.returncode}\n{ended.stdout[-500:]}{ended.stderr[-1500:]}")
    assert failed == [], "\n".join(failed)


def shorten(arguments: Sequence[str]) -> tuple[str, ...] | None:
    """The same run as one step that needs no engine; None for what is not a run of one embedded model on this machine, and for
    what is about the engine or the backend itself, or needs what the page does not write."""
    if arguments[:1] != ["run"] or any(word in ("-m", "--help", "--new-key", "--cfg", "--info") for word in arguments):
        return None
    if any(word.startswith(("cluster=", "backend", "inference", "weight_sync", "model.lora", "eval")) for word in arguments):
        return None
    config_dir = arguments[arguments.index("--config-dir") + 1] if "--config-dir" in arguments else None
    if any(part in word for word in arguments for part in NOT_HERE) or (config_dir and not Path(config_dir).is_dir()):
        return None
    overrides = [word for word in arguments[1:] if "=" in word]
    (point,) = load_points([*overrides, *FAKE], places_for(config_dir), os.environ)
    if point.config is None or point.config.model.name not in embedded_models():
        return None
    return (*arguments, *FAKE)
