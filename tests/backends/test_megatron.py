"""backend=megatron against backend=fsdp on the same batch and weights in float32, in worlds of one, two and four ranks.

Four processes train all cases (tests/backends/megatron_ranks.py) over gloo, with the real backend; what they found is compared
with FSDP on one rank.
"""

from __future__ import annotations

import json
import queue
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed here: the extra `megatron` brings it")

from safetensors import safe_open

from telescope.backends.base import Saved, World
from telescope.backends.common.saving import ShardReader
from telescope.cli.export import Wanted, export
from telescope.config.sections import ModelSettings
from telescope.maths.memory import shape_from
from telescope.maths.parallel_memory import parallel_activation_bytes
from tests.backends.four_ranks import run_module
from tests.backends.megatron_ranks import (
    AS_WITHOUT,
    CASES,
    EMBEDDING,
    EXPERTS,
    KEEPING,
    KEPT,
    KEPT_TOKENS,
    MODELS,
    MOVED,
    NORMS,
    OF_FSDP,
    OWN_NORMS,
    PLANTED,
    RESUMED,
    ROUNDED,
    ROWS,
    SHARES,
    Case,
    keeping_model,
    make,
    models,
    pack_all,
    shard_of,
    whole_shard,
)
from tests.backends.shards import make_job, part
from tests.backends.watching import watch

LIMIT_S = 1200.0
"""Of a machine that does much else at the time."""
CLOSE = 1e-5
"""‖g − g′‖ / ‖g‖ of each parameter's gradient."""
SAME = ("loss", "grad_norm", "entropy", "kl_divergence_inference", "trained_tokens", "packed_tokens", "learning_rate")
"""Metrics that do not depend on rows and ranks."""
OF_EXPERTS = (
    "expert_load_max", "expert_load_mean", "experts_idle_fraction", "router_entropy", "router_replayed_fraction",
    "router_difference",
)  # fmt: skip
"""Neither do these, where there are experts."""
WORST = {NORMS: "norm.weight", EMBEDDING: "embed_tokens.weight", EXPERTS: ".mlp.experts.", ROWS: "k_norm.weight"}
"""In whose name what is missing is found, by the sum that is left out."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plain:
    """What FSDP finds on one rank."""

    logprobs: np.ndarray
    metrics: dict[str, float]
    gradients: Tensors
    weights: Tensors
    packed: Tensors
    begun: Tensors
    """As `packed`, before the step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Filled by four ranks, once for all tests."""
    found: Path = tmp_path_factory.mktemp("megatron")
    models(found)
    for model in dict.fromkeys(case.model for case in OF_FSDP.values()):
        save_by_fsdp(found, model)
    run_module("tests.backends.megatron_ranks", str(found), limit_s=LIMIT_S)
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[tuple[Any, ...], Plain]:
    """By what of a case changes what FSDP computes."""
    return {key(case): by_fsdp(case, folder) for case in (*CASES.values(), *PLANTED.values())}


def key(case: Case) -> tuple[Any, ...]:
    return case.model, case.support, case.temperatures, repr(case.algorithm), case.minibatches, case.replayed


def by_fsdp(case: Case, folder: Path) -> Plain:
    backend = watch(make(case, str(folder / case.model.replace(" ", "-")), World(0, 1, "cpu")))
    begun = pack_all(backend, 0)
    shard = shard_of(case)
    logprobs = backend.logprobs(shard)
    metrics = backend.train_step(shard).metrics
    weights = dict(backend.weights())
    found = Plain(logprobs, metrics, backend.gradients, weights, pack_all(backend, 0), begun)
    backend.close()
    return found


def gradients(folder: Path, name: str, case: Case) -> Tensors:
    """Of all stages."""
    found: Tensors = {}
    for stage in range(case.stages):
        found |= torch.load(folder / f"{name}-gradients-{stage}.pt")
    return found


def worst(expected: Tensors, found: Tensors) -> tuple[float, str]:
    """The largest relative distance, and whose it is."""
    names = {name.removeprefix("lm."): tensor for name, tensor in expected.items()}
    assert names.keys() == found.keys()
    return max((float((found[name] - tensor).norm() / tensor.norm()), name) for name, tensor in names.items())


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_fsdp_computes(folder: Path, plain: dict[tuple[Any, ...], Plain], name: str):
    """Log-probs, loss, every parameter's gradient, the weights after a step of AdamW, and what servers are sent. Of two
    minibatches the second's gradient, where what AdamW made of rounding counts."""
    case, expected = CASES[name], plain[key(CASES[name])]
    found = torch.load(folder / f"{name}.pt")
    distance, whose = worst(expected.gradients, gradients(folder, name, case))
    assert distance <= CLOSE * (1 if len(case.minibatches) == 1 else 10), f"the gradient of {whose} is {distance:.1e} apart"
    for rank in range(case.ranks):
        mine = np.load(folder / f"{name}-{rank}.npy")
        ends = np.cumsum([item.length for item in whole_shard().items])
        lengths = [item.length for item in whole_shard().items]
        wanted = np.concatenate([np.zeros(0), *(expected.logprobs[ends[i] - lengths[i] : ends[i]] for i in case.share(rank))])
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5)
        metrics = msgspec.json.decode((folder / f"{name}-{rank}.json").read_bytes())
        assert {each: metrics[each] for each in SAME} == pytest.approx(
            {each: expected.metrics[each] for each in SAME}, rel=1e-5
        )
        assert metrics.keys() == expected.metrics.keys()
        loads = [each for each in OF_EXPERTS if each in metrics]
        assert bool(loads) == case.model.startswith("experts")
        assert {each: metrics[each] for each in loads} == pytest.approx(
            {each: expected.metrics[each] for each in loads}, rel=1e-4
        )
    assert found["weights"].keys() == expected.weights.keys()
    apart = torch.cat([(found["weights"][each] - tensor).abs().flatten() for each, tensor in expected.weights.items()])
    assert int((apart > 2e-5).sum()) <= 1, "AdamW's first step is the rate, 1e-3, whatever the gradient's size"
    assert float(apart.max()) <= 5e-5, "one number's gradient, 3e-8, is next to AdamW's own 1e-8, and so is its rounding"
    assert found["packed"].keys() == expected.packed.keys()
    for each, theirs in expected.packed.items():
        torch.testing.assert_close(found["packed"][each].float(), theirs.float(), rtol=2**-7, atol=1e-4)


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", CASES)
def test_before_a_step_servers_are_sent_the_same_bytes_as_by_fsdp(folder: Path, plain: dict[tuple[Any, ...], Plain], name: str):
    """Version 0 of a checkpoint that both read."""
    case = CASES[name]
    found, expected = torch.load(folder / f"{name}.pt"), plain[key(case)]
    assert found["begun"].keys() == expected.begun.keys()
    assert all(torch.equal(found["begun"][each], theirs) for each, theirs in expected.begun.items())
    changed = [each for each, before in found["begun"].items() if not torch.equal(before, found["packed"][each])]
    assert len(changed) > len(expected.begun) / 2, "after the step they are others"
    if case.settings.get("expert_parallel_size", 1) == 1:
        assert list(found["begun"]) == list(expected.begun), "ranks that share out experts send them in turn"


