"""Processor seconds of a run's steps: what its parts cost by what they do, and what those of a simulated run would.

    servers' engines    step_s · (engine steps) + token_s · (tokens sampled)
    servers             request_s · (requests answered)
    workers             score_s · (rollouts scored)
    orchestrator        rollout_s · (rollouts scored)
    trainers            step_s + token_s · (tokens of the batch)

Seconds of the wall clock change with what else a machine does, and with how many of the run's processes share its cores; these
hardly do. Fitted on a run's settled steps: the engines' one by one, all else on the totals. Refuses runs that say nothing of
their processor time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from telescope.planning.engine_fit import least_squares
from telescope.planning.simulator import SimulatedStep

PREFIX = "processor_s/"
PARTS = ("orchestrator", "workers", "servers", "engines", "trainers")


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Processor seconds."""

    engine_step_s: float
    """Of an engine's step, whatever it serves."""
    engine_token_s: float
    """More for each token that it samples, prompts included as they come with them."""
    request_s: float
    score_s: float
    rollout_s: float
    train_step_s: float
    """All ranks together."""
    train_token_s: float

    def of(self, before: SimulatedStep | None, step: SimulatedStep, epochs: int = 1) -> dict[str, float]:
        """What lies between the ends of two train steps, by part; `before`: none for the first."""

        def grown(name: str) -> float:
            total: float = getattr(step, name) - (getattr(before, name) if before is not None else 0.0)
            return total

        return {
            "orchestrator": self.rollout_s * grown("scores"),
            "workers": self.score_s * grown("scores"),
            "servers": self.request_s * grown("answers"),
            "engines": self.engine_step_s * grown("engine_steps") + self.engine_token_s * grown("sampled"),
            "trainers": self.train_step_s + self.train_token_s * step.tokens * epochs,
        }

    def step_s(self, steps: Sequence[SimulatedStep], epochs: int = 1) -> float:
        """Median over the steps of a simulated run."""
        before: list[SimulatedStep | None] = [None, *steps[:-1]]
        return median(sum(self.of(one, other, epochs).values()) for one, other in zip(before, steps, strict=True))


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did in its settled steps, all together or (tuples) one by one."""

    engine_steps: tuple[float, ...]
    sampled: tuple[float, ...]
    step_wall_s: float
    """What a step of an engine takes by the wall clock, whatever it serves."""
    requests: int
    scores: int
    tokens: int
    """Of the batches, prompts included, as often as they were trained on."""
    token_share: float
    """Of a train step's time, the part that grows with its tokens."""


def spent(metrics: Mapping[str, float]) -> dict[str, float]:
    """Processor seconds of a step by part, from its row in `step_metrics`; empty where they were not known."""
    found = {part: metrics.get(PREFIX + part) for part in PARTS}
    return {part: seconds for part, seconds in found.items() if seconds is not None} if None not in found.values() else {}


def measured_step_s(metrics: Sequence[Mapping[str, float]]) -> float | None:
    """Median of a run's own steps, to compare with; None where a step does not say it."""
    found = [spent(row) for row in metrics]
    return median(sum(row.values()) for row in found) if found and all(found) else None


def fit_costs(rows: Sequence[Mapping[str, float]], work: Work) -> Costs | None:
    """From the metrics of the settled steps, and what was done in them. None where they don't say it."""
    found = [spent(row) for row in rows]
    if not found or not all(found):
        return None
    total = {part: sum(row[part] for row in found) for part in PARTS}
    engine_step_s, engine_token_s = _engine([row["engines"] for row in found], work)
    return Costs(
        engine_step_s=engine_step_s,
        engine_token_s=engine_token_s,
        request_s=total["servers"] / max(work.requests, 1),
        score_s=total["workers"] / max(work.scores, 1),
        rollout_s=total["orchestrator"] / max(work.scores, 1),
        train_step_s=(1 - work.token_share) * total["trainers"] / len(found),
        train_token_s=work.token_share * total["trainers"] / max(work.tokens, 1),
    )


def _engine(seconds: Sequence[float], work: Work) -> tuple[float, float]:
    """Of a step, and of a token: least squares over the train steps, which differ in how many sequences shared an engine's
    step; where they do not (a single one, or all alike), each explains half. It costs the processor no more than it takes, and
    all of them no more than was spent; tokens have the rest, so that both together are what was spent."""
    step_s = least_squares(np.array([work.engine_steps, work.sampled]).T, np.array(seconds))[0]
    step_s = min(step_s, work.step_wall_s, sum(seconds) / max(sum(work.engine_steps), 1e-9))
    rest = sum(seconds) - step_s * sum(work.engine_steps)
    return step_s, max(0.0, rest) / max(sum(work.sampled), 1.0)
