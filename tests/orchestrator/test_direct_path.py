"""The orchestrator's part of the direct path, over real sockets; and when the core hears that a cancelled rollout has ended."""

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
from telescope.orchestrator.loop import Orchestrator
from telescope.orchestrator.recorder import Recorder
from telescope.records import PromptRef, RolloutOrder, Sampling
from telescope.runlog.layout import RunDirectory
from telescope.wire import messages as m
from telescope.wire.hub import Hub
from telescope.wire.link import Link
from telescope.wire.peer_events import Delivery, PeerStuck
from telescope.wire.security import make_keys
from tests.orchestrator.test_wrong_messages import orchestrating

DIRECT = m.DirectAddress("tcp://10.0.0.7:41874", "k" * 40)
ORDER = RolloutOrder(11, 3, 2, 0, PromptRef("task", "train", 4), 99)
IDS = np.arange(3, dtype=np.int32)


@dataclass
class Scene:
    """An orchestrator without a core: a worker and a server are there, and one rollout plays."""

    orchestrator: Orchestrator
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
        list(self.orchestrator.executor.execute(do.DispatchRollout("worker-0", ORDER)))
        self.order = await self.heard(self.worker, m.RunRollout)
        ask: Any = m.RequestGrant("q", 11, 0, 0, 3) if direct else m.Generate("q", 11, 0, 0, Sampling(1.0, 4, 1))
        self.worker.send(ask, () if direct else (IDS,))
        delivery = await self.next()
        assert self.orchestrator.relay.ask(delivery, delivery.body) == seen.TurnStarted("q", 11, 0, 0, 3)
        list(self.orchestrator.executor.execute(do.PlaceRequest("q", "server-0", 0)))
        return await self.heard(self.server, m.ExpectRequest if direct else m.Generate)

    async def cancelled(self) -> None:
        """The core cancels; the worker answers at once, the server has the Abort and is silent yet."""
        list(self.orchestrator.executor.execute(do.CancelAttempt("worker-0", 11, 0, "off_policy")))
        await self.heard(self.worker, m.CancelRollout)
        await self.heard(self.server, m.Abort)
        self.worker.send(m.RolloutError(11, 0, "cancelled: off_policy"), answers=self.order)

    def forget(self) -> None:
        """The core has heard of the rollout's end."""
        self.orchestrator.executor.settle(seen.RolloutFailed(11, 0, "over"), counts=True)

    async def worker_answer(self) -> list[seen.AnyEvent]:
        delivery = await self.next()
        return list(self.orchestrator.executor.hear_answer(delivery, delivery.body))


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with orchestrating(tmp_path) as (orchestrator, run):
        hub = orchestrator._hub
        links = [await join(run, name) for name in ("worker-0", "server-0")]
        for _ in links:
            await hub.next(10)
        yield Scene(orchestrator, hub, *links)
        for link in links:
            await asyncio.to_thread(link.close, "the test has ended")


async def join(run: RunDirectory, name: str) -> Link:
    role: Any = name.rpartition("-")[0]
    address = DIRECT if role == "server" else None
    hello = m.Hello(role, name, "r", "a", name, "c", 2, 1, "here", direct_address=address)
    return await asyncio.to_thread(Link.connect, run, hello, 20.0)


async def test_a_grant_names_the_port_and_the_secret_that_the_server_expects(scene: Scene):
    expect = (await scene.placed(direct=True)).body
    grant = (await scene.heard(scene.worker, m.Grant)).body
    assert (grant.request_id, grant.server, grant.address) == ("q", "server-0", DIRECT)
    assert (expect.request_id, expect.worker, expect.prompt_tokens) == ("q", "worker-0", 3)
    assert grant.secret == expect.secret
    assert len(bytes.fromhex(grant.secret)) == 16
    assert scene.hub.credits("server-0") == 1  # of 2


