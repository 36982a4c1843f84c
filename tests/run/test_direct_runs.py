"""Whole runs with `wire.direct=true`: the same run as through the relay, decided by the same events; and its deaths."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.replay import JournalLine, decode_line, decode_opening, replay
from telescope.runlog.layout import RunDirectory
from tests.run.conftest import Start, WholeRun
from tests.run.test_fake_runs import played, trained

DIRECT, RELAY = "wire.direct=true", "wire.direct=false"
SLOW = ("experiment=fake", "number_of_steps=100000", "inference.fake_token_s=0.2")


def lines(run: RunDirectory) -> list[JournalLine]:
    texts = run.journal.read_bytes().splitlines()
    decode_opening(texts[0])
    return [decode_line(text, number) for number, text in enumerate(texts[1:], start=2)]


def kinds(run: WholeRun) -> tuple[set[str], Counter[str]]:
    """Kinds of events and commands in the journal; of those that the seed decides, how many."""
    found = Counter(type(event).__name__ for line in lines(run.directory) for event in (line.event, *line.commands))
    counted = ("TurnStarted", "TurnDone", "RolloutDone", "Run", "Place", "Train", "StepDone", "UpdateDone")
    return set(found) - {"Tick"}, Counter({kind: found[kind] for kind in counted})


def test_a_synchronous_run_is_the_same_by_relay_and_directly(start: Start):
    runs = [
        start(
            "experiment=fake", "number_of_steps=3", "orchestrator.max_async_rollout=0", "seed=11",
            "cluster.inference_num_workers=2", way,
        )
        for way in (DIRECT, RELAY)
    ]  # fmt: skip
    for run in runs:
        assert run.wait() == 0, run.said()
        assert replay(run.directory.journal.read_bytes().splitlines()).disagreement is None
    direct, relay = runs
    assert played(direct) == played(relay)
    assert sorted(trained(direct)) == sorted(trained(relay))
    assert kinds(direct) == kinds(relay)
    columns = [{name for row in run.rows("turns") for name in row} for run in runs]
    assert columns[0] == columns[1]
    assert {row["server"] for row in direct.rows("turns")} == {"server-0", "server-1"}


class Places:
    """What servers hold, from the journal alone: requests placed and not answered, by rollout."""

    def __init__(self) -> None:
        self.rollout_of: dict[str, tuple[int, int]] = {}
        self.placed: dict[str, tuple[int, int]] = {}

    def take(self, line: JournalLine) -> None:
        match line.event:
            case seen.TurnStarted(request_id=name, rollout_id=rollout_id, attempt=attempt):
                self.rollout_of[name] = rollout_id, attempt
            case seen.TurnDone(request_id=name):
                self.placed.pop(name, None)
        for command in line.commands:
            if isinstance(command, do.PlaceRequest):
                self.placed[command.request_id] = self.rollout_of[command.request_id]


@pytest.mark.parametrize("way", [DIRECT, pytest.param(RELAY, marks=pytest.mark.slow)])
def test_a_cancelled_rollout_keeps_its_lane_until_its_server_has_stopped(start: Start, way: str):
    run = start(
        "experiment=fake", "number_of_steps=6", "orchestrator.max_async_rollout=1", "orchestrator.max_off_policy_steps=1",
        "orchestrator.max_concurrent_prompts_per_server=3", "inference.fake_token_s=0.03",
        "cluster.inference_num_workers=2", way,
    )  # fmt: skip
    assert run.wait() == 0, run.said()
    places, running, cancelled, cut_short = Places(), set[tuple[int, int]](), set[tuple[int, int]](), 0
    for line in lines(run.directory):
        match line.event:
            case (
                seen.RolloutDone(rollout_id=rollout_id, attempt=attempt)
                | seen.RolloutFailed(rollout_id=rollout_id, attempt=attempt)
            ):
                assert (rollout_id, attempt) not in places.placed.values()
                running.discard((rollout_id, attempt))
            case seen.TurnDone(request_id=name, finish_reason="abort"):
                cut_short += places.rollout_of[name] in cancelled
        places.take(line)
        running |= {(c.order.rollout_id, c.order.attempt) for c in line.commands if isinstance(c, do.DispatchRollout)}
        cancelled |= {(c.rollout_id, c.attempt) for c in line.commands if isinstance(c, do.CancelAttempt)}
        assert len(running | set(places.placed.values())) <= 2 * 3 * 4  # servers, prompts a server, samples: never more lanes
    assert len(cancelled) > 0
    assert cut_short > 0  # some of them in mid-generation
    assert run.summary()["reasons"]["cancelled: off_policy"] > 0


@pytest.mark.parametrize("victim", ["server-0", pytest.param("worker-0", marks=pytest.mark.slow)])
def test_a_death_with_direct_requests_out_ends_the_run_with_its_name_and_leaves_nothing(start: Start, victim: str):
    run = start(*SLOW, DIRECT, "cluster.max_server_restarts=0")
    run.until(lambda: len(run.rows("turns")) > 3 if run.directory.path.is_dir() else False, "generating")
    os.kill(run.find(victim).pid, signal.SIGKILL)
    assert run.wait() == 70
    assert victim in run.summary()["exit_reason"]
    assert run.left_after(30) == []
