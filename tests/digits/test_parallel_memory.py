"""What a rank of a model that is cut by tensor parallelism holds, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from telescope.maths.memory import ModelShape
from telescope.maths.parallel_memory import parallel_activation_bytes, parallel_memory, rank_parameters

TINY = ModelShape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=2, vocabulary=10, tied=True, qk_norm=True)
"""A layer has 2 * 8 * (8 + 4) + 3 * 8 * 16 = 576 parameters in matrices and 2 * 8 + 2 * 2 = 20 in norms, the embedding 80."""
ONE: dict[str, Any] = {
    "tensor": 1, "copies": 1, "spread_sequence": False, "spread_moments": False, "row_tokens": 100, "chunk": 10,
}  # fmt: skip


def test_matrices_are_cut_and_norms_are_whole():
    assert TINY.parameters == 2 * (576 + 20) + 80 + 8 == 1280
    assert rank_parameters(TINY, 1, layers=2) == 1280
    assert rank_parameters(TINY, 2, layers=2) == 2 * (288 + 20) + 40 + 8 == 664


def test_a_stage_has_its_layers_and_its_end_of_the_model():
    """The last one of a tied model has a copy of the embedding."""
    assert rank_parameters(TINY, 1, layers=1, ends=False) == 596 + 80
    assert rank_parameters(TINY, 1, layers=1, begins=False) == 596 + 80 + 8
    first = parallel_memory(TINY, **ONE, layers=1, ends=False, rows_held=2.0)
    last = parallel_memory(TINY, **ONE, layers=1, begins=False)
    assert (first.kept, first.tail, first.logits, first.waiting) == (100 * 2 * 2 * 8, 0, 0, 0)
    assert (last.kept, last.head_gradient) == (100 * (2 * 8 + 80), 0)
    assert last.logits == parallel_memory(TINY, **ONE).logits


def test_weights_that_compute_lie_beside_those_that_are_updated():
    one = parallel_memory(TINY, **ONE)
    assert (one.weights, one.gradients, one.moments) == (1280 * 6, 1280 * 4, 1280 * 8)
    same = parallel_memory(TINY, **ONE, compute_bytes=4)
    assert (same.weights, same.moments) == (1280 * 4, 1280 * 8)
    assert parallel_memory(TINY, **ONE, gradient_bytes=2).gradients == 1280 * 2


def test_what_is_updated_is_spread_over_copies_and_gradients_are_not():
    """A buffer has the gradients of all of a rank's part, also where another rank updates them."""
    two = parallel_memory(TINY, **ONE | {"copies": 2, "spread_moments": True})
    assert (two.weights, two.gradients, two.moments) == (1280 * 2 + 640 * 4, 1280 * 4, 640 * 8)
    assert parallel_memory(TINY, **ONE | {"copies": 2}) == parallel_memory(TINY, **ONE)


def test_gradients_are_there_between_steps():
    one = parallel_memory(TINY, **ONE)
    assert one.between_steps == one.weights + one.gradients + one.moments
    assert one.at_the_update == one.between_steps


@pytest.mark.parametrize(("checkpointing", "bytes_a_layer"), [
    (False, 2 * (4 * 9 + 4 * 8) + 2 * (2 * 8 + 2 * 4) + 4 * 4 + 6 * (8 + 4) + 4 * (4 + 2) + 6 * 16),
    ("selective", 2 * (3 * 8 + 2 * 8 + 2 * 4 + 2 * 16) + 4 * 4), ("full", 2 * 8), (True, 2 * 8),
])  # fmt: skip
def test_activations_are_those_of_the_layers_and_of_the_end(checkpointing: Any, bytes_a_layer: int):
    told = parallel_memory(TINY, **ONE, checkpointing=checkpointing)
    assert told.kept == 100 * (2 * bytes_a_layer + (4 + 3 * 2) * 8)


def test_ranks_share_activations_and_norms_only_where_the_sequence_is_spread():
    whole, norms = parallel_activation_bytes(TINY, 2, 1, spread_sequence=False), 2 * (4 * 9 + 4 * 8)
    assert parallel_activation_bytes(TINY, 2, 2, spread_sequence=True) == whole // 2
    assert parallel_activation_bytes(TINY, 2, 2, spread_sequence=False) == norms + (whole - norms) // 2


