"""The orchestrator's part of a ticket, over real sockets; and when the core hears that a cancelled rollout has stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.orchestrator.perform import Performer
from telescope.records import PromptRef, RolloutOrder, Sampling
from telescope.runlog.layout import RunDirectory
from telescope.wire import messages as m
from telescope.wire.happenings import Delivery, PeerStuck
from telescope.wire.hub import Hub
from telescope.wire.link import Link
from telescope.wire.security import make_keys
from tests.orchestrator.test_wrong_messages import orchestrating

DOOR = m.DoorAddress("tcp://10.0.0.7:41874", "k" * 40)
ORDER = RolloutOrder(11, 3, 2, 0, PromptRef("task", "train", 4), 99)
IDS = np.arange(3, dtype=np.int32)


@dataclass
class Desk:
    """A performer without a core: a worker and a server are there, and one rollout plays."""

    performer: Performer
    hub: Hub
    worker: Link
    server: Link
    order: Delivery | None = None

    async def heard(self, link: Link, kind: type) -> Delivery:
        delivery = await asyncio.wait_for(link.received(), 60)
        assert isinstance(delivery.body, kind), delivery.body
        return delivery

    async def next(self) -> Delivery:
        happening = await self.hub.next(10)
        assert isinstance(happening, Delivery), happening
        return happening

    async def placed(self, direct: bool) -> Delivery:
        """The order runs, its turn 0 is at the server. Gives the server's order, its answer's question."""
        list(self.performer.perform(do.DispatchRollout("worker-0", ORDER)))
        self.order = await self.heard(self.worker, m.RunRollout)
        ask: Any = m.AskPlace("q", 11, 0, 0, 3) if direct else m.Generate("q", 11, 0, 0, Sampling(1.0, 4, 1))
        self.worker.send(ask, () if direct else (IDS,))
        delivery = await self.next()
        assert self.performer.asked(delivery, delivery.body) == seen.TurnStarted("q", 11, 0, 0, 3)
        list(self.performer.perform(do.PlaceRequest("q", "server-0", 0)))
        return await self.heard(self.server, m.Expect if direct else m.Generate)

    async def cancelled(self) -> None:
        """The core cancels; the worker answers at once, the server has the Abort and is silent yet."""
        list(self.performer.perform(do.CancelAttempt("worker-0", 11, 0, "off_policy")))
        await self.heard(self.worker, m.CancelRollout)
        await self.heard(self.server, m.Abort)
        self.worker.send(m.RolloutFailed(11, 0, "cancelled: off_policy"), answers=self.order)

    async def worker_answer(self) -> Any:
        delivery = await self.next()
        return self.performer.answered(delivery, delivery.body)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with orchestrating(tmp_path) as (_, run, performer):
        hub = performer._hub
        links = [await join(run, name) for name in ("worker-0", "server-0")]
        for _ in links:
            await hub.next(10)
        yield Desk(performer, hub, *links)
        for link in links:
            await asyncio.to_thread(link.close, "the test has ended")


async def join(run: RunDirectory, name: str) -> Link:
    role: Any = name.rpartition("-")[0]
    door = DOOR if role == "server" else None
    hello = m.Hello(role, name, "r", "a", name, "c", 2, 1, "here", door=door)
    return await asyncio.to_thread(Link.connect, run, hello, 20.0)


async def test_a_ticket_names_the_door_and_the_secret_that_the_server_expects(desk: Desk):
    expect = (await desk.placed(direct=True)).body
    ticket = (await desk.heard(desk.worker, m.Ticket)).body
    assert (ticket.request_id, ticket.server, ticket.door) == ("q", "server-0", DOOR)
    assert (expect.request_id, expect.worker, expect.prompt_tokens) == ("q", "worker-0", 3)
    assert ticket.secret == expect.secret
    assert len(bytes.fromhex(ticket.secret)) == 16
    assert desk.hub.credits("server-0") == 1  # of 2


async def test_served_gives_the_core_the_same_event_and_row_as_a_completion(desk: Desk):
    results = []
    for direct in (False, True):
        question = await desk.placed(direct)
        if direct:
            await desk.heard(desk.worker, m.Ticket)
            desk.server.send(m.Served("q", "stop", 5, 2, 0.125, 0.5), answers=question)
        else:
            arrays = (np.zeros(5, np.int32), np.zeros(5, np.float32), np.zeros(5, np.int32))
            desk.server.send(m.Completion("q", "stop", 5, 2, 0.125, 0.5), arrays, answers=question)
        delivery = await desk.next()
        event, row = desk.performer.relay.answer(delivery, delivery.body)
        results.append((event, {name: value for name, value in row.items() if not name.endswith("_ns")}))
        if not direct:
            await desk.heard(desk.worker, m.Completion)
        assert desk.hub.credits("server-0") == 2
        desk.worker.send(m.RolloutFailed(11, 0, "over"), answers=desk.order)
        await desk.worker_answer()
    assert results[0] == results[1]
    assert results[0][0] == seen.TurnDone("q", 11, 5, "stop")


@pytest.mark.parametrize("direct", [False, True])
async def test_a_cancelled_rollout_has_ended_for_the_core_only_when_its_server_has_answered(desk: Desk, direct: bool):
    question = await desk.placed(direct)
    if direct:
        await desk.heard(desk.worker, m.Ticket)
    await desk.cancelled()
    assert await desk.worker_answer() is None  # held: the lane is not free yet
    assert list(desk.performer.freed()) == []
    assert desk.hub.credits("server-0") == 1
    if direct:
        desk.server.send(m.Served("q", "abort", 2, 0, 0.0, 0.1), answers=question)
    else:
        arrays = (np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
        desk.server.send(m.Completion("q", "abort", 2, 0, 0.0, 0.1), arrays, answers=question)
    delivery = await desk.next()
    event, _ = desk.performer.relay.answer(delivery, delivery.body)
    assert event == seen.TurnDone("q", 11, 2, "abort")
    assert list(desk.performer.freed()) == [seen.RolloutFailed(11, 0, "cancelled: off_policy")]
    assert desk.hub.credits("server-0") == 2


async def test_a_lane_is_not_free_before_the_server_has_said_that_it_has_ended(desk: Desk):
    """With a ticket the worker has its tokens, and says that it needs no more, before the orchestrator hears of their end."""
    question = await desk.placed(direct=True)
    await desk.heard(desk.worker, m.Ticket)
    desk.worker.send(m.GenerationOver(11, 0))
    delivery = await desk.next()
    assert desk.performer.generated(delivery, delivery.body) is None
    assert list(desk.performer.freed()) == []
    desk.server.send(m.Served("q", "stop", 2, 0, 0.0, 0.1), answers=question)
    delivery = await desk.next()
    desk.performer.relay.answer(delivery, delivery.body)
    assert list(desk.performer.freed()) == [seen.GenerationOver(11, 0)]
    assert list(desk.performer.freed()) == []


@pytest.mark.parametrize("direct", [False, True])
async def test_a_server_that_does_not_end_an_aborted_request_is_named(
    desk: Desk, direct: bool, monkeypatch: pytest.MonkeyPatch
):
    await desk.placed(direct)
    if direct:
        await desk.heard(desk.worker, m.Ticket)
    await desk.cancelled()
    assert await desk.worker_answer() is None
    desk.performer.tick(time.monotonic())
    assert desk.performer.complaints.counts["server-0"] == 0
    monkeypatch.setattr("telescope.orchestrator.perform.SERVER_LATE_S", 0.0)
    desk.performer.tick(time.monotonic())
    desk.performer.tick(time.monotonic())
    assert desk.performer.complaints.counts["server-0"] == 1


@pytest.mark.parametrize("direct", [False, True])
async def test_a_server_that_ends_nothing_is_given_up_but_not_for_the_time_of_an_update(
    desk: Desk, direct: bool, monkeypatch: pytest.MonkeyPatch
):
    await desk.placed(direct)
    if direct:
        await desk.heard(desk.worker, m.Ticket)
    await desk.cancelled()
    assert await desk.worker_answer() is None
    start = time.monotonic()
    desk.performer.tick(start + 29.0)
    assert desk.performer.take_hanging() == []
    with monkeypatch.context() as busy:
        busy.setattr(type(desk.performer.weights), "doing", "weights of version 1: being committed")
        desk.performer.tick(start + 300.0)
    assert desk.performer.take_hanging() == []
    desk.performer.tick(start + 329.0)
    assert desk.performer.take_hanging() == []
    desk.performer.tick(start + 331.0)
    cause = "it has not ended the aborted requests of rollout 11 within 30 s"
    assert desk.performer.take_hanging() == [("server-0", cause)]


@pytest.mark.parametrize("direct", [False, True])
async def test_what_nobody_waits_for_is_not_generated_again_when_its_server_is_lost(desk: Desk, direct: bool):
    await desk.placed(direct)
    if direct:
        await desk.heard(desk.worker, m.Ticket)
    await desk.cancelled()
    assert await desk.worker_answer() is None
    freed = list(desk.performer.server_lost("server-0", time.monotonic()))
    assert freed == [seen.RolloutFailed(11, 0, "cancelled: off_policy")]
    await desk.heard(desk.worker, m.Revoke if direct else m.GenerateFailed)
    assert list(desk.performer.perform(do.PlaceRequest("q", "server-1", 0))) == [seen.TurnDone("q", 11, 0, "abort")]
    assert list(desk.performer.perform(do.PlaceRequest("q", "server-1", 0))) == []


async def test_a_cancel_that_crosses_its_answer_leaves_nothing_behind(desk: Desk):
    """The rollout has failed by itself; its cancel comes too late to say of it that it was told to stop."""
    list(desk.performer.perform(do.DispatchRollout("worker-0", ORDER)))
    order = await desk.heard(desk.worker, m.RunRollout)
    desk.worker.send(m.RolloutFailed(11, 0, "the sandbox is down"), answers=order)
    assert await desk.worker_answer() is not None
    list(desk.performer.perform(do.CancelAttempt("worker-0", 11, 0, "off_policy")))
    assert not desk.performer._recorder._cancelled


async def test_an_answer_held_for_a_revoked_ticket_is_free_when_the_request_ends(desk: Desk):
    await desk.placed(direct=True)
    await desk.heard(desk.worker, m.Ticket)
    assert list(desk.performer.server_lost("server-0", time.monotonic())) == []
    await desk.heard(desk.worker, m.Revoke)
    assert list(desk.performer.perform(do.PlaceRequest("q", "server-1", 0))) == [seen.TurnDone("q", 11, 0, "abort")]


async def test_a_lost_server_revokes_its_tickets_and_frees_what_waited_for_it(desk: Desk):
    await desk.placed(direct=True)
    await desk.heard(desk.worker, m.Ticket)
    await desk.cancelled()
    assert await desk.worker_answer() is None
    ended = list(desk.performer.perform(do.RefuseRequest("q", "server-0 was lost: killed by SIGKILL")))
    assert ended == [seen.RolloutFailed(11, 0, "cancelled: off_policy")]
    assert (await desk.heard(desk.worker, m.Revoke)).body.cause == "server-0 was lost: killed by SIGKILL"


async def test_a_worker_that_waits_at_a_door_is_not_stuck(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    make_keys(run, ("orchestrator", "worker-0", "server-0"))
    hub = await Hub.open(run, run="r", attempt="a", config_hash="c", stuck_s=0.6, heartbeat_s=0.1)
    link = await join(run, "worker-0")
    await hub.next(60)
    hub.send("worker-0", m.RunRollout(ORDER))
    link.send(m.AskPlace("q", 11, 0, 0, 3))
    asked = await hub.next(60)
    assert isinstance(asked, Delivery)
    hub.send("worker-0", m.Ticket("q", "server-0", DOOR, "s", 30.0), answers=asked)
    hub.elsewhere(asked, waits=True)
    assert await hub.next(1.5) is None
    back = time.monotonic()
    hub.elsewhere(asked, waits=False)
    stuck = await hub.next(60)
    assert isinstance(stuck, PeerStuck)
    assert 0.6 <= stuck.seconds <= time.monotonic() - back  # the time at the door counts for nothing
    await asyncio.to_thread(link.close, "the test has ended")
    await hub.close("the test has ended", timeout_s=0.0)
