"""What Slurm is asked, by clients that stand in for its own: how often, for how long, and what is made of the answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from telescope._launch.slurm.queue import query_addresses, query_job
from telescope._launch.slurm.requeueing import JobFacts

JOB = "JobId=12 JobName=x JobState=RUNNING Restarts=0 PreemptTime=None"
NODES = (
    "NodeName=n1 NodeAddr=10.0.0.1 State=MIXED",
    "NodeName=n2 NodeAddr=10.0.0.2 State=DOWN+DRAIN Reason=it said State=IDLE before",
    "NodeName=n3 NodeAddr=10.0.0.3 State=IDLE*",
)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose scontrol prints `answer-job` or `answer-node`, and notes what it was asked in `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {folder}/calls\n[ ! -e {folder}/hangs ] || exec sleep 600\ncat {folder}/answer-$3\n'
    )
    program.chmod(0o700)
    (folder / "answer-job").write_text(JOB + "\n")
    (folder / "answer-node").write_text("\n".join(NODES) + "\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_the_nodes_of_a_job_are_asked_about_in_one_question(scontrol: Path):
    found = query_job("12", ("n1", "n2", "n3"), 0, ())
    assert found == JobFacts("RUNNING", nodes_down=("n2", "n3"))
    assert (scontrol / "calls").read_text().splitlines() == ["show --oneliner job 12", "show --oneliner node n1,n2,n3"]


def test_addresses_are_one_question_too_and_a_node_that_is_not_in_the_answer_goes_by_its_name(scontrol: Path):
    assert query_addresses(("n1", "n4")) == {"n1": "10.0.0.1", "n4": "n4"}
    assert (scontrol / "calls").read_text().splitlines() == ["show --oneliner node n1,n4"]


def test_a_controller_that_does_not_answer_is_waited_for_once_a_question_and_within_what_there_is(scontrol: Path):
    (scontrol / "hangs").touch()
    assert query_job(
        "12", tuple(f"n{index}" for index in range(500)), 0, ("CANCELLED AT x DUE TO PREEMPTION ***",), 0.5
    ) == JobFacts(preempted=True)
    assert len((scontrol / "calls").read_text().splitlines()) == 2
