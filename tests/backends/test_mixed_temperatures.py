"""Environments of one run at temperatures of their own, from the worker's play to the trainer's step, in this process: what is
sampled is what is trained, as exactly as with one temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from telescope.backends.base import TrainShard
from telescope.backends.common.rows import to_device
from telescope.cli.env.check_policies import load_model
from telescope.config.models import EMBEDDED
from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.template import ChatTemplate
from telescope.flow.commands import TrainOnBatch
from telescope.maths import packing
from telescope.orchestrator.batch import Recipe, make_batch
from telescope.orchestrator.rollout_store import Rollout, RolloutStore
from telescope.records import PromptRef, RolloutOrder
from telescope.wire.messages import RolloutResult
from telescope.workers.play import PlayLimits, play
from telescope.workers.prompt_cache import PromptCache
from tests.backends.shards import make_job, make_shard
from tests.workers.conftest import loaded, template  # noqa: F401 a fixture

GROUPS, SAMPLES = 4, 2


class Letters(SingleTurn):
    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": text},)) for text in ("ab", "bca", "cab", "abc")]

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        return Reward(float(len(answer) % 2))


async def played(template: ChatTemplate, temperatures: dict[str, float | None]) -> TrainShard:  # noqa: F811
    """One step of as many groups of each environment, cut as the orchestrator does."""
    limits = PlayLimits(temperature=1.0, max_tokens=12, max_prompt_tokens=100, timeout_s=60.0)
    model, store = load_model(EMBEDDED / "tiny", (1,)), RolloutStore()
    places = [replace(loaded(Letters(), label), temperature=own) for label, own in temperatures.items()]
    prompts = PromptCache(template)
    groups = []
    for group in range(GROUPS):
        place = places[group % len(places)]
        ids = tuple(group * SAMPLES + sample for sample in range(SAMPLES))
        for sample, rollout_id in enumerate(ids):
            order = RolloutOrder(rollout_id, group, sample, 0, PromptRef(place.label, "train", group), 1000 + rollout_id)
            result, arrays = await play(order, place, prompts, limits, model.answer)
            assert isinstance(result, RolloutResult)
            rollout = Rollout(order)
            rollout.score(result, arrays, newest=0)
            rollout.taken = True
            store.add(rollout)
        groups.append(ids)
    prompts.close()
    command = TrainOnBatch(1, tuple(range(GROUPS)), tuple(groups), (), ())
    job = make_job()
    (shard,) = make_batch(command, store, Recipe(job.algorithm, SAMPLES, job.max_tokens), ranks=1).shards
    return TrainShard(1, shard.step.items, *shard.arrays, shard.step.denominators)


@pytest.mark.parametrize("own", [{"a": None, "b": None}, {"a": None, "b": 0.5}], ids=["one", "two"])
async def test_sampler_and_trainer_agree_where_environments_have_temperatures_of_their_own(build, template, own):  # noqa: F811
    shard = await played(template, own)
    assert [item.temperature for item in shard.items[:: 2 * SAMPLES]] == [1.0] * 2
    assert [item.temperature for item in shard.items[SAMPLES :: 2 * SAMPLES]] == [own["b"] or 1.0] * 2
    metrics = build(make_job()).train_step(shard).metrics
    assert metrics["rows"] == 1
    assert metrics["logprob_difference"] < 2e-6
    if own["b"]:
        at_one = replace(shard, items=make_alike(shard))
        assert build(make_job()).train_step(at_one).metrics["logprob_difference"] > 0.05


def make_alike(shard: TrainShard):
    import msgspec

    return tuple(msgspec.structs.replace(item, temperature=1.0) for item in shard.items)


def test_a_row_of_one_temperature_needs_one_number_and_a_mixed_one_a_number_a_token():
    shard = make_shard(lengths=(6, 7), temperatures=(0.7, 1.3))

    def temperature(items):
        row = packing.Row(items, (0, shard.items[items[0]].length)[: len(items)], (6, 7)[items[0] :][: len(items)], 16)
        from telescope.backends.common.shards import trajectories

        return to_device(packing.arrange(row, trajectories(shard), shard.items), "cpu").temperature

    assert temperature((0,)) == 0.7  # the very number, not rounded to float32
    mixed = temperature((0, 1))
    assert isinstance(mixed, np.ndarray)
    assert mixed.tolist() == np.float32([0.7] * 2 + [1.3] * 3).tolist()
    assert to_device(packing.arrange(packing.filler(multiple=8), [], []), "cpu").temperature == 1.0


def test_the_trainers_log_probs_before_a_step_are_those_of_each_trajectorys_temperature(build):
    """`Backend.logprobs`, which the doctor asks: of a mixed shard each trajectory's are those of a shard at its own."""
    backend = build(make_job(seq_len=256))
    mixed = backend.logprobs(make_shard(temperatures=(0.7, 1.3)))
    ends = np.cumsum([item.length for item in make_shard().items])
    for number, temperature in enumerate((0.7, 1.3)):
        alone = backend.logprobs(make_shard(temperatures=(temperature,)))
        for index in range(number, len(ends), 2):
            here = slice(0 if index == 0 else ends[index - 1], ends[index])
            np.testing.assert_allclose(mixed[here], alone[here], rtol=0, atol=2e-6)


def test_temperatures_stay_float32_where_the_model_computes_in_bfloat16(build):
    """FSDP rounds tensors in a module's arguments to that precision: 0.7 would be 0.69921875, and 0.6 % of it lost."""
    mixed, alone = make_shard(temperatures=(0.7, 1.3)), make_shard(temperatures=(0.7,))
    backend = build(make_job(), mixed_precision_dtype="bfloat16")
    together, apart = backend.logprobs(mixed), backend.logprobs(alone)
    first = slice(0, mixed.items[0].length)
    np.testing.assert_allclose(together[first], apart[first], rtol=0, atol=5e-6)
