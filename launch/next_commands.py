"""The commands that apply to a run that has ended, one a line, and the word that nothing is saved. Looks at the disk; prints
nothing.

Owns which ones apply, and in which order they are told. One more is one more entry of `_list_candidates`.
"""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

from telescope._launch.prepare_attempt import CannotResume, has_played_all
from telescope.config.run import RunConfig
from telescope.exit_codes import DONE
from telescope.runlog import checkpoints
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import RunLook, is_run, look


class NextCommand(NamedTuple):
    purpose: str
    words: tuple[str, ...]
    """Behind `python -m telescope`, the first one the command's name."""

    def __str__(self) -> str:
        return f"{self.purpose}: python -m telescope {shlex.join(self.words)}"


def list_next_lines(config: RunConfig, code: int, known: Container[str]) -> list[str]:
    """For the end of a run with this exit code; `known`: the commands that there are. None where the run's directory is gone,
    and where its last words are that its last checkpoint is lost."""
    run = RunDirectory(Path(str(config.run_dir)))
    if not config.trains or not is_run(run.path):
        return []
    seen = look(run)
    if seen.summary.get("lost_checkpoint"):
        return []
    lines = [str(command) for command in _list_candidates(config, run, code) if command.words[0] in known]
    return [*lines, *filter(None, (_say_what_is_lost(config, run, seen),))]


def _list_candidates(config: RunConfig, run: RunDirectory, code: int) -> Iterator[NextCommand]:
    place = str(run.path)
    yield NextCommand("to see what it has learnt, or why not", ("show", place))
    if config.backend.has_model and checkpoints.steps(checkpoints.root(run, config.checkpoint.dir)):
        yield NextCommand("to talk to it", ("chat", place))
        yield NextCommand("to serve it", ("serve", place))
        yield NextCommand("to take the model away", ("export", "latest", "--run-dir", place, "--to", "my-model"))
    if code != DONE and (step := find_way_on(config)):
        yield NextCommand(f"to go on from the checkpoint of step {step}", ("runs", "resume", place))


def find_way_on(config: RunConfig) -> int:
    """The step of the latest checkpoint from which the run can go on; 0 where there is none, nothing is left to train or
    evaluate behind it, or the directory itself is gone, which checkpoints elsewhere outlive and a save may have made anew."""
    run = RunDirectory(Path(str(config.run_dir)))
    if not config.trains or not run.config_json.exists() or not is_run(run.path):
        return 0
    root = checkpoints.root(run, config.checkpoint.dir)
    whole = checkpoints.steps_with_state(root)
    if not whole or whole[-1] < config.number_of_steps <= checkpoints.steps(root)[-1]:  # the last weights are saved
        return 0
    try:
        return 0 if has_played_all(run, config, whole[-1]) else whole[-1]
    except CannotResume:  # who resumes it is told why
        return 0


def _say_what_is_lost(config: RunConfig, run: RunDirectory, seen: RunLook) -> str:
    """Where a model was trained and no checkpoint has any of it."""
    trained = seen.summary.get("steps") or seen.status.step
    if not trained or not config.backend.has_model or checkpoints.steps(checkpoints.root(run, config.checkpoint.dir)):
        return ""
    remedy = "checkpoint.every=10, say, saves on the way" if config.end_saves.any else "checkpoint.at_end=weights saves them"
    return f"nothing of what it trained is saved, and its weights are gone with its processes: {remedy}"
