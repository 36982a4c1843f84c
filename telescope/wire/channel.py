"""One direction pair of one link: numbers, kept messages, credits, acknowledgements, and what was seen already.

The same bookkeeping serves both ends. Pure state: no frames on sockets, no clocks, no names of peers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from telescope.wire.codec import NO_ARRAYS, MalformedMessage, RawArrays, encode
from telescope.wire.messages import (
    ACKNOWLEDGED,
    ANSWERED_BY,
    ANSWERS,
    KEPT,
    MAX_WEIGHT_ORDERS,
    SAFE_BY_APPLICATION,
    WEIGHT_ORDERS,
    WORK,
    Body,
    Envelope,
    Kind,
)

if TYPE_CHECKING:
    from telescope.wire.codec import Buffer

MAX_AHEAD = 2**16
"""How far a number may run ahead of the first one missing: bounds the memory for telling repeats."""


class NoCredit(RuntimeError):
    """An order was about to be sent to a peer that has no credit left. The sender's own count is wrong: nothing was sent."""


@dataclass(slots=True)
class Seen:
    """Which numbers have come: all up to `floor`, and those in `ahead` beyond it. Holds at most MAX_AHEAD numbers."""

    floor: int = 0
    ahead: set[int] = field(default_factory=set)

    def __contains__(self, seq: int) -> bool:
        return seq <= self.floor or seq in self.ahead

    def add(self, seq: int) -> None:
        """Raises `MalformedMessage` if the number runs too far ahead; it is then not seen and may come again later."""
        if seq > self.floor + MAX_AHEAD:
            raise MalformedMessage("seq", f"{seq} is more than {MAX_AHEAD} ahead of {self.floor}")
        self.ahead.add(seq)
        while self.floor + 1 in self.ahead:
            self.floor += 1
            self.ahead.discard(self.floor)


@dataclass(frozen=True, slots=True)
class Kept:
    kind: Kind
    frames: list[Buffer]


