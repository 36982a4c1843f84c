"""Two updates of a step with all that a loss may look at, beside the same written out in plain torch and transformers.

Of ours the reference takes only the names of metrics: its log-probs, cuts, ratios, penalties, counts and steps are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from telescope.algorithms.grpo import GRPO
from telescope.backends.base import TrainShard
from telescope.maths.support import WHOLE, Support
from tests.backends.models import random_model
from tests.backends.shards import in_minibatches, make_job, make_shard

TEMPERATURE = 0.7
MIXED = (0.7, 1.3, 1.0)
RATE = 0.02
LOW, HIGH, CAP = 0.03, 0.05, 1.1
BASE, SAMPLER, BONUS = 0.5, 0.3, 0.2
"""Coefficients of the penalties and of the entropy."""
CUT = Support(top_k=40, top_p=0.9)


@dataclass(frozen=True)
class Sample:
    """One trajectory of n trained tokens."""

    ids: Tensor  # [1, T]
    places: Tensor  # [n] of the trained tokens
    sampler: Tensor  # [n] log-probs
    advantage: float
    minibatch: int
    temperature: float


def with_tool_tokens(shard: TrainShard) -> TrainShard:
    """Every third of what was sampled comes from a tool instead, and is trained nowhere."""
    mask, end, items = shard.mask.copy(), 0, []
    for item in shard.items:
        start, end = end, end + item.length
        sampled = np.flatnonzero(mask[start:end]) + start
        mask[sampled[1::3]] = 0
        items.append(msgspec.structs.replace(item, sequence_tokens=int(mask[start:end].sum())))
    logprobs = np.where(mask, shard.logprobs, np.nan).astype(np.float32)
    return replace(shard, items=tuple(items), mask=mask, logprobs=logprobs)


def samples(shard: TrainShard) -> Iterator[Sample]:
    end = 0
    for item in shard.items:
        here = slice(end, end := end + item.length)
        places = torch.from_numpy(np.flatnonzero(shard.mask[here]))
        sampler = torch.from_numpy(shard.logprobs[here])[places].double()
        ids = torch.from_numpy(shard.ids[here].astype(np.int64))[None]
        yield Sample(ids, places, sampler, item.advantage, item.minibatch, item.temperature)


def taken(model: torch.nn.Module, sample: Sample, support: Support) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [n], of the sample alone. The cut goes token by token, as one would sample."""
    logits = model(sample.ids).logits[0, sample.places - 1] / sample.temperature
    targets = sample.ids[0, sample.places]
    kept = torch.ones_like(logits, dtype=torch.bool)
    for place, row in enumerate(logits.detach() if support != WHOLE else ()):
        order = row.argsort(descending=True)[: support.top_k]
        before = row[order].softmax(0).cumsum(0).roll(1)
        before[0] = 0.0
        kept[place] = False
        kept[place, order[before < support.top_p]] = True
        kept[place, targets[place]] = True
    logp = torch.where(kept, logits, torch.full_like(logits, -1e30)).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def loss_of(models: tuple[torch.nn.Module, ...], group: list[Sample], old: list[Tensor], support: Support) -> Tensor:
    """The clipped surrogate against `old`, weighted by old over sampler; two k3 penalties; the bonus: the mean over tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for sample, before in zip(group, old, strict=True):
        now, entropy = taken(models[0], sample, support)
        base = taken(models[1], sample, support)[0].detach()
        ratio, gain = (now - before).exp(), sample.advantage
        losses = torch.maximum(-ratio * gain, -ratio.clamp(1 - LOW, 1 + HIGH) * gain)
        losses = losses * (before - sample.sampler).exp().clamp(max=CAP)
        for weight, other in ((BASE, base), (SAMPLER, sample.sampler)):
            losses = losses + weight * ((other - now).exp() - 1 + now - other)
        total = total + (losses - BONUS * entropy).sum()
    return total / sum(len(sample.places) for sample in group)


@pytest.mark.parametrize("temperatures", [(TEMPERATURE,), MIXED], ids=["one temperature", "three"])
@pytest.mark.parametrize("support", [WHOLE, CUT], ids=["all tokens", "cut"])
def test_two_updates_of_a_step_are_those_of_plain_torch(build, tmp_path, support: Support, temperatures: tuple[float, ...]):
    folder = random_model(tmp_path / "model")
    model, base = (AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double() for _ in range(2))
    shard = in_minibatches(with_tool_tokens(make_shard(temperatures=temperatures)), (4, 4))
    given = list(samples(shard))
    with torch.no_grad():
        near = [taken(model, sample, support)[0] for sample in given]
    drawn = np.random.default_rng(4).normal(0, 0.2, int(shard.mask.sum()))
    logprobs = shard.logprobs.copy()
    logprobs[shard.mask == 1] = np.minimum(torch.cat(near).numpy() + drawn, 0)
    shard = replace(shard, logprobs=logprobs)
    given = list(samples(shard))
    losses = []
    for number in (0, 1):
        group, old = zip(*((s, o) for s, o in zip(given, near, strict=True) if s.minibatch == number), strict=True)
        loss = loss_of((model, base), list(group), list(old), support)
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    algorithm = GRPO(
        use_ppo_clip=True, clip_low=LOW, clip_high=HIGH, ppo_clip_ref_logprobs="batch", use_tis=True, tis_cap=CAP,
        kl_ref_coef=BASE, kl_rollout_coef=SAMPLER, entropy_coef=BONUS,
    )  # fmt: skip
    job = make_job(model=folder, temperature=TEMPERATURE, algorithm=algorithm, learning_rate=RATE, seq_len=48)
    backend = build(replace(job, support=support), optimizer="sgd")
    before = {name: tensor.double().clone() for name, tensor in backend.weights()}
    result = backend.train_step(shard)
    assert result.metrics["loss"] == pytest.approx(sum(losses) / 2, abs=2e-6)
    assert result.metrics["clip_fraction"] > 0
    assert 0 < result.metrics["tis_capped_fraction"] < 1
    assert result.metrics["kl_ref"] > 0  # of the second minibatch: the first begins at the base model
    plain = model.state_dict()
    for name, tensor in backend.weights():
        moved = plain[name] - before[name]
        assert float(moved.norm()) > 0
        assert float((tensor.double() - before[name] - moved).norm() / moved.norm()) < 2e-4, name
