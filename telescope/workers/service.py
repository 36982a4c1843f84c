"""The worker's one event loop: orders in, rollouts played side by side, answers out.

    RunRollout ─▶ task: play ─▶ RolloutResult | RolloutError (answers the order: its credit goes back)
                     │  ▲
             Generate ▼  │ Completion | GenerateFailed           (through the hub, or straight to a server: wire/direct.py)

Every order is answered exactly once, a cancelled one too. Refuses to know what a task is (environments) or how bytes travel
(wire).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from telescope.environments.chat import ChatError, Sampled
from telescope.environments.graders.pool import open_graders
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef, RolloutOrder, Sampling
from telescope.wire.direct import Answer, DirectClient, DirectPathLost
from telescope.wire.messages import (
    Abort,
    CancelRollout,
    Completion,
    Generate,
    GenerateFailed,
    GenerationEnded,
    Grant,
    PrefetchPrompts,
    RevokeGrant,
    RolloutError,
    RolloutResult,
    RunRollout,
    Stop,
)
from telescope.wire.peer_events import Delivery
from telescope.workers.loading import LoadedEnvironment, set_up, tear_down
from telescope.workers.play import PlayLimits, play
from telescope.workers.prompt_cache import PromptCache
from telescope.workers.report import make_error
from telescope.workers.reward_threads import RewardThreads
from telescope.workers.text_chat import ChatCompletions

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


def read_completion(body: Completion | GenerateFailed, arrays: Sequence[np.ndarray]) -> Sampled:
    """What a server has answered. Raises `GenerationFailed`."""
    if isinstance(body, GenerateFailed):
        raise GenerationFailed(f"generation failed: {body.cause}")
    if len(arrays) not in (3, 4):
        raise GenerationFailed(
            f"a completion came with {len(arrays)} arrays, not ids, log-probs, versions, and at most routing"
        )
    return Sampled(arrays[0], arrays[1], arrays[2], body.finish_reason, *arrays[3:])


class WorkerLink(Protocol):
    """The part of `telescope.wire.link.Link` that a worker uses."""

    async def received(self) -> Any: ...
    def send(self, body: Any, arrays: Sequence[np.ndarray] = (), answers: Any = None) -> int: ...
    def progress(self, doing: str) -> None: ...


@dataclass(eq=False)
class _PlayedRollout:
    """An order that is being played, or cancelled for the orchestrator's `reason`."""

    task: asyncio.Task[None]
    cancelled: str | None = None


