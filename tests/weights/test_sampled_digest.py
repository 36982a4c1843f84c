"""A checksum made on the device: it sees every change of a drawn tensor, and all tensors are drawn in their turn."""

from __future__ import annotations

import pytest
import torch

from telescope.records import TensorSpec
from telescope.weights import sampled_digest
from telescope.weights.buckets import ModelTensor, buckets, lay_out
from telescope.weights.sampled_digest import SampledDigest, digests, drawn, text

SPECS, NBYTES = lay_out([ModelTensor(f"t{i}", "uint8", (100 + i,)) for i in range(40)])


def some_bytes(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_digest_of_known_bytes_is_always_the_same_word():
    data = torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8)
    assert text(digests(data, drawn(SPECS, 3))) == "sample:7c8bf249cb12a68e"
    assert text(digests(data, SPECS, whole=True), whole=True) == "all:ca5dd5df9fa967ea"


def test_one_changed_bit_two_swapped_words_and_two_swapped_tensors_change_it():
    data = some_bytes()
    first = text(digests(data, SPECS))
    for change in (flip_a_bit, swap_words, swap_tensors):
        other = data.clone()
        change(other)
        assert text(digests(other, SPECS)) != first, change.__name__


def flip_a_bit(data: torch.Tensor) -> None:
    data[SPECS[7].offset + SPECS[7].nbytes - 1] ^= 1  # within the odd bytes at a tensor's end


def swap_words(data: torch.Tensor) -> None:
    words = data[SPECS[3].offset :][:96].view(torch.int64)
    words[[2, 9]] = words[[9, 2]]


def swap_tensors(data: torch.Tensor) -> None:
    a, b = (data[SPECS[i].offset :][:100] for i in (5, 6))
    a_before = a.clone()
    a.copy_(b)
    b.copy_(a_before)


def test_bytes_between_tensors_do_not_count():
    data = some_bytes()
    other = data.clone()
    other[SPECS[0].nbytes : SPECS[1].offset] = 0
    assert text(digests(data, SPECS)) == text(digests(other, SPECS))


def test_a_bucket_has_the_digests_of_its_place_in_the_whole():
    data = some_bytes()
    part = data[SPECS[10].offset : SPECS[20].offset]
    assert torch.equal(digests(part, SPECS[10:20], start=SPECS[10].offset), digests(data, SPECS)[10:20])


def test_a_large_tensor_is_sampled_evenly_and_counts_whole_where_all_do(monkeypatch):
    monkeypatch.setattr(sampled_digest, "WORDS_AT_ONCE", 4)
    data = torch.arange(800, dtype=torch.int64).to(torch.uint8)  # 100 words, of which every 25th is looked at
    (spec,), _ = lay_out([ModelTensor("big", "uint8", (800,))])
    other = data.clone()
    other[8 * 30] ^= 1
    assert text(digests(data, [spec])) == text(digests(other, [spec]))
    assert text(digests(data, [spec], whole=True)) != text(digests(other, [spec], whole=True))
    other[8 * 50] ^= 1
    assert text(digests(data, [spec])) != text(digests(other, [spec]))


def test_sixteen_tensors_are_drawn_evenly_and_each_has_its_turn():
    names = [[spec.name for spec in drawn(SPECS, version)] for version in range(4)]
    assert [len(chosen) for chosen in names] == [16, 16, 16, 16]
    assert names[0] != names[1]
    assert {name for chosen in names for name in chosen} == {spec.name for spec in SPECS}
    assert drawn(SPECS[:5], 9) == SPECS[:5]


def by_hand(data: bytes, *, whole: bool, at_once: int) -> int:
    """The formula in integers: length, and the sum of stirred words; what is left at the end is at place 0."""
    mask = (1 << 64) - 1
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
    words = words[:: 1 if whole else max(1, -(-len(words) // at_once))]
    placed = [*enumerate(words, 1), *([(0, int.from_bytes(data[len(data) // 8 * 8 :], "little"))] if len(data) % 8 else [])]
    total = len(data)
    for place, word in placed:
        mixed = (place * (sampled_digest.POSITION & mask) ^ word) * (sampled_digest.SPREAD & mask) & mask
        mixed = (mixed ^ signed(mixed) >> 29) * (sampled_digest.POSITION & mask) & mask
        total += (mixed ^ signed(mixed) >> 32) & mask
    return signed(total & mask)


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


SIZES = (8, 0, 3, 640, 641, 24, 0, 4096, 5001, 16, 9, 80_000, 80_007, 1, 700, 0)
"""Of 80 to 10 000 words and none, with and without odd bytes, some larger than what is looked at in one go below."""


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("together", "at_once"), [(1 << 21, 1 << 22), (600, 1 << 22), (100, 90), (2, 7)])
def test_tensors_looked_at_together_have_the_digests_of_each_for_itself(monkeypatch, together, at_once, whole):
    monkeypatch.setattr(sampled_digest, "TOGETHER", together)
    monkeypatch.setattr(sampled_digest, "WORDS_AT_ONCE", at_once)
    specs, nbytes = lay_out([ModelTensor(f"t{i}", "uint8", (size,)) for i, size in enumerate(SIZES)])
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    given = [data[spec.offset :][: spec.nbytes].numpy().tobytes() for spec in specs]
    wanted = [by_hand(each, whole=whole, at_once=at_once) for each in given]
    assert digests(data, specs, whole=whole).tolist() == wanted
    assert [int(digests(data, [spec], whole=whole)) for spec in specs] == wanted


@pytest.mark.parametrize("everything", [False, True])
def test_a_sample_added_bucket_by_bucket_says_what_the_digests_of_its_tensors_say(everything):
    data = some_bytes()
    sample = SampledDigest(SPECS, 5, everything=everything, device=torch.device("cpu"))
    for bucket in buckets(SPECS, 700):
        sample.add(data[bucket.start : bucket.stop], bucket.start)
    wanted = text(digests(data, sample.specs, whole=everything), whole=everything)
    assert len(sample.specs) == (40 if everything else 16)
    assert sample.text() == sample.text(sample.sums) == wanted


def test_a_tensor_that_does_not_begin_at_a_word_is_refused():
    spec = TensorSpec("askew", "uint8", (8,), 4, 8)
    with pytest.raises(ValueError, match="askew begins at byte 4, which is not a multiple of 8"):
        digests(some_bytes(), [spec])
