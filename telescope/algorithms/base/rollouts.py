"""Rules on whole rollouts, the same for every algorithm: what a length costs, and which rollouts leave the loss.

They act in the orchestrator, on rollouts as they were scored. A rollout that leaves the loss leaves its denominators too, and
stays in the statistics of its group: its reward was measured all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from telescope.maths import filters
from telescope.records import FinishReason
from telescope.settings import Settings


@dataclass(frozen=True)
class SampledRollout:
    """What the rules see of a rollout. `logprobs`: the sampler's, of its n sampled tokens in order."""

    finish_reason: FinishReason
    logprobs: np.ndarray  # [n] float32

    @property
    def truncated(self) -> bool:
        """Cut off by the limit on tokens."""
        return self.finish_reason == "length"


class RolloutRules(Settings):
    overlong_filter: bool = False
    """Leave rollouts that were cut off by the limit on tokens out of the loss."""
    overlong_buffer_tokens: int | None = Field(default=None, ge=1)
    """DAPO's soft punishment: the last so many tokens before rollout.max_tokens, or before the
    environment's own max_tokens, cost reward; null: none do."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """What a rollout of so many tokens or more loses of its reward, with overlong_buffer_tokens."""
    repetition_filter_tokens: int | None = Field(default=None, ge=2)
    """Leave rollouts with so many near-certain sampled tokens in a row out of the loss; null: none. 3000 is usual."""
    repetition_filter_probability: float = Field(default=0.99, gt=0, lt=1)
    """Above this probability a sampled token is near-certain, for repetition_filter_tokens."""

    def length_penalty(self, tokens: int, *, max_tokens: int) -> float:
        """What is added to the reward of a rollout of `tokens` sampled tokens: 0 or less."""
        if self.overlong_buffer_tokens is None:
            return 0.0
        return self.overlong_penalty * filters.soft_overlong(tokens, max_tokens=max_tokens, buffer=self.overlong_buffer_tokens)

    def filters_out(self, rollout: SampledRollout) -> tuple[str, ...]:
        """The rules by which the rollout leaves the loss, of `overlong` and `repetition`; empty: it stays."""
        found = []
        if self.overlong_filter and rollout.truncated:
            found.append("overlong")
        limit = self.repetition_filter_tokens
        if limit is not None and filters.longest_certain_run(rollout.logprobs, self.repetition_filter_probability) >= limit:
            found.append("repetition")
        return tuple(found)

    def length_errors(self, *, max_tokens: int) -> list[str]:
        """Sentences that refuse a limit on tokens with which these rules make no sense."""
        buffer = self.overlong_buffer_tokens
        if buffer is None or buffer < max_tokens:
            return []
        return [
            f"algorithm.overlong_buffer_tokens={buffer} must be below rollout.max_tokens={max_tokens}, or every rollout is "
            f"punished for its length: DAPO takes a fifth, here {max(max_tokens // 5, 1)}"
        ]

    @model_validator(mode="after")
    def _penalty_has_a_buffer(self) -> Self:
        if "overlong_penalty" in self.model_fields_set and self.overlong_penalty != 1.0 and self.overlong_buffer_tokens is None:
            raise ValueError(
                f"overlong_penalty={self.overlong_penalty} does nothing without overlong_buffer_tokens: set that too"
            )
        return self
