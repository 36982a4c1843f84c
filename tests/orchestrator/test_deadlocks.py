"""A real orchestrator, hub and links against the deadlocks of this field's bug reports: the run always ends, and as it should.

Peers are played by the test; what waits is told apart from what hangs by a deadline of a minute, which no passing run comes
near.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.flow.core import Core
from telescope.flow.replay import JournalLine, decode_line, encode_opening, replay
from telescope.flow.settings import EvalRules
from telescope.orchestrator.batch import Recipe
from telescope.orchestrator.eval_scores import EvalScoring
from telescope.orchestrator.loop import Orchestrator, RunOutcome
from telescope.orchestrator.main import make_flow_settings
from telescope.orchestrator.peers import FencedServers, Peers
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.weight_coordinator import UpdateRules
from telescope.records import RolloutOrder
from telescope.runlog.journal import Journal, journal_lines
from telescope.runlog.layout import RunDirectory
from telescope.runlog.writer import RunLog
from telescope.wire import messages as m
from telescope.wire.hub import Hub
from telescope.wire.link import Link
from telescope.wire.peer_events import Delivery
from telescope.wire.security import make_keys
from telescope.wire.supervisor_channel import SupervisorChannel
from tests.orchestrator.test_wrong_messages import TRAINER, Peer, config, hello
from tests.wire.shuffler import Shuffler


class Actor(Peer):
    """Well-behaved; a cancelled order is answered at once, whatever its server does."""

    def __init__(self, link: Link) -> None:
        super().__init__(link, 0, 0.0, {})

    def take(self, delivery: Delivery) -> None:
        match delivery.body:
            case m.CancelRollout(rollout_id=rollout_id, attempt=attempt):
                for name, (order_delivery, order) in list(self.waiting.items()):
                    if (order.rollout_id, order.attempt) == (rollout_id, attempt):
                        del self.waiting[name]
                        self.link.send(m.RolloutError(rollout_id, attempt, "cancelled"), answers=order_delivery)
            case _:
                super().take(delivery)


class Deaf(Actor):
    """Takes orders, and never says anything of them."""

    def take(self, delivery: Delivery) -> None:
        if not isinstance(delivery.body, m.RunRollout | m.CancelRollout):
            super().take(delivery)


class Forgetful(Actor):
    """Loses each order, and answers its cancel."""

    def ordered(self, delivery: Delivery, order: RolloutOrder) -> None:
        self.waiting[f"lost/{order.rollout_id}.{order.attempt}"] = delivery, order


class LateServer(Actor):
    """Answers its first requests only when they have been aborted, and then with all their tokens, as if it had not heard."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.asked: dict[str, Delivery] = {}
        self.aborted = set[str]()
        self.late = 4

    def take(self, delivery: Delivery) -> None:
        match delivery.body:
            case m.Generate(request_id=request_id) if self.late > 0:
                self.late -= 1
                self.asked[request_id] = delivery
            case m.Abort(request_id=request_id):
                self.aborted.add(request_id)  # which may have overtaken its request
            case _:
                super().take(delivery)
        for request_id in [name for name in self.asked if name in self.aborted]:
            asyncio.get_running_loop().call_later(0.05, self.generate, self.asked.pop(request_id))


class SlowToPrepare(Actor):
    """Takes new weights only after a time in which several steps would be through."""

    def take(self, delivery: Delivery) -> None:
        if isinstance(delivery.body, m.PrepareWeights):
            asyncio.get_running_loop().call_later(UPDATE_S, super().take, delivery)
        else:
            super().take(delivery)


UPDATE_S = 0.3