async def test_served_gives_the_core_the_same_event_and_row_as_a_completion(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    results = []
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(Recorder, "record_turn", lambda _, row: rows.append(row))
    for direct in (False, True):
        question = await scene.placed(direct)
        if direct:
            await scene.heard(scene.worker, m.Grant)
            scene.server.send(m.Served("q", "stop", 5, 2, 0.125, 0.5), answers=question)
        else:
            arrays = (np.zeros(5, np.int32), np.zeros(5, np.float32), np.zeros(5, np.int32))
            scene.server.send(m.Completion("q", "stop", 5, 2, 0.125, 0.5), arrays, answers=question)
        delivery = await scene.next()
        (event,) = scene.orchestrator.relay.answer(delivery, delivery.body)
        results.append((event, {name: value for name, value in rows.pop().items() if not name.endswith("_ns")}))
        if not direct:
            await scene.heard(scene.worker, m.Completion)
        assert scene.hub.credits("server-0") == 2
        scene.worker.send(m.RolloutError(11, 0, "over"), answers=scene.order)
        await scene.worker_answer()
        scene.forget()
    assert results[0] == results[1]
    assert results[0][0] == seen.TurnDone("q", 11, 5, "stop")


@pytest.mark.parametrize("direct", [False, True])
async def test_a_cancelled_rollout_has_ended_for_the_core_only_when_its_server_has_answered(scene: Scene, direct: bool):
    question = await scene.placed(direct)
    if direct:
        await scene.heard(scene.worker, m.Grant)
    await scene.cancelled()
    assert await scene.worker_answer() == []  # held: the lane is not free yet
    assert scene.hub.credits("server-0") == 1
    if direct:
        scene.server.send(m.Served("q", "abort", 2, 0, 0.0, 0.1), answers=question)
    else:
        arrays = (np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32))
        scene.server.send(m.Completion("q", "abort", 2, 0, 0.0, 0.1), arrays, answers=question)
    delivery = await scene.next()
    heard = list(scene.orchestrator.relay.answer(delivery, delivery.body))
    assert heard == [seen.TurnDone("q", 11, 2, "abort"), seen.RolloutFailed(11, 0, "cancelled: off_policy")]
    assert scene.hub.credits("server-0") == 2


async def test_a_lane_is_not_free_before_the_server_has_said_that_it_has_ended(scene: Scene):
    """With a grant the worker has its tokens, and says that it needs no more, before the orchestrator hears of their end."""
    question = await scene.placed(direct=True)
    await scene.heard(scene.worker, m.Grant)
    scene.worker.send(m.GenerationEnded(11, 0))
    delivery = await scene.next()
    assert list(scene.orchestrator.executor.hear_generation_ended(delivery, delivery.body)) == []
    scene.server.send(m.Served("q", "stop", 2, 0, 0.0, 0.1), answers=question)
    delivery = await scene.next()
    heard = list(scene.orchestrator.relay.answer(delivery, delivery.body))
    assert heard == [seen.TurnDone("q", 11, 2, "stop"), seen.GenerationOver(11, 0)]


@pytest.mark.parametrize("direct", [False, True])
async def test_a_server_that_does_not_end_an_aborted_request_is_named(
    scene: Scene, direct: bool, monkeypatch: pytest.MonkeyPatch
):
    await scene.placed(direct)
    if direct:
        await scene.heard(scene.worker, m.Grant)
    await scene.cancelled()
    assert await scene.worker_answer() == []
    scene.orchestrator._tick(time.monotonic())
    assert scene.orchestrator.violations.counts["server-0"] == 0
    monkeypatch.setattr("telescope.orchestrator.executor.SERVER_LATE_S", 0.0)
    scene.orchestrator._tick(time.monotonic())
    scene.orchestrator._tick(time.monotonic())
    assert scene.orchestrator.violations.counts["server-0"] == 1


@pytest.mark.parametrize("direct", [False, True])
async def test_a_server_that_ends_nothing_is_given_up_but_not_for_the_time_of_an_update(
    scene: Scene, direct: bool, monkeypatch: pytest.MonkeyPatch
):
    await scene.placed(direct)
    if direct:
        await scene.heard(scene.worker, m.Grant)
    await scene.cancelled()
    assert await scene.worker_answer() == []
    start = time.monotonic()
    scene.orchestrator._tick(start + 29.0)
    assert scene.orchestrator.executor.take_hanging() == []
    with monkeypatch.context() as busy:
        busy.setattr(type(scene.orchestrator.weights), "doing", "weights of version 1: being committed")
        scene.orchestrator._tick(start + 300.0)
    assert scene.orchestrator.executor.take_hanging() == []
    scene.orchestrator._tick(start + 329.0)
    assert scene.orchestrator.executor.take_hanging() == []
    scene.orchestrator._tick(start + 331.0)
    cause = "it has not ended the aborted requests of rollout 11 within 30 s"
    assert scene.orchestrator.executor.take_hanging() == [("server-0", cause)]