@pytest.mark.timeout(LIMIT_S + 100)
def test_what_two_stages_have_they_go_on_to_have_alike(folder: Path):
    """A tied embedding: each of them updates its own, by the same gradient to the bit."""
    tied = [name for name, case in CASES.items() if case.stages > 1 and MODELS[case.model].get("tie_word_embeddings")]
    assert len(tied) > 5
    for name in tied:
        first, last = (torch.load(folder / f"{name}-gradients-{stage}.pt") for stage in (0, CASES[name].stages - 1))
        assert first.keys() & last.keys() == {"model.embed_tokens.weight"}, name
        assert torch.equal(first["model.embed_tokens.weight"], last["model.embed_tokens.weight"]), name


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("went on PP 2, TP 2", [(0, 2), (1, 3)]),
        ("resumed PP 2, TP 2", [(0, 2), (1, 3)]),
        ("went on PP 2, DP 2, half", [(0, 1), (2, 3)]),
        ("resumed PP 2, DP 2, half", [(0, 1), (2, 3)]),
        ("went on CP 2, PP 2, half", [(0, 2), (1, 3)]),
        ("resumed CP 2, PP 2, half", [(0, 2), (1, 3)]),
        ("resumed PP 2 of FSDP", [(0, 1)]),
        ("resumed PP 2 of four", [(0, 1)]),
    ],
)
def test_a_tied_embedding_stays_alike_on_two_stages(folder: Path, name: str, pairs: list[tuple[int, int]]):
    """Its weights and moments, after a save or a checkpoint and after each of two steps from there. `pairs`: ranks that have
    the same part of it; moments are spread over two models, and over ranks that share rows."""
    for pair in pairs:
        first, last = (torch.load(folder / f"{name}-embedding-{rank}.pt") for rank in pair)
        assert len(first) == 3
        for one, other in zip(first, last, strict=True):
            assert one.keys() == other.keys() == {"computing", "updated", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(tensor, other[each]) for each, tensor in one.items())
        assert not torch.equal(first[1]["updated"], first[2]["updated"])


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", ["TP 2, DP 2", "PP 2, TP 2", "CP 2, TP 2"])
def test_an_export_holds_the_weights_that_four_ranks_have_saved(folder: Path, name: str):
    saved, exported = torch.load(folder / f"saved {name}.pt")["weights"], read(folder, f"saved {name}")
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())


