"""A step of n minibatches is n updates, each of its own; what came before the first of them stays frozen."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from telescope.algorithms.base import AlgorithmRaised, PackedRow, TokenLosses
from telescope.algorithms.grpo import GRPO
from telescope.algorithms.sapo import SAPO
from telescope.backends.base import TrainShard
from telescope.config.models import model_source
from telescope.records import Denominators
from tests.backends.shards import alone, in_minibatches, make_job, make_shard, part
from tests.backends.watching import Watching, distance

PROMPT = 4
SIZES = (4, 2, 2)
RATE = 0.02
LOSS_RTOL = 5e-5
"""Packed rows against plain samples in float32, after updates: the kernels of an AMD EPYC differ by 1.4e-5, others by less."""
CORRECTED = GRPO(use_ppo_clip=True, clip_low=0.05, clip_high=0.05, ppo_clip_ref_logprobs="batch", use_tis=True, tis_cap=1.1)


def weights(backend: Watching) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_three_minibatches_are_three_steps_to_the_bit(build, optimizer):
    """Where nothing is frozen: the ratio is to the sampler."""
    job = make_job(algorithm=SAPO(), learning_rate=RATE)
    shard = in_minibatches(make_shard(), SIZES)
    whole = build(job, optimizer=optimizer)
    result = whole.train_step(shard)
    found, gradients = weights(whole), whole.updates
    by_hand = build(job, optimizer=optimizer)
    results = [by_hand.train_step(alone(shard, number)) for number in range(3)]
    assert same(found, weights(by_hand))
    assert all(same(ours, theirs) for ours, theirs in zip(gradients, by_hand.updates, strict=True))
    assert not same(gradients[0], gradients[1])
    assert result.metrics["updates"] == 3.0
    for name in ("loss", "grad_norm"):
        assert result.metrics[name] == pytest.approx(np.mean([each.metrics[name] for each in results]))
    assert result.metrics["grad_norm_max"] == max(each.metrics["grad_norm"] for each in results)
    assert result.metrics["trained_tokens"] == sum(each.metrics["trained_tokens"] for each in results)


def logprobs(model: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    tokens = torch.from_numpy(ids.astype(np.int64))
    return model(tokens[None]).logits[0, PROMPT - 1 : -1].log_softmax(-1).gather(1, tokens[PROMPT:, None]).squeeze(1)


def pieces(shard):
    ends = np.cumsum([item.length for item in shard.items])
    return [
        (item, shard.ids[end - item.length : end], torch.from_numpy(shard.logprobs[end - item.length + PROMPT : end].copy()))
        for item, end in zip(shard.items, ends, strict=True)
    ]


def by_hand(shard, base: str = "tiny") -> tuple[torch.nn.Module, list[float]]:
    """CORRECTED with plain SGD on plain transformers: o from before the first update, whatever the updates do."""
    model = AutoModelForCausalLM.from_pretrained(model_source(base), attn_implementation="eager")
    with torch.no_grad():
        old = [logprobs(model, ids) for _, ids, _ in pieces(shard)]
    losses = []
    for number, counts in enumerate(shard.denominators):
        loss = torch.zeros(())
        for (item, ids, rollout), before in zip(pieces(shard), old, strict=True):
            if item.minibatch != number:
                continue
            ratio = (logprobs(model, ids) - before).exp()
            clipped = ratio.clamp(0.95, 1.05)
            weight = (before - rollout).exp().clamp(max=1.1)
            loss = loss + (weight * torch.maximum(-ratio * item.advantage, -clipped * item.advantage)).sum() / counts.tokens
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        losses.append(loss.item())
    return model, losses


def sampled_nearby(shard):
    """Sampling log-probs near the model's own, so that neither weight nor clip is at its bound everywhere."""
    model = AutoModelForCausalLM.from_pretrained(model_source("tiny"), attn_implementation="eager")
    random = np.random.default_rng(1)
    found = np.full(len(shard.ids), np.nan, np.float32)
    at = 0
    with torch.no_grad():
        for item, ids, _ in pieces(shard):
            near = logprobs(model, ids).numpy() + 0.1 * random.standard_normal(item.length - PROMPT)
            found[at + PROMPT : at + item.length] = np.minimum(near, 0.0)
            at += item.length
    return replace(shard, logprobs=found)


