"""A real orchestrator and hub, and servers that refuse weights, never answer, answer late, or die: the run completes.

The part of the supervisor is played by the test: what is fenced comes back as a new process of its name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from telescope.flow.core import Core
from telescope.orchestrator.batch import Recipe
from telescope.orchestrator.loop import Orchestrator, RunOutcome
from telescope.orchestrator.main import make_flow_settings
from telescope.orchestrator.peers import FencedServers, Peers
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.weight_coordinator import UpdateRules
from telescope.records import WeightGroup, WeightManifest
from telescope.runlog.journal import Journal
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog
from telescope.wire import messages as m
from telescope.wire.hub import Hub
from telescope.wire.link import Link
from telescope.wire.peer_events import Delivery
from telescope.wire.security import make_keys
from telescope.wire.supervisor_channel import DESCRIPTOR, OrchestratorChannel, SupervisorChannel
from tests.orchestrator.test_wrong_messages import SERVERS, STEPS, TRAINER, WORKERS, Peer, config, hello

SILENCE_S = 2.5
"""Of an update of whose servers one says nothing: as short as the good ones can surely keep on a busy machine."""
TIMEOUT_S = 30.0
"""Of all other updates: nobody waits for it."""
PIDS = count(100)


@dataclass
class Fleet:
    """The run's peers. `manners` are those of the first process of a server (or of so many, `LIVES`); a later one is good."""

    run: RunDirectory
    transport: str
    manners: dict[str, Callable[[Naughty, Delivery], bool]]
    peers: dict[str, Peer] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    lives: set[asyncio.Task[None]] = field(default_factory=set)
    born: dict[str, int] = field(default_factory=dict)
    epochs: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    gathered: dict[int, dict[str, tuple[Naughty, m.Body | None, Delivery]]] = field(default_factory=dict)
    """By epoch: the members that have come, each with its answer to come and the order it answers."""
    came: dict[int, set[str]] = field(default_factory=dict)
    """By epoch that did not come together: who came to it, told or not that it is broken off."""
    unjoined: dict[str, Delivery] = field(default_factory=dict)
    """The orders of whom never joins."""

    def __post_init__(self) -> None:
        self.supervisor = OrchestratorChannel()
        self.channel = SupervisorChannel.take_over({DESCRIPTOR: str(os.dup(self.supervisor.passed))})

    async def bring(self, name: str) -> None:
        self.born[name] = self.born.get(name, 0) + 1
        self.pids[name] = next(PIDS)
        greeting = hello(name, incarnation=f"{name}.{self.born[name]}", pid=self.pids[name])
        link = await asyncio.to_thread(Link.connect, self.run, greeting, 20.0)
        peer = Naughty(link, self)
        self.peers[name] = peer
        self.lives.add(asyncio.create_task(peer.live()))

    def gather(self, group: WeightGroup, peer: Naughty, answer: m.Body | None, delivery: Delivery) -> None:
        """A broadcast is over for each member when all have come to it. None: the member says itself what becomes of it."""
        here = self.gathered.setdefault(group.epoch, {})
        here[peer.link.name] = peer, answer, delivery
        if len(here) == len(group.members):
            for member, its_answer, its_order in self.gathered.pop(group.epoch).values():
                if its_answer is not None:
                    say(member, its_answer, its_order)

    def gone_from(self, peer: Naughty) -> tuple[Delivery, tuple[str, ...]] | None:
        """The order that the peer waits with in a group that has not come together, and who has not come to it."""
        for epoch, here in self.gathered.items():
            if peer.link.name in here and here[peer.link.name][0] is peer:
                order = here[peer.link.name][2]
                self.gathered[epoch] = {name: waiting for name, waiting in here.items() if name != peer.link.name}
                came = self.came.setdefault(epoch, set(here))
                return order, tuple(name for name in order.body.group.members if name.partition("/")[0] not in came)
        return None

    async def supervise(self) -> None:
        """Fence and start again, as the supervisor does."""
        while True:
            self.supervisor.read()
            for name in SERVERS:
                fence = self.supervisor.fences.pop(name, None)
                if fence is not None and fence.pid == self.pids.get(name):
                    await asyncio.to_thread(self.peers[name].link.close, "killed")
                    await self.bring(name)
            await asyncio.sleep(0.02)


class Naughty(Peer):
    def __init__(self, link: Link, fleet: Fleet) -> None:
        super().__init__(link, 0, 0.0, {})
        self.fleet, self.life = fleet, fleet.born[link.name]

    def take(self, delivery: Delivery) -> None:
        manner = self.fleet.manners.get(self.link.name)
        if manner is not None and self.life <= LIVES.get(manner, 1) and manner(self, delivery):
            return
        match delivery.body:
            case m.PublishWeights(version=version):
                collective = self.fleet.transport == "gloo"
                manifest = WeightManifest(version, self.fleet.transport, "here", (), 0, "" if collective else "sum")
                self.link.send(m.WeightsPublished(version, manifest, 0.0), answers=delivery)
            case m.SendWeights(version=version, group=group):
                self.fleet.epochs.append((group.epoch, group.members))
                self.fleet.gather(group, self, m.WeightsSent(version, "sum", 0.0), delivery)
            case m.PrepareWeights(manifest=manifest, group=WeightGroup() as group):
                self.fleet.gather(group, self, m.WeightsReady(self.version, manifest.version, "", 0.0), delivery)
            case m.AbortWeights(version=version):
                if (waits := self.fleet.gone_from(self)) is not None:
                    order, missing = waits
                    self.link.send(m.WeightsFailed(version, "broken off", fatal=False, missing=missing), answers=order)
                self.link.send(m.WeightsReady(self.version, None, "", 0.0), answers=delivery)
            case _:
                super().take(delivery)


