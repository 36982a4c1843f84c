"""The worker's one event loop: orders in, rollouts played side by side, answers out.

    RunRollout ─▶ task: play ─▶ RolloutDone | RolloutFailed (answers the order: its credit goes back)
                     │  ▲
             Generate ▼  │ Completion | GenerateFailed           (or, with doors, by a ticket: direct.py)

Every order is answered exactly once, a cancelled one too. Refuses to know what a task is (environments) or how bytes travel
(wire).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from telescope.environments.chat import ChatError, Sampled
from telescope.environments.graders.pool import open_graders
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef, RolloutOrder, Sampling
from telescope.wire.messages import (
    Abort,
    AskPlace,
    CancelRollout,
    Completion,
    Generate,
    GenerateFailed,
    GenerationOver,
    PrefetchPrompts,
    Revoke,
    RolloutDone,
    RolloutFailed,
    RunRollout,
    Stop,
    Ticket,
)
from telescope.workers.direct import DoorLost, Doors
from telescope.workers.hooks import set_up, tear_down
from telescope.workers.load import Loaded
from telescope.workers.play import Limits, play
from telescope.workers.prefetch import Openings
from telescope.workers.report import failed
from telescope.workers.threads import RewardThreads

log = logging.getLogger(__name__)

LEAVE_S = 10.0
"""For what rollouts do as they are cancelled; then they are cancelled again, and left behind."""
REWARD_THREADS = 32
LOOK_S = 5.0
"""Between two looks for hung threads, at most, and between two words of a set_up that goes on."""


class GenerationFailed(ChatError):
    """The server, or the way to it, failed to answer."""


class WorkerHopeless(RuntimeError):
    """This worker can score nothing any more; the message says why."""


def sampled(body: Completion | GenerateFailed, arrays: Sequence[np.ndarray]) -> Sampled:
    """What a server has answered. Raises `GenerationFailed`."""
    if isinstance(body, GenerateFailed):
        raise GenerationFailed(f"generation failed: {body.cause}")
    if len(arrays) != 3:
        raise GenerationFailed(f"a completion came with {len(arrays)} arrays, not ids, log-probs, versions")
    return Sampled(arrays[0], arrays[1], arrays[2], body.finish_reason)


class Delivered(Protocol):
    """What a link delivers (`telescope.wire.link.Delivery`)."""

    @property
    def body(self) -> Any: ...
    @property
    def arrays(self) -> Sequence[np.ndarray]: ...


class WorkerLink(Protocol):
    """The part of `telescope.wire.link.Link` that a worker uses."""

    async def received(self) -> Any: ...
    def send(self, body: Any, arrays: Sequence[np.ndarray] = (), answers: Any = None) -> int: ...
    def progress(self, doing: str) -> None: ...


class Service:
    """Plays every order that the link delivers until the orchestrator says Stop."""

    def __init__(
        self,
        link: WorkerLink,
        name: str,
        environments: Mapping[str, Loaded],
        template: ChatTemplate,
        limits: Limits,
        doors: Doors | None = None,
        threads: int = REWARD_THREADS,
    ) -> None:
        self._link = link
        self._doors = doors
        self._name = name
        self._environments = environments
        self._labels = ", ".join(f"environments.{label}" for label in environments)
        self._openings = Openings(template)
        self._limits = limits
        self._threads = RewardThreads(threads)
        self._rollouts: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._cancelled: dict[tuple[int, int], str] = {}
        self._answers: dict[str, asyncio.Future[Sampled]] = {}
        self._tickets: dict[str, asyncio.Future[Ticket]] = {}
        self._brought: dict[str, str] = {}  # request -> the server whose door it was brought to
        self._hopeless: asyncio.Future[None] | None = None
        self._leaving = False

    async def run(self) -> str:
        """The reason of the Stop. Raises what the link raises, and `WorkerHopeless`."""
        async with open_graders():
            return await self._until_stopped()

    async def _until_stopped(self) -> str:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(self._threads)
        self._hopeless = loop.create_future()
        receiving, watching = asyncio.ensure_future(self._live()), asyncio.ensure_future(self._watch_threads())
        try:
            await asyncio.wait((receiving, self._hopeless), return_when=asyncio.FIRST_COMPLETED)
            if self._hopeless.done():
                self._hopeless.result()
            return receiving.result()
        finally:
            self._hopeless.cancel()
            self._leaving = True
            self._openings.close()
            await self._cancelled_all({receiving, watching, *self._rollouts.values()})
            if self._doors is not None:
                await self._doors.close()
            await self._tear_down()

    async def _cancelled_all(self, tasks: set[asyncio.Future[Any]]) -> None:
        """Cancel, wait, and once more: what a rollout still does in its `finally` may wait for a thread that never comes."""
        for _ in range(2):
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=LEAVE_S)
            if not tasks:
                return
        log.warning("%d rollouts of %s did not end in %g s; left behind", len(tasks), self._labels, 2 * LEAVE_S)

    async def _live(self) -> str:
        await self._set_up()
        self._link.progress("waiting for orders")
        return await self._receive()

    async def _set_up(self) -> None:
        """The environments' own beginnings, side by side. Raises `EnvironmentBroken`; orders wait meanwhile."""

        telling = asyncio.ensure_future(self._tell_of_set_up())
        try:
            await asyncio.gather(*(set_up(loaded) for loaded in self._environments.values()))
        finally:
            telling.cancel()

    async def _tell_of_set_up(self) -> None:
        """It has its own deadline: a worker that is still in it is not stuck."""
        while True:
            self._link.progress(f"setting up {self._labels}")
            await asyncio.sleep(LOOK_S)

    async def _tear_down(self) -> None:
        await asyncio.gather(*(tear_down(loaded) for loaded in self._environments.values()))

    async def _receive(self) -> str:
        while True:
            delivery = await self._link.received()
            await asyncio.sleep(0)  # a flood of orders is taken in one a turn of the loop: timers and answers come between
            body = delivery.body
            match body:
                case RunRollout():
                    self._start(delivery, body.order)
                case CancelRollout():
                    self._cancel(body)
                case PrefetchPrompts(prompts=prompts):
                    self._prefetch(prompts)
                case Completion() | GenerateFailed():
                    self._answered(body, delivery.arrays)
                case Ticket():
                    self._placed(body)
                case Revoke():
                    self._revoked(body)
                case Stop():
                    return body.reason
                case _:
                    log.warning("a %s is not for a worker; ignored", type(body).__name__)

    def _prefetch(self, prompts: Sequence[PromptRef]) -> None:
        for prompt in prompts:
            loaded = self._environments.get(prompt.environment)
            if loaded is not None:
                self._openings.prefetch(loaded, (prompt,))

    def _start(self, delivery: Delivered, order: RolloutOrder) -> None:
        key = (order.rollout_id, order.attempt)
        task = asyncio.create_task(self._play(delivery, order), name=f"rollout {order.rollout_id}.{order.attempt}")
        self._rollouts[key] = task
        self._link.progress(f"playing {len(self._rollouts)} rollouts of {self._labels}")
        task.add_done_callback(lambda done: self._ended(key, done))

    async def _play(self, delivery: Delivered, order: RolloutOrder) -> None:
        loaded = self._environments.get(order.prompt.environment)
        body: RolloutDone | RolloutFailed
        arrays: Sequence[np.ndarray] = ()
        try:
            if loaded is None:
                body = failed(order, f"this worker has no environment {order.prompt.environment!r}")
            else:
                body, arrays = await play(order, loaded, self._openings, self._limits, self._ask, self._generated)
        except asyncio.CancelledError:
            reason = self._cancelled.get((order.rollout_id, order.attempt))
            if reason is None and self._leaving:  # the link's Goodbye answers for all
                raise
            label = order.prompt.environment
            body = failed(
                order, f"environments.{label}: it raised CancelledError" if reason is None else f"cancelled: {reason}"
            )
        self._answer(delivery, order, body, arrays)
        self._link.progress(f"playing {len(self._rollouts) - 1} rollouts of {self._labels}")
        self._look_for_hung_threads()

    def _answer(
        self, delivery: Delivered, order: RolloutOrder, body: RolloutDone | RolloutFailed, arrays: Sequence[np.ndarray]
    ) -> None:
        """Answer the order; where the wire does not take the score, with the reason why."""
        if isinstance(body, RolloutDone):
            try:
                self._link.send(body, arrays, answers=delivery)
                return
            except (ValueError, TypeError) as error:  # nothing was sent
                body = failed(order, f"environments.{order.prompt.environment}: its rollout cannot be sent: {error}")
        log.info("rollout %d attempt %d: %s", body.rollout_id, body.attempt, body.cause)
        self._link.send(body, answers=delivery)

    def _ended(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        self._rollouts.pop(key, None)
        self._cancelled.pop(key, None)
        if not task.cancelled() and task.exception() is not None:
            self._give_up(task.exception())

    def _cancel(self, order: CancelRollout) -> None:
        key = (order.rollout_id, order.attempt)
        task = self._rollouts.get(key)
        if task is not None:  # else its answer is on the way already
            self._cancelled[key] = order.reason
            task.cancel()

    async def _ask(self, order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling) -> Sampled:
        request_id = f"{self._name}/{order.rollout_id}.{order.attempt}.{turn}"
        request = Generate(request_id, order.rollout_id, order.attempt, turn, sampling)
        try:
            return await (self._through_hub(request, ids) if self._doors is None else self._through_door(request, ids))
        except asyncio.CancelledError:
            if (order.rollout_id, order.attempt) not in self._cancelled:  # who cancels aborts the request as well
                self._link.send(Abort(request_id))
            raise

    async def _through_hub(self, request: Generate, ids: np.ndarray) -> Sampled:
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = answer
        try:
            self._link.send(request, (ids,))
            return await answer
        finally:
            del self._answers[request.request_id]

    async def _through_door(self, request: Generate, ids: np.ndarray) -> Sampled:
        """Ask for a place, and bring the request there."""
        assert self._doors is not None
        request_id = request.request_id
        placed: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._tickets[request_id] = placed
        try:
            ask = AskPlace(request_id, request.rollout_id, request.attempt, request.turn, len(ids))
            self._link.send(ask)
            ticket = await placed
            body, arrays = await self._doors.bring(ticket, msgspec.structs.replace(request, ticket=ticket.secret), ids)
            self._link.progress(f"playing {len(self._rollouts)} rollouts of {self._labels}")
            return sampled(body, arrays)
        except DoorLost as error:
            self._link.send(Abort(request_id))  # the server may hold its place still
            raise GenerationFailed(f"generation failed: {error}") from error
        finally:
            del self._tickets[request_id]
            self._brought.pop(request_id, None)

    def _placed(self, ticket: Ticket) -> None:
        placed = self._tickets.get(ticket.request_id)
        if placed is not None and not placed.done():  # else its rollout has ended, and the request was aborted
            self._brought[ticket.request_id] = ticket.server
            placed.set_result(ticket)

    def _revoked(self, order: Revoke) -> None:
        server = self._brought.get(order.request_id)
        if server is not None and self._doors is not None:
            self._doors.revoke(server, order.cause)

    def _generated(self, order: RolloutOrder) -> None:
        if self._limits.free_lane:
            self._link.send(GenerationOver(order.rollout_id, order.attempt))

    def _answered(self, body: Completion | GenerateFailed, arrays: Sequence[np.ndarray]) -> None:
        answer: asyncio.Future[Any] | None = self._answers.get(body.request_id) or self._tickets.get(body.request_id)
        if answer is None or answer.done():
            return  # its rollout was cancelled or ran out of time
        try:
            answer.set_result(sampled(body, arrays))
        except GenerationFailed as error:
            answer.set_exception(error)
        self._link.progress(f"playing {len(self._rollouts)} rollouts of {self._labels}")

    async def _watch_threads(self) -> None:
        """Looks on a timer too: where every rollout waits for a thread, none ends."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._limits.timeout_s))
            self._look_for_hung_threads()

    def _look_for_hung_threads(self) -> None:
        if self._threads.hung(self._limits.timeout_s) >= self._threads.size:
            self._give_up(
                WorkerHopeless(
                    f"all {self._threads.size} threads for reward functions hang since rollout.timeout_s="
                    f"{self._limits.timeout_s:g}: give the environment's reward a time limit of its own"
                )
            )

    def _give_up(self, error: BaseException | None) -> None:
        if self._hopeless is not None and not self._hopeless.done() and error is not None:
            self._hopeless.set_exception(error)
