"""Which tokens top_k, top_p and min_p keep: by hand, and in the order that the sampler cuts in."""

from __future__ import annotations

import pytest
import torch

from telescope.maths.support import WHOLE, Support, left_out

LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def kept(support: Support, target: int = 0, logits: torch.Tensor = LOGITS) -> list[int]:
    return torch.nonzero(~left_out(logits, torch.tensor([target]), support)[0]).flatten().tolist()


@pytest.mark.parametrize(
    ("support", "expected"),
    [
        (WHOLE, [0, 1, 2, 3]),
        (Support(top_k=2), [0, 1]),
        (Support(top_k=9), [0, 1, 2, 3]),
        (Support(min_p=0.6), [0, 1]),  # at least 0.24
        (Support(min_p=0.2), [0, 1, 2, 3]),
        (Support(top_p=0.39), [0]),
        (Support(top_p=0.5), [0, 1]),  # the token that crosses the share is kept
        (Support(top_p=0.95), [0, 1, 2, 3]),
        (Support(top_k=3, top_p=0.75), [0, 1]),  # of the three, 0.44 and 0.33 have 0.78 of the probability
        (Support(top_p=0.75), [0, 1, 2]),
    ],
)
def test_what_is_kept(support: Support, expected: list[int]):
    assert kept(support) == expected


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too():
    assert kept(Support(top_k=2), logits=torch.tensor([[1.0, 0.5, 0.5, 0.0]])) == [0, 1, 2]


def test_the_sampled_token_is_never_left_out():
    assert kept(Support(top_k=2), target=3) == [0, 1, 3]
    assert kept(Support(top_p=0.3), target=2) == [0, 2]
    assert kept(Support(min_p=0.9), target=1) == [0, 1]