class WorkerService:
    """Plays every order that the link delivers until the orchestrator says Stop."""

    def __init__(
        self,
        link: WorkerLink,
        name: str,
        environments: Mapping[str, LoadedEnvironment],
        template: ChatTemplate | None,
        limits: PlayLimits,
        direct: DirectClient | None = None,
        threads: int = REWARD_THREADS,
        remote: ChatCompletions | None = None,
    ) -> None:
        """`template`: None with `remote`, which is asked in text."""
        self._remote = remote
        self._link = link
        self._direct = direct
        self._name = name
        self._environments = environments
        self._labels = ", ".join(loaded.place for loaded in environments.values())
        self._prompts = PromptCache(template)
        self._limits = limits
        self._threads = RewardThreads(threads)
        self._rollouts: dict[tuple[int, int], _PlayedRollout] = {}
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        """Of requests on the relayed path, by id."""
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
            self._prompts.close()
            await self._cancel_all({receiving, watching, *(rollout.task for rollout in self._rollouts.values())})
            if self._direct is not None:
                await self._direct.close()
            if self._remote is not None:
                await self._remote.close()
            await self._tear_down()

    async def _cancel_all(self, tasks: set[asyncio.Future[Any]]) -> None:
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
        """The environments' own, side by side. Raises `EnvironmentBroken`; orders wait meanwhile."""
        telling = asyncio.ensure_future(self._report_set_up())
        try:
            await asyncio.gather(*(set_up(loaded) for loaded in self._environments.values()))
        finally:
            telling.cancel()

    async def _report_set_up(self) -> None:
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
                case Grant() | RevokeGrant() | GenerateFailed() if self._direct is not None:
                    self._direct.hear(body)
                case Completion() | GenerateFailed():
                    self._take_answer(body, delivery.arrays)
                case Stop():
                    return body.reason
                case _:
                    log.warning("a %s is not for a worker; ignored", type(body).__name__)

    def _prefetch(self, prompts: Sequence[PromptRef]) -> None:
        for prompt in prompts:
            loaded = self._environments.get(prompt.environment)
            if loaded is not None:
                self._prompts.prefetch(loaded, (prompt,))

    def _start(self, delivery: Delivery, order: RolloutOrder) -> None:
        key = (order.rollout_id, order.attempt)
        task = asyncio.create_task(self._play(delivery, order), name=f"rollout {order.rollout_id}.{order.attempt}")
        self._rollouts[key] = _PlayedRollout(task)
        self._report_progress()
        task.add_done_callback(lambda done: self._finish(key, done))

    async def _play(self, delivery: Delivery, order: RolloutOrder) -> None:
        loaded = self._environments.get(order.prompt.environment)
        body: RolloutResult | RolloutError
        arrays: Sequence[np.ndarray] = ()
        try:
            if loaded is None:
                body = make_error(order, f"this worker has no environment {order.prompt.environment!r}")
            else:
                body, arrays = await play(
                    order, loaded, self._prompts, self._limits, self._generate, self._end_generation, self._remote
                )
                if self._remote is not None and self._remote.refusal:
                    raise WorkerHopeless(self._remote.refusal)  # no other order would fare better
        except asyncio.CancelledError:
            reason = self._rollouts[order.rollout_id, order.attempt].cancelled
            if reason is None and self._leaving:  # the link's Goodbye answers for all
                raise
            body = make_error(
                order, f"{self._find_place(order)}: it raised CancelledError" if reason is None else f"cancelled: {reason}"
            )
        self._answer(delivery, order, body, arrays)
        self._report_progress(ended=1)
        self._look_for_hung_threads()

    def _find_place(self, order: RolloutOrder) -> str:
        """Of its environment in the configuration."""
        loaded = self._environments.get(order.prompt.environment)
        return f"environments.{order.prompt.environment}" if loaded is None else loaded.place

    def _answer(
        self, delivery: Delivery, order: RolloutOrder, body: RolloutResult | RolloutError, arrays: Sequence[np.ndarray]
    ) -> None:
        """Answer the order; where the wire does not take the score, with the reason why."""
        if isinstance(body, RolloutResult):
            try:
                self._link.send(body, arrays, answers=delivery)
                return
            except (ValueError, TypeError) as error:  # nothing was sent
                body = make_error(order, f"{self._find_place(order)}: its rollout cannot be sent: {error}")
        log.info("rollout %d attempt %d: %s", body.rollout_id, body.attempt, body.cause)
        self._link.send(body, answers=delivery)

    def _finish(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        rollout = self._rollouts.get(key)
        if rollout is not None and rollout.task is task:
            del self._rollouts[key]
        if not task.cancelled() and task.exception() is not None:
            self._give_up(task.exception())

    def _cancel(self, order: CancelRollout) -> None:
        rollout = self._rollouts.get((order.rollout_id, order.attempt))
        if rollout is not None:  # else its answer is on the way already
            rollout.cancelled = order.reason
            rollout.task.cancel()

    async def _generate(self, order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling) -> Sampled:
        """Ask a server for one turn's tokens, by the orchestrator's relay or directly. Raises `GenerationFailed`."""
        request_id = f"{self._name}/{order.rollout_id}.{order.attempt}.{turn}"
        request = Generate(request_id, order.rollout_id, order.attempt, turn, sampling)
        try:
            body, arrays = await (self._ask_hub if self._direct is None else self._direct.generate)(request, ids)
        except DirectPathLost as error:
            raise GenerationFailed(f"generation failed: {error}") from error
        except asyncio.CancelledError:
            if self._rollouts[order.rollout_id, order.attempt].cancelled is None:  # who cancels aborts the request as well
                self._link.send(Abort(request_id))
            raise
        self._report_progress()
        return read_completion(body, arrays)

    async def _ask_hub(self, request: Generate, ids: np.ndarray) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = answer
        try:
            self._link.send(request, (ids,))
            return await answer
        finally:
            del self._answers[request.request_id]

    def _take_answer(self, body: Completion | GenerateFailed, arrays: Sequence[np.ndarray]) -> None:
        answer = self._answers.get(body.request_id)
        if answer is not None and not answer.done():  # else its rollout was cancelled or ran out of time
            answer.set_result((body, arrays))

    def _end_generation(self, order: RolloutOrder) -> None:
        if self._limits.free_lane:
            self._link.send(GenerationEnded(order.rollout_id, order.attempt))

    def _report_progress(self, ended: int = 0) -> None:
        """`ended`: rollouts that are answered and not yet forgotten."""
        self._link.progress(f"playing {len(self._rollouts) - ended} rollouts of {self._labels}")

    async def _watch_threads(self) -> None:
        """Looks on a timer too: where every rollout waits for a thread, none ends."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._limits.timeout_s))
            self._look_for_hung_threads()

    def _look_for_hung_threads(self) -> None:
        if self._threads.count_hung(self._limits.timeout_s) >= self._threads.size:
            self._give_up(
                WorkerHopeless(
                    f"all {self._threads.size} threads for reward functions hang since rollout.timeout_s="
                    f"{self._limits.timeout_s:g}: give the environment's reward a time limit of its own"
                )
            )

    def _give_up(self, error: BaseException | None) -> None:
        if self._hopeless is not None and not self._hopeless.done() and error is not None:
            self._hopeless.set_exception(error)
