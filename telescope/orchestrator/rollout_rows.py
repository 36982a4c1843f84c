"""Rows of the stream `rollouts`: an order, and what came back. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from telescope.orchestrator.shelf import Scored
from telescope.records import RolloutOrder


def order_row(order: RolloutOrder) -> dict[str, Any]:
    """What was ordered, whatever came of it."""
    return {
        "rollout_id": order.rollout_id,
        "attempt": order.attempt,
        "group_id": order.group_id,
        "sample": order.sample,
        "environment": order.prompt.environment,
        "split": order.prompt.split,
        "index": order.prompt.index,
        "seed": order.seed,
    }


def rollout_row(rollout: Scored, worker: str) -> dict[str, Any]:
    """A scored rollout, without its arrays."""
    done, versions = rollout.done, rollout.versions()
    sampled = np.concatenate([branch.logprobs[branch.mask.astype(bool)] for branch in rollout.branches])
    return {
        **order_row(rollout.order),
        "reward": done.reward,
        "length_penalty": rollout.length_penalty,
        "metrics": done.metrics,
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "turns": done.turns,
        "finish_reason": done.finish_reason,
        "version_first": int(versions.min(initial=np.iinfo(np.int32).max)) if len(versions) else None,
        "version_last": int(versions.max(initial=-1)) if len(versions) else None,
        "logprob_mean": float(sampled.mean()) if len(sampled) else None,
        "worker": worker,
        "started_ns": done.started_ns,
        "generated_ns": done.generated_ns,
        "scored_ns": done.scored_ns,
        "prompt": done.prompt_text,
        "completion": done.completion_text,
        "golden_answers": list(done.golden_answers),
        "tags": list(done.tags),
        "info": _info(done.info),
    }


def _info(text: str) -> Any:
    """What a worker sent as JSON; text that is none stays text."""
    try:
        return orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return text
