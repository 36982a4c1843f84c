"""A trainer rank sends from a thread, hears that it is to break off meanwhile, and never answers for what it did not do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from telescope.records import WeightGroup, WeightManifest
from telescope.trainer.service import OutOfOrder, SenderStuck, Service
from telescope.weights.base import TransferFailed
from telescope.wire.happenings import Delivery
from telescope.wire.messages import (
    AbortWeights,
    Body,
    PublishWeights,
    SendWeights,
    Stop,
    WeightsFailed,
    WeightsReady,
    WeightsSent,
)

GROUP = WeightGroup(4, ("trainer-0", "server-0/0"))


class Orders:
    """The link: what the orchestrator says, one after another, and what it hears."""

    def __init__(self) -> None:
        self.coming: queue.Queue[Delivery] = queue.Queue()
        self.heard: queue.Queue[tuple[Body, int]] = queue.Queue()
        self.numbers = 0

    def tell(self, body: Body) -> int:
        self.numbers += 1
        self.coming.put(Delivery("hub", self.numbers, body))
        return self.numbers

    def receive(self, timeout_s: float) -> Delivery | None:
        try:
            return self.coming.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send(self, body: Body, arrays: Sequence[Any] = (), answers: Delivery | None = None) -> int:
        assert answers is not None
        self.heard.put((body, answers.seq))
        return 0

    def progress(self, doing: str) -> None: ...


class Sender:
    """A publisher whose `send` waits until it is broken off, or is over, or fails."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.fails_with: Exception | None = None
        self.aborted: list[int] = []

    def publish(self, version: int) -> WeightManifest | None:
        return WeightManifest(version, "gloo", "tcp://127.0.0.1:1/x", (), 0, "")

    def send(self, version: int, group: WeightGroup) -> str:
        self.begun.set()
        assert self.may_end.wait(60)
        if self.aborted:
            raise TransferFailed(f"the group of epoch {group.epoch} was broken off")
        if self.fails_with is not None:
            raise self.fails_with
        return "sample:7"

    def abort(self, epoch: int) -> None:
        self.aborted.append(epoch)
        self.may_end.set()

    def close(self) -> None: ...


class Bench:
    def __init__(self, update_s: float = 20.0) -> None:
        self.orders, self.sender = Orders(), Sender()
        self.service = Service(self.orders, None, self.sender, lambda: None, update_s)  # type: ignore[arg-type]
        self.ended: queue.Queue[object] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.ended.put(self.service.run())
        except (OutOfOrder, SenderStuck, RuntimeError) as error:
            self.ended.put(error)

    def answer(self) -> tuple[Body, int]:
        return self.orders.heard.get(timeout=60)


def test_a_send_is_answered_when_it_is_over_with_the_checksum():
    bench = Bench()
    number = bench.orders.tell(SendWeights(0, GROUP))
    assert bench.sender.begun.wait(60)
    assert bench.orders.heard.empty()
    bench.sender.may_end.set()
    answer, answers = bench.answer()
    assert isinstance(answer, WeightsSent)
    assert (answer.version, answer.checksum, answers) == (0, "sample:7", number)


def test_a_send_under_way_is_broken_off_and_both_orders_are_answered():
    bench = Bench()
    sent = bench.orders.tell(SendWeights(0, GROUP))
    assert bench.sender.begun.wait(60)
    aborted = bench.orders.tell(AbortWeights(0, "server-0 was lost"))
    assert bench.answer() == (WeightsFailed(0, "the group of epoch 4 was broken off", False), sent)
    assert bench.answer() == (WeightsReady(0, None, "", 0.0), aborted)
    assert bench.sender.aborted == [4]


def test_an_abort_with_nothing_under_way_is_answered_at_once():
    bench = Bench()
    number = bench.orders.tell(AbortWeights(0, "prepare failed"))
    assert bench.answer() == (WeightsReady(0, None, "", 0.0), number)
    assert bench.sender.aborted == []


def test_a_later_order_waits_for_the_send_before_it():
    bench = Bench()
    sent = bench.orders.tell(SendWeights(0, GROUP))
    assert bench.sender.begun.wait(60)
    published = bench.orders.tell(PublishWeights(0))
    bench.sender.may_end.set()
    assert [bench.answer()[1], bench.answer()[1]] == [sent, published]


def test_what_is_no_fault_of_the_servers_ends_the_rank():
    bench = Bench()
    bench.sender.fails_with = RuntimeError("another trainer rank was lost")
    bench.sender.may_end.set()
    bench.orders.tell(SendWeights(0, GROUP))
    assert str(bench.ended.get(timeout=60)) == "another trainer rank was lost"
    assert bench.orders.heard.empty()


def test_a_version_that_is_not_here_is_not_sent():
    bench = Bench()
    bench.orders.tell(SendWeights(3, GROUP))
    assert str(bench.ended.get(timeout=60)) == "told to send version 3, but the weights here are version 0"


def test_a_sender_that_does_not_end_when_told_ends_the_rank(monkeypatch):
    monkeypatch.setattr("telescope.trainer.service.BROKEN_OFF_S", 0.1)
    bench = Bench()
    monkeypatch.setattr(bench.sender, "abort", lambda epoch: None)
    bench.orders.tell(SendWeights(0, GROUP))
    assert bench.sender.begun.wait(60)
    bench.orders.tell(AbortWeights(0, "late"))
    ended = bench.ended.get(timeout=60)
    assert isinstance(ended, SenderStuck)
    bench.sender.may_end.set()


def test_stop_does_not_wait_for_a_send():
    bench = Bench()
    bench.orders.tell(SendWeights(0, GROUP))
    assert bench.sender.begun.wait(60)
    bench.orders.tell(Stop("done"))
    assert bench.ended.get(timeout=60) == "done"
    bench.sender.may_end.set()
