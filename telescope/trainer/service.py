"""What a trainer rank does with each message: train, publish or send a version, save, stop. One order at a time, in order.

Owns the check that steps and versions go up one by one, and the thread that sends: while it waits for servers, this rank still
hears that it is to break off. Refuses to know how training is done and how weights travel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import numpy as np

from telescope.backends.base import Backend, NotSaved, Outcome, RankLost, Saved, TrainShard
from telescope.runlog.checkpoints import trainer_part
from telescope.trainer.gpu_share import GpuShare
from telescope.trainer.kept_batches import Keeper
from telescope.trainer.timeline import Timeline
from telescope.weights.base import Publisher, TransferFailed
from telescope.wire.messages import (
    AbortWeights,
    Body,
    CheckpointError,
    CheckpointStaged,
    CheckpointWritten,
    PublishWeights,
    SaveCheckpoint,
    SendWeights,
    StepReport,
    Stop,
    TrainStep,
    WeightsFailed,
    WeightsPublished,
    WeightsReady,
    WeightsSent,
)
from telescope.wire.peer_events import Delivery

log = logging.getLogger(__name__)

POLL_S = 0.2
"""How often a rank that waits for an order looks whether it has been told to end."""
LOOK_S = 0.05
"""How often a rank that sends, and has another order to do after it, looks whether it has been told to break off."""
BROKEN_OFF_S = 25.0
"""A sender that was told to break off, or whose time is up, has ended after this long, or never will. Less than the 30 s in
which the orchestrator wants the answer to an abort, so that it is this rank that says what is stuck."""


class OutOfOrder(RuntimeError):
    """The orchestrator and this rank disagree on what was trained; the run must end."""


class SenderStuck(RuntimeError):
    """The thread that sends weights can be waited for no longer; the process must end."""


class TrainerLink(Protocol):
    """The part of `telescope.wire.link.Link` that a rank uses."""

    def receive(self, timeout_s: float) -> Delivery | None: ...

    def send(self, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int: ...

    def progress(self, doing: str) -> None: ...


class TrainerService:
    """Serves one link until Stop."""

    def __init__(
        self,
        link: TrainerLink,
        backend: Backend,
        publisher: Publisher,
        check: Callable[[], None],
        update_s: float,
        step: int = 0,
        *,
        keeper: Keeper | None = None,
        timeline: Timeline | None = None,
        room: GpuShare | None = None,
    ) -> None:
        """`check` is called between orders; it raises to end the process. `update_s`: the deadline of one `send`. `step`: the
        last one trained, of the checkpoint that the backend began with. `keeper` keeps batches of steps that go wrong,
        `timeline` stores what took how long, `room` says how much of a shared GPU a step may take."""
        self._room = room
        self._keeper, self._timeline = keeper, timeline
        self._link = link
        self._backend = backend
        self._publisher = publisher
        self._check = check
        self._update_s = update_s
        self._sending: _Sending | None = None
        self._put_off: deque[Delivery] = deque()
        """Orders that came while weights were being sent."""
        self._sent_by = 0.0
        self._step = step
        self._stall_s = 0.0
        self._waited_s = 0.0
        """Without an order, since the last step."""

    def run(self) -> str:
        """Returns Stop's reason. Raises what the backend, the publisher or the link raises, and `OutOfOrder`."""
        try:
            return self._serve()
        finally:
            if self._keeper is not None:
                self._keeper.left()

    def _serve(self) -> str:
        self._link.progress("waiting for orders")
        while True:
            delivery = self._next()
            if self._keeper is not None and delivery is not None and isinstance(delivery.body, TrainStep):
                self._keeper.begins(_shard(delivery.body, delivery.arrays))
            self._check()
            if self._sending is not None and self._sending.error is not None:
                raise self._sending.error
            if delivery is None:
                continue
            match delivery.body:
                case SendWeights() as order:
                    self._link.progress(f"send version {order.version}")
                    self._sending = self._send(order, delivery)
                    continue
                case AbortWeights():
                    if self._sending is not None:
                        self._publisher.abort(self._sending.order.group.epoch)
                    self._end_sending(BROKEN_OFF_S)
                    answer: Body = WeightsReady(version=self._step, prepared=None, checksum="", pause_s=0.0)
                case TrainStep() as order:
                    self._link.progress(f"train step {order.step}")
                    answer = self._train(order, delivery.arrays)
                case PublishWeights() as order:
                    self._link.progress(f"publish version {order.version}")
                    answer = self._publish(order.version)
                case SaveCheckpoint() as order:
                    self._link.progress(f"save the checkpoint of step {order.step}")
                    self._save(order, delivery)
                    self._link.progress("waiting for orders")
                    continue
                case Stop() as order:
                    return order.reason
                case other:
                    raise OutOfOrder(f"a trainer rank has no use for the message {type(other).__name__}")
            self._link.send(answer, answers=delivery)
            self._link.progress("waiting for orders")

    def _next(self) -> Delivery | None:
        """The next order, None where none has come. While weights are being sent only those are taken that end it, and the
        others wait: a server that hangs in the sending must not keep this rank from hearing that it is to break off."""
        if self._put_off:
            if self._has_sent(LOOK_S):
                self._end_sending(0.0)
                return self._put_off.popleft()
            if time.monotonic() > self._sent_by:
                raise SenderStuck(f"sending weights did not end {BROKEN_OFF_S:g} s after its time was up")
        started = time.perf_counter()
        delivery = self._link.receive(0.0 if self._put_off else POLL_S)
        self._waited_s += time.perf_counter() - started
        if delivery is None or isinstance(delivery.body, AbortWeights | Stop):
            return delivery
        if not self._put_off and self._has_sent(0.0):
            self._end_sending(0.0)
            return delivery
        if not self._put_off:
            self._sent_by = time.monotonic() + self._update_s + BROKEN_OFF_S
        self._put_off.append(delivery)
        return None

    def _has_sent(self, patience_s: float) -> bool:
        """Whether no sender is under way, after so long at the most."""
        if self._sending is not None:
            self._sending.join(patience_s)
        return self._sending is None or not self._sending.is_alive()

    def _train(self, order: TrainStep, arrays: Sequence[np.ndarray]) -> StepReport:
        if order.step != self._step + 1:
            raise OutOfOrder(
                f"told to train step {order.step} when step {self._step} was the last: a step was lost or repeated"
            )
        shard, waited = _shard(order, arrays), self._waited_s
        try:
            with self._room.step() if self._room is not None else nullcontext():
                result = self._backend.train_step(shard)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            if self._keeper is not None and not isinstance(error, RankLost):
                self._keeper.broke(shard, error)
            raise
        self._step, self._waited_s = order.step, 0.0
        if self._keeper is not None:
            self._keeper.trained(shard, result)
        if self._timeline is not None:
            self._timeline.step(order.step, result.spans)
        log.info("step %d: %d trajectories in %.3f s", order.step, len(order.items), result.timings["timing_step_active"])
        own = {"timing_waiting_for_data": waited}
        if self._stall_s:
            own["timing_checkpoint_stall"] = self._stall_s
        self._stall_s = 0.0
        return StepReport(order.step, result.metrics, result.timings | own)

    def _save(self, order: SaveCheckpoint, delivery: Delivery) -> None:
        """Holds training up until the state is copied off; the answer comes when it is written, from another thread."""
        if order.step != self._step:
            raise OutOfOrder(f"told to save step {order.step}, but the weights here are those of step {self._step}")
        saving, started = _SaveUnderWay(self._link, order.step, delivery), time.perf_counter()
        folder = trainer_part(Path(order.folder))
        self._backend.save(order.step, folder, saving.ended, training_state=order.training_state)
        stall = time.perf_counter() - started
        self._stall_s += stall
        saving.staged(stall)

    def _send(self, order: SendWeights, delivery: Delivery) -> _Sending:
        """From a thread of its own, which answers itself."""
        if order.version != self._step:
            raise OutOfOrder(f"told to send version {order.version}, but the weights here are version {self._step}")
        sending = _Sending(self._publisher, order, lambda answer: self._link.send(answer, answers=delivery), self._timeline)
        sending.start()
        return sending

    def _end_sending(self, patience_s: float) -> None:
        """Wait for the sender under way. Raises what it has raised, and `SenderStuck`."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        sending.join(patience_s)
        if sending.is_alive():
            raise SenderStuck(f"sending weights did not end within {patience_s:g} s, though it was told to or its time was up")
        if sending.error is not None:
            raise sending.error

    def _publish(self, version: int) -> WeightsPublished:
        if version != self._step:
            raise OutOfOrder(f"told to publish version {version}, but the weights here are version {self._step}")
        began_ns, started = time.time_ns(), time.perf_counter()
        manifest = self._publisher.publish(version)
        seconds = time.perf_counter() - started
        if self._timeline is not None:
            self._timeline.span("publish", version, began_ns, seconds)
        return WeightsPublished(version, manifest, seconds)


def _shard(order: TrainStep, arrays: Sequence[np.ndarray]) -> TrainShard:
    ids, mask, logprobs, versions, *routed = arrays
    return TrainShard(order.step, order.items, ids, mask, logprobs, versions, order.denominators, routed[0] if routed else None)


class _SaveUnderWay:
    """What is told of one save, in order: that training goes on, then what became of it, which may be known first."""

    def __init__(self, link: TrainerLink, step: int, delivery: Delivery) -> None:
        self._link, self._step, self._delivery = link, step, delivery
        self._lock = threading.Lock()
        self._staged = False
        self._answer: Body | None = None

    def staged(self, stall_s: float) -> None:
        with self._lock:
            self._link.send(CheckpointStaged(self._step, stall_s))
            self._staged = True
            if self._answer is not None:
                self._link.send(self._answer, answers=self._delivery)

    def ended(self, outcome: Outcome) -> None:
        """From any thread."""
        match outcome:
            case Saved(nbytes, seconds):
                log.info("step %d: its checkpoint's part, %.3f GB, is written in %.3f s", self._step, nbytes / 1e9, seconds)
                answer: Body = CheckpointWritten(self._step, nbytes, seconds)
            case NotSaved(cause):
                log.warning("step %d is not saved: %s", self._step, cause)
                answer = CheckpointError(self._step, cause)
        with self._lock:
            if not self._staged:
                self._answer = answer
                return
        try:
            self._link.send(answer, answers=self._delivery)
        except ConnectionError:  # the link is over, which whoever receives on it is told too
            log.debug("nobody hears what became of the checkpoint", exc_info=True)


class _Sending(threading.Thread):
    """One `send` in a thread. `error`: what it ended with, where that is not an answer but the end of this process."""

    def __init__(
        self, publisher: Publisher, order: SendWeights, answer: Callable[[Body], object], timeline: Timeline | None
    ) -> None:
        super().__init__(name=f"send-{order.version}", daemon=True)
        self._publisher, self.order, self._answer, self._timeline = publisher, order, answer, timeline
        self.error: Exception | None = None

    def run(self) -> None:
        began_ns, started = time.time_ns(), time.perf_counter()
        version = self.order.version
        try:
            checksum = self._publisher.send(version, self.order.group)
        except TransferFailed as failed:
            log.warning("version %d to %s: %s", version, ", ".join(self.order.group.members[1:]), failed)
            self._tell(WeightsFailed(version=version, cause=str(failed), fatal=False, missing=failed.missing))
        except Exception as error:  # noqa: BLE001 the edge of a thread: raised again by the one that gives orders
            self.error = error
        else:
            seconds = time.perf_counter() - started
            log.info("version %d sent in %.3f s", version, seconds)
            if self._timeline is not None:
                self._timeline.span("send", version, began_ns, seconds)
            self._tell(WeightsSent(version=version, checksum=checksum, seconds=seconds))

    def _tell(self, answer: Body) -> None:
        try:
            self._answer(answer)
        except ConnectionError:  # the link is over, which whoever receives on it is told too
            log.debug("nobody hears how sending ended", exc_info=True)