@pytest.mark.parametrize("direct", [False, True])
async def test_what_nobody_waits_for_is_not_generated_again_when_its_server_is_lost(scene: Scene, direct: bool):
    await scene.placed(direct)
    if direct:
        await scene.heard(scene.worker, m.Grant)
    await scene.cancelled()
    assert await scene.worker_answer() == []
    freed = list(scene.orchestrator.executor.lose_server("server-0", time.monotonic()))
    assert freed == [seen.RolloutFailed(11, 0, "cancelled: off_policy")]
    await scene.heard(scene.worker, m.RevokeGrant if direct else m.GenerateFailed)
    assert list(scene.orchestrator.executor.execute(do.PlaceRequest("q", "server-1", 0))) == [
        seen.TurnDone("q", 11, 0, "abort")
    ]
    assert list(scene.orchestrator.executor.execute(do.PlaceRequest("q", "server-1", 0))) == []


async def test_a_cancel_that_crosses_its_answer_leaves_nothing_behind(scene: Scene):
    """The rollout has failed by itself; its cancel comes too late to say of it that it was told to stop."""
    list(scene.orchestrator.executor.execute(do.DispatchRollout("worker-0", ORDER)))
    order = await scene.heard(scene.worker, m.RunRollout)
    scene.worker.send(m.RolloutError(11, 0, "the sandbox is down"), answers=order)
    assert await scene.worker_answer() != []
    list(scene.orchestrator.executor.execute(do.CancelAttempt("worker-0", 11, 0, "off_policy")))
    (rollout,) = scene.orchestrator.store
    assert not rollout.cancelled


async def test_an_answer_held_for_a_revoked_grant_is_free_when_the_request_ends(scene: Scene):
    await scene.placed(direct=True)
    await scene.heard(scene.worker, m.Grant)
    assert list(scene.orchestrator.executor.lose_server("server-0", time.monotonic())) == []
    await scene.heard(scene.worker, m.RevokeGrant)
    assert list(scene.orchestrator.executor.execute(do.PlaceRequest("q", "server-1", 0))) == [
        seen.TurnDone("q", 11, 0, "abort")
    ]


async def test_a_lost_server_revokes_its_grants_and_frees_what_waited_for_it(scene: Scene):
    await scene.placed(direct=True)
    await scene.heard(scene.worker, m.Grant)
    await scene.cancelled()
    assert await scene.worker_answer() == []
    ended = list(scene.orchestrator.executor.execute(do.RefuseRequest("q", "server-0 was lost: killed by SIGKILL")))
    assert ended == [seen.RolloutFailed(11, 0, "cancelled: off_policy")]
    assert (await scene.heard(scene.worker, m.RevokeGrant)).body.cause == "server-0 was lost: killed by SIGKILL"


async def test_a_worker_that_waits_for_a_server_is_not_stuck(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    make_keys(run, ("orchestrator", "worker-0", "server-0"))
    hub = await Hub.open(run, run="r", attempt="a", config_hash="c", stuck_s=0.6, heartbeat_s=0.1)
    link = await join(run, "worker-0")
    await hub.next(60)
    hub.send("worker-0", m.RunRollout(ORDER))
    link.send(m.RequestGrant("q", 11, 0, 0, 3))
    asked = await hub.next(60)
    assert isinstance(asked, Delivery)
    hub.send("worker-0", m.Grant("q", "server-0", DIRECT, "s", 30.0), answers=asked)
    hub.mark_elsewhere(asked, waits=True)
    assert await hub.next(1.5) is None
    back = time.monotonic()
    hub.mark_elsewhere(asked, waits=False)
    stuck = await hub.next(60)
    assert isinstance(stuck, PeerStuck)
    assert 0.6 <= stuck.seconds <= time.monotonic() - back  # the time at the server counts for nothing
    await asyncio.to_thread(link.close, "the test has ended")
    await hub.close("the test has ended", timeout_s=0.0)
