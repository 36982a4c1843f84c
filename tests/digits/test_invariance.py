"""The loss, its gradient and its metrics depend neither on packing, filler, order, micro-batches nor ranks. Float32."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from telescope.maths import dealing, packing
from tests.digits.batches import VARIANTS, Batch, Outcome, make_batch, outcome, single_rows

ALL = pytest.mark.parametrize("name", VARIANTS)
SLIGHT = 1e-6
CLAMPED = {"tis_capped_fraction", "clip_fraction", "icepop_masked_fraction"}


def assert_same(got: Outcome, expected: Outcome) -> None:
    assert got.loss == pytest.approx(expected.loss, rel=SLIGHT, abs=SLIGHT)
    largest = max(np.abs(each).max() for each in expected.gradients)
    assume(largest > 0)  # a mask may have dropped every sequence; nothing would be compared
    for ours, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert np.abs(ours - theirs).max() <= SLIGHT * largest
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)


def shuffled_rows(batch: Batch, random: np.random.Generator, seq_len: int, multiple: int, fillers: int) -> list[packing.Row]:
    """Trajectories in any order into rows in any order, with filler rows among them."""
    order = random.permutation(len(batch.items)).tolist()
    rows = packing.pack([batch.lengths[index] for index in order], seq_len=seq_len, multiple=multiple)
    rows = [
        packing.Row(items=tuple(order[item] for item in row.items), starts=row.starts, lengths=row.lengths, size=row.size)
        for row in rows
    ]
    rows = packing.with_filler(rows, len(rows) + fillers, multiple=multiple)
    return [rows[index] for index in random.permutation(len(rows))]


@ALL
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    seq_len=st.sampled_from([24, 31, 64, 400]),
    multiple=st.sampled_from([1, 8, 64]),
    fillers=st.integers(0, 3),
)
def test_any_packing_order_padding_and_filler_give_the_same(name, seed, seq_len, multiple, fillers):
    batch = make_batch(VARIANTS[name], seed)
    rows = shuffled_rows(batch, np.random.default_rng(seed), seq_len, multiple, fillers)
    assert_same(outcome(VARIANTS[name], batch, rows), outcome(VARIANTS[name], batch, single_rows(batch)))


@ALL
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), ranks=st.integers(1, 4))
def test_any_number_of_ranks_adds_up_to_the_same_update(name, seed, ranks):
    batch = make_batch(VARIANTS[name], seed)
    whole = outcome(VARIANTS[name], batch, single_rows(batch))
    shares = dealing.assign([packing.cost([length]) for length in batch.lengths], ranks)
    loss, gradients = 0.0, [np.zeros(length, np.float32) for length in batch.lengths]
    parts = [batch.picked(share) for share in shares]
    count = max(packing.rows_needed(part.lengths, seq_len=32) for part in parts)
    for share, part in zip(shares, parts, strict=True):
        rows = packing.with_filler(packing.pack(part.lengths, seq_len=32, multiple=8), count, multiple=8)
        ours = outcome(VARIANTS[name], part, rows)
        loss += ours.loss
        for index, gradient in zip(share, ours.gradients, strict=True):
            gradients[index] += gradient
    assert_same(Outcome(loss, gradients, whole.metrics), whole)


@ALL
def test_a_rank_without_anything_to_train_contributes_exactly_nothing(name):
    batch = make_batch(VARIANTS[name], 1)
    nothing = outcome(VARIANTS[name], batch.picked([]), [packing.filler(multiple=8)])
    assert nothing.loss == 0.0
    assert nothing.metrics == {"loss": 0.0}


@ALL
def test_eight_real_rows_in_sixteen_slots_do_not_shrink_the_gradient(name):
    batch = make_batch(VARIANTS[name], 5)
    rows = packing.pack(batch.lengths, seq_len=24)
    twice = packing.with_filler(rows, 2 * len(rows), multiple=4)
    assert_same(outcome(VARIANTS[name], batch, twice), outcome(VARIANTS[name], batch, rows))


def test_a_short_rollout_alone_in_its_row_weighs_no_more_than_in_company():
    algorithm = VARIANTS["grpo"]
    batch = make_batch(algorithm, 3)
    result = outcome(algorithm, batch, single_rows(batch))
    for item, trajectory, gradient in zip(batch.items, batch.trajectories, result.gradients, strict=True):
        expected = np.where(trajectory.mask, -item.advantage / batch.denominators.tokens, 0.0)
        assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-9)


@ALL
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_whatever_stands_at_masked_places_loss_gradient_and_metrics_are_bit_identical(name, seed):
    batch = make_batch(VARIANTS[name], seed)
    rows = packing.with_filler(packing.pack(batch.lengths, seq_len=48, multiple=16), 9, multiple=16)
    plain = outcome(VARIANTS[name], batch, rows, rubbish=0.0)
    for rubbish in (np.nan, np.inf, -np.inf, 1e9, -1e9):
        spoiled = outcome(VARIANTS[name], batch, rows, rubbish=rubbish)
        assert spoiled.loss == plain.loss
        assert spoiled.metrics == plain.metrics
        for ours, theirs in zip(spoiled.gradients, plain.gradients, strict=True):
            assert ours.tobytes() == theirs.tobytes()


@ALL
def test_a_rollout_without_a_trained_token_counts_and_adds_exactly_nothing(name):
    batch = make_batch(VARIANTS[name], 8)
    silent = [index for index, item in enumerate(batch.items) if item.rollout_id == 1]
    gradients = outcome(VARIANTS[name], batch, single_rows(batch)).gradients
    assert silent
    for index in silent:
        assert not gradients[index].any()
    assert batch.denominators.sequences == len({item.sequence for item in batch.items})
