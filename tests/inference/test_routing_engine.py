"""The routing that a real engine gives with its answers is what the policy in training chooses for the same tokens."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from telescope.backends.base import TrainShard
from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.engine import Generated
from telescope.inference.server import make_completion
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan
from telescope.maths.routing import unrecorded
from telescope.records import Denominators, Sampling, TrainItem
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from telescope.wire.codec import RawArrays, decode, encode
from telescope.workers.service import read_completion
from tests.backends.shards import make_job
from tests.backends.watching import watch
from tests.gpu.check_moe import tensors
from tests.inference.routers import EXPERTS, LAYERS, TOP_K, Chosen, differ, make_served_experts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

RUN, PART, TIE = "routing-tests", 64, 1e-4
"""`PART`: tokens of a step, so that longer prompts come in parts. `TIE`: logits of two experts that are nearer may swap."""
MARK = unrecorded(np.uint8)


@dataclass
class Asked:
    prompt: np.ndarray
    answer: Generated

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.answer.ids]).astype(np.int64)


@dataclass
class Heard:
    """What the engine answered: `crowd` by the first weights, many at once; `cached` by a prompt of which it had the beginning;
    `moved` while other weights were put in place, and `after` by those."""

    folders: list[Path]
    crowd: list[Asked]
    cached: Asked
    moved: list[Asked]
    after: list[Asked]
    aborted: Generated
    preemptions: int


@pytest.fixture(scope="module")
def heard(vllm_variables: None, tmp_path_factory: pytest.TempPathFactory) -> Heard:
    folders = make_served_experts(tmp_path_factory.mktemp("experts"))
    return asyncio.run(listen(folders, tmp_path_factory.mktemp("segments")))


async def listen(folders: list[Path], segments: Path) -> Heard:
    settings = InferenceSettings.model_validate(
        {"http": False, "max_model_len": 512, "cpu_kv_cache_mb": 8, "dtype": "float32", "max_num_batched_tokens": PART}
    )
    plan = ServerPlan(ModelSettings(name="experts"), folders[0], settings, "cpu", 32, 0, RUN, router_replay=True)
    engine = VllmEngine(plan, WeightSyncSettings(update_timeout_s=120.0))
    publisher = SharedMemoryPublisher(RUN, segments)
    await engine.start()
    try:
        crowd = await ask(engine, "crowd", 14, max_tokens=150)
        preemptions = engine.load.preemptions
        begun = crowd[-1].prompt
        cached = Asked(begun, await engine.generate("cached", begun, Sampling(1.0, 20, 99), 0))

        long = asyncio.create_task(engine.generate("long", prompt(3, 90), Sampling(0.05, 300, 1), 0))
        await sampling(engine, 10)
        await engine.abort("long")
        aborted = await long

        running = asyncio.create_task(ask(engine, "moved", 3, max_tokens=120, temperature=0.05))
        await sampling(engine, 15)
        manifest = publisher.publish(1, iter(tensors(folders[1])))
        await engine.prepare(manifest)
        await engine.commit(1)
        moved = await running
        after = await ask(engine, "after", 3, max_tokens=40)
    finally:
        await engine.close()
        publisher.close()
    return Heard(folders, crowd, cached, moved, after, aborted, preemptions)


async def ask(engine: VllmEngine, name: str, count: int, *, max_tokens: int, temperature: float = 1.0) -> list[Asked]:
    prompts = [prompt(index, 30 + 12 * index) for index in range(count)]
    asked = (
        engine.generate(f"{name}-{index}", each, Sampling(temperature, max_tokens, index), 0)
        for index, each in enumerate(prompts)
    )
    return [Asked(each, answer) for each, answer in zip(prompts, await asyncio.gather(*asked), strict=True)]


async def sampling(engine: VllmEngine, tokens: int) -> None:
    """Return once every request that runs has so many tokens."""
    async with asyncio.timeout(120):
        while not (held := await engine.running()) or min(held.values()) < tokens:
            await asyncio.sleep(0.01)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 90, length).astype(np.int32)


# ---- what is compared with -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(heard: Heard) -> Iterator[Any]:
    """backend=fsdp with the first weights. It comes behind the engine, which forks this process."""
    backend = watch(make_job(model=str(heard.folders[0]), seq_len=512, router_replay=True))
    yield backend
    backend.close()
    del backend
    gc.collect()


def shard_of(asked: list[Asked], *, with_record: bool) -> TrainShard:
    """One step whose samples came from the server, over the wire."""
    items, arrays = [], []
    for index, each in enumerate(asked):
        sampled, before = over_the_wire(each.answer), len(each.prompt)
        items.append(
            TrainItem(
                rollout_id=index, group_id=0, sequence=index, length=len(each.ids), advantage=(-1.0) ** index,
                sequence_tokens=len(sampled.ids), temperature=1.0,
            )
        )  # fmt: skip
        mask = np.r_[np.zeros(before, np.uint8), np.ones(len(sampled.ids), np.uint8)]
        logprobs = np.r_[np.full(before, np.nan, np.float32), sampled.logprobs]
        versions = np.r_[np.full(before, -1, np.int32), sampled.versions]
        arrays.append((each.ids.astype(np.int32), mask, logprobs, versions, sampled.routed))
    ids, mask, logprobs, versions, routed = (np.concatenate(each) for each in zip(*arrays, strict=True))
    counts = Denominators(int(mask.sum()), len(items), 1)
    return TrainShard(1, tuple(items), ids, mask, logprobs, versions, (counts,), routed if with_record else None)


def over_the_wire(answer: Generated) -> Any:
    packet = decode(encode(make_completion("r", answer), 1, 1, RawArrays.of(answer.arrays)))
    return read_completion(packet.envelope.body, packet.raw.views())  # type: ignore[arg-type]


def assert_alike(routed: np.ndarray, experts: np.ndarray, ahead: np.ndarray) -> int:
    """Two records [T, L, K] are the same, the order of a token's experts left aside, up to the first token with a tie that fell
    otherwise, from which on others see something else. The answer: how many tokens that is."""
    other = differ(routed, experts)
    turned = np.flatnonzero((other & (ahead < TIE)).any(-1))
    upto = int(turned[0]) if len(turned) else len(routed)
    assert not other[:upto].any(), np.argwhere(other)[:5].tolist()
    return upto


# ---- the tests -------------------------------------------------------------------------------------------------------


def test_it_is_what_the_policys_routers_choose_token_by_token_and_layer_by_layer(heard: Heard, policy: Any):
    assert heard.preemptions > 0, "the KV cache must be too small for all of them at once"
    assert max(len(each.prompt) for each in heard.crowd) > 2 * PART, "a prompt must come in parts"
    assert heard.cached.answer.cached_tokens >= 128, "a block of the prompt must come out of the cache"
    chosen, alike = Chosen(policy._policy), []
    for each in [*heard.crowd, heard.cached]:
        routed, read = each.answer.routed, len(each.ids) - 1
        assert routed is not None
        assert (routed.shape, routed.dtype) == ((len(each.ids), LAYERS, TOP_K), np.uint8)
        assert (routed[-1] == MARK).all(), "the last token was never read"
        policy.logprobs(shard_of([each], with_record=False))
        experts, ahead = chosen.read()
        alike.append(assert_alike(routed[:read], experts[:read], ahead[:read]) / read)
    assert np.mean(alike) > 0.9


def test_a_policy_that_follows_the_record_has_the_servers_logprobs_behind_a_tie_too(heard: Heard, policy: Any):
    for each in [*heard.crowd, heard.cached]:
        found = policy.logprobs(shard_of([each], with_record=True))[len(each.prompt) :]
        np.testing.assert_allclose(found, each.answer.logprobs, rtol=0, atol=1e-4)


def test_a_request_that_is_broken_off_brings_none(heard: Heard):
    assert heard.aborted.finish_reason == "abort"
    assert heard.aborted.routed is None


def test_over_an_update_each_token_has_the_experts_of_the_weights_that_read_it(heard: Heard):
    """With the keys and values before it as they are: vLLM keeps them."""
    from transformers import AutoModelForCausalLM, DynamicCache

    models = [AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float() for folder in heard.folders]
    chosen = [Chosen(model) for model in models]
    for each in heard.moved:
        assert set(each.answer.versions.tolist()) == {0, 1}
    for each in [*heard.moved, *heard.after]:
        old = len(each.prompt) + int((each.answer.versions == 0).sum()) - 1 if 0 in each.answer.versions else 0
        parts = [(0, 0, old), (1, old, len(each.ids) - 1)]
        cache, tokens = DynamicCache(), torch.from_numpy(each.ids)[None]
        for version, start, end in parts:
            if start == end:
                continue
            with torch.no_grad():
                models[version](tokens[:, start:end], past_key_values=cache, use_cache=True)
            assert each.answer.routed is not None
            assert assert_alike(each.answer.routed[start:end], *chosen[version].read()) == end - start


def test_a_step_trains_on_what_the_server_recorded(heard: Heard, policy: Any):
    few = heard.crowd[:4]
    shard = shard_of(few, with_record=True)
    metrics = policy.train_step(shard).metrics
    assert metrics["router_replayed_fraction"] == pytest.approx(1 - len(few) / len(shard.ids)), "all but each one's last token"
    assert metrics["router_difference"] < 1e-3, "weights that sampled choose alike, but for ties"
    assert np.isfinite(metrics["loss"])
    wrong = replace(shard, routed=np.where(shard.routed == MARK, MARK, (shard.routed + 1) % EXPERTS).astype(np.uint8))
    assert policy.train_step(replace(wrong, step=2)).metrics["router_difference"] > 0.5, "it is the record that is followed"