async def play(
    folder: Path,
    actors: Mapping[str, type[Actor]],
    *,
    servers: int = 2,
    workers: int = 2,
    group_size: int = 4,
    shuffle: int | None = None,
    placement_timeout_s: float | None = None,
    **flow: Any,
) -> tuple[RunOutcome, list[JournalLine]]:
    """One run to its end, and its journal. `flow`: the core's settings that differ. `placement_timeout_s`: nobody comes."""
    base, run = config(), RunDirectory.create(folder / "run")
    there = {"inference_num_workers": servers, "env_num_workers": workers}
    patience = {} if placement_timeout_s is None else {"placement_timeout_s": placement_timeout_s}
    cluster = base.cluster.model_copy(update=there | patience)
    rollout = base.rollout.model_copy(update={"group_size": group_size, "min_group_size": min(2, group_size)})
    settings = base.model_copy(update={"cluster": cluster, "rollout": rollout})
    names = (*(f"worker-{i}" for i in range(workers)), *(f"server-{i}" for i in range(servers)), TRAINER)
    make_keys(run, ("orchestrator", *names))
    core = Core(msgspec.structs.replace(make_flow_settings(settings), **flow))
    log, journal = RunLog(run, "orchestrator"), Journal(run.journal)
    journal.append(encode_opening(core.settings))
    measures = {rules.name: EvalScoring((1,), 0.5) for rules in core.settings.evals}
    recorder = Recorder(run, log, None, core.settings.number_of_steps, evals=measures)
    peers = Peers.from_config(cluster)
    hub = await Hub.open(run, run="r", attempt="a", config_hash="c")
    recipe = Recipe(settings.algorithm, group_size, settings.rollout.max_tokens)
    orchestrator = Orchestrator(
        settings,
        hub=hub,
        core=core,
        peers=peers,
        servers=FencedServers(SupervisorChannel(), hub, peers, 0),
        journal=journal,
        recorder=recorder,
        recipe=recipe,
        updates=UpdateRules(60.0, 1),
    )
    shuffler = Shuffler(run, shuffle) if shuffle is not None else None
    running = asyncio.create_task(orchestrator.run())
    peers: list[Actor] = []
    lives: list[asyncio.Task[None]] = []
    try:
        for name in names if placement_timeout_s is None else ():
            link = await asyncio.to_thread(Link.connect, run, hello(name, name, 1), 60.0)
            peers.append(actors.get(name, Actor)(link))
        lives = [asyncio.create_task(peer.live()) for peer in peers]
        outcome = await asyncio.wait_for(running, 60)
    finally:
        await hub.close("over", timeout_s=1.0)
        if shuffler is not None:
            shuffler.close()
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(peer.link.close) for peer in peers))
        log.close()
        journal.close()
    if shuffler is not None:
        assert shuffler.repeated > 0
        assert shuffler.overtaken > 0
    written = list(journal_lines(run.journal))
    assert replay(written).disagreement is None
    return outcome, [decode_line(text, number) for number, text in enumerate(written[1:], start=2)]


def trained(lines: list[JournalLine]) -> list[int]:
    """Groups in the order in which they were trained."""
    return [
        group
        for line in lines
        for command in line.commands
        if isinstance(command, do.TrainOnBatch)
        for group in command.group_ids
    ]


def reasons(lines: list[JournalLine], state: str) -> list[str]:
    return [c.reason for line in lines for c in line.commands if isinstance(c, do.RecordGroupState) and c.state == state]


@pytest.mark.parametrize("steps", [1, 2, 3])  # 1, 2 = the lag, the lag and one
@pytest.mark.parametrize("shape", ["one of each", "groups of one", pytest.param("two of each", marks=pytest.mark.slow)])
async def test_a_run_ends_with_exactly_its_steps(tmp_path: Path, shape: str, steps: int):
    one, group_size = (1 if shape == "one of each" else 2), (1 if shape == "groups of one" else 4)
    outcome, lines = await play(
        tmp_path, {}, servers=one, workers=one, group_size=group_size, number_of_steps=steps, max_async_rollout=2
    )
    assert outcome.reason == f"all {steps} steps are trained"
    assert len(trained(lines)) == len(set(trained(lines))) == 2 * steps


