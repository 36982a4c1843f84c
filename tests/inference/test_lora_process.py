"""A real server with LoRA adapters: hot loaded beside the running ones, proven by log-probs, gone when nobody uses them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from telescope.config.sections import InferenceSettings, LoraSettings, ModelSettings
from telescope.records import Sampling, WeightManifest
from telescope.runlog.identity import read_identity
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from telescope.wire.messages import CommitWeights, Completion, Generate, PrepareWeights, WeightsFailed, WeightsReady
from telescope.wire.peer_events import Delivery
from tests.inference.models import make_model
from tests.inference.test_process import PATIENCE_S, Bench, bench

LORA = LoraSettings(rank=12, alpha=24)
PROMPT = np.arange(20, 44, dtype=np.int32)


class Trainer:
    """The model with peft's adapters, and the publisher of the run."""

    def __init__(self, folder: Path, run: str) -> None:
        from transformers import AutoModelForCausalLM

        from telescope.backends.common.lora import inject

        self.model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        inject(self.model, LORA)
        self.publisher = SharedMemoryPublisher(run)

    def move(self, seed: int, size: float = 0.1) -> None:
        import torch

        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(size * torch.randn(parameter.shape, generator=random))

    def publish(self, version: int) -> WeightManifest:
        from telescope.backends.common.lora import published

        return self.publisher.publish(version, [(n, p.detach()) for n, p in published(self.model, "", adapters=True)])

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        import torch

        tokens = torch.as_tensor(np.concatenate([PROMPT, ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = self.model(tokens).logits[0, len(PROMPT) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, tokens[0, len(PROMPT) :, None])[:, 0].numpy()


def order(name: str, tokens: int = 24, temperature: float = 1.0) -> Generate:
    return Generate(request_id=name, rollout_id=0, attempt=0, turn=0, sampling=Sampling(temperature, tokens, 3))


async def serve(here: Bench, manifest: WeightManifest) -> WeightsReady:
    ready = (await here.ask(PrepareWeights(manifest=manifest))).body
    assert isinstance(ready, WeightsReady), ready
    done = (await here.ask(CommitWeights(version=manifest.version))).body
    assert isinstance(done, WeightsReady), done
    return done


def apart(trainer: Trainer, answer: Delivery) -> float:
    return float(np.abs(answer.arrays[1] - trainer.logprobs(answer.arrays[0])).max())


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_adapters_are_served_as_the_trainer_computes_them_and_requests_keep_theirs(tmp_path: Path):
    folder = make_model(tmp_path / "model", 0)
    inference = InferenceSettings(base_port=0, max_model_len=512, cpu_kv_cache_mb=16, max_loras=2)
    async with bench(tmp_path, inference=inference, model=ModelSettings(name=str(folder), lora=LORA)) as here:
        await here.joined()
        trainer = Trainer(folder, read_identity(here.directory).run_id)
        base = await here.ask(order("base"), PROMPT)
        assert apart(trainer, base) < 1e-3
        assert set(base.arrays[2].tolist()) == {0}

        same = await serve(here, trainer.publish(1))  # B is still zero: the base model
        assert apart(trainer, await here.ask(order("r1"), PROMPT)) < 1e-3
        assert same.version == 1

        trainer.move(1)
        done = await serve(here, trainer.publish(2))
        assert done.pause_s < 0.005
        moved = await here.ask(order("r2"), PROMPT)
        assert apart(trainer, moved) < 1e-3
        assert set(moved.arrays[2].tolist()) == {2}
        assert np.abs(trainer.logprobs(base.arrays[0]) - base.arrays[1]).max() > 0.1
        assert await over_http(here, trainer) < 1e-3

        # A long request keeps the adapter that it began with, while newer versions serve others.
        number = here.hub.send("server-0", order("long", 400, 0.3), (PROMPT,))
        trainer.move(2)
        third = trainer.publish(3)
        answers = await until(here, here.hub.send("server-0", PrepareWeights(manifest=third)), number)
        assert number not in answers
        answers = await until(here, here.hub.send("server-0", CommitWeights(version=3)), number)
        young = await until(here, here.hub.send("server-0", order("r3"), (PROMPT,)), number)
        (answer,) = [one for one in young.values() if isinstance(one.body, Completion) and one.body.request_id == "r3"]
        assert apart(trainer, answer) < 1e-3
        assert set(answer.arrays[2].tolist()) == {3}
        ends = answers | young
        if number not in ends:
            ends |= await until(here, number, number)
        assert set(ends[number].arrays[2].tolist()) == {2}

        # Whatever is not a whole adapter is refused, and the old one serves on.
        manifest = trainer.publish(4)
        partial = msgspec.structs.replace(manifest, tensors=manifest.tensors[1:])
        failed = (await here.ask(PrepareWeights(manifest=partial))).body
        assert isinstance(failed, WeightsFailed)
        assert not failed.fatal
        assert "don't fit model.lora: 1 tensors are missing: base_model.model.model.layers.0" in failed.cause
        assert apart(trainer, await here.ask(order("r4"), PROMPT)) < 1e-3

        # The folders of versions that nobody uses are gone by the next update.
        await serve(here, manifest)
        kept = sorted(path.name for path in here.directory.scratch("server-0").iterdir())
        assert [name.split("-")[1] for name in kept] in (["3", "4"], ["4"])
        trainer.publisher.close()


async def over_http(here: Bench, trainer: Trainer) -> float:
    """How far the log-probs of an HTTP answer are from the trainer's."""
    told = json.loads(here.directory.server("server-0").read_text())
    ask = {"model": told["model"], "prompt": PROMPT.tolist(), "max_tokens": 12, "temperature": 1.0, "logprobs": 0}
    async with httpx.AsyncClient(timeout=60) as client:
        said = (await client.post(f"{told['url']}/completions", json=ask | {"return_token_ids": True})).json()["choices"][0]
    expected = trainer.logprobs(np.array(said["token_ids"]))
    return float(np.abs(np.array(said["logprobs"]["token_logprobs"]) - expected).max())


async def until(here: Bench, wanted: int, other: int) -> dict[int, Delivery]:
    """Answers by the number of their order, up to the wanted one."""
    found: dict[int, Delivery] = {}
    async with asyncio.timeout(PATIENCE_S):
        while wanted not in found:
            answer = await here.next()
            assert isinstance(answer, Delivery), answer
            assert answer.answers is not None
            found[answer.answers] = answer
    return found


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_adapters_served_in_bfloat16_are_the_trainers_within_its_precision_and_seen_to_arrive(tmp_path: Path):
    """Two right implementations in bfloat16 are some hundredths of a nat apart, an adapter that is not there tenths."""
    folder = make_model(tmp_path / "model", 0)
    inference = InferenceSettings(http=False, max_model_len=512, cpu_kv_cache_mb=16, dtype="bfloat16")
    async with bench(tmp_path, inference=inference, model=ModelSettings(name=str(folder), lora=LORA)) as here:
        await here.joined()
        trainer = Trainer(folder, read_identity(here.directory).run_id)
        for version in (1, 2, 3):
            before = await here.ask(order(f"before-{version}", 64), PROMPT)
            trainer.move(version, 0.1)
            await serve(here, trainer.publish(version))
            after = await here.ask(order(f"after-{version}", 64), PROMPT)
            close, far = (
                float(np.abs(answer.arrays[1] - trainer.logprobs(answer.arrays[0])).mean()) for answer in (after, before)
            )
            assert close < 0.1 < far
            assert set(after.arrays[2].tolist()) == {version}
        trainer.move(4, 1e-6)  # a step of training: below what one product in bfloat16 resolves
        await serve(here, trainer.publish(4))
        trainer.publisher.close()
