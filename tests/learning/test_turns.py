"""Whole dialogues are learned from their outcome, and a broken run learns nothing. Good runs gain 0.29 and more in 40 steps."""

from __future__ import annotations

import numpy as np
import pytest

from telescope.algorithms.grpo import GRPO
from telescope.environments.tasks.guess_letter import GuessLetter
from tests.learning.loop import Spoil
from tests.learning.turns import learn_turns

CLIPPED = GRPO(use_ppo_clip=True, clip_low=0.2, clip_high=0.28)


def curve(seed: int, spoil: Spoil | None = None) -> list[float]:
    found = learn_turns(
        GuessLetter(), "tiny_turns", CLIPPED,
        seed=seed, spoil=spoil, steps=40, prompts=32, group_size=8, max_tokens=3, learning_rate=4e-4,
    )  # fmt: skip
    print("spoiled" if spoil else "turns", seed, np.round(found, 2).tolist())
    return found


def gain(found: list[float]) -> float:
    return float(np.mean(found[-5:]) - np.mean(found[:5]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_dialogues_are_learned_from_their_outcome(seed: int) -> None:
    assert gain(curve(seed)) >= 0.15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_advantages_shuffled_within_their_groups_teach_no_dialogue() -> None:
    assert abs(gain(curve(0, lambda advantages, random: random.permuted(advantages, axis=1)))) < 0.12