def test_clip_and_weight_refer_to_the_log_probs_before_the_first_update(build):
    shard = in_minibatches(sampled_nearby(make_shard()), SIZES)
    backend = build(make_job(algorithm=CORRECTED, learning_rate=RATE), optimizer="sgd")
    start = weights(backend)
    result = backend.train_step(shard)
    model, losses = by_hand(shard)
    assert result.metrics["loss"] == pytest.approx(np.mean(losses), rel=LOSS_RTOL, abs=1e-7)
    assert result.metrics["clip_fraction"] > 0.05  # later minibatches have left the old policy
    assert 0.05 < result.metrics["tis_capped_fraction"] < 0.95
    moved = {name: tensor - start[name] for name, tensor in weights(backend).items()}
    expected = {name: tensor.detach() - start[name] for name, tensor in model.named_parameters()}
    assert distance(expected, moved) < 1e-4


@pytest.mark.parametrize(
    ("algorithm", "sizes", "passes"),
    [(CORRECTED, (8,), 1), (CORRECTED, SIZES, 3 + 2), (SAPO(), SIZES, 3), (GRPO(use_tis=True), (4, 4), 2 + 1)],
)
def test_an_extra_pass_is_made_only_for_later_minibatches_that_need_it(build, algorithm, sizes, passes):
    """One row a minibatch here. The first one's own pass comes before any update, so it needs no other."""
    backend = build(make_job(algorithm=algorithm))
    forward, calls = backend._policy.forward, []
    backend._policy.forward = lambda *given, **named: calls.append(given) or forward(*given, **named)
    result = backend.train_step(in_minibatches(make_shard(), sizes))
    assert len(calls) == passes
    assert ("timing_compute_old_logprobs_total" in result.timings) == (passes > len(sizes))


def test_a_minibatch_that_nothing_is_left_of_moves_no_weight(build):
    """The moments of the update before would move them; a filter can empty a minibatch on all ranks."""
    backend = build(make_job())
    backend.train_step(make_shard())
    before = weights(backend)
    arrays = (np.zeros(0, kind) for kind in (np.int32, np.uint8, np.float32, np.int32))
    result = backend.train_step(TrainShard(2, (), *arrays, (Denominators(0, 0, 0),)))
    assert same(before, weights(backend))
    assert (result.metrics["update_skipped"], result.metrics["updates_skipped_total"]) == (1.0, 1.0)
    assert not {"loss", "grad_norm", "grad_norm_max", "ratio_mean", "entropy"} & set(result.metrics)
    result = backend.train_step(in_minibatches(make_shard(3), (8, 0)))
    assert (result.metrics["updates"], result.metrics["update_skipped"]) == (2.0, 1.0)


@pytest.mark.parametrize("sizes", [(8, 0), (0, 8), (0, 8, 0)])
def test_a_minibatch_that_nothing_is_left_of_counts_in_no_mean(build, sizes):
    """Its share of the loss and its gradient are 0 because nothing was asked of it, which is not a measurement."""
    alone = build(make_job()).train_step(make_shard()).metrics
    found = build(make_job()).train_step(in_minibatches(make_shard(), sizes)).metrics
    assert (found["updates"], found["update_skipped"]) == (len(sizes), len(sizes) - 1)
    assert alone["loss"] != 0.0
    speeds = {"trainer_tokens_per_s", "mfu"}
    about_rows = {"updates", "update_skipped", "updates_skipped_total", "rows", "filler_rows", "padding_fraction"}
    assert found.keys() == alone.keys()
    assert {name: found[name] for name in found.keys() - speeds - about_rows} == pytest.approx(
        {name: alone[name] for name in alone.keys() - speeds - about_rows}, rel=1e-6
    )


