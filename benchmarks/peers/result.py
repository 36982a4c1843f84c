"""One run of one system: its file of figures, and what is taken from it. Pure but for reading and writing the file.

Owns what a step's figures mean, so that they mean the same of each system:

- `seconds`: from the end of the step before (the first: from the start of training) to its end
- `training_s`: in which the trainer computed: forward, backward, clipping, optimiser, log-probs
- `generation_s`: in which the sampler had at least one request under way
- `tokens`: of the batch that was trained, prompts and answers
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Workload

WARM_STEPS = 2
"""At the start, and not counted: they compile, capture graphs and fill the pipeline."""
FEWEST_STEPS = 5
"""Counted, for a figure that is to be quoted."""


class UnusableResult(ValueError):
    """A file of figures that is missing or damaged, or has too few steps; the message names it."""


@dataclass(frozen=True)
class PeerStep:
    """One training step."""

    step: int
    seconds: float
    tokens: int
    answer_tokens: int
    training_s: float | None = None
    generation_s: float | None = None
    """None: the system does not say, as with the next ones."""
    weights_s: float | None = None
    """What the trainer waited for new weights to reach the sampler."""
    in_flight: float | None = None
    """Requests that the sampler had under way, on average over the step."""


@dataclass(frozen=True)
class PeerResult:
    """`settings`: all that was given or is not at the system's default; `reasons`: why, by setting; `handicaps`: what is not
    equal and cannot be made so, in sentences."""

    system: str
    mode: str
    variant: str
    workload: Workload
    cards: tuple[str, ...]
    masters: str
    """Precision of the weights that the optimiser updates."""
    steps: tuple[PeerStep, ...]
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    handicaps: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.system, self.mode, self.variant) if part)

    @property
    def counted(self) -> tuple[PeerStep, ...]:
        """The steps after the warm ones."""
        return self.steps[WARM_STEPS:]


def write_result(result: PeerResult, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def read_result(file: Path) -> PeerResult:
    """Raises `UnusableResult` where the file is not there, or not a result."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        found["workload"] = Workload(**found["workload"])
        found["steps"] = tuple(PeerStep(**step) for step in found["steps"])
        found |= {name: tuple(found[name]) for name in ("cards", "handicaps")}
        found["commands"] = tuple(tuple(command) for command in found["commands"])
        return PeerResult(**found)
    except FileNotFoundError:
        raise UnusableResult(f"{file} is not there: run the peer's command with --out={file}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnusableResult(f"{file} is not a file of figures of benchmarks.peers ({error}): run the peer again") from error


@dataclass(frozen=True)
class PeerFigures:
    """Medians over the counted steps of a system. Shares are of the step's seconds; None: not known of each of them."""

    steps: int
    seconds: float
    tokens_per_s: float
    answer_tokens: float
    """Of one rollout, on average."""
    trainer_idle: float | None
    sampler_idle: float | None
    in_flight: float | None
    over_longest: float | None
    """The step by the longer of generation and training. 1: they overlap wholly; the sum by the longer: by turns."""


def summarise(steps: Sequence[PeerStep], rollouts: int) -> PeerFigures:
    """Of counted steps, `rollouts` each. Raises `UnusableResult` where there are none."""
    if not steps:
        raise UnusableResult(f"no step is left after the first {WARM_STEPS}, which are not counted: give more --steps")
    return PeerFigures(
        steps=len(steps),
        seconds=statistics.median(step.seconds for step in steps),
        tokens_per_s=statistics.median(step.tokens / step.seconds for step in steps),
        answer_tokens=statistics.fmean(step.answer_tokens / rollouts for step in steps),
        trainer_idle=_median([_idle(step.training_s, step) for step in steps]),
        sampler_idle=_median([_idle(step.generation_s, step) for step in steps]),
        in_flight=_median([step.in_flight for step in steps]),
        over_longest=_median([_over_longest(step) for step in steps]),
    )


def _idle(busy_s: float | None, step: PeerStep) -> float | None:
    return None if busy_s is None else max(0.0, 1 - busy_s / step.seconds)


def _over_longest(step: PeerStep) -> float | None:
    longest = max(step.training_s or 0.0, step.generation_s or 0.0)
    return None if step.training_s is None or step.generation_s is None or not longest else step.seconds / longest


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
