"""The arithmetic of staleness, and that real runs reach its limits but never pass them."""

from __future__ import annotations

import pytest

from telescope.flow.staleness import age_bound, age_bound_in_updates, explain, stale_cancel_can_fire
from tests.flow.harness import Manners, World, settings


@pytest.mark.parametrize(
    ("order", "m", "d", "versions"),
    [
        ("completion", 0, 8, 0),
        ("completion", 1, 1, 1),
        ("completion", 2, 8, 9),
        ("completion", 4, 3, 6),
        ("admission", 0, 8, 0),
        ("admission", 2, 8, 2),
        ("admission", 4, 1, 4),
    ],
)
def test_the_bound_is_m_in_admission_order_and_m_plus_d_less_one_in_completion_order(order, m, d, versions):
    assert age_bound(settings(number_of_steps=100, take_order=order, max_async_rollout=m, max_off_policy_steps=d)) == versions


def test_a_run_of_three_steps_trains_nothing_older_than_two_versions():
    assert age_bound(settings(number_of_steps=3, max_async_rollout=2, max_off_policy_steps=8)) == 2


def test_the_last_of_four_minibatches_is_three_updates_older_than_the_first():
    assert age_bound_in_updates(settings(number_of_steps=100, max_async_rollout=1, max_off_policy_steps=2), 4) == 2 * 4 + 3


@pytest.mark.parametrize(
    ("order", "m", "d", "steps", "fires"),
    [
        ("completion", 0, 1, 30, False),
        ("completion", 1, 8, 30, True),
        ("completion", 1, 8, 9, True),
        ("completion", 1, 8, 8, False),
        ("admission", 2, 2, 30, True),
        ("admission", 2, 3, 30, False),
    ],
)
def test_the_stale_cancel_fires_only_where_it_can(order, m, d, steps, fires):
    case = settings(
        number_of_steps=steps, take_order=order, max_async_rollout=m, max_off_policy_steps=d,
        prompts_batch_size_for_trainer=2, group_size=2, rollout_deadline_s=10_000.0,
    )  # fmt: skip
    assert stale_cancel_can_fire(case) == fires
    manners = Manners(straggler_share=0.1, straggler_factor=300.0, step_s=2.0)
    fired = sum(World(case, manners, seed).run().core.counts().reasons.get("cancelled: off_policy", 0) for seed in range(12))
    assert (fired > 0) == fires


@pytest.mark.parametrize(
    ("order", "m", "d"), [("completion", 1, 2), ("completion", 2, 3), ("admission", 1, 8), ("admission", 3, 8)]
)
def test_the_bound_is_reached(order, m, d):
    case = settings(
        number_of_steps=12, prompts_batch_size_for_trainer=2, take_order=order, max_async_rollout=m, max_off_policy_steps=d
    )
    manners = Manners(straggler_share=0.15, straggler_factor=30.0, step_s=3.0, update_s=1.0, capacity=512)
    oldest = max(max(World(case, manners, seed).run().rules.ages) for seed in range(40))
    assert oldest == age_bound(case)


def test_plan_says_it_in_sentences():
    assert explain(
        settings(
            number_of_steps=300, prompts_batch_size_for_trainer=16, group_size=8, max_async_rollout=2, max_off_policy_steps=8
        )
    ) == (
        "A batch is 16 groups of 8 samples: 128 rollouts a step.",
        "B = (max_async_rollout + 1) x groups = (2 + 1) x 16 = 48 groups may be alive at once: 384 rollouts.",
        "A trained group is at most 9 versions old (9 optimiser updates), in take_order=completion.",
        "A group still incomplete 8 versions after its first dispatch is cancelled as off-policy.",
    )
    synchronous = explain(settings(max_async_rollout=0))
    assert "max_async_rollout=0 is synchronous" in synchronous[2]
    assert synchronous[3].startswith("A trained group is at most 0 versions old (0 optimiser updates)")
    assert "max_off_policy_steps=2) never fires: each step waits" in synchronous[4]
    assert "the run has 2 steps" in explain(settings(number_of_steps=2))[-1]
    in_order = settings(number_of_steps=100, take_order="admission", max_async_rollout=2, max_off_policy_steps=3)
    assert "in admission order no group waits for more than max_async_rollout=2 versions" in explain(in_order)[-1]
