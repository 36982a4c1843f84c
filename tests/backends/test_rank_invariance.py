"""Loss, gradient, update and metrics of every algorithm are the same on 1, 2, 3 and 4 ranks, for any packing. Float32.

Four processes train all cases in worlds of four sizes (tests/backends/gang.py), over gloo, with the real backend and with SGD
at rate 1, whose update hides nothing. What they found is compared with one rank that packs one long row, and its metrics with
a direct computation from the log-probs of plain transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from telescope.algorithms.base import PackedRow
from telescope.maths import metrics, packing
from telescope.records import Trajectory
from tests.backends.cases import (
    PLAIN,
    SHARED_CASES,
    SHARED_WORLDS,
    STEEP,
    STEP,
    TWO_MINIBATCHES,
    VOCABULARY,
    WORLDS,
    Case,
    Found,
    cases,
    plain_logprobs,
    sample,
)
from tests.backends.forking import run_forked
from tests.backends.models import random_model
from tests.digits.batches import MAX_TOKENS, VARIANTS
from tests.ports import free_ports

SLIGHT = 1e-6
LIMIT_S = 1200.0
"""Of a machine that does much else at the time; alone it is done within two minutes."""
ALL_WORLDS = (*WORLDS, *SHARED_WORLDS)


@dataclass(frozen=True)
class Runs:
    """What every world found, and what the cases are."""

    model: str
    cases: dict[str, Case]
    found: dict[str, dict[str, Found]]
    gradients: dict[str, np.ndarray]  # by world, [cases, parameters]
    updates: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """One gang for all tests. Its model has sizes that neither 2 nor 3 nor 4 ranks can share evenly."""
    folder = tmp_path_factory.mktemp("gang")
    model = random_model(folder / "model", hidden_size=25, head_dim=10, vocab_size=VOCABULARY, initializer_range=0.05)
    sample(plain(model), folder / "logprobs.npy")
    start_gang(folder, model)
    return Runs(
        model=model,
        cases={case.name: case for case in cases(folder / "logprobs.npy")},
        found={world: read(folder / f"{world}.json") for world in ALL_WORLDS},
        gradients={world: np.load(folder / f"{world}-gradients.npy") for world in ALL_WORLDS},
        updates={world: np.load(folder / f"{world}-updates.npy") for world in ALL_WORLDS},
    )


def plain(model: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()


def read(file: Path) -> dict[str, Found]:
    return {each.name: each for each in msgspec.json.decode(file.read_bytes(), type=list[Found])}


def start_gang(folder: Path, model: str) -> None:
    ports = dict(zip(ALL_WORLDS, free_ports(len(ALL_WORLDS)), strict=True))
    environment = {"MASTER_ADDR": "127.0.0.1", "PORTS": json.dumps(ports), "GLOO_SOCKET_IFNAME": "lo"}
    ended = run_forked(4, "tests.backends.gang", [str(folder), model], environment, LIMIT_S)
    assert [code for code, _ in ended] == [0] * 4, "\n\n".join(output[-3000:] for _, output in ended)


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", VARIANTS)
def test_any_number_of_ranks_and_any_packing_makes_the_same_update(runs: Runs, name: str):
    """The loss relative to its largest terms, which cancel in it: advantages of STEEP times log-probs."""
    number = list(runs.cases).index(name)
    expected = runs.found[PLAIN][name].metrics["loss"]
    gradient, update = runs.gradients[PLAIN][number], runs.updates[PLAIN][number]
    largest = np.abs(gradient).max()
    assert largest > 1e-3
    assert np.abs(update + gradient).max() <= SLIGHT * np.abs(update).max()
    for world in WORLDS:
        assert abs(runs.found[world][name].metrics["loss"] - expected) <= SLIGHT * max(STEEP, abs(expected)), world
        assert np.abs(runs.gradients[world][number] - gradient).max() <= SLIGHT * largest, world
        assert np.abs(runs.updates[world][number] - update).max() <= SLIGHT * np.abs(update).max(), world


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", TWO_MINIBATCHES)
def test_two_minibatches_are_the_same_two_updates_on_any_number_of_ranks(runs: Runs, name: str):
    """The second update's gradient, and what both have moved: rounding of the weights counts 100 times, as the rate is 0.01."""
    number = list(runs.cases).index(name)
    gradient, update = runs.gradients[PLAIN][number], runs.updates[PLAIN][number]
    for world in WORLDS:
        assert runs.found[world][name].metrics["updates"] == 2.0
        assert np.abs(runs.gradients[world][number] - gradient).max() <= 10 * SLIGHT * np.abs(gradient).max(), world
        assert np.abs(runs.updates[world][number] - update).max() <= 40 * SLIGHT * np.abs(update).max(), world


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", SHARED_CASES)
def test_ranks_that_share_rows_make_the_same_update_and_metrics(runs: Runs, name: str):
    """Two ranks or four share each row, or two pairs of ranks have rows of their own: sums over sequences cross their parts."""
    two_updates = name in TWO_MINIBATCHES
    number = list(runs.cases).index(name)
    place = [case for case in runs.cases if case in SHARED_CASES].index(name)
    gradient, update = runs.gradients[PLAIN][number], runs.updates[PLAIN][number]
    expected = runs.found[PLAIN][name].metrics
    packing_tells = {"rows", "filler_rows", "packed_tokens", "padding_fraction", "trainer_tokens_per_s"}
    for world in SHARED_WORLDS:
        found = runs.found[world][name].metrics
        limits = (10 * SLIGHT, 40 * SLIGHT) if two_updates else (SLIGHT, SLIGHT)
        assert np.abs(runs.gradients[world][place] - gradient).max() <= limits[0] * np.abs(gradient).max(), world
        assert np.abs(runs.updates[world][place] - update).max() <= limits[1] * np.abs(update).max(), world
        same = {key: value for key, value in expected.items() if key not in packing_tells}
        assert {key: found[key] for key in same} == pytest.approx(same, rel=1e-4, abs=1e-5), world
        assert found["packed_tokens"] == expected["packed_tokens"], world


