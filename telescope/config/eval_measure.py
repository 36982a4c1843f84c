"""A number of an eval by which steps are compared: which one, and which way is better. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FORM = re.compile(r"(?P<eval>[A-Za-z0-9_-]+)(?:/pass@(?P<k>[1-9]\d*))?:(?P<way>max|min)")


@dataclass(frozen=True)
class EvalMeasure:
    """`k`: of pass@k; None: the reward."""

    eval: str
    k: int | None = None
    lower_is_better: bool = False

    @classmethod
    def parse(cls, text: str) -> EvalMeasure:
        """`countdown:max`, `countdown/pass@4:max`. Raises ValueError with a sentence."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(
                f"checkpoint.keep_best={text!r} must be an eval and which way is better, e.g. countdown:max for its reward or "
                "countdown/pass@4:max"
            )
        return cls(found["eval"], int(found["k"]) if found["k"] else None, found["way"] == "min")

    @property
    def name(self) -> str:
        """`the reward of countdown`, `pass@4 of countdown`."""
        return f"{'the reward' if self.k is None else f'pass@{self.k}'} of {self.eval}"

    def read(self, row: Mapping[str, Any]) -> float | None:
        """Of a row of the stream `evals`; None where it has no such number, or is another eval's or not complete."""
        if row["eval"] != self.eval or row["state"] != "complete":
            return None
        value = row.get("reward") if self.k is None else row.get("pass_at", {}).get(str(self.k))
        return None if value is None else float(value)
