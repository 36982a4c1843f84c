"""What a backend is told of a run; and that workers ask servers for the distribution that the backend computes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from telescope.algorithms.grpo import GRPO
from telescope.backends.base import World
from telescope.backends.fsdp import FSDP
from telescope.config.run import RunConfig
from telescope.config.sections import CheckpointSettings, EnvironmentEntry, RolloutSettings, TrainerSettings
from telescope.maths.support import Support
from telescope.records import PromptRef, RolloutOrder, Sampling
from telescope.trainer.main import job
from telescope.workers.play import PlayLimits, TurnSampler

CONFIG = RunConfig(
    environments={"countdown": EnvironmentEntry(name="countdown")},
    algorithm=GRPO(use_tis=True),
    backend=FSDP(),
    rollout=RolloutSettings(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, max_tokens=17, group_size=4),
    trainer=TrainerSettings(learning_rate=1e-3, number_of_minibatches=2),
    number_of_steps=12,
    seed=9,
)


def test_a_backend_is_told_of_temperature_cuts_limits_and_steps():
    told = job(CONFIG, World(1, 3, "cpu"), lambda doing: None)
    assert (told.temperature, told.support) == (0.7, Support(top_k=40, top_p=0.9, min_p=0.05))
    assert (told.max_tokens, told.number_of_steps, told.seed, told.world.rank) == (17, 12, 9, 1)
    assert told.trainer == CONFIG.trainer
    assert told.rollouts == CONFIG.orchestrator.prompts_batch_size_for_trainer * 4 // 2


@pytest.mark.parametrize(
    ("checkpoint", "background", "expected"),
    [({}, False, False), ({"every": 5}, True, True), ({"every": 5, "async_save": False}, False, True)],
)
def test_a_run_that_saves_at_its_end_alone_holds_no_copy_for_it(checkpoint: dict[str, Any], background: bool, expected: bool):
    config = CONFIG.model_copy(update={"checkpoint": CheckpointSettings(**checkpoint)})
    saving = job(config, World(0, 1, "cpu"), lambda doing: None).saving
    assert (saving.background, saving.expected) == (background, expected)


def test_workers_ask_for_the_distribution_that_the_trainer_computes():
    """Any difference would be a ratio to the sampler that is wrong, without a sign."""
    asked: list[Sampling] = []

    async def ask(order: RolloutOrder, turn: int, ids: np.ndarray, sampling: Sampling):
        asked.append(sampling)

    order = RolloutOrder(
        rollout_id=0, group_id=0, sample=0, attempt=0, prompt=PromptRef("countdown", "train", 0), seed=5
    )  # fmt: skip
    asyncio.run(TurnSampler(order, PlayLimits.from_config(CONFIG), ask).sample(np.zeros(1, np.int32), 0, None))
    told = job(CONFIG, World(0, 1, "cpu"), lambda doing: None)
    (sampling,) = asked
    assert sampling.temperature == told.temperature
    assert Support(sampling.top_k, sampling.top_p, sampling.min_p) == told.support
    assert sampling.max_tokens == told.max_tokens
