"""What is done about the gap between trainer and sampler: weights on the tokens' losses, listed in `algorithm.corrections`.

Each is a small class: its fields are the settings of its entry, `weight` the function. All look at o - q, the trainer's
log-prob before the step's first update less the sampler's, so they are frozen over the updates of a step and carry no
gradient. A dropped token stays in the denominators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from telescope.maths import metrics, ratios
from telescope.maths.segments import segment_mean, segment_sum, spread
from telescope.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from telescope.algorithms.base.row import PackedRow


class Correction(Settings):
    """Base of all. A subclass gives `name`, its settings and `weight`."""

    reweights: ClassVar[bool] = False
    """Whether it multiplies by a ratio, which may happen once only; otherwise it keeps (1) or drops (0)."""
    whole_sequences: ClassVar[bool] = False
    """Whether all tokens of a sequence get the same weight, as a loss a sequence needs it."""

    name: str

    def weight(self, row: PackedRow) -> Tensor:
        """[T] factor on the losses of a cleaned row, without gradient."""
        raise NotImplementedError

    def sums(self, weight: Tensor, row: PackedRow) -> dict[str, Tensor]:
        """What is measured of it."""
        return metrics.mean_sums(f"{self.name}_masked_fraction", weight == 0, row.mask)


class Tis(Correction):
    """Truncated importance sampling: min(exp(clamp(o - q, -clamp, clamp)), cap)."""

    reweights: ClassVar[bool] = True

    name: Literal["tis"] = "tis"
    cap: float = Field(default=2.0, gt=0)
    clamp: float = Field(default=20.0, gt=0)

    def weight(self, row: PackedRow) -> Tensor:
        return ratios.tis_weight(row.before, row.rollout, cap=self.cap, clamp=self.clamp)

    def sums(self, weight: Tensor, row: PackedRow) -> dict[str, Tensor]:
        capped = metrics.mean_sums("tis_capped_fraction", weight >= self.cap, row.mask)
        return {**metrics.mean_sums("tis_weight", weight, row.mask), **capped}


class _Interval(Correction):
    low: float = Field(ge=0)
    high: float = Field(gt=0)

    @model_validator(mode="after")
    def _is_an_interval(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self


class IcePop(_Interval):
    """k = exp(o - q) where low <= k <= high, else 0."""

    reweights: ClassVar[bool] = True

    name: Literal["icepop"] = "icepop"
    low: float = Field(default=0.5, ge=0)
    high: float = Field(default=5.0, gt=0)

    def weight(self, row: PackedRow) -> Tensor:
        return ratios.icepop_weight(row.before, row.rollout, low=self.low, high=self.high)


class SequenceMask(_Interval):
    """1 where the sequence's whole ratio, exp(sum of o - q), lies in [low, high], else 0."""

    whole_sequences: ClassVar[bool] = True

    name: Literal["sequence_mask"] = "sequence_mask"
    low: float = Field(default=0.1, ge=0)
    high: float = Field(default=10.0, gt=0)

    def weight(self, row: PackedRow) -> Tensor:
        gaps = segment_sum((row.before - row.rollout).where(row.mask, 0.0), row.segments, row.segment_count)
        return spread(ratios.inside(gaps, low=self.low, high=self.high), row.segments)


class GeometricMask(_Interval):
    """1 where the geometric mean of the sequence's ratios, exp(mean of o - q), lies in [low, high], else 0."""

    whole_sequences: ClassVar[bool] = True

    name: Literal["geometric_mask"] = "geometric_mask"
    low: float = Field(default=0.99, ge=0)
    high: float = Field(default=1.01, gt=0)

    def weight(self, row: PackedRow) -> Tensor:
        gaps = segment_mean(row.before - row.rollout, row.mask, row.segments, row.segment_count)
        return spread(ratios.inside(gaps, low=self.low, high=self.high), row.segments)


SHIPPED: Mapping[str, type[Correction]] = {
    "tis": Tis,
    "icepop": IcePop,
    "sequence_mask": SequenceMask,
    "geometric_mask": GeometricMask,
}


def read_list(entries: Any, known: Mapping[str, type[Correction]]) -> tuple[Correction, ...]:
    """The typed entries of `corrections`. Raises `ValueError` in words."""
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ValueError("corrections must be a list, e.g. [{name: icepop, low: 0.5, high: 5.0}]")
    return tuple(
        entry if isinstance(entry, Correction) else _read(number, entry, known) for number, entry in enumerate(entries)
    )


def _read(number: int, entry: Any, known: Mapping[str, type[Correction]]) -> Correction:
    where = f"corrections[{number}]"
    if not isinstance(entry, Mapping) or entry.get("name") not in known:
        raise ValueError(f"{where} must have a name, one of {', '.join(known)}, e.g. {{name: icepop, low: 0.5}}")
    kind = known[entry["name"]]
    try:
        return kind.model_validate(dict(entry))
    except ValidationError as error:
        settings = ", ".join(name for name in kind.model_fields if name != "name")
        problems = "; ".join(_in_words(detail) for detail in error.errors(include_url=False))
        raise ValueError(f"{where} ({entry['name']}, whose settings are {settings}): {problems}") from error


def _in_words(detail: Mapping[str, Any]) -> str:
    where = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"there is no setting {where}"
    return f"{where}: {detail['msg']}" if where else str(detail["msg"])
