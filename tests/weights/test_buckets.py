"""The flat layout and where it is cut: what both sides of a transport work out for themselves."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.weights.buckets import ALIGNMENT, ModelTensor, buckets, lay_out, misplaced

THREE = (ModelTensor("a", "float32", (3, 5)), ModelTensor("b", "bfloat16", (7,)), ModelTensor("c", "int8", (130,)))


def test_tensors_lie_one_after_another_at_multiples_of_64_bytes():
    specs, nbytes = lay_out(THREE)
    assert [(spec.offset, spec.nbytes) for spec in specs] == [(0, 60), (64, 14), (128, 130)]
    assert nbytes == 128 + 192


def test_floating_tensors_take_the_dtype_of_the_wire_and_others_keep_theirs():
    specs, nbytes = lay_out(THREE, "bfloat16")
    assert [(spec.dtype, spec.nbytes) for spec in specs] == [("bfloat16", 30), ("bfloat16", 14), ("int8", 130)]
    assert nbytes == 64 + 64 + 192


def test_a_tensor_that_is_exact_keeps_its_dtype_on_the_way():
    specs, _ = lay_out([ModelTensor("a", "float32", (2,)), ModelTensor("bias", "float32", (2,), exact=True)], "bfloat16")
    assert [(spec.dtype, spec.nbytes) for spec in specs] == [("bfloat16", 4), ("float32", 8)]


def test_a_bucket_holds_what_fits_and_a_larger_tensor_is_alone():
    specs, nbytes = lay_out(THREE)
    assert [(cut.start, cut.stop) for cut in buckets(specs, 128)] == [(0, 128), (128, nbytes)]
    assert [[spec.name for spec in cut.specs] for cut in buckets(specs, 128)] == [["a", "b"], ["c"]]
    assert [len(cut.specs) for cut in buckets(specs, 0)] == [1, 1, 1]
    assert [len(cut.specs) for cut in buckets(specs, nbytes)] == [3]
    assert buckets((), 100) == ()


def test_a_name_given_twice_and_an_unknown_dtype_are_refused():
    with pytest.raises(ValueError, match="tensor a is given twice"):
        lay_out((THREE[0], THREE[0]))
    with pytest.raises(ValueError, match="tensor q has dtype complex64"):
        lay_out((ModelTensor("q", "complex64", (1,)),))


shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
models = st.lists(st.tuples(st.sampled_from(["float32", "bfloat16", "int8"]), shapes), max_size=20)


@given(models, st.integers(0, 5000))
def test_the_buckets_together_are_the_layout(kinds, bucket_bytes):
    specs, nbytes = lay_out([ModelTensor(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)])
    cut = buckets(specs, bucket_bytes)
    assert [spec for bucket in cut for spec in bucket.specs] == list(specs)
    assert [bucket.start for bucket in cut] == [0, *(bucket.stop for bucket in cut)][: len(cut)]
    assert (cut[-1].stop if cut else 0) == nbytes
    assert all(bucket.nbytes <= bucket_bytes or len(bucket.specs) == 1 for bucket in cut)
    assert all(bucket.start % ALIGNMENT == bucket.stop % ALIGNMENT == 0 for bucket in cut)


def test_a_layout_that_can_not_be_is_told_tensor_by_tensor():
    specs, nbytes = lay_out(THREE)
    assert misplaced(specs, nbytes) == []
    assert misplaced(lay_out((*THREE, ModelTensor("none", "float32", (0,)), ModelTensor("one", "float32", ())))[0], 512) == []

    def changed(name: str, **fields: int) -> list[str]:
        return misplaced([msgspec.structs.replace(s, **fields) if s.name == name else s for s in specs], nbytes)

    assert changed("a", nbytes=56) == ["a is float32[3, 5] and said to have 56 bytes"]
    assert changed("b", offset=56) == ["b begins at byte 56, within a"]
    assert changed("b", offset=65) == ["b lies in bytes 65 to 79 of 320"]
    assert misplaced(specs, 256) == ["c lies in bytes 128 to 258 of 256"]
    assert changed("a", offset=-64) == ["a lies in bytes -64 to -4 of 320"]
