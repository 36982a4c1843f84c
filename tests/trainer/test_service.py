"""A trainer rank sends from a thread, hears that it is to break off meanwhile, and never answers for what it did not do."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telescope.backends.base import NotSaved, Outcome, Saved, StepResult, TrainShard
from telescope.records import WeightGroup, WeightManifest
from telescope.trainer.service import OutOfOrder, SenderStuck, TrainerService
from telescope.weights.base import TransferFailed
from telescope.wire.codec import RawArrays
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
    WeightsReady,
    WeightsSent,
)
from telescope.wire.peer_events import Delivery

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
        assert answers is not None or isinstance(body, CheckpointStaged)
        self.heard.put((body, 0 if answers is None else answers.seq))
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
            raise TransferFailed(f"the group of epoch {group.epoch} was broken off", ("server-0/0",))
        if self.fails_with is not None:
            raise self.fails_with
        return "sample:7"

    def abort(self, epoch: int) -> None:
        self.aborted.append(epoch)
        self.may_end.set()

    def close(self) -> None: ...


class Trainer:
    """A backend that trains nothing, and whose saves end when they are told to."""

    def __init__(self) -> None:
        self.saves: queue.Queue[tuple[int, Path, Callable[[Outcome], None]]] = queue.Queue()

    def train_step(self, shard: TrainShard) -> StepResult:
        return StepResult({}, {"timing_step_active": 0.0})

    def save(self, step: int, folder: Path, done: Callable[[Outcome], None], *, training_state: bool = True) -> None:
        self.saves.put((step, folder, done))


class Bench:
    def __init__(self, update_s: float = 20.0, step: int = 0) -> None:
        self.orders, self.sender, self.trainer = Orders(), Sender(), Trainer()
        self.service = TrainerService(self.orders, self.trainer, self.sender, lambda: None, update_s, step)  # type: ignore[arg-type]
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
    assert bench.answer() == (WeightsFailed(0, "the group of epoch 4 was broken off", False, ("server-0/0",)), sent)
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


def test_a_send_is_broken_off_although_a_checkpoint_waits_for_its_end(tmp_path: Path):
    """A checkpoint is ordered right behind the weights for a server that came late; that server may hang."""
    bench = Bench(step=1)
    sent = bench.orders.tell(SendWeights(1, GROUP))
    assert bench.sender.begun.wait(60)
    bench.orders.tell(SaveCheckpoint(1, str(tmp_path)))
    aborted = bench.orders.tell(AbortWeights(1, "server-0 was lost"))
    assert bench.answer() == (WeightsFailed(1, "the group of epoch 4 was broken off", False, ("server-0/0",)), sent)
    assert bench.answer() == (WeightsReady(1, None, "", 0.0), aborted)
    step, _, _ = bench.trainer.saves.get(timeout=60)
    assert step == 1


def test_a_send_that_never_ends_is_not_waited_for_without_end(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("telescope.trainer.service.BROKEN_OFF_S", 0.1)
    bench = Bench(update_s=0.1, step=1)
    bench.orders.tell(SendWeights(1, GROUP))
    assert bench.sender.begun.wait(60)
    bench.orders.tell(SaveCheckpoint(1, str(tmp_path)))
    assert isinstance(bench.ended.get(timeout=60), SenderStuck)
    bench.sender.may_end.set()


def test_orders_that_came_while_weights_were_sent_are_done_in_their_order(tmp_path: Path):
    bench = Bench(step=1)
    sent = bench.orders.tell(SendWeights(1, GROUP))
    assert bench.sender.begun.wait(60)
    bench.orders.tell(SaveCheckpoint(1, str(tmp_path)))
    published = [bench.orders.tell(PublishWeights(1)) for _ in range(2)]
    bench.sender.may_end.set()
    assert bench.answer()[1] == sent
    assert bench.trainer.saves.get(timeout=60)[0] == 1
    assert [bench.answer()[1] for _ in range(3)] == [0, *published]  # 0: the save's staging


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


def train(bench: Bench, step: int) -> StepReport:
    nothing = (np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.float32), np.zeros(0, np.int32))
    bench.orders.numbers += 1
    bench.orders.coming.put(Delivery("hub", bench.orders.numbers, TrainStep(step, (), ()), RawArrays.of(nothing)))
    answer, _ = bench.answer()
    assert isinstance(answer, StepReport)
    return answer


def test_training_goes_on_while_a_checkpoint_is_written_and_its_stall_is_told_once():
    bench = Bench()
    assert without_waiting(train(bench, 1)) == {"timing_step_active": 0.0}
    number = bench.orders.tell(SaveCheckpoint(1, "/run/checkpoints/step_00000001.partial-a"))
    staged, answers = bench.answer()
    assert isinstance(staged, CheckpointStaged)
    assert (staged.step, answers) == (1, 0)
    step, folder, done = bench.trainer.saves.get(timeout=60)
    assert (step, folder) == (1, Path("/run/checkpoints/step_00000001.partial-a/trainer"))
    assert without_waiting(train(bench, 2)) == {"timing_step_active": 0.0, "timing_checkpoint_stall": staged.stall_s}
    done(Saved(1024, 0.5))
    assert bench.answer() == (CheckpointWritten(1, 1024, 0.5), number)
    assert without_waiting(train(bench, 3)) == {"timing_step_active": 0.0}


def without_waiting(report: StepReport) -> dict[str, float]:
    return {name: seconds for name, seconds in report.timings.items() if name != "timing_waiting_for_data"}


def test_a_step_says_how_long_its_rank_had_nothing_to_do_before_it():
    bench = Bench()
    train(bench, 1)
    time.sleep(0.6)
    begun = time.perf_counter()
    waited = train(bench, 2).timings["timing_waiting_for_data"]
    most = 0.6 + time.perf_counter() - begun
    assert 0.5 < waited < most + 0.1
    begun = time.perf_counter()
    assert train(bench, 3).timings["timing_waiting_for_data"] < time.perf_counter() - begun + 0.1  # its own wait alone


def test_a_failed_save_is_answered_with_its_cause_and_the_rank_goes_on():
    bench = Bench()
    train(bench, 1)
    number = bench.orders.tell(SaveCheckpoint(1, "/full"))
    bench.answer()
    bench.trainer.saves.get(timeout=60)[2](NotSaved("No space left on device"))
    assert bench.answer() == (CheckpointError(1, "No space left on device"), number)
    assert train(bench, 2).step == 2


def test_a_save_of_a_step_that_is_not_the_last_trained_ends_the_rank():
    bench = Bench()
    bench.orders.tell(SaveCheckpoint(1, "/early"))
    ended = bench.ended.get(timeout=60)
    assert isinstance(ended, OutOfOrder)
    assert str(ended) == "told to save step 1, but the weights here are those of step 0"


def test_a_rank_that_begins_with_a_checkpoint_publishes_its_version_and_trains_the_next_step():
    bench = Bench(step=10)
    bench.orders.tell(PublishWeights(10))
    published, _ = bench.answer()
    assert published.manifest.version == 10
    assert train(bench, 11).step == 11


def test_that_training_goes_on_is_told_before_what_became_of_the_save():
    """A backend that writes at once has its answer before the order's call returns."""
    bench = Bench()
    train(bench, 1)
    bench.trainer.save = lambda step, folder, done, *, training_state: done(Saved(8, 0.0))  # type: ignore[method-assign]
    number = bench.orders.tell(SaveCheckpoint(1, "/run"))
    staged, _ = bench.answer()
    assert isinstance(staged, CheckpointStaged)
    assert bench.answer() == (CheckpointWritten(1, 8, 0.0), number)
