"""Samples that begin alike in one row: what is repeated, where it stands, and how rows are filled by what is computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.maths import packing, prefixes

Samples = list[np.ndarray]


@pytest.fixture(autouse=True, scope="module")
def short_ones_count() -> None:
    """So that small examples say all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST", 1)
        yield


@st.composite
def trees(draw: st.DrawFn) -> Samples:
    """Samples of few symbols, so that many begin alike, some are whole in others, and some are the same."""
    return [
        np.array(draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)), np.int32) for _ in range(draw(st.integers(1, 9)))
    ]


def beginnings(samples: Samples) -> int:
    """Nodes of the tree of all samples, counted by hand: no token is computed twice."""
    return len({tuple(sample[:length].tolist()) for sample in samples for length in range(1, len(sample) + 1)})


def test_neighbours_repeat_what_they_share():
    samples = [np.array(tokens) for tokens in ([1, 2, 3], [9], [1, 2, 4], [1, 2, 3, 5])]
    assert prefixes.in_order(samples, range(4)) == ([0, 3, 2, 1], [0, 3, 2, 0])
    assert prefixes.in_order(samples, [1, 2]) == ([2, 1], [0, 0])


@given(samples=trees())
def test_no_token_is_computed_twice_and_each_has_its_whole_beginning(samples: Samples):
    order, repeated = prefixes.in_order(samples, range(len(samples)))
    boundaries = np.cumsum([0, *(len(samples[item]) for item in order)])
    row = np.concatenate([samples[item] for item in order])
    places, computed = prefixes.places(boundaries, repeated), prefixes.computed(boundaries, repeated)
    assert len(computed) == beginnings(samples) == places.max() + 1
    assert (row[computed][places] == row).all()
    beginning = {}
    for start, end in itertools.pairwise(boundaries):
        for at in range(start, end):
            assert beginning.setdefault(int(places[at]), row[start : at + 1].tolist()) == row[start : at + 1].tolist()


@given(samples=trees(), groups=st.lists(st.integers(0, 2), min_size=9, max_size=9), seq_len=st.integers(12, 40))
def test_rows_are_filled_by_what_is_computed(samples: Samples, groups: list[int], seq_len: int):
    groups = groups[: len(samples)]
    rows = packing.pack_shared(samples, groups, seq_len=seq_len, multiple=8)
    assert sorted(item for row in rows for item in row.items) == list(range(len(samples)))
    for row in rows:
        own = [samples[item] for item in row.items]
        assert row.lengths == tuple(map(len, own))
        assert row.computed == beginnings(own) <= seq_len
        assert row.computed_size % 8 == 0
        assert 0 <= row.computed_size - row.computed < 8
        assert row.squares == sum(len(one) ** 2 for one in own) - sum(count**2 for count in row.repeated)
    assert len(rows) == packing.shared_rows_needed(samples, groups, seq_len=seq_len)
    assert rows == packing.pack_shared(samples, groups, seq_len=seq_len, multiple=8)


def test_a_group_that_is_longer_than_a_row_pays_its_beginning_once_more():
    """A prompt of 6 and four answers of 3: 9 tokens, then 12, which 14 hold; with the third, 15, they don't."""
    samples = [np.array([0] * 6 + [answer, 0, 0]) for answer in range(1, 5)]
    found = packing.pack_shared(samples, [0] * 4, seq_len=14)
    assert [(row.items, row.repeated, row.computed) for row in found] == [((0, 1), (0, 6), 12), ((2, 3), (0, 6), 12)]


def test_samples_that_share_nothing_are_packed_as_ever():
    samples = [np.arange(10 * number, 10 * number + length) for number, length in enumerate((7, 2, 4, 3))]
    lengths = [len(sample) for sample in samples]
    found, plain = packing.pack_shared(samples, range(4), seq_len=10, multiple=4), packing.pack(lengths, seq_len=10, multiple=4)
    assert found == plain


def test_few_common_tokens_are_not_shared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefixes, "LEAST", 3)
    samples = [np.array(tokens) for tokens in ([1, 2, 3], [1, 2, 4], [1, 2, 4, 5])]
    assert prefixes.in_order(samples, range(3)) == ([0, 1, 2], [0, 0, 3])


def test_a_sample_longer_than_a_row_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"trajectory 1 has 11 tokens.*trainer.seq_len=10: raise trainer.seq_len"):
        packing.pack_shared([np.arange(3), np.arange(11)], [0, 0], seq_len=10)


@pytest.mark.parametrize("repeated", [(3, 0), (0, 6), (0, 5)])
def test_a_beginning_longer_than_the_sample_or_the_one_before_it_is_refused(repeated: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no such beginning"):
        prefixes.places(np.array([0, 4, 9]), repeated)
