"""A worker may forget a rollout when it is on the orchestrator's disk, and not before."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from telescope.flow import commands as do
from telescope.flow import events as seen
from telescope.records import PromptRef, RolloutOrder
from telescope.runlog.reader import rows
from telescope.wire import messages as m
from telescope.wire.link import Link
from tests.orchestrator.test_direct_path import Scene, join
from tests.orchestrator.test_wrong_messages import done, orchestrating, trajectory

LIMIT_S = 60
ORDERS = [RolloutOrder(number, 0, number, 0, PromptRef("task", "train", 4), 99) for number in (0, 1)]


def kept(link: Link) -> set[str]:
    """What it would send again after a reconnect."""
    with link._changed:
        return {each.kind.__name__ for each in link._session.channel.kept.values()}


async def until_kept(link: Link, kinds: set[str]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while kept(link) != kinds:
            await asyncio.sleep(0.01)


async def test_a_rollout_is_acknowledged_when_its_row_is_on_disk_and_not_before(tmp_path: Path):
    async with orchestrating(tmp_path) as (orchestrator, run):
        worker = await join(run, "worker-0")
        scene = Scene(orchestrator, orchestrator._hub, worker, worker)
        await scene.hub.next(LIMIT_S)
        stands, goes_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            stands.set()
            goes_on.wait(LIMIT_S)

        note = {"level": "warning", "source": "the test", "message": "the disk is slow"}
        orchestrator._recorder._log.append("alerts", note, stand_still)  # called by the thread that writes
        assert await asyncio.to_thread(stands.wait, LIMIT_S)
        for order in ORDERS:
            list(orchestrator.executor.execute(do.DispatchRollout("worker-0", order)))
        first, second = [await scene.heard(worker, m.RunRollout) for _ in ORDERS]
        worker.send(done(ORDERS[0], 0), trajectory(0), answers=first)
        (event,) = await scene.worker_answer()
        assert isinstance(event, seen.RolloutDone)
        orchestrator.executor.settle(event, counts=True)
        orchestrator._recorder.catch_up()  # the loop does, as soon as no message waits
        worker.send(m.RolloutError(1, 0, "no tokens"), answers=second)
        (failed,) = await scene.worker_answer()
        assert isinstance(failed, seen.RolloutFailed)
        await until_kept(worker, {"RolloutResult"})  # what came later is acknowledged, and this is not
        assert rows(run, "rollouts") == []
        goes_on.set()
        await until_kept(worker, set())
        written = next(row for row in rows(run, "rollouts") if row["rollout_id"] == 0)
        assert (written["status"], written["reward"]) == ("scored", 0.0)
        await asyncio.to_thread(worker.close, "the test has ended")