def read(folder: Path, name: str) -> Tensors:
    """A checkpoint, exported by the command that users have."""
    from safetensors.torch import load_file

    target = folder / f"exported {name}"
    export(folder / name, ModelSettings(name=str(folder / "qwen3")), target, Wanted())
    return load_file(target / "model.safetensors")


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", PLANTED)
def test_a_sum_over_the_ranks_of_a_model_that_is_left_out_is_found_and_the_worst_tensor_named(
    folder: Path, plain: dict[tuple[Any, ...], Plain], name: str
):
    case = PLANTED[name]
    distance, whose = worst(plain[key(case)].gradients, gradients(folder, f"planted {name}", case))
    assert distance > 0.1
    assert WORST[case.missing] in whose


@pytest.mark.timeout(LIMIT_S + 100)
def test_a_norm_of_the_gradient_that_leaves_a_stage_out_is_found(folder: Path, plain: dict[tuple[Any, ...], Plain]):
    expected = plain[key(OWN_NORMS)].metrics["grad_norm"]
    for stage in range(2):
        metrics = msgspec.json.decode((folder / f"own norms-{stage}.json").read_bytes())
        assert metrics["grad_norm"] < 0.99 * expected
        assert metrics["loss"] == pytest.approx(plain[key(OWN_NORMS)].metrics["loss"], rel=1e-5)


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_to_the_bit(folder: Path, name: str):
    went_on, resumed = (torch.load(folder / f"{how} {name}.pt") for how in ("went on", "resumed"))
    for one, other in zip(went_on["metrics"], resumed["metrics"], strict=True):
        assert {each: one[each] for each in ("loss", "grad_norm")} == {each: other[each] for each in ("loss", "grad_norm")}
    assert all(torch.equal(tensor, resumed["weights"][each]) for each, tensor in went_on["weights"].items())


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", dict.fromkeys(begun for begun, _ in MOVED.values()))
def test_a_checkpoint_of_four_ranks_is_gone_on_with_by_others_and_by_fsdp(folder: Path, name: str):
    """Its files have the names, shapes and moments of Hugging Face's tensors, whoever wrote them."""
    went_on = torch.load(folder / f"went on {name}.pt")
    resumed = [torch.load(folder / f"resumed {other}.pt") for other, (begun, _) in MOVED.items() if begun == name]
    found = [*resumed, by_fsdp_from(folder / f"saved {name}", folder, RESUMED[name].model)]
    for each in found:
        for one, other in zip(went_on["metrics"], each["metrics"], strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        apart = max(float((each["weights"][name] - tensor).abs().max()) for name, tensor in went_on["weights"].items())
        assert apart < 2e-4


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", OF_FSDP)
def test_a_checkpoint_of_fsdp_is_gone_on_with_by_two_ranks_of_a_model(folder: Path, name: str):
    model = OF_FSDP[name].model
    went_on = by_fsdp_from(folder / f"saved by FSDP {model}", folder, model)
    found = torch.load(folder / f"resumed {name} of FSDP.pt")
    for one, other in zip(went_on["metrics"], found["metrics"], strict=True):
        assert {each: other[each] for each in SAME} == pytest.approx({each: one[each] for each in SAME}, rel=1e-5)
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-6)
    for name, tensor in went_on["weights"].items():
        apart = (found["weights"][name] - tensor).abs()
        assert float(apart.max()) < 2e-4, name
        assert int((apart > 5e-6).sum()) <= 1, f"{name}: AdamW makes steps of rounding where a gradient is next to nothing"


def save_by_fsdp(folder: Path, model: str) -> None:
    """After step 1."""
    backend = watch(make_job(model=str(folder / model), seq_len=64, pad_to_multiple_of=1))
    backend.train_step(whole_shard())
    outcomes: queue.Queue[Any] = queue.Queue()
    backend.save(1, folder / f"saved by FSDP {model}", outcomes.put)
    outcome = outcomes.get(timeout=60)
    assert isinstance(outcome, Saved), outcome
    backend.close()


