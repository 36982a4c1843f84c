"""Pools by pass rate: who is in which, how often each is drawn from, and that all of it can be saved and replayed."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.flow.curriculum import CurriculumState, PassRateCurriculum, PassRatePool, PassRateRules
from telescope.flow.prompt_sampler import DataPosition, PromptSampler
from telescope.flow.replay import replay
from telescope.records import PromptRef, RolloutOrder
from tests.flow.harness import Manners, World, settings

POOLS = PassRateRules(
    (PassRatePool("hard", 0.25, 1.0), PassRatePool("medium", 0.75, 3.0), PassRatePool("easy", 1.0, 0.0)),
    new_share=4.0,
    window=2,
    pass_above=0.5,
)
ONE = (("countdown", 1.0),)


def counting(limit: int):
    numbers = iter(range(limit))
    return lambda: next(numbers, None)


def rewards(passed: int, of: int = 4) -> list[float]:
    return [1.0] * passed + [0.0] * (of - passed)


def played(pools: PassRateCurriculum, passed: list[int]) -> None:
    """Prompts 0, 1, 2 … are drawn for the first time, and so many of their 4 samples pass."""
    fresh = counting(len(passed))
    assert [pools.draw(0.0, fresh) for _ in passed] == list(range(len(passed)))
    for index, number in enumerate(passed):
        pools.record(index, rewards(number))


def test_a_prompts_pass_rate_puts_it_into_a_pool_upper_ends_included():
    pools = PassRateCurriculum(POOLS)
    played(pools, [0, 1, 2, 3, 4])
    assert pools.state.pools == ((0, 1), (2, 3), (4,))
    assert pools.sizes() == {"new": 0, "hard": 2, "medium": 2, "easy": 1}


def test_only_the_last_groups_of_a_prompt_count_and_each_alike():
    pools = PassRateCurriculum(POOLS)
    played(pools, [0])
    for passed, of, expected in ((4, 4, 0.5), (8, 8, 1.0), (0, 2, 0.5), (0, 4, 0.0)):
        pools.record(0, rewards(passed, of))
        assert pools.state.records[0].rate == expected
    assert pools.state.records[0].samples == (2, 4)


def test_a_reward_must_be_above_the_threshold_to_pass():
    pools = PassRateCurriculum(POOLS)
    pools.draw(0.0, counting(1))
    pools.record(0, [0.5, 0.51, 0.1, 1.0])
    assert pools.state.records[0].rate == 0.5


def test_pools_are_drawn_from_by_share_and_prompts_take_turns():
    """Shares 4 : 1 : 3 of new, hard and medium, so points below 0.5 are new and from 0.625 medium; easy has share 0."""
    pools = PassRateCurriculum(POOLS)
    played(pools, [0, 0, 2, 2, 4])
    never = counting(0)
    assert [pools.draw(point, counting(9)) for point in (0.0, 0.499)] == [0, 0]
    pools = PassRateCurriculum(POOLS)
    played(pools, [0, 0, 2, 2, 4])
    assert [pools.draw(0.5, counting(9)), pools.draw(0.624, counting(9))] == [0, 1]
    assert [pools.draw(0.625, never), pools.draw(0.999, never)] == [2, 3]
    assert pools.draw(0.3, never) == 4  # all that is left, though its share is 0


def test_shares_of_many_draws_are_those_of_the_settings():
    draws = PromptSampler(0, ONE, "train", {"countdown": 100_000}, {"countdown": POOLS})
    for _ in range(900):  # something in every pool
        prompt = draws.draw().prompt
        draws.record(prompt, rewards(prompt.index % 5))
    known = {index: record.rate for index, record in state_of(draws).records.items()}
    drawn = [draws.draw().prompt.index for _ in range(300)]
    seen = Counter("new" if index not in known else "hard" if known[index] <= 0.25 else "medium" for index in drawn)
    # 150, 37.5 and 112.5 expected; four standard deviations of a binomial are 35, 23 and 34
    assert abs(seen["new"] - 150) < 35
    assert abs(seen["hard"] - 37.5) < 23
    assert abs(seen["medium"] - 112.5) < 34
    assert max(Counter(drawn).values()) == 1  # without replacement while they are in play


def state_of(draws: PromptSampler) -> CurriculumState:
    state = draws.position.cursors["countdown"].curriculum
    assert state is not None
    return state


@given(size=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_every_prompt_is_played_once_before_the_new_ones_end_and_none_is_lost(size: int, seed: int):
    draws = PromptSampler(seed, ONE, "train", {"countdown": size}, {"countdown": POOLS})
    seen = Counter()
    for turn in range(6 * size):
        prompt = draws.draw().prompt
        seen[prompt.index] += 1
        match (turn + prompt.index) % 4:
            case 0:
                draws.give_back(prompt)
            case 1:
                draws.drop(prompt)
            case _:
                draws.record(prompt, rewards(prompt.index % 5))
    state = state_of(draws)
    everywhere = sorted([*state.again, *(index for pool in state.pools for index in pool)])
    assert everywhere == sorted(seen)  # each exactly once
    assert len(everywhere) == len(set(everywhere))


def test_with_every_prompt_in_play_the_one_drawn_longest_ago_comes_again():
    draws = PromptSampler(0, ONE, "train", {"countdown": 3}, {"countdown": POOLS})
    first = [draws.draw().prompt.index for _ in range(3)]
    assert sorted(first) == [0, 1, 2]
    assert [draws.draw().prompt.index for _ in range(4)] == [*first, first[0]]
    for _ in range(2):
        draws.record(PromptRef("countdown", "train", first[1]), rewards(1))
    assert state_of(draws).pools[0].count(first[1]) == 1


def test_a_saved_position_goes_on_where_it_was():
    def new() -> PromptSampler:
        return PromptSampler(5, (("a", 1.0), ("b", 1.0)), "train", {"a": 50, "b": 1000}, {"a": POOLS})

    draws = new()
    for turn in range(60):
        prompt = draws.draw().prompt
        draws.record(prompt, rewards(turn % 5))
    saved = msgspec.json.encode(draws.position)
    resumed = new()
    resumed.restore(msgspec.json.decode(saved, type=DataPosition))
    assert resumed.position == draws.position
    for turn in range(60):
        one, other = draws.draw(), resumed.draw()
        assert one == other
        for each in (draws, resumed):
            each.record(one.prompt, rewards(turn % 3))
    assert resumed.position == draws.position


def test_prompts_in_play_are_saved_as_if_they_had_come_back():
    draws = PromptSampler(5, ONE, "train", {"countdown": 4}, {"countdown": POOLS})
    drawn = [draws.draw().prompt.index for _ in range(4)]
    draws.record(PromptRef("countdown", "train", drawn[0]), rewards(0))
    assert (state_of(draws).again, state_of(draws).pools[0]) == (tuple(drawn[1:]), (drawn[0],))


def test_a_position_with_and_without_a_curriculum_do_not_fit_each_other():
    plain = PromptSampler(0, ONE, "train", {"countdown": 5})
    with_pools = PromptSampler(0, ONE, "train", {"countdown": 5}, {"countdown": POOLS})
    with pytest.raises(ValueError, match=r"has no curriculum of environments\.countdown, and this run has one"):
        with_pools.restore(plain.position)
    with pytest.raises(ValueError, match=r"has a curriculum of environments\.countdown, and this run has none"):
        plain.restore(with_pools.position)
    other = PromptSampler(0, ONE, "train", {"countdown": 5}, {"countdown": PassRateRules((PassRatePool("all", 1.0, 1.0),))})
    with pytest.raises(ValueError, match="has 3 pools, the settings 1"):
        other.restore(with_pools.position)


def test_a_split_of_a_million_prompts_costs_what_was_played():
    tracemalloc.start()
    draws = PromptSampler(0, ONE, "train", {"countdown": 10**6}, {"countdown": POOLS})
    for _ in range(5000):
        prompt = draws.draw().prompt
        draws.record(prompt, rewards(prompt.index % 5))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 5000 * 700


@pytest.mark.parametrize(
    ("pools", "why"),
    [
        ((), "must rise from above 0 to exactly 1"),
        ((PassRatePool("a", 0.5, 1.0),), "must rise from above 0 to exactly 1"),
        ((PassRatePool("a", 0.5, 1.0), PassRatePool("b", 0.5, 1.0), PassRatePool("c", 1.0, 1.0)), "must rise"),
        ((PassRatePool("a", 0.5, 1.0), PassRatePool("a", 1.0, 1.0)), "give each its own"),
        ((PassRatePool("new", 1.0, 1.0),), "none 'new'"),
        ((PassRatePool("a", 1.0, -1.0),), "share must be 0 or more"),
    ],
)
def test_pools_that_leave_a_rate_without_a_pool_are_refused(pools: tuple[PassRatePool, ...], why: str):
    with pytest.raises(ValueError, match=why):
        PassRateRules(pools)


def hardness(order: RolloutOrder) -> float:
    """Prompts whose index ends in 0 are never solved, in 1 to 4 always, the others by half of the samples."""
    last = order.prompt.index % 10
    return 0.0 if last == 0 else 1.0 if last < 5 else float(order.sample % 2)


def test_runs_with_a_curriculum_replay_and_learn_what_was_discarded():
    case = settings(max_async_rollout=2, number_of_steps=20, curricula={"countdown": POOLS}, group_size=4)
    manners = Manners(prompts=40, failure_share=0.05, worker_life_s=30, straggler_share=0.05, reward=hardness)
    world = World(case, manners, 1, journal=True).run()
    assert replay(world.lines).disagreement is None
    position = world.core.data_position
    assert position is not None
    state = position.cursors["countdown"].curriculum
    assert state is not None
    # the rows of discarded groups are there too: prompts that always or never pass are discarded
    assert all(record.rate == 0.0 for index, record in state.records.items() if index % 10 == 0)
    assert all(record.rate == 1.0 for index, record in state.records.items() if 0 < index % 10 < 5)
    trained = [command.group_ids for command in world.rules.steps]
    assert sum(map(len, trained)) == 20 * 4


def test_a_curriculum_wastes_fewer_groups_on_prompts_without_a_signal():
    def discarded(**changes: object) -> int:
        manners = Manners(prompts=40, reward=hardness)
        return (
            World(settings(max_async_rollout=1, number_of_steps=40, group_size=4, **changes), manners, 1)
            .run()
            .core.counts()
            .reasons.get("discarded: zero_advantage", 0)
        )

    assert discarded(curricula={"countdown": POOLS}) * 2 < discarded()
