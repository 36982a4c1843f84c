"""Rows of the `tokens` stream: the exact tokens of the first groups of each step, for `python -m telescope env audit`.

Pure: a batch in, rows out. All tokens of a run would be many times its other rows; of a step's first groups they are few, and
an error in masks, versions or log-probs shows in any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from telescope.orchestrator.batch import Batch

MAX_TOKENS = 200_000
"""Of one step; a rollout that would go beyond is left out."""


def token_rows(batch: Batch, groups: int) -> Iterator[dict[str, Any]]:
    """One row a branch of each rollout of the step's first `groups` groups. `versions` and `logprobs` are those of the sampled
    tokens alone, in their order."""
    wanted, left = set(batch.command.group_ids[:groups]), MAX_TOKENS
    for place, rollout in enumerate(batch.rollouts):
        if rollout.order.group_id not in wanted or rollout.tokens > left:
            continue
        left -= rollout.tokens
        for number, branch in enumerate(rollout.branches):
            sampled = branch.mask.astype(bool)
            yield {
                "step": batch.command.step,
                "group_id": rollout.order.group_id,
                "rollout_id": rollout.order.rollout_id,
                "branch": number,
                "reward": rollout.done.reward,
                "advantage": float(batch.advantages[place]),
                "filtered": list(batch.filters[place]),
                "ids": branch.ids.tolist(),
                "mask": branch.mask.tolist(),
                "versions": branch.versions[sampled].tolist(),
                "logprobs": [round(value, 6) for value in branch.logprobs[sampled].tolist()],
            }
