"""What a trainer rank does with each message: train a step, publish a version, stop. One order at a time, in order.

Owns the check that steps and versions go up one by one. Refuses to know how training is done and how weights travel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from telescope.backends.base import Backend, TrainShard
from telescope.weights.base import Publisher
from telescope.wire.happenings import Delivery
from telescope.wire.messages import Body, PublishWeights, StepDone, Stop, TrainStep, WeightsPublished

log = logging.getLogger(__name__)

POLL_S = 0.2
"""How often a rank that waits for an order looks whether it has been told to end."""


class OutOfOrder(RuntimeError):
    """The orchestrator and this rank disagree on what was trained; the run must end."""


class Wire(Protocol):
    """The part of `telescope.wire.link.Link` that a rank uses."""

    def receive(self, timeout_s: float) -> Delivery | None: ...

    def send(self, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int: ...

    def progress(self, doing: str) -> None: ...


class Service:
    """Serves one link until Stop."""

    def __init__(self, link: Wire, backend: Backend, publisher: Publisher | None, check: Callable[[], None]) -> None:
        """`publisher` is rank 0's; the others have none. `check` is called between orders; it raises to end the process."""
        self._link = link
        self._backend = backend
        self._publisher = publisher
        self._check = check
        self._step = 0

    def run(self) -> str:
        """Returns Stop's reason. Raises what the backend, the publisher or the link raises, and `OutOfOrder`."""
        self._link.progress("waiting for orders")
        while True:
            delivery = self._link.receive(POLL_S)
            self._check()
            if delivery is None:
                continue
            match delivery.body:
                case TrainStep() as order:
                    self._link.progress(f"train step {order.step}")
                    answer: Body = self._train(order, delivery.arrays)
                case PublishWeights() as order:
                    self._link.progress(f"publish version {order.version}")
                    answer = self._publish(order.version)
                case Stop() as order:
                    return order.reason
                case other:
                    raise OutOfOrder(f"a trainer rank has no use for the message {type(other).__name__}")
            self._link.send(answer, answers=delivery)
            self._link.progress("waiting for orders")

    def _train(self, order: TrainStep, arrays: Sequence[np.ndarray]) -> StepDone:
        if order.step != self._step + 1:
            raise OutOfOrder(
                f"told to train step {order.step} when step {self._step} was the last: a step was lost or repeated"
            )
        ids, mask, logprobs, versions = arrays
        shard = TrainShard(order.step, order.items, ids, mask, logprobs, versions, order.denominators)
        result = self._backend.train_step(shard)
        self._step = order.step
        log.info("step %d: %d trajectories in %.3f s", order.step, len(order.items), result.timings["timing_step_active"])
        return StepDone(order.step, result.metrics, result.timings)

    def _publish(self, version: int) -> WeightsPublished:
        if version != self._step:
            raise OutOfOrder(f"told to publish version {version}, but the weights here are version {self._step}")
        started = time.perf_counter()
        tensors = self._backend.weights()
        manifest = None
        if self._publisher is not None:
            manifest = self._publisher.publish(version, tensors)
        for _ in tensors:  # the other ranks run along, as gathering is a collective
            pass
        return WeightsPublished(version, manifest, time.perf_counter() - started)