OWN = EvalRules(name="own", environment="task", every=1, num_samples=2)
EVAL_TROUBLES: dict[str, tuple[dict[str, type[Actor]], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "orders that are lost": ({"worker-1": Forgetful}, {"rollout_deadline_s": 1.0, "max_attempts": 1000}),
    "a late server": ({"server-1": LateServer}, {"max_off_policy_steps": 1, "rollout_deadline_s": 1.0}),
    "slow weights": ({"server-0": SlowToPrepare}, {}),
    "messages out of order": ({}, {"shuffle": 5}),
    "servers that must be idle": ({}, {"evals_hold_training": True, "max_async_rollout": 0}),
    "a server held for them": ({}, {"servers": 3, "eval_servers": 1}),
    "two held ones, and a late one": ({"server-1": LateServer}, {"servers": 3, "eval_servers": 2, "rollout_deadline_s": 1.0}),
    "one held, and slow weights": ({"server-0": SlowToPrepare}, {"servers": 3, "eval_servers": 1}),
    "one held, and messages out of order": ({}, {"servers": 3, "eval_servers": 1, "shuffle": 6}),
    "group lanes": ({}, {"enable_individual_sample_lanes": False, "free_lane_after_generation": False}),
}


@pytest.mark.parametrize("trouble", EVAL_TROUBLES)
async def test_every_eval_that_is_due_ends_and_the_run_waits_for_the_last(tmp_path: Path, trouble: str):
    actors, flow = EVAL_TROUBLES[trouble]
    other = EvalRules(name="other", environment="task", every=2, num_prompts=2, baseline=False)
    outcome, lines = await play(tmp_path, actors, number_of_steps=3, evals=(OWN, other), **flow)
    assert outcome.reason == "all 3 steps are trained"
    ended = [command for line in lines for command in line.commands if isinstance(command, do.EndEval)]
    due = {("own", step) for step in range(4)} | {("other", 2), ("other", 3)}
    assert {(one.eval, one.step) for one in ended} == due
    assert all(one.state in ("complete", "left out") for one in ended)
    assert [one.state for one in ended if one.step in (0, 3)] == ["complete"] * 3
    assert len(trained(lines)) == len(set(trained(lines))) == 6


async def test_a_worker_that_never_answers_ends_a_run_in_its_baseline_too(tmp_path: Path):
    outcome, lines = await play(
        tmp_path, {"worker-0": Deaf}, workers=1, rollout_deadline_s=0.3, cancel_deadline_s=0.6, evals=(OWN,)
    )
    assert not outcome.ok
    assert "worker-0 did not answer the cancel of rollout" in outcome.reason
    ended = [command for line in lines for command in line.commands if isinstance(command, do.EndEval)]
    assert [(one.step, one.state) for one in ended] == [(0, "cut off")]


async def test_who_never_comes_is_named_with_the_setting(tmp_path: Path):
    outcome, _ = await play(tmp_path, {}, servers=1, workers=1, placement_timeout_s=0.5)
    assert not outcome.ok
    assert outcome.reason.endswith(" did not say hello within cluster.placement_timeout_s=0.5 s; their logs say why")
    assert set(outcome.reason.split(" did not ")[0].split(", ")) == {"worker-0", "server-0", TRAINER}


async def test_a_worker_that_never_answers_anything_ends_the_run_with_its_name(tmp_path: Path):
    outcome, lines = await play(tmp_path, {"worker-0": Deaf}, workers=1, rollout_deadline_s=0.3, cancel_deadline_s=0.6)
    assert not outcome.ok
    assert "worker-0 did not answer the cancel of rollout" in outcome.reason
    cancels = [command.reason for line in lines for command in line.commands if isinstance(command, do.CancelAttempt)]
    assert "no answer from worker-0 within 0.3 s" in cancels
    assert "asked again" in cancels


async def test_orders_that_a_worker_loses_are_tried_again_after_their_deadline_and_the_run_completes(tmp_path: Path):
    outcome, lines = await play(
        tmp_path, {"worker-1": Forgetful}, rollout_deadline_s=1.0, cancel_deadline_s=60.0, number_of_steps=3, max_attempts=1000
    )
    assert outcome.reason == "all 3 steps are trained"
    assert len(trained(lines)) == len(set(trained(lines))) == 6


async def test_a_server_that_answers_only_after_the_cancel_holds_its_rollouts_lane_until_then(tmp_path: Path):
    outcome, lines = await play(tmp_path, {"server-1": LateServer}, number_of_steps=6, max_off_policy_steps=1)
    assert outcome.reason == "all 6 steps are trained"
    assert "off_policy" in reasons(lines, "cancelled")
    open_requests: dict[tuple[int, int], set[str]] = {}
    rollout_of: dict[str, tuple[int, int]] = {}
    cancelled, late = set[tuple[int, int]](), 0
    for line in lines:
        match line.event:
            case seen.TurnStarted(request_id=name, rollout_id=rollout_id, attempt=attempt):
                rollout_of[name] = rollout_id, attempt
            case seen.TurnDone(request_id=name):
                late += rollout_of[name] in cancelled
                open_requests.get(rollout_of[name], set()).discard(name)
            case seen.RolloutDone() | seen.RolloutFailed() as ended:
                assert not open_requests.get((ended.rollout_id, ended.attempt))
        for command in line.commands:
            if isinstance(command, do.PlaceRequest):
                open_requests.setdefault(rollout_of[command.request_id], set()).add(command.request_id)
            elif isinstance(command, do.CancelAttempt):
                cancelled.add((command.rollout_id, command.attempt))
    assert late > 0  # tokens came when nobody wanted them any more


async def test_weights_that_take_longer_than_a_step_hold_nothing_up(tmp_path: Path):
    outcome, lines = await play(tmp_path, {"server-0": SlowToPrepare}, number_of_steps=4)
    assert outcome.reason == "all 4 steps are trained"
    begun = {c.version: line.now for line in lines for c in line.commands if isinstance(c, do.UpdateWeights)}
    took = [line.now - begun[line.event.version] for line in lines if isinstance(line.event, seen.UpdateDone)]
    assert len(took) == 4
    assert min(took) > 0.9 * UPDATE_S


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
async def test_repeated_and_reordered_messages_lose_nothing_and_train_nothing_twice(tmp_path: Path, seed: int):
    outcome, lines = await play(tmp_path, {}, shuffle=seed, number_of_steps=6)
    assert outcome.reason == "all 6 steps are trained"
    assert len(trained(lines)) == len(set(trained(lines))) == 12


async def test_repeated_and_reordered_messages_with_a_late_server_and_stale_groups(tmp_path: Path):
    actors = {"server-1": LateServer}
    outcome, lines = await play(tmp_path, actors, shuffle=4, number_of_steps=6, max_off_policy_steps=1)
    assert outcome.reason == "all 6 steps are trained"
    assert len(trained(lines)) == len(set(trained(lines))) == 12
