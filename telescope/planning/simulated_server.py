"""One simulated inference server: sequences that share an engine, in virtual time. No events, no core.

All running sequences of a server get one token a step, so one number, the tokens made by each sequence since the start, says
how far all of them are: `made` grows at 1 / step time. A sequence that needs L more tokens is done when `made` has grown by L,
whoever comes and goes meanwhile, so a line of those marks in order gives the next end, and no event is needed for a token
(processor sharing in virtual time: Parekh and Gallager 1993 for networks). The step's time rises as the sequences grow, so the
time for x tokens of n sequences is `τ·x + kv_token_s·n·x²/2`, with τ the step time now.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from math import inf, sqrt
from typing import Any

from telescope.planning.latencies import EngineTimes

NEARLY = 1e-6
"""Tokens: less is rounding."""
WATERMARK = 0.99
"""Share of the KV cache above which nothing new begins, so that what was put back does not come straight in again."""


class SimulatedRequest:
    """One request on a server."""

    __slots__ = (
        "cached", "completion", "done_at", "group", "key", "left", "number", "prompt", "readers", "shared", "started_at",
    )  # fmt: skip

    def __init__(self, key: Any, group: int, shared: int, prompt: int, completion: int, cached: int = 0) -> None:
        self.key = key  # whatever its owner knows it by
        self.group = group
        self.shared = shared  # tokens of the prompt that the whole group begins with
        self.prompt = prompt
        self.cached = cached  # tokens of its own earlier turns
        self.completion = completion
        self.left = float(completion)
        self.readers: dict[int, int] | None = None  # where it is counted among those that read its group's prompt
        self.started_at = self.done_at = 0.0  # by the tokens that each sequence of the server has made
        self.number = -1  # of its stay in the batch; -1 while it waits


class SimulatedServer:
    """Times never go back: `advance` first, then change what runs, then ask for `next_at`."""

    def __init__(self, times: EngineTimes, *, share_prefixes: bool = True) -> None:
        self._times = times
        self._share_prefixes = share_prefixes
        self._now = 0.0
        self._made = 0.0
        self._debt_s = self._pause_s = 0.0
        self._reads = self._held = 0.0
        self._speed = 1.0
        self._numbers = 0
        self._ends = array("d")
        self._by_end: list[SimulatedRequest] = []
        self.running: dict[int, SimulatedRequest] = {}
        """By their numbers, in order of their entry."""
        self.waiting: deque[SimulatedRequest] = deque()
        self._readers: dict[int, int] = {}  # of each group's cached prompt; another dict since each time all were forgotten
        self.resets = 0
        """Times that cached prefixes were forgotten."""
        self.generating_s = self.paused_s = self.sequence_s = self.tokens = 0.0
        self.preemptions = 0
        self.scheduled_at = inf

    # ---- time

    def advance(self, now: float) -> None:
        """Let time pass."""
        left = now - self._now
        self._now = now
        if left <= 0:
            return
        if self._pause_s:
            paused = min(self._pause_s, left)
            self._pause_s -= paused
            self.paused_s += paused
            left -= paused
        sequences = len(self.running)
        if not sequences or not left:
            return
        self.generating_s += left
        self.sequence_s += left * sequences
        if self._debt_s:
            paid = min(self._debt_s, left * self._speed)
            self._debt_s -= paid
            left -= paid / self._speed
        # tokens x in so many seconds: τ·x + growth·x²/2 = seconds, solved for x
        times, seconds = self._times, left * self._speed
        growth = times.kv_token_s * sequences
        step_s = times.step_s + times.sequence_s * sequences + times.kv_token_s * self._reads
        tokens = 2 * seconds / (step_s + sqrt(step_s * step_s + 2 * growth * seconds))
        made = tokens * sequences
        self._made += tokens
        self._reads += made
        self._held += made
        self.tokens += made

    @property
    def steps(self) -> float:
        """Steps of the engine so far: each running sequence got one token in each of them."""
        return self._made

    @property
    def next_at(self) -> float:
        """When something happens if nobody comes: a sequence ends, or the KV cache is full. Infinite where nothing runs."""
        sequences, times, ends = len(self.running), self._times, self._ends
        if not sequences:
            return inf
        tokens = ends[0] - self._made
        if sequences > 1 and (room := (times.kv_tokens - self._held) / sequences) < tokens:
            tokens = room
        if tokens < 0.0:
            tokens = 0.0
        step_s = times.step_s + times.sequence_s * sequences + times.kv_token_s * self._reads
        seconds = step_s * tokens + times.kv_token_s * sequences * tokens * tokens / 2
        return self._now + self._pause_s + (self._debt_s + seconds) / self._speed

    def ended(self) -> list[SimulatedRequest]:
        """Take what has all its tokens by now; where the cache is full instead, put the youngest back."""
        done: list[SimulatedRequest] = []
        ends, reached = self._ends, self._made + NEARLY
        while ends and ends[0] <= reached:
            done.append(self._leave(0))
        while len(self.running) > 1 and self._held >= self._times.kv_tokens - NEARLY * len(self.running):
            self._preempt()
        if self.waiting:
            self._admit()
        return done

    # ---- who comes and goes

    def add(self, sequence: SimulatedRequest) -> None:
        if self.waiting or not self._enters(sequence):
            self.waiting.append(sequence)
            self._admit()

    def remove(self, sequence: SimulatedRequest) -> None:
        """An abort."""
        if sequence.number >= 0:
            self._leave(self._place_of(sequence))
            self._admit()
        else:
            self.waiting.remove(sequence)

    def everyone(self) -> list[SimulatedRequest]:
        return [*self.running.values(), *self.waiting]

    def pause(self, seconds: float, *, forget_prefixes: bool, recompute: bool = False) -> None:
        """Stand still from now on for so long (a weight update); `recompute`: then read all that runs once more."""
        self._pause_s += seconds
        if recompute:
            self._debt_s += self._times.prefill_token_s * self._held
        if forget_prefixes:
            self.resets += 1
            self._readers = {}

    @property
    def kv_used(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        return min(1.0, max(0.0, self._held / self._times.kv_tokens))

    def slow(self, share: float) -> None:
        """Lose so much of the full speed from now on."""
        self._speed = 1.0 - share

    # ---- inside

    def _admit(self) -> None:
        while self.waiting and self._enters(self.waiting[0]):
            self.waiting.popleft()

    def _enters(self, sequence: SimulatedRequest) -> bool:
        """Begin with it, if there is room."""
        times, running, prompt = self._times, self.running, sequence.prompt
        if len(running) >= times.max_seqs:
            return False
        readers = self._readers.get(sequence.group, 0)
        known = sequence.shared if readers else 0
        if running and self._held + prompt - known > WATERMARK * times.kv_tokens:
            return False
        if self._share_prefixes:
            sequence.readers = self._readers
            self._readers[sequence.group] = readers + 1
        number = sequence.number = self._numbers = self._numbers + 1
        made = sequence.started_at = self._made
        done_at = sequence.done_at = made + sequence.left
        cached = known if known > sequence.cached else sequence.cached
        self._debt_s += (prompt - cached if prompt > cached else 1) * times.prefill_token_s
        self._reads += prompt
        self._held += prompt - known
        running[number] = sequence
        place = bisect_right(self._ends, done_at)
        self._ends.insert(place, done_at)
        self._by_end.insert(place, sequence)
        return True

    def _place_of(self, sequence: SimulatedRequest) -> int:
        """In order of the ends."""
        return self._by_end.index(sequence, bisect_left(self._ends, sequence.done_at))

    def _leave(self, place: int) -> SimulatedRequest:
        """The one at this place in order of the ends goes."""
        done_at, sequence = self._ends.pop(place), self._by_end.pop(place)
        del self.running[sequence.number]
        sequence.number = -1
        made = self._made - sequence.started_at
        left = done_at - self._made
        sequence.left = left if left > 0.0 else 0.0
        self._reads -= sequence.prompt + made
        self._held -= sequence.prompt + made - self._left_behind(sequence)
        if not self.running:
            self._reads = self._held = self._debt_s = 0.0  # no rounding is carried on
        return sequence

    def _left_behind(self, sequence: SimulatedRequest) -> int:
        """Tokens of its prompt that stay in the cache, as a sibling reads them."""
        readers, group = sequence.readers, sequence.group
        if readers is None:
            return 0
        others = readers[group] - 1
        if others:
            readers[group] = others
            return sequence.shared
        del readers[group]
        return 0

    def _preempt(self) -> None:
        """The youngest is put back with what it has made, which becomes part of its prompt."""
        sequence = self.running[next(reversed(self.running))]
        made = round(self._made - sequence.started_at)
        self._leave(self._place_of(sequence))
        sequence.prompt += made
        sequence.cached = 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1
