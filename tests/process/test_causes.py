"""Whose end is told as the cause of a run's, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope._launch.causes import find_root_cause
from telescope._launch.child_processes import ProcessEnd
from telescope.runlog.layout import RunDirectory

NAMES = ("orchestrator", "worker-0", "trainer-0")
SILENT = "worker-0 was lost: worker-0 (pid 7 on here) was not heard for 15.2 s (limit silent_s=15) and is given up"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run")
    run.failure("orchestrator").parent.mkdir(exist_ok=True)
    run.failure("orchestrator").write_text(SILENT + "\n")
    return run


def sentence(run: RunDirectory, **endings: ProcessEnd) -> tuple[str, str]:
    cause = find_root_cause(run, NAMES, {name.replace("_", "-"): ending for name, ending in endings.items()})
    assert cause is not None
    return cause.process, cause.sentence


def test_a_process_that_left_with_0_and_without_a_word_is_not_only_said_to_be_silent(run: RunDirectory):
    told = f"worker-0 ended with exit code 0 while the run went on, without a word. {SILENT}"
    assert sentence(run, orchestrator=ProcessEnd(70, at=30.0), worker_0=ProcessEnd(0, at=10.0)) == ("worker-0", told)


@pytest.mark.parametrize("worker", [ProcessEnd(0, at=31.0), ProcessEnd(0, at=10.0, ordered=True)])
def test_one_that_left_after_the_orchestrator_or_was_told_to_is_not_said_to_have_left(run: RunDirectory, worker: ProcessEnd):
    assert sentence(run, orchestrator=ProcessEnd(70, at=30.0), worker_0=worker) == ("worker-0", SILENT)


def test_one_that_is_silent_and_alive_is_told_in_the_orchestrators_words(run: RunDirectory):
    assert sentence(run, orchestrator=ProcessEnd(70, at=30.0)) == ("worker-0", SILENT)


def test_stacks_are_told_of_who_was_asked_and_not_of_who_crashed_with_some_in_its_log(run: RunDirectory):
    run.log("worker-0").parent.mkdir(exist_ok=True)
    run.log("worker-0").write_text('Current thread 0x01 (most recent call first):\n  File "/x/hard.py", line 12 in reward\n')
    ends = {"orchestrator": ProcessEnd(70, at=30.0)}
    crashed = find_root_cause(run, NAMES, ends)
    asked = find_root_cause(run, NAMES, ends, asked="worker-0")
    assert crashed is not None
    assert asked is not None
    assert crashed.sentence == SILENT
    assert asked.sentence == f"{SILENT} When it was asked, it was at /x/hard.py:12 (reward)."


CRASH = 'Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n  File "/x/hard.py", line 12 in reward\n'


def test_of_a_process_that_a_fault_of_its_own_killed_it_is_told_where(run: RunDirectory):
    run.log("worker-0").parent.mkdir(exist_ok=True)
    run.log("worker-0").write_text(CRASH)
    run.config_json.write_text('{"environments": {"mine": {"name": "hard"}}}')
    told = sentence(run, worker_0=ProcessEnd(-6, at=10.0))[1]
    assert told == (
        "worker-0 was killed by signal 6 (SIGABRT). When it crashed, it was at /x/hard.py:12 (reward). That is code of "
        "environments.mine: what may crash belongs in a process of its own."
    )
    assert sentence(run, worker_0=ProcessEnd(-9, at=10.0))[1] == "worker-0 was killed by signal 9 (SIGKILL)."
