"""What a server does with each message: generate, abort, change weights, stop. Any engine, any link that can receive and send.

Requests run side by side; weight orders one after another, in the order they came. Refuses to know vLLM, files and signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from telescope.inference.engine import Engine, EngineDead, Generated, LoadReport, RequestRefused, WeightsRefused, WeightState
from telescope.inference.status import Status
from telescope.wire.direct import DirectEndpoint
from telescope.wire.hub import Hub
from telescope.wire.messages import (
    Abort,
    AbortWeights,
    Asleep,
    Body,
    CommitWeights,
    Completion,
    EngineLoad,
    ExpectRequest,
    Generate,
    GenerateFailed,
    PrepareWeights,
    Sleep,
    Stop,
    WeightsFailed,
    WeightsReady,
)
from telescope.wire.peer_events import Delivery

LOAD_EVERY_S = 0.25
"""The engine's load is told at most so often."""
KV_DIGITS = 2
"""Smaller changes of the KV cache's use are no news."""
AGAIN_S = 0.05
"""An order to break off is repeated so often until the order that it breaks off is answered."""
STOP_S = 1.0
"""How long running requests may still take to end when the run stops: they are aborted, and nobody waits for them."""

log = logging.getLogger(__name__)


async def first_of(*waits: asyncio.Future[Any]) -> None:
    """Return once one of them is done; none is cancelled."""
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