class MessageChannel:
    """`capacity`: work orders that the other side takes at once; None where this side gives no orders (a peer's end)."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.last_seq = 0
        self.kept: dict[int, Kept] = {}  # in the order of their numbers
        self.work = 0
        self.weight_orders = 0
        self.seen = Seen()
        self.questions: dict[int, Kind] = {}  # delivered, and not yet answered from here
        self.unsafe: set[int] = set()  # delivered, and not yet safe by the application's word
        self.acks: list[int] = []  # to be told to the other side

    @property
    def credits(self) -> int:
        return 0 if self.capacity is None else self.capacity - self.work

    @property
    def orders(self) -> int:
        """Orders not yet answered, of both budgets."""
        return self.work + self.weight_orders

    @property
    def unacknowledged(self) -> int:
        """Own answers and results that the other side has not yet called safe."""
        return sum(1 for kept in self.kept.values() if kept.kind in ACKNOWLEDGED)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, body: Body, raw: RawArrays = NO_ARRAYS, answers: int = 0) -> tuple[int, list[Buffer]]:
        """Number, count and keep the message as its kind demands; gives its number (0 if not kept) and its frames.

        Raises `NoCredit`, or `ValueError` if the arrays are not those of the message, or an answer names no open question.
        Nothing has changed after an error.
        """
        kind = type(body)
        self._check_question(kind, answers)
        if kind not in KEPT:
            return 0, encode(body, raw=raw)
        self._check_credit(kind)
        seq = self.last_seq + 1
        frames = encode(body, seq, answers, raw)
        self.last_seq = seq
        self.kept[seq] = Kept(kind, frames)
        self.questions.pop(answers, None)
        self._count(kind, +1)
        return seq, frames

    def _check_question(self, kind: Kind, answers: int) -> None:
        if (kind in ANSWERS) != (answers > 0):
            expected = "must name the message it answers (answers=)" if kind in ANSWERS else "answers nothing"
            raise ValueError(f"{kind.__name__} {expected}, got answers={answers}")
        if not answers:
            return
        question = self.questions.get(answers)
        if question is None:
            raise ValueError(f"{kind.__name__} answers message {answers}, which is answered already or never came")
        if kind not in ANSWERED_BY[question]:
            raise ValueError(f"{kind.__name__} is not an answer to {question.__name__}")

    def _check_credit(self, kind: Kind) -> None:
        if self.capacity is None:
            return
        if kind in WORK and self.work >= self.capacity:
            raise NoCredit(f"{kind.__name__} was not sent: the peer takes {self.capacity} orders at once and has {self.work}")
        if kind in WEIGHT_ORDERS and self.weight_orders >= MAX_WEIGHT_ORDERS:
            raise NoCredit(f"{kind.__name__} was not sent: {self.weight_orders} weight orders are unanswered already")

    def _count(self, kind: Kind, change: int) -> None:
        if self.capacity is None:
            return
        if kind in WORK:
            self.work += change
        elif kind in WEIGHT_ORDERS:
            self.weight_orders += change

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def accept(self, envelope: Envelope) -> bool:
        """Whether the message is new and goes to the application. Raises `MalformedMessage` if it breaks the rules."""
        kind = type(envelope.body)
        if (kind in KEPT) != (envelope.seq > 0):
            raise MalformedMessage("seq", f"{kind.__name__} came with seq={envelope.seq}")
        if (kind in ANSWERS) != (envelope.answers > 0):
            raise MalformedMessage("answers", f"{kind.__name__} came with answers={envelope.answers}")
        if not envelope.seq:
            return True
        if envelope.seq in self.seen:
            self._acknowledge_again(kind, envelope.seq)
            return False
        if envelope.answers:
            self._check_answer(kind, envelope.answers)
        self.seen.add(envelope.seq)
        if not self._settle(envelope.answers):
            self.acks.append(envelope.seq)
            raise MalformedMessage("answers", f"{kind.__name__} answers {envelope.answers}, which is settled")
        if kind in ANSWERED_BY:
            self.questions[envelope.seq] = kind
        self._owe_ack(kind, envelope.seq)
        return True

    def _acknowledge_again(self, kind: Kind, seq: int) -> None:
        """The first Ack may have been lost with a connection."""
        if kind in ACKNOWLEDGED and seq not in self.unsafe:
            self.acks.append(seq)

    def _owe_ack(self, kind: Kind, seq: int) -> None:
        if kind in SAFE_BY_APPLICATION and self.capacity is not None:
            self.unsafe.add(seq)
        elif kind in ACKNOWLEDGED:
            self.acks.append(seq)

    def _check_answer(self, kind: Kind, answers: int) -> None:
        if answers > self.last_seq:
            raise MalformedMessage("answers", f"{kind.__name__} answers {answers}, which was never sent")
        question = self.kept.get(answers)
        if question is not None and kind not in ANSWERED_BY.get(question.kind, ()):
            raise MalformedMessage("answers", f"{kind.__name__} is not an answer to {question.kind.__name__}")

    def _settle(self, answers: int) -> bool:
        """Forget the answered message and take its credit back. False if it was settled before."""
        if not answers:
            return True
        question = self.kept.pop(answers, None)
        if question is None:
            return False
        self._count(question.kind, -1)
        return True

    # ---- acknowledgements --------------------------------------------------------------------------------------------

    def forget(self, seqs: tuple[int, ...]) -> None:
        """The other side calls these safe. Numbers unknown or awaiting an answer rather than an Ack are passed over."""
        for seq in seqs:
            kept = self.kept.get(seq)
            if kept is not None and kept.kind in ACKNOWLEDGED:
                del self.kept[seq]

    def mark_safe(self, seq: int) -> None:
        """The application has made the delivered message safe: the other side may forget it."""
        if seq in self.unsafe:
            self.unsafe.discard(seq)
            self.acks.append(seq)

    def take_acks(self) -> tuple[int, ...]:
        acks, self.acks = tuple(self.acks), []
        return acks
