"""The reward of an eval in words, with how sure it is: one form for the terminal, the log and a run's last lines.

Pure: a row of the stream `evals`, or its part of `summary.json`, in; text out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard


def describe_reward(row: Mapping[str, Any]) -> str:
    """`0.412 ± 0.021`, with the standard error. Where all prompts have the same reward it is 0, which says nothing: then the
    ends of the 95 % interval (Wilson 1927, by `maths.evals.share_interval`), `0.000 (95 %: 0.000 to 0.658)`; the reward
    alone where these are not known either, or are not numbers. `–` without a reward."""
    reward, error = row.get("reward"), row.get("reward_error")
    if not _is_number(reward):
        return "–"
    if _is_number(error) and error:
        return f"{reward:.3f} ± {error:.3f}"
    return f"{reward:.3f}" + (f" (95 %: {interval})" if (interval := _describe_interval(row)) else "")


def _describe_interval(row: Mapping[str, Any]) -> str:
    """`0.000 to 0.658`; empty where it is not known."""
    low, high = row.get("reward_low"), row.get("reward_high")
    return f"{low:.3f} to {high:.3f}" if _is_number(low) and _is_number(high) else ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