def test_ranks_that_share_a_row_have_a_part_of_its_tokens_and_attentions_output_twice():
    """In 2-byte numbers: 8 of attention's output, and where 4 ranks share the row of a model with 2 key heads, these twice."""
    whole, shared = (parallel_memory(TINY, **ONE, checkpointing=False, sharing=sharing) for sharing in (1, 4))
    alone = parallel_activation_bytes(TINY, 2, 1, spread_sequence=False)
    assert parallel_activation_bytes(TINY, 2, 1, spread_sequence=False, sharing=2) == alone + 2 * 8
    assert parallel_activation_bytes(TINY, 2, 1, spread_sequence=False, sharing=4) == alone + 2 * 8 + 2 * 2 * 4
    assert parallel_activation_bytes(TINY, 2, 2, spread_sequence=True, sharing=2) == (alone + 2 * 8 + 2 * 2 * 4) // 2
    assert shared.kept == 25 * (whole.kept // 100 + 2 * (2 * 8 + 2 * 2 * 4))
    assert (shared.tail, shared.logits) == (whole.tail // 4, whole.logits)
    assert (shared.weights, shared.moments) == (whole.weights, whole.moments)


def test_logits_are_cut_along_the_vocabulary():
    one, two = (parallel_memory(TINY, **ONE | {"tensor": tensor}) for tensor in (1, 2))
    assert (one.logits, two.logits) == (10 * 10 * 6 + 80 * 4, 10 * 10 * 3 + 40 * 4)


def test_a_head_that_is_the_embedding_waits_for_the_embeddings_gradient():
    untied = ModelShape(**{**{name: getattr(TINY, name) for name in TINY.__struct_fields__}, "tied": False})
    assert parallel_memory(TINY, **ONE).head_gradient == 160
    assert parallel_memory(untied, **ONE).head_gradient == 0


def test_moments_of_fewer_bits_lie_on_the_card_and_come_in_float32_for_their_step():
    """All 1280 at once, as they are less than 256 MiB."""
    told = parallel_memory(TINY, **ONE, moment_bytes=(2, 4))
    assert (told.moments, told.visiting, told.host) == (1280 * 6, 1280 * 4, 0)
    assert parallel_memory(TINY, **ONE, moment_bytes=(4, 4)) == parallel_memory(TINY, **ONE)
    assert parallel_memory(TINY, **ONE, moment_bytes=(2, 2)).visiting == 1280 * 8


def test_what_is_in_host_memory_is_not_on_the_card_but_for_its_step():
    """12 bytes each: the weight that is updated, and two moments."""
    half, whole = (parallel_memory(TINY, **ONE, hosted=hosted) for hosted in (0.5, 1.0))
    assert (half.weights, half.moments, half.host) == (1280 * 2 + 640 * 4, 640 * 8, 640 * 12)
    assert (whole.weights, whole.moments, whole.host) == (1280 * 2, 0, 1280 * 12)
    assert half.visiting == whole.visiting == 1280 * 12
    assert whole.at_the_update == 1280 * (2 + 4 + 12)
    rounded = parallel_memory(TINY, **ONE, hosted=1.0, moment_bytes=(2, 2))
    assert (rounded.moments, rounded.visiting, rounded.host) == (0, 1280 * 12, 1280 * 8)


def test_weights_that_compute_as_they_are_updated_stay_on_the_card():
    told = parallel_memory(TINY, **ONE, compute_bytes=4, hosted=1.0)
    assert (told.weights, told.moments, told.visiting, told.host) == (1280 * 4, 0, 1280 * 8, 1280 * 8)


def test_spread_over_copies_what_is_in_host_memory_is_a_ranks_own():
    two = parallel_memory(TINY, **ONE | {"copies": 2, "spread_moments": True}, hosted=1.0)
    assert (two.weights, two.gradients, two.host) == (1280 * 2, 1280 * 4, 640 * 12)


def test_a_gradient_of_fewer_bits_is_widened_a_piece_at_a_time():
    assert parallel_memory(TINY, **ONE, gradient_bytes=2).visiting == 1280 * 4
    wide = ModelShape(**{**{name: getattr(TINY, name) for name in TINY.__struct_fields__}, "intermediate": 10**8})
    told = parallel_memory(wide, **ONE, gradient_bytes=2)
    assert told.visiting == 2**28, "256 MiB of weights"
