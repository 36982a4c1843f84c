"""The commands that apply to a run that has ended, one a line, and the word that nothing is saved. Looks at the disk; prints
nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from telescope._launch.own_command import name_own_command
from telescope._launch.prepare_attempt import CannotResume, has_played_all
from telescope.config.run import RunConfig
from telescope.exit_codes import DONE
from telescope.runlog import checkpoints
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import is_run, look


def list_next_lines(config: RunConfig, code: int) -> list[str]:
    """For the end of a run with this exit code. None where the run's directory is gone or can't be read, and where its last
    words are that its last checkpoint is lost."""
    try:
        return _list_next_lines(config, code)
    except OSError:  # the run has ended as it has
        return []


def _list_next_lines(config: RunConfig, code: int) -> list[str]:
    run = RunDirectory(Path(str(config.run_dir)))
    if not config.trains or not is_run(run.path):
        return []
    seen = look(run)
    if seen.summary.get("lost_checkpoint"):
        return []
    lines = list(_list_commands(config, run, code))
    trained = seen.summary.get("steps") or seen.status.step
    if trained and config.backend.has_model and not _list_steps(config, run):
        lines.append(_say_that_nothing_is_saved(config))
    return lines


def _list_commands(config: RunConfig, run: RunDirectory, code: int) -> Iterator[str]:
    place = str(run.path)
    yield _tell("to see what it has learnt, or why not", "show", place)
    if config.backend.has_model and _list_steps(config, run):
        if config.inference.engine == "vllm":
            yield _tell("to talk to it", "chat", place)
        yield _tell("to take the model away", "export", "latest", "--run-dir", place, "--to", "my-model")
    if code != DONE and (step := find_way_on(config)):
        yield _tell(f"to go on from the checkpoint of step {step}", "runs", "resume", place)


def _tell(purpose: str, *words: str) -> str:
    return f"{purpose}: {name_own_command()} {shlex.join(words)}"


def _list_steps(config: RunConfig, run: RunDirectory) -> list[int]:
    return checkpoints.steps(checkpoints.root(run, config.checkpoint.dir))


def _say_that_nothing_is_saved(config: RunConfig) -> str:
    remedy = "checkpoint.every=10, say, saves on the way" if config.end_saves.any else "checkpoint.at_end=weights saves them"
    return f"nothing of what it trained is saved, and its weights are gone with its processes: {remedy}"


def find_way_on(config: RunConfig) -> int:
    """The step of the latest checkpoint from which the run can go on; 0 where there is none, nothing is left to train or
    evaluate behind it, the disk does not say, or the directory itself is gone, which checkpoints elsewhere outlive and a save
    may have made anew."""
    run = RunDirectory(Path(str(config.run_dir)))
    try:
        if not config.trains or not run.config_json.exists() or not is_run(run.path):
            return 0
        whole = checkpoints.steps_with_state(checkpoints.root(run, config.checkpoint.dir))
        if not whole or whole[-1] < config.number_of_steps <= _list_steps(config, run)[-1]:  # the last weights are saved
            return 0
        return 0 if has_played_all(run, config, whole[-1]) else whole[-1]
    except (CannotResume, OSError):  # who resumes it is told why
        return 0
