"""The streams of a run directory and their columns: the one source for writer, sealer and reader.

A row is a flat mapping. `json` columns hold small nested values as JSON text once sealed. A floating NaN or infinity is stored
as null and its place named in `not_finite`: the column, or `metrics.exact` within a json column. Every row also carries the
columns of `COMMON`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["int", "float", "str", "bool", "json"]

COMMON: dict[str, Kind] = {
    "seq": "int",  # the writer's row number: a reader that meets a row twice knows it
    "time_ns": "int",  # wall clock
    "mono_ns": "int",  # the writer's monotonic clock
    "not_finite": "json",  # where a NaN or an infinity was: `reward`, `metrics.exact`
}


@dataclass(frozen=True)
class Stream:
    """One kind of row. Rows of a `droppable` stream may be lost under pressure, and are then counted."""

    name: str
    columns: dict[str, Kind]
    droppable: bool = False


_ATTEMPT: dict[str, Kind] = {
    "rollout_id": "int",
    "attempt": "int",
    "group_id": "int",
    "sample": "int",
    "environment": "str",
    "split": "str",
    "index": "int",
    "seed": "int",
    "status": "str",  # scored | ignored | cancelled | error; what became of its group stands in `groups`
    "cause": "str",
    "failure": "str",  # infrastructure | grader, where there is no score
    "reward": "float",  # the environment's
    "metrics": "json",
    "prompt_tokens": "int",
    "completion_tokens": "int",
    "turns": "int",
    "finish_reason": "str",
    "version_first": "int",
    "version_last": "int",
    "logprob_mean": "float",
    "temperature": "float",  # at which its tokens were sampled
    "worker": "str",
    "started_ns": "int",
    "generated_ns": "int",
    "scored_ns": "int",
    "prompt": "str",
    "completion": "str",
    "golden_answers": "json",
    "tags": "json",
    "info": "json",  # what the environment says of it, cut off where it was long
    "turn_rewards": "json",  # by turn; empty where the environment gives none
}
"""Of one attempt at a rollout of training or at a sample of an eval."""

STREAMS: dict[str, Stream] = {
    stream.name: stream
    for stream in (
        Stream("rollouts", {**_ATTEMPT, "length_penalty": "float"}),  # the penalty is what training adds to the reward
        Stream(
            "evals",  # one a time that an eval was due
            {
                "eval": "str",
                "step": "int",  # the version that it was due at, 0 before the first step
                # complete | cut off (by the run's end) | changed (at a resume) | left out (the one before it still played)
                "state": "str",
                "prompts": "int",
                "samples": "int",  # of each prompt
                "scored": "int",
                "failed": "int",  # samples given up: they count as not passed, and with the lowest reward
                "unfinished": "int",  # samples without an outcome when it was cut off
                "truncated": "int",  # scored answers that ended at the token limit
                "reward": "float",  # mean over all samples, the failed ones too; this and what follows of a complete one alone
                "reward_error": "float",  # its standard error, clustered by prompt
                "reward_low": "float",  # both ends of its 95 % interval
                "reward_high": "float",
                "reward_scored": "float",  # mean over the scored samples alone
                "pass_above": "float",  # the reward above which a sample passes
                "setup": "json",  # environment, sampling and the like, by which two results are told to be of one kind
                "pass_at": "json",  # k: pass@k
                "pass_all": "json",  # k: pass^k
                "metrics": "json",  # means over the scored samples
                "completion_tokens": "float",  # mean over the scored samples
                "version_first": "int",  # the oldest and youngest weights that sampled one of its tokens
                "version_last": "int",
                "seconds": "float",
            },
        ),
        Stream(
            "eval_samples",  # one attempt at a sample of an eval; those of training stand in `rollouts`
            {"eval": "str", "step": "int", **_ATTEMPT},
        ),
        Stream("groups", {"group_id": "int", "state": "str", "reason": "str", "version": "int"}),
        Stream(
            "batches",
            {
                "step": "int",
                "group_ids": "json",
                "baseline_group_ids": "json",
                "rollout_ids": "json",
                "advantages": "json",
                "turn_advantages": "json",  # by rollout, then by turn; empty unless algorithm.credit=turn
                "lag_versions": "json",
                "tokens": "int",
                "trained_tokens": "int",
                "filtered": "json",  # rollout id: the rules by which it left the loss
                "truncated": "json",  # rollout id: tokens that each of its branches lost beyond trainer.seq_len
            },
        ),
        Stream(
            "tokens",  # one branch of a rollout in the first groups of a step (logging.token_groups)
            {
                "step": "int",
                "group_id": "int",
                "rollout_id": "int",
                "branch": "int",
                "reward": "float",
                "advantage": "float",
                "turns": "json",  # [sampled tokens, advantage] of each answer in it; empty where all have the rollout's
                "filtered": "json",
                "temperature": "float",
                "ids": "json",
                "mask": "json",
                "versions": "json",  # of the sampled tokens, in their order
                "logprobs": "json",  # likewise
            },
            droppable=True,
        ),
        Stream("step_metrics", {"step": "int", "metrics": "json"}),
        Stream("policy", {"version": "int", "cut_off": "bool", "metrics": "json"}),  # all groups begun at a version
        Stream(
            "weights",
            {
                "version": "int",
                "server": "str",  # empty: the whole update
                "phase": "str",  # published | sent | prepared | refused | broken off | committed | failed
                "started_ns": "int",
                "ended_ns": "int",
                "nbytes": "int",
                "pause_s": "float",
                "checksum": "str",
                "cause": "str",
            },
        ),
        Stream(
            "turns",
            {
                "request_id": "str",
                "rollout_id": "int",
                "turn": "int",
                "server": "str",
                "prompt_tokens": "int",
                "completion_tokens": "int",
                "cached_tokens": "int",
                "finish_reason": "str",
                "placed_ns": "int",
                "done_ns": "int",
                "queued_s": "float",
                "generated_s": "float",
            },
            droppable=True,
        ),
        Stream(
            "spans",  # a phase of a trainer rank's work (logging.track_gpu_events)
            {
                "step": "int",
                "process": "str",
                "name": "str",  # forward, backward, loss_computation, clip, optimizer, publish, …
                "minibatch": "int",  # from 0; absent for what belongs to none
                "row": "int",  # the micro-batch, likewise
                "started_ns": "int",  # wall clock
                "seconds": "float",
            },
            droppable=True,
        ),
        Stream(
            "memory",  # of a trainer rank, every logging.torch_memory_sample_interval_seconds
            {
                "process": "str",
                "step": "int",  # the last one that ended
                "sampled_ns": "int",  # wall clock
                "rss": "int",  # bytes of the process in host memory
                "allocated": "int",  # bytes of tensors on its GPU; absent on a CPU, as the next three
                "reserved": "int",  # held by PyTorch's allocator
                "peak_allocated": "int",  # since the start
                "retries": "int",  # of the allocator, each of which costs time
            },
            droppable=True,
        ),
        Stream(
            "checkpoints",
            {
                "step": "int",
                "state": "str",  # complete | failed
                "nbytes": "int",
                "seconds": "float",  # from the order to the last byte
                "stall_s": "float",  # that training stood still, of the slowest rank
                "cause": "str",
            },
        ),
        Stream("alerts", {"level": "str", "source": "str", "message": "str"}),
    )
}