def test_a_broken_minibatch_leaves_the_others_alone(build):
    shard = in_minibatches(make_shard(), (4, 4))
    items = (*shard.items[:4], msgspec.structs.replace(shard.items[4], advantage=float("inf")), *shard.items[5:])
    backend = build(make_job(algorithm=SAPO(), learning_rate=RATE), optimizer="sgd")
    result = backend.train_step(replace(shard, items=items))
    found = weights(backend)
    assert (result.metrics["updates"], result.metrics["update_skipped"]) == (2.0, 1.0)
    first = build(make_job(algorithm=SAPO(), learning_rate=RATE), optimizer="sgd")
    first.train_step(alone(shard, 0))
    assert same(found, weights(first))


def test_an_item_of_a_minibatch_that_does_not_exist_is_refused(build):
    shard = make_shard()
    items = (msgspec.structs.replace(shard.items[0], minibatch=1), *shard.items[1:])
    with pytest.raises(ValueError, match="rollout 100 is of minibatch 1, and the step has 1"):
        build(make_job()).train_step(replace(shard, items=items))


def test_sgd_is_the_rate_times_the_gradient(build):
    backend = build(make_job(learning_rate=1.0), optimizer="sgd")
    before = weights(backend)
    backend.train_step(make_shard())
    for name, tensor in weights(backend).items():
        torch.testing.assert_close(tensor, before[name] - backend.gradients[f"lm.{name}"], rtol=0, atol=1e-7)


def test_two_epochs_are_four_updates_against_the_log_probs_before_the_first(build):
    """Each trajectory is there once an epoch, in other minibatches the second time: a plain loop does the same."""
    once = sampled_nearby(make_shard())
    order = [*range(8), 3, 6, 0, 5, 7, 1, 4, 2]
    shard = in_minibatches(replace(part(once, order), denominators=()), (4, 4, 4, 4))
    backend = build(make_job(algorithm=CORRECTED, learning_rate=RATE), optimizer="sgd")
    start = weights(backend)
    result = backend.train_step(shard)
    model, losses = by_hand(shard)
    assert result.metrics["updates"] == 4.0
    assert result.metrics["loss"] == pytest.approx(np.mean(losses), rel=LOSS_RTOL, abs=1e-7)
    moved = {name: tensor - start[name] for name, tensor in weights(backend).items()}
    expected = {name: tensor.detach() - start[name] for name, tensor in model.named_parameters()}
    assert distance(expected, moved) < 1e-4


def test_a_loss_that_raises_is_named_with_step_and_line(build):
    """Also where the words are those of a collective that broke: it is not another rank's fault."""

    class Own(GRPO):
        def token_losses(self, row: PackedRow, ratio: torch.Tensor) -> TokenLosses:
            raise RuntimeError("connection reset by peer\nat great length")

    backend = build(make_job(algorithm=Own()))
    said = r"^step 4: Own.token_losses raised RuntimeError: connection reset by peer \(test_minibatches.py, line \d+\)$"
    with pytest.raises(AlgorithmRaised, match=said) as raised:
        backend.train_step(make_shard(4))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_step_meets_the_other_ranks_three_times_besides_what_fsdp_does(build, monkeypatch):
    backend, reduced, reduce = build(make_job()), [], dist.all_reduce
    backend.train_step(make_shard())
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, *given, **named: reduced.append(tensor) or reduce(tensor, *given, **named)
    )
    metrics = backend.train_step(in_minibatches(make_shard(2), SIZES)).metrics
    assert [tensor.numel() > 3 for tensor in reduced] == [False, True, True]
    assert metrics["trainer_tokens_per_s"] > 0
    assert "slowest_s" not in metrics