# ---- manners: True where the message was dealt with


def refuses(peer: Naughty, delivery: Delivery) -> bool:
    if isinstance(delivery.body, m.PrepareWeights):
        peer.link.send(m.WeightsFailed(delivery.body.manifest.version, "error 500", fatal=False), answers=delivery)
        return True
    return False


def never_answers(peer: Naughty, delivery: Delivery) -> bool:
    return isinstance(delivery.body, m.PrepareWeights | m.AbortWeights)


def never_joins(peer: Naughty, delivery: Delivery) -> bool:
    """It does not come to a broadcast, or to the reading, and ends that at once when it is told to break off."""
    match delivery.body:
        case m.PrepareWeights():
            peer.fleet.unjoined[peer.link.name] = delivery
            return True
        case m.AbortWeights(version=version):
            say(peer, m.WeightsFailed(version, "broken off", fatal=False), peer.fleet.unjoined.pop(peer.link.name))
    return False


def answers_late(peer: Naughty, delivery: Delivery) -> bool:
    if isinstance(delivery.body, m.PrepareWeights):
        if delivery.body.group is not None:
            peer.fleet.gather(delivery.body.group, peer, None, delivery)
        ready = m.WeightsReady(peer.version, delivery.body.manifest.version, "", 0.0)
        asyncio.get_running_loop().call_later(1.2 * SILENCE_S, lambda: say(peer, ready, delivery))
        return True
    return False


def say(peer: Naughty, body: m.Body, delivery: Delivery) -> None:
    try:
        peer.link.send(body, answers=delivery)
    except ConnectionError:
        return  # fenced meanwhile


def dies_in_prepare(peer: Naughty, delivery: Delivery) -> bool:
    if isinstance(delivery.body, m.PrepareWeights):
        peer.fleet.lives.add(asyncio.create_task(asyncio.to_thread(peer.link.close, "the engine is gone")))
        return True
    return False


def dies_in_commit(peer: Naughty, delivery: Delivery) -> bool:
    if isinstance(delivery.body, m.CommitWeights):
        peer.fleet.lives.add(asyncio.create_task(asyncio.to_thread(peer.link.close, "the engine is gone")))
        return True
    return False


def never_says_that_it_has_committed(peer: Naughty, delivery: Delivery) -> bool:
    return isinstance(delivery.body, m.CommitWeights)


def speaks_of_the_version_before(peer: Naughty, delivery: Delivery) -> bool:
    if isinstance(delivery.body, m.PrepareWeights):
        peer.link.send(m.WeightsReady(peer.version, delivery.body.manifest.version - 1, "", 0.0), answers=delivery)
        return True
    return False


def says_everything_twice(peer: Naughty, delivery: Delivery) -> bool:
    """Twice in answer to the same order, which its own side of the wire does not let pass by itself."""
    match delivery.body:
        case m.PrepareWeights(manifest=manifest, group=group):
            if group is not None:
                peer.fleet.gather(group, peer, None, delivery)
            said: m.Body = m.WeightsReady(peer.version, manifest.version, "", 0.0)
        case m.CommitWeights(version=version):
            peer.version, said = version, m.WeightsReady(version, None, "sum", 0.0)
        case _:
            return False
    questions = peer.link._session.channel.questions
    question = questions[delivery.seq]
    for _ in range(2):
        questions[delivery.seq] = question
        peer.link.send(said, answers=delivery)
    return True


def fails_to_commit(peer: Naughty, delivery: Delivery) -> bool:
    if isinstance(delivery.body, m.CommitWeights):
        peer.link.send(m.WeightsFailed(delivery.body.version, "half loaded", fatal=True), answers=delivery)
        return True
    return False


def commits_other_bytes(peer: Naughty, delivery: Delivery) -> bool:
    if isinstance(delivery.body, m.CommitWeights):
        peer.link.send(m.WeightsReady(delivery.body.version, None, "another", 0.0), answers=delivery)
        return True
    return False


def dies_and_comes_back_refusing(peer: Naughty, delivery: Delivery) -> bool:
    return dies_in_prepare(peer, delivery) if peer.life == 1 else refuses(peer, delivery)


LIVES: dict[Callable[[Naughty, Delivery], bool], int] = {dies_and_comes_back_refusing: 2}


# ---- the play


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telescope.orchestrator.weight_update.GRACE_S", 0.5)


