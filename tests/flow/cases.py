"""Random runs: settings and manners picked one by one, by `random` or by hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from telescope.flow.settings import EvalRules, FlowSettings
from tests.flow.harness import Manners, equal, mixed, sometimes_equal

T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]


LANES = (
    {"enable_individual_sample_lanes": False},
    {"enable_individual_sample_lanes": True},
    {"enable_individual_sample_lanes": True, "free_lane_after_generation": True},
    {"enable_individual_sample_lanes": True, "adaptive_concurrency": True},
    {"enable_individual_sample_lanes": True, "free_lane_after_generation": True, "adaptive_concurrency": True},
)


EVALS = (
    (),
    (),
    (EvalRules(name="own", environment="countdown", every=2, num_samples=2),),
    (
        EvalRules(name="own", environment="countdown", every=1, num_samples=3, num_prompts=2, baseline=False),
        EvalRules(name="other", environment="wordle", every=3, final=False),
    ),
)


def any_settings(pick: Pick) -> FlowSettings:
    """M 0 to 4, D 1 to 8, P 1 to 32, both take orders and both kinds of lanes; few steps where a batch is large."""
    groups = pick([1, 2, 3, 4, 8, 16, 32])
    eval_servers = pick([0, 1, 1, 2])
    return FlowSettings(
        number_of_steps=pick(range(1, max(4, 40 // groups) + 1)),
        prompts_batch_size_for_trainer=groups,
        group_size=pick([1, 2, 3, 4]),
        max_async_rollout=pick(range(5)),
        take_order=pick(["completion", "admission"]),
        max_off_policy_steps=pick(range(1, 9)),
        discard_group_zero_advantage=pick([True, False]),
        min_group_size=2,
        max_attempts=pick([1, 2, 3]),
        **pick(LANES),
        kv_soft=pick([0.3, 0.85]),
        max_concurrent_prompts_per_server=pick([1, 2, 8, 64]),
        environments=pick([(("countdown", 1.0),), (("countdown", 1.0), ("math", 3.0))]),
        seed=pick(range(100)),
        rollout_deadline_s=pick([20.0, 400.0]),
        cancel_deadline_s=60.0,
        absence_deadline_s=900.0,
        weights_while_training=pick([True, False]),
        failed_batches_limit=pick([2, 50]),
        discarded_batches_limit=3,
        evals=pick(EVALS),
        eval_servers=eval_servers,
        evals_hold_training=not eval_servers and pick([False, True]),
    )


def any_manners(pick: Pick) -> Manners:
    """Quiet and troubled stand-ins: stragglers, deaths and returns, failures, repetitions, silence, slow updates."""
    return Manners(
        workers=pick([1, 2, 3]),
        capacity=pick([1, 7, 64]),
        servers=pick([1, 2, 3, 4]),
        server_capacity=pick([1, 2, 7, 1000]),
        prompts=pick([1, 5, 50]),
        most_turns=pick([1, 2, 3]),
        straggler_share=pick([0.0, 0.05, 0.3]),
        straggler_factor=pick([10.0, 100.0]),
        step_s=pick([0.0, 0.5, 3.0, 30.0]),
        update_s=pick([0.0, 0.5, 20.0]),
        failure_share=pick([0.0, 0.0, 0.05, 0.3]),
        timeout_share=pick([0.0, 0.0, 0.1, 0.5]),
        worker_life_s=pick([0.0, 0.0, 30.0]),
        server_life_s=pick([0.0, 0.0, 30.0]),
        fenced_share=pick([0.0, 0.0, 0.2]),
        repeat_share=pick([0.0, 0.2]),
        mute_share=pick([0.0, 0.0, 0.02]),
        closes_share=pick([0.0, 0.5, 1.0]),
        score_s=pick([0.2, 0.2, 5.0]),
        kv_tokens=pick([0, 100, 1000, 10_000]),
        engine_room=pick([1000, 1000, 4]),
        load_every_s=pick([0.25, 2.0]),
        load_lost_share=pick([0.0, 0.0, 0.5]),
        deaf=pick([False, False, False, True]),
        reward=pick([mixed, mixed, sometimes_equal, equal]),
    )
