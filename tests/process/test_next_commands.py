"""The last lines of a run: the commands that apply to what it has left, and the word that nothing is saved."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from telescope._launch import next_commands, prepare_attempt
from telescope._launch.next_commands import find_way_on, list_next_lines
from telescope.config.run import RunConfig
from telescope.runlog import checkpoints
from telescope.runlog.attempts import write_rows
from telescope.runlog.identity import new_identity, read_identity, write_identity
from telescope.runlog.layout import RunDirectory

SETTINGS = {
    "environments": {"countdown": {"name": "countdown"}},
    "algorithm": {"name": "grpo"},
    "backend": {"name": "fsdp"},
    "number_of_steps": 9,
}
BY_SIGNAL, FAILED, STOPPED = 130, 70, 75


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "a run")
    write_identity(directory, new_identity("x", datetime.now(UTC), "0" * 16))
    directory.config_json.write_text("{}")
    directory.summary_json.write_text('{"steps": 4}')
    return directory


def config(run: RunDirectory, **changes: Any) -> RunConfig:
    return RunConfig.model_validate_json(json.dumps({**SETTINGS, "run_dir": str(run.path), **changes}), strict=True)


def save(run: RunDirectory, step: int, *, whole: bool) -> None:
    partial = checkpoints.begin(run.checkpoints, step, "a")
    write_rows(checkpoints.orchestrator_part(partial) / prepare_attempt.ROWS, ())
    run_id = read_identity(run).run_id
    checkpoints.finish(partial, checkpoints.Complete(1, step, step, run_id, "a", "", 1, whole, 0, 0.0, checkpoints.now()))


@pytest.fixture(autouse=True)
def an_activated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_commands, "name_own_command", lambda: "telescope")


def lines(run: RunDirectory, code: int, **changes: Any) -> list[str]:
    said = list_next_lines(config(run, **changes), code)
    return [line.replace(f"'{run.path}'", "RUN") for line in said]


SHOW = "to see what it has learnt, or why not: telescope show RUN"
CHAT = "to talk to it: telescope chat RUN"
EXPORT = "to take the model away: telescope export latest --run-dir RUN --to my-model"
ON = "to go on from the checkpoint of step 4: telescope runs resume RUN"


def test_after_the_last_step_the_model_can_be_talked_to_and_taken_away(run: RunDirectory):
    save(run, 9, whole=False)
    assert lines(run, 0) == [SHOW, CHAT, EXPORT]
    assert lines(run, 0, inference={"engine": "fake"}) == [SHOW, EXPORT]  # chat refuses it


def test_after_a_stop_the_run_can_go_on(run: RunDirectory):
    save(run, 4, whole=True)
    assert lines(run, STOPPED) == lines(run, BY_SIGNAL) == lines(run, FAILED) == [SHOW, CHAT, EXPORT, ON]


def test_from_weights_alone_no_run_can_go_on(run: RunDirectory):
    save(run, 4, whole=False)
    assert lines(run, STOPPED) == [SHOW, CHAT, EXPORT]


def test_nothing_is_left_to_go_on_with_when_all_is_trained(run: RunDirectory):
    save(run, 9, whole=True)
    assert lines(run, FAILED) == [SHOW, CHAT, EXPORT]
    assert find_way_on(config(run)) == 0
    assert find_way_on(config(run, number_of_steps=12)) == 9


def test_whose_last_weights_are_saved_is_not_trained_again_from_where_it_was_stopped_before(run: RunDirectory):
    save(run, 4, whole=True)
    save(run, 9, whole=False)
    assert lines(run, FAILED) == [SHOW, CHAT, EXPORT]
    assert find_way_on(config(run, number_of_steps=12)) == 4


@pytest.mark.parametrize(
    ("checkpoint", "remedy"),
    [({"at_end": "none"}, "checkpoint.at_end=weights saves them"), ({}, "checkpoint.every=10, say, saves on the way")],
)
def test_where_nothing_is_saved_that_is_the_last_line(run: RunDirectory, checkpoint: dict[str, Any], remedy: str):
    lost = f"nothing of what it trained is saved, and its weights are gone with its processes: {remedy}"
    assert lines(run, BY_SIGNAL, checkpoint=checkpoint) == [SHOW, lost]
    run.summary_json.write_text('{"steps": 0}')
    assert lines(run, BY_SIGNAL, checkpoint=checkpoint) == [SHOW]  # nothing was trained
    assert lines(run, BY_SIGNAL, backend={"name": "fake"}) == [SHOW]


def test_a_run_that_was_killed_before_its_summary_is_known_by_its_status(run: RunDirectory):
    run.summary_json.unlink()
    run.status_json.write_text('{"step": 3, "steps": 9}')
    assert lines(run, BY_SIGNAL)[-1].startswith("nothing of what it trained is saved")


def test_nothing_is_said_behind_a_lost_checkpoint_and_of_a_run_that_was_moved_away(run: RunDirectory):
    run.summary_json.write_text('{"steps": 9, "lost_checkpoint": 9}')
    assert lines(run, 1) == []
    run.summary_json.unlink()
    save(run, 4, whole=True)
    run.run_json.unlink()
    assert lines(run, FAILED) == []
    assert find_way_on(config(run)) == 0
