"""Drawing: counter-based, without replacement, the same digits on every Python."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.flow.prompt_sampler import DataPosition, Permutation, PromptSampler, keyed_hash, sample_seed
from telescope.records import PromptRef

ONE = (("countdown", 1.0),)


def indices(draws: PromptSampler, number: int) -> list[int]:
    return [draws.draw().prompt.index for _ in range(number)]


def test_hashes_seeds_and_orders_are_these_digits_on_every_python():
    assert keyed_hash("sample", 0, 0, 0) == 14477663335659223624
    assert [sample_seed(0, 0, sample) for sample in range(3)] == [220911610956714, 191166739973933, 131665839659392]
    assert [Permutation(10, 7)[place] for place in range(10)] == [9, 7, 2, 6, 4, 8, 3, 1, 5, 0]


@given(size=st.integers(1, 400), key=st.integers(0, 2**64 - 1))
def test_a_permutation_visits_each_place_once(size: int, key: int):
    order = Permutation(size, key)
    assert sorted(order[place] for place in range(size)) == list(range(size))


def test_small_permutations_come_up_equally_often():
    seen = Counter(tuple(Permutation(3, key)[place] for place in range(3)) for key in range(6000))
    assert len(seen) == 6
    # 1000 expected each; five standard deviations of a binomial are 144
    assert all(abs(times - 1000) < 144 for times in seen.values())


def test_a_split_of_a_million_prompts_needs_no_list():
    draws = PromptSampler(0, ONE, "train", {"countdown": 10**6})
    drawn = indices(draws, 2000)
    assert len(set(drawn)) == 2000
    assert 450_000 < sum(drawn) / 2000 < 550_000


def test_every_prompt_is_drawn_once_an_epoch_and_epochs_differ():
    draws = PromptSampler(3, ONE, "train", {"countdown": 7})
    first, second = indices(draws, 7), indices(draws, 7)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second


def test_environments_are_drawn_by_weight():
    draws = PromptSampler(0, (("countdown", 1.0), ("math", 3.0)), "train", {"countdown": 50, "math": 50})
    seen = Counter(draws.draw().prompt.environment for _ in range(4000))
    # 3000 expected; four standard deviations are 110
    assert abs(seen["math"] - 3000) < 110


def test_group_numbers_count_up_and_another_seed_draws_otherwise():
    one, other = (PromptSampler(seed, ONE, "train", {"countdown": 100}) for seed in (0, 1))
    assert [one.draw().group_id for _ in range(3)] == [0, 1, 2]
    assert indices(one, 20) != indices(other, 20)


def test_a_given_back_prompt_is_drawn_next_and_marked():
    draws = PromptSampler(0, ONE, "train", {"countdown": 100})
    draws.give_back(PromptRef("countdown", "train", 41))
    drawn = draws.draw()
    assert (drawn.prompt.index, drawn.returned) == (41, True)
    assert not draws.draw().returned


def test_a_saved_position_goes_on_where_it_was():
    draws = PromptSampler(5, (("a", 1.0), ("b", 1.0)), "train", {"a": 5, "b": 1000})
    for _ in range(37):
        draws.draw()
    draws.give_back(PromptRef("b", "train", 12))
    saved = msgspec.json.encode(draws.position)
    expected = [draws.draw() for _ in range(20)]
    resumed = PromptSampler(5, (("a", 1.0), ("b", 1.0)), "train", {"a": 5, "b": 1000})
    resumed.restore(msgspec.json.decode(saved, type=DataPosition))
    assert [resumed.draw() for _ in range(20)] == expected


def test_a_position_of_other_environments_is_refused():
    draws = PromptSampler(0, ONE, "train", {"countdown": 5})
    with pytest.raises(ValueError, match=r"knows environments \['math'\], this run \['countdown'\]"):
        draws.restore(DataPosition(0, {"math": draws.position.cursors["countdown"]}))