class Wire(Protocol):
    """The part of `telescope.wire.link.Link` that a server uses."""

    async def received(self) -> Delivery: ...

    def send(self, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int: ...

    def progress(self, doing: str) -> None: ...


class Asked(Protocol):
    """Whoever asked for a completion: where its one answer goes."""

    def answer(self, body: Completion | GenerateFailed, arrays: Sequence[np.ndarray] = ()) -> None: ...


class RelayedRequest:
    """A request that came through the orchestrator, and is answered there."""

    def __init__(self, link: Wire, delivery: Delivery) -> None:
        self._link, self._delivery = link, delivery

    def answer(self, body: Completion | GenerateFailed, arrays: Sequence[np.ndarray] = ()) -> None:
        self._link.send(body, arrays, answers=self._delivery)


class Server:
    """Serves one link, and its own port where it has one (`port`, for the direct path), with one engine until Stop."""

    def __init__(self, link: Wire, engine: Engine, port: Hub | None = None, status: Status | None = None) -> None:
        self._link = link
        self._engine = engine
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._weights = asyncio.Lock()
        self._preparing: tuple[int, asyncio.Task[None]] | None = None
        """The last order to prepare a version, answered or not."""
        self._others: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._told = LoadReport()
        self._telling: asyncio.TimerHandle | None = None
        self._status = status or Status("server-0")
        self._direct = DirectEndpoint(port, link, self._begin, self._abort) if port is not None else None
        engine.on_step(self._stepped)

    async def run(self) -> str:
        """Returns Stop's reason. Raises `EngineDead`, what the link raises, or what should not have happened."""
        self._link.progress("waiting for orders")
        receiving = asyncio.create_task(self._receive())
        dying = asyncio.create_task(self._engine.dead())
        if self._direct is not None:
            self._start(self._direct.run())
        try:
            await first_of(receiving, dying, self._failed)
            if dying.done():  # what else failed, failed for that
                raise EngineDead(dying.result())
            if self._failed.done():
                raise self._failed.result()
            return receiving.result()
        finally:
            if self._telling is not None:
                self._telling.cancel()
            for task in (receiving, dying, *self._others):
                task.cancel()
            await self._end_requests()

    async def _receive(self) -> str:
        while True:
            delivery = await self._link.received()
            match delivery.body:
                case Generate() as order:
                    self._begin(order, delivery.arrays[0], RelayedRequest(self._link, delivery))
                case ExpectRequest() as order if self._direct is not None:
                    self._direct.expect(order, delivery)
                case Abort() as order if self._direct is None or not self._direct.abort(order.request_id):
                    self._abort(order.request_id)
                case Abort():
                    pass  # it had not come yet, and the endpoint has said so
                case PrepareWeights() as order:
                    self._preparing = order.manifest.version, self._start(self._change_weights(order, delivery))
                case CommitWeights() | AbortWeights() as order:
                    self._start(self._change_weights(order, delivery))
                case Sleep() as order:
                    self._start(self._sleep(order, delivery))
                case Stop() as order:
                    return order.reason
                case other:
                    log.warning("a server has no use for the message %s", type(other).__name__)

    def _start(self, work: Coroutine[Any, Any, None], request_id: str = "") -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        if not request_id:
            self._others.add(task)
        task.add_done_callback(lambda done: self._ended(done, request_id))
        return task

    def _ended(self, task: asyncio.Task[None], request_id: str) -> None:
        self._others.discard(task)
        if self._requests.get(request_id) is task:
            del self._requests[request_id]
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_result(error)

    # ---- what the engine says of itself ------------------------------------------------------------------------------

    def _stepped(self) -> None:
        self._moved()
        if self._telling is None and self._load() != self._told:
            self._tell_load()

    def _load(self) -> LoadReport:
        load = self._engine.load
        return replace(load, kv_used=round(load.kv_used, KV_DIGITS))

    def _tell_load(self) -> None:
        """Send what has changed, and look again after a while: the next change may have come by then."""
        load, self._telling = self._load(), None
        if load != self._told:
            self._told = load
            self._link.send(EngineLoad(load.kv_used, load.running, load.waiting, load.preemptions))
            self._telling = asyncio.get_running_loop().call_later(LOAD_EVERY_S, self._tell_load)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _begin(self, order: Generate, ids: np.ndarray, asked: Asked) -> None:
        self._requests[order.request_id] = self._start(self._generate(order, ids, asked), order.request_id)

    def _abort(self, request_id: str) -> None:
        self._start(self._engine.abort(request_id))

    async def _generate(self, order: Generate, ids: np.ndarray, asked: Asked) -> None:
        try:
            prompt_ids = np.array(ids, dtype=np.int32)
            done = await self._engine.generate(order.request_id, prompt_ids, order.sampling, order.priority)
        except RequestRefused as error:
            asked.answer(GenerateFailed(order.request_id, str(error)))
        else:
            asked.answer(make_completion(order.request_id, done), done.arrays)
        self._status.answered += 1
        self._moved(ended=1)

    def _moved(self, ended: int = 0) -> None:
        """`ended`: requests that are answered and not yet forgotten."""
        self._status.running = len(self._requests) - ended
        self._link.progress(self._status.move())

    async def _end_requests(self) -> None:
        """Abort what still runs; the tasks get a moment to answer."""
        running = dict(self._requests)
        if running and not self._failed.done():
            await asyncio.wait({asyncio.create_task(self._engine.abort(request_id)) for request_id in running}, timeout=STOP_S)
            await asyncio.wait(running.values(), timeout=STOP_S)
        for task in running.values():
            task.cancel()

    # ---- weights ----------------------------------------------------------------------------------------------------

    async def _change_weights(self, order: PrepareWeights | CommitWeights | AbortWeights, delivery: Delivery) -> None:
        version = order.manifest.version if isinstance(order, PrepareWeights) else order.version
        if isinstance(order, AbortWeights):  # breaks off a prepare under way, and is answered after it
            self._start(self._break_off(order.version))
        async with self._weights:  # asyncio's locks are fair: orders keep their order
            self._status.updating = f"{type(order).__name__} {version}"
            self._moved()
            try:
                state = self._status.weights = await self._ordered(order)
            except WeightsRefused as error:
                log.warning("%s", error)
                refused = WeightsFailed(version=version, cause=str(error), fatal=False, missing=error.missing)
                self._link.send(refused, answers=delivery)
                return
            except EngineDead as error:
                self._link.send(WeightsFailed(version=version, cause=str(error), fatal=True), answers=delivery)
                raise
            finally:
                self._status.updating = ""
            self._status.asleep = self._status.asleep and not isinstance(order, CommitWeights)
            log.info("%s %d: serving %d, pause %.4f s", type(order).__name__, version, state.version, state.pause_s)
            answer = WeightsReady(
                version=state.version, prepared=state.prepared, checksum=state.checksum, pause_s=state.pause_s
            )
            self._link.send(answer, answers=delivery)

    async def _sleep(self, order: Sleep, delivery: Delivery) -> None:
        """Between weight orders, like them. An engine that can't ends the server."""
        async with self._weights:
            self._status.updating = f"falling asleep for step {order.step}"
            self._moved()
            started = time.monotonic()
            try:
                await self._engine.sleep()
            finally:
                self._status.updating = ""
            seconds = time.monotonic() - started
            self._status.asleep = True
            self._moved()
            log.info("asleep for step %d after %.4f s", order.step, seconds)
            self._link.send(Asleep(step=order.step, seconds=seconds), answers=delivery)

    async def _break_off(self, version: int) -> None:
        """Again until the order to prepare is answered: what comes before the engine has begun finds nothing to break off, and
        the engine would then wait for a sender that has given up."""
        preparing = self._preparing[1] if self._preparing is not None and self._preparing[0] == version else None
        with contextlib.suppress(EngineDead):  # told by the answer to the order
            while True:
                await self._engine.discard(version)
                if preparing is None or (await asyncio.wait({preparing}, timeout=AGAIN_S))[0]:
                    return

    async def _ordered(self, order: PrepareWeights | CommitWeights | AbortWeights) -> WeightState:
        match order:
            case PrepareWeights():
                return await self._engine.prepare(order.manifest, order.group)
            case CommitWeights():
                return await self._engine.commit(order.version)
            case AbortWeights():
                return await self._engine.discard(order.version)


def make_completion(request_id: str, done: Generated) -> Completion:
    return Completion(
        request_id=request_id,
        finish_reason=done.finish_reason,
        tokens=len(done.ids),
        cached_tokens=done.cached_tokens,
        queued_s=done.queued_s,
        generated_s=done.generated_s,
    )