async def play(folder: Path, transport: str, manners: dict[str, Any]) -> tuple[RunOutcome, RunDirectory, Fleet]:
    settings, run = config(), RunDirectory.create(folder / "run")
    fleet = Fleet(run, transport, manners)
    timeout_s = (
        SILENCE_S
        if {never_answers, never_joins, answers_late, never_says_that_it_has_committed} & set(manners.values())
        else TIMEOUT_S
    )
    make_keys(run, ("orchestrator", *WORKERS, *SERVERS, TRAINER))
    log, journal = RunLog(run, "orchestrator"), Journal(run.journal)
    recorder, peers = Recorder(run, log, None, STEPS), Peers.from_config(settings.cluster)
    hub = await Hub.open(run, run="r", attempt="a", config_hash="c")
    recipe = Recipe(settings.algorithm, settings.rollout.group_size, settings.rollout.max_tokens)
    orchestrator = Orchestrator(
        settings,
        hub=hub,
        core=Core(make_flow_settings(settings, trainer_sends=transport == "gloo")),
        peers=peers,
        servers=FencedServers(fleet.channel, hub, peers, 3),
        journal=journal,
        recorder=recorder,
        recipe=recipe,
        updates=UpdateRules(timeout_s, 2),
    )
    running = asyncio.create_task(orchestrator.run())
    node = asyncio.create_task(fleet.supervise())
    try:
        for name in (*WORKERS, *SERVERS, TRAINER):
            await fleet.bring(name)
        outcome = await asyncio.wait_for(running, 60)
    finally:
        node.cancel()
        await hub.close("over", timeout_s=1.0)
        for life in fleet.lives:
            life.cancel()
        await asyncio.gather(node, *fleet.lives, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(peer.link.close) for peer in fleet.peers.values()))
        log.close()
        journal.close()
    return outcome, run, fleet


BAD = {
    "refuses": refuses, "never answers": never_answers, "never joins": never_joins,
    "answers late": answers_late, "dies in prepare": dies_in_prepare,
    "dies in commit": dies_in_commit, "never says that it has committed": never_says_that_it_has_committed,
    "speaks of the version before": speaks_of_the_version_before, "fails to commit": fails_to_commit,
    "commits other bytes": commits_other_bytes,
}  # fmt: skip


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("manner", BAD)
async def test_one_bad_server_is_fenced_and_comes_back_and_the_run_completes(tmp_path: Path, transport: str, manner: str):
    outcome, run, fleet = await play(tmp_path, transport, {"server-1": BAD[manner]})
    assert outcome.reason == f"all {STEPS} steps are trained"
    assert fleet.born["server-0"] == 1
    assert fleet.born["server-1"] == 2
    assert any("server-1 is given up" in row["message"] for row in rows(run, "alerts"))
    if transport == "gloo":  # the group with the dead one, the survivor alone, and perhaps the one that came back
        assert [epoch for epoch, _ in fleet.epochs] == sorted(epoch for epoch, _ in fleet.epochs)
        assert ("trainer-0", "server-0/0", "server-1/0") in {members for _, members in fleet.epochs}
        assert max(epoch for epoch, _ in fleet.epochs) > 1


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
async def test_what_a_server_says_twice_counts_once_and_the_server_is_kept(tmp_path: Path, transport: str):
    outcome, run, fleet = await play(tmp_path, transport, {"server-1": says_everything_twice})
    assert outcome.reason == f"all {STEPS} steps are trained"
    assert (fleet.born["server-0"], fleet.born["server-1"]) == (1, 1)
    followed = [(row["version"], row["server"]) for row in rows(run, "weights") if row["phase"] == "committed"]
    assert sorted(followed) == [(step, server) for step in range(1, STEPS + 1) for server in SERVERS]


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("manner", ["never answers", "dies in prepare", "fails to commit"])
async def test_two_bad_servers_come_back_and_the_run_completes(tmp_path: Path, transport: str, manner: str):
    outcome, _, fleet = await play(tmp_path, transport, dict.fromkeys(SERVERS, BAD[manner]))
    assert outcome.reason == f"all {STEPS} steps are trained"
    assert (fleet.born["server-0"], fleet.born["server-1"]) == (2, 2)


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
async def test_a_server_that_comes_back_and_refuses_is_fenced_and_does_not_end_the_run(tmp_path: Path, transport: str):
    outcome, run, fleet = await play(tmp_path, transport, {"server-1": dies_and_comes_back_refusing})
    assert outcome.reason == f"all {STEPS} steps are trained"
    assert (fleet.born["server-0"], fleet.born["server-1"]) == (1, 3)
    assert any("server-1 is given up" in row["message"] and "error 500" in row["message"] for row in rows(run, "alerts"))


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
async def test_where_every_server_refuses_they_serve_on_until_the_retries_are_used_up(tmp_path: Path, transport: str):
    outcome, run, fleet = await play(tmp_path, transport, dict.fromkeys(SERVERS, refuses))
    assert not outcome.ok
    assert "error 500" in outcome.reason
    assert "weight_sync.max_retries=2" in outcome.reason
    assert (fleet.born["server-0"], fleet.born["server-1"]) == (1, 1)
    assert [row["phase"] for row in rows(run, "weights")].count("broken off") == 3