def test_the_worlds_really_packed_and_shared_in_different_ways(runs: Runs):
    found = {world: [runs.found[world][name] for name in VARIANTS] for world in WORLDS}
    rows = {world: [each.metrics["rows"] for each in found[world]] for world in WORLDS}
    assert max(rows[PLAIN]) == 1.0
    assert all(min(rows[world]) > 1.0 for world in WORLDS if world != PLAIN)
    assert any(each.metrics["filler_rows"] > 0 for each in found["4"])
    assert all(each.metrics["updates"] == 1.0 for world in WORLDS for each in found[world])


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", VARIANTS)
def test_metrics_of_two_ranks_are_those_of_a_direct_computation(runs: Runs, name: str):
    case, found = runs.cases[name], runs.found["2"][name].metrics
    expected = loss_metrics(case, runs.model) | host_metrics(case)
    expected["grad_norm"] = expected["grad_norm_max"] = float(np.linalg.norm(runs.gradients["2"][list(runs.cases).index(name)]))
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    told = {"rows", "filler_rows", "packed_tokens", "padding_fraction", "learning_rate", "trainer_tokens_per_s"}
    told |= {"updates", "update_skipped", "updates_skipped_total", "updates_not_finite"}
    assert set(found) == set(expected) | told


def loss_metrics(case: Case, model: str) -> dict[str, float]:
    """The loss over one row without padding, in float64, from the log-probs of plain transformers."""
    shard = case.shard
    current, entropy = (torch.from_numpy(values) for values in plain_logprobs(plain(model), shard))
    ends = np.cumsum([item.length for item in shard.items])
    trajectories = [
        Trajectory(*(getattr(shard, name)[end - item.length : end] for name in ("ids", "mask", "logprobs", "versions")))
        for item, end in zip(shard.items, ends, strict=True)
    ]
    starts = tuple(int(end - item.length) for item, end in zip(shard.items, ends, strict=True))
    lengths = tuple(item.length for item in shard.items)
    row = packing.Row(tuple(range(len(lengths))), starts, lengths, size=int(ends[-1]))
    arrays = packing.arrange(row, trajectories, shard.items, dtype=np.float64)
    out = case.algorithm.loss(
        PackedRow(
            current=current,
            old=None,
            rollout=torch.from_numpy(arrays.logprobs),
            mask=torch.from_numpy(arrays.mask),
            advantages=torch.from_numpy(arrays.advantages),
            segments=torch.from_numpy(arrays.segments),
            sequence_tokens=torch.from_numpy(arrays.sequence_tokens),
            entropy=entropy,
            reference=current,
        ),
        shard.denominators[0],
        max_tokens=MAX_TOKENS,
    )
    return metrics.finish({n: float(v) for n, v in out.sums.items()}, {n: float(v) for n, v in out.peaks.items()})


def host_metrics(case: Case) -> dict[str, float]:
    lags = STEP - 1 - case.shard.versions[case.shard.mask == 1]
    return {"trained_tokens": float(len(lags)), "staleness_mean": float(lags.mean()), "staleness_max": float(lags.max())}


def test_the_metrics_of_clipped_grpo_on_two_ranks_by_hand(runs: Runs):
    """The same once more, with no code of ours between the log-probs and the numbers."""
    name = "grpo clipped"
    case, found = runs.cases[name], runs.found["2"][name].metrics
    sampled = case.shard.mask == 1
    current, entropy = (values[sampled] for values in plain_logprobs(plain(runs.model), case.shard))
    rollout = case.shard.logprobs[sampled].astype(np.float64)
    advantages = np.repeat([item.advantage for item in case.shard.items], [item.length for item in case.shard.items])[sampled]
    ratio = np.exp(current - rollout)
    low, high = 1.0 - case.algorithm.clip_low, 1.0 + case.algorithm.clip_high
    losses = np.maximum(-ratio * advantages, -ratio.clip(low, high) * advantages)
    dual = (advantages < 0) & (losses > 1.6 * np.abs(advantages))
    losses = np.where(dual, 1.6 * np.abs(advantages), losses)
    below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    expected = {
        "loss": losses.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "entropy": entropy.mean(),
        "kl_divergence_inference": (rollout - current).mean(),
        "logprob_difference": np.abs(rollout - current).mean(),
        "clip_fraction": (below | above).mean(),
        "clip_fraction_low": below.mean(),
        "clip_fraction_high": above.mean(),
        "dual_clip_fraction": dual.mean(),
        "masked_fraction": 0.0,
        "learning_rate": 1.0,
        "update_skipped": 0.0,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