def by_fsdp_from(checkpoint: Path, folder: Path, model: str) -> dict[str, Any]:
    job = make_job(model=str(folder / model), seq_len=64, pad_to_multiple_of=1)
    backend = watch(replace(job, resume=checkpoint))
    metrics = [backend.train_step(whole_shard(step)).metrics for step in (2, 3)]
    found = {"metrics": metrics, "weights": dict(backend.weights())}
    backend.close()
    return found


@pytest.mark.timeout(LIMIT_S + 100)
def test_moments_on_all_ranks_or_spread_over_them_are_the_same_update_of_weights_that_compute_in_half(folder: Path):
    """The float32 weights are finer than bfloat16, and are what is published in float32 and saved."""
    spread, whole = (torch.load(folder / f"went on DP 2, half, {how}.pt") for how in ("again", "whole moments"))
    for name, tensor in whole["weights"].items():
        torch.testing.assert_close(spread["weights"][name], tensor, rtol=0, atol=1e-6)
        assert not torch.equal(tensor, tensor.bfloat16().float()), name


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", AS_WITHOUT)
def test_weights_and_moments_in_host_memory_are_updated_to_the_bit_as_on_the_device(folder: Path, name: str):
    """And are saved to the bit, with moments spread over ranks or not: two steps each after a save and after its checkpoint."""
    for how in ("went on", "resumed"):
        hosted, plain = (torch.load(folder / f"{how} {each}.pt") for each in (name, AS_WITHOUT[name]))
        for one, other in zip(hosted["metrics"], plain["metrics"], strict=True):
            assert {each: one[each] for each in SAME} == {each: other[each] for each in SAME}
        assert all(torch.equal(hosted["weights"][each], tensor) for each, tensor in plain["weights"].items())
    saved, theirs = (ShardReader(folder / f"saved {each}") for each in (name, AS_WITHOUT[name]))
    moments = [each for each in saved.shapes if each.startswith("optimizer.") and not each.endswith(".step")]
    assert len(moments) == 2 * len([each for each in saved.shapes if each.startswith("model.")])
    assert all(torch.equal(*(reader.read(each, torch.float32) for reader in (saved, theirs))) for each in moments)


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("name", [name for name, case in RESUMED.items() if case.settings.items() >= ROUNDED.items()])
def test_moments_of_fewer_bits_are_saved_as_they_are(folder: Path, name: str):
    """In bfloat16, and weights in float32: read into float32 and rounded again they are the same."""
    dtypes: dict[str, set[str]] = {}
    for file in (folder / f"saved {name}").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for each in opened.keys():  # noqa: SIM118 it is no dict
                kind = each.rpartition(".")[2] if each.startswith("optimizer.") else each.partition(".")[0]
                dtypes.setdefault(kind, set()).add(opened.get_slice(each).get_dtype())
    assert {kind: dtypes[kind] for kind in ("exp_avg", "exp_avg_sq", "model", "step")} == {
        "exp_avg": {"BF16"}, "exp_avg_sq": {"BF16"}, "model": {"F32"}, "step": {"F32"},
    }  # fmt: skip


@pytest.mark.timeout(LIMIT_S + 100)
def test_moments_of_fewer_bits_make_nearly_the_same_steps(folder: Path):
    """Within some 2 % of AdamW's rate of 1e-3, and not to the bit."""
    names = "DP 2, half, again", "DP 2, half, hosted, rounded"
    exact, rounded = (torch.load(folder / f"went on {name}.pt")["weights"] for name in names)
    apart = torch.cat([(rounded[name] - tensor).abs().flatten() for name, tensor in exact.items()])
    assert 1e-7 < float(apart.mean()) < 2e-5


def test_part_of_a_shard_is_what_the_ranks_take():
    assert [item.rollout_id for item in part(whole_shard(), SHARES[2][1]).items] == [106, 107, 105, 104]


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("kind", KEEPING)
@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_for_its_backward_pass_what_planning_says(folder: Path, name: str, kind: str):
    """Of two more layers, by autograd's own account; sdpa on a CPU copies its output once more, as does the way back to tokens
    where ranks share rows, which then takes the copy."""
    case = KEPT[name]
    shape = shape_from(json.loads((keeping_model(folder, kind, 3) / "config.json").read_text()))
    one, three = (int((folder / f"kept {name} {kind} {layers}").read_text()) for layers in (1, 3))
    spread = case.settings.get("sequence_parallel", case.tensor_size > 1)
    sharing = case.stage_ranks // case.tensor_size
    told = parallel_activation_bytes(shape, 2, case.tensor_size, spread_sequence=spread, sharing=sharing)
    copied = 0 if sharing > 1 else 2 * shape.query // case.tensor_size
    assert (three - one) / 2 / KEPT_TOKENS == told + copied
