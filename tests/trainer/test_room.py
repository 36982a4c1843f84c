"""A rank on a shared GPU keeps to its part, and gives back what it took while the server slept."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from telescope.trainer.gpu_share import GIB, GpuShare, NoRoomBeside


@dataclass
class Card:
    """A GPU of 80 GiB; `used` are in tensors, `held` besides in torch's allocator."""

    total: int = 80 * GIB
    held: int = 0
    used: int = 0
    limits: list[float] = field(default_factory=list)

    def release(self) -> None:
        self.held = self.used

    def limit(self, share: float) -> None:
        self.limits.append(round(share, 6))


def test_the_version_handed_to_the_server_is_charged_to_the_ranks_part():
    card = Card(used=20 * GIB)
    GpuShare(card, 0.55, outside=6 * GIB).settle()
    assert card.limits == [0.475]  # 44 of 80 GiB, less 6


def test_a_rank_that_keeps_more_than_its_part_says_so_in_numbers():
    card = Card(used=39 * GIB)
    with pytest.raises(NoRoomBeside) as raised:
        GpuShare(card, 0.55, outside=6 * GIB).settle()
    assert str(raised.value).startswith(
        "this rank keeps 45.00 GiB of its GPU between steps, 6.00 GiB of it for the version handed to the server, and the "
        "server leaves it 55% of 80.00 GiB: lower inference.gpu_memory_utilization to 0.43 or less"
    )
    assert card.limits == []


def test_a_part_that_the_handed_version_fills_is_refused():
    with pytest.raises(NoRoomBeside, match=r"keeps 44\.00 GiB"):
        GpuShare(Card(), 0.55, outside=44 * GIB).settle()


def test_in_turns_a_step_has_the_whole_card_and_gives_it_back():
    card = Card(used=20 * GIB)
    room = GpuShare(card, 0.5, outside=8 * GIB, in_turns=True)
    with room.step():
        assert card.limits == [1.0]
        card.held = 70 * GIB
    assert (card.held, card.limits) == (20 * GIB, [1.0, 0.4])


def test_in_turns_what_stays_after_a_step_must_fit_beside_the_server():
    card = Card(used=20 * GIB)
    with pytest.raises(NoRoomBeside, match=r"keeps 41\.00 GiB"), GpuShare(card, 0.5, in_turns=True).step():
        card.used = 41 * GIB


def test_beside_a_server_that_is_awake_a_step_changes_no_limit():
    card = Card()
    with GpuShare(card, 0.5).step():
        card.held = 30 * GIB
    assert (card.held, card.limits) == (30 * GIB, [])
