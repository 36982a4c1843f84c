"""What a simulated run did: its steps, and the shares of time over its settled part. Numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from telescope.flow.counts import Counts


class Step(msgspec.Struct, frozen=True):
    """One train step: when it began, when it was through, when its weights were served. Seconds; sums from the start."""

    begun_s: float
    done_s: float
    committed_s: float
    rollouts: int
    tokens: int
    """Prompts and completions of its batch."""
    sampled: float
    """Tokens that all servers have made by `done_s`."""
    generating_s: float
    """Of all servers together, by `done_s`: at least one sequence runs."""
    paused_s: float
    sequence_s: float
    """Running sequences, integrated over time."""
    engine_steps: float
    """Of the servers' engines."""
    answers: int
    """Requests answered."""
    scores: int
    """Rollouts scored, those that nothing was trained on included."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulated run did. The shares are over its settled part: without the first steps, which fill the pipeline, and
    the last ones, for which nothing is generated any more."""

    ok: bool
    reason: str
    steps: tuple[Step, ...]
    step_s: float
    """Median of the seconds between the ends of train steps, as `timing_step_total` counts them."""
    mean_step_s: float
    """Of the settled steps: with their tokens, `tokens_per_s`."""
    tokens_per_s: float
    """Trained tokens, prompts included, a second."""
    sampled_per_s: float
    trainer_training: float
    trainer_syncing: float
    trainer_waiting: float
    """Shares of the trainer's time; they add up to 1."""
    servers_generating: float
    servers_paused: float
    servers_waiting: float
    """Shares of the servers' time; they add up to 1."""
    sequences: float
    """Sequences that run on a server, in the mean over time."""
    preemptions: int
    counts: Counts
    events: int


def account(
    steps: Sequence[Step], *, ok: bool, reason: str, max_async: int, servers: int, preemptions: int, counts: Counts, events: int
) -> Outcome:
    """Sum a run up. Raises ValueError where it has no step."""
    if not steps:
        raise ValueError(f"the simulated run ended before its first step: {reason}")
    first, last = settled(len(steps), max_async)
    ends = [0.0, *(step.done_s for step in steps)]
    span = ends[last] - ends[first]
    origin = steps[first - 1] if first else None
    inner = steps[first:last]
    syncs = steps[first - 1 : last - 1] if first else steps[first : last - 1]
    training = sum(step.done_s - step.begun_s for step in inner) / span
    syncing = sum(step.committed_s - step.done_s for step in syncs) / span

    def grown(name: str) -> float:
        total: float = getattr(steps[last - 1], name) - (getattr(origin, name) if origin else 0.0)
        return total

    servers_s = span * servers
    generating, paused = grown("generating_s") / servers_s, grown("paused_s") / servers_s
    return Outcome(
        ok=ok,
        reason=reason,
        steps=tuple(steps),
        step_s=median(b - a for a, b in pairwise(ends)),
        mean_step_s=span / (last - first),
        tokens_per_s=sum(step.tokens for step in inner) / span,
        sampled_per_s=grown("sampled") / span,
        trainer_training=training,
        trainer_syncing=syncing,
        trainer_waiting=max(0.0, 1.0 - training - syncing),  # rounding is no negative time
        servers_generating=generating,
        servers_paused=paused,
        servers_waiting=max(0.0, 1.0 - generating - paused),
        sequences=grown("sequence_s") / servers_s,
        preemptions=preemptions,
        counts=counts,
        events=events,
    )


def settled(steps: int, max_async: int) -> tuple[int, int]:
    """Steps `first:last` between the filling and the emptying of the pipeline; all of them where few remain."""
    first, last = max_async + 1, steps - max_async - 1
    return (first, last) if last - first >= 2 else (0, steps)
