"""Recorded routing in place of a router's choice, with backend=fsdp on one rank; test_megatron.py compares backend=megatron."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from telescope.backends.base import TrainShard
from telescope.backends.common.models import UnfitModel
from telescope.backends.common.routing import ExpertLoad, RowRouting, load_metrics
from telescope.backends.fsdp.routers import Routers
from telescope.maths.routing import continued, dtype_of, find_wrong, joined, unrecorded
from tests.backends.models import random_experts, random_model
from tests.backends.shards import make_job, make_shard, part, with_routing
from tests.backends.watching import distance

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3_moe not normalised": {"norm_topk_prob": False},
    "mixtral": {},
}
SIZES = {"layers": 2, "experts": 4, "top_k": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("routed")
    return {
        name: random_experts(folder / name.replace(" ", "-"), name.split()[0], seed=4, **given) for name, given in KINDS.items()
    }


def plain(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")


def own_choices(folder: str, shard: TrainShard) -> TrainShard:
    """The shard with what transformers' routers choose for each trajectory alone; of its last token nothing is recorded."""
    lm, found = plain(folder), []
    for item, end in zip(shard.items, np.cumsum([item.length for item in shard.items]), strict=True):
        ids = torch.from_numpy(shard.ids[end - item.length : end].astype(np.int64))
        with torch.no_grad():
            layers = lm(ids[None], output_router_logits=True).router_logits
        chosen = torch.stack([logits.softmax(-1, dtype=torch.float32).topk(2).indices for logits in layers], 1).numpy()
        chosen[-1] = unrecorded(np.uint8)
        found.append(chosen.astype(np.uint8))
    return replace(shard, routed=np.concatenate(found))


def loss_of_forced(lm: Any, shard: TrainShard) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """By transformers alone, a sample at a time, each router made to give what was recorded, with weights by the formula."""
    gates = [module for module in lm.modules() if type(module).__name__.endswith("TopKRouter")]
    loss, end, found = torch.zeros(()), 0, []
    for item in shard.items:
        start, end = end, end + item.length
        for number, gate in enumerate(gates):
            gate.forward = forced(gate, torch.from_numpy(shard.routed[start:end, number].astype(np.int64)))
        ids = torch.from_numpy(shard.ids[start:end].astype(np.int64))
        logp = lm(ids[None]).logits[0, 3:-1].log_softmax(-1).gather(1, ids[4:, None])
        found.append(logp.detach()[:, 0])
        loss = loss - logp.sum() * item.advantage / shard.denominators[0].tokens
    return loss, found


def forced(gate: Any, recorded: torch.Tensor) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        weights, experts = [], []
        for token, wanted in zip(hidden @ gate.weight.t(), recorded.tolist(), strict=True):
            p = token.exp() / token.exp().sum()
            chosen = p.topk(2).indices.tolist() if wanted[0] == 255 else wanted
            whole = sum(p[expert] for expert in chosen) if getattr(gate, "norm_topk_prob", True) else 1.0
            weights.append(torch.stack([p[expert] / whole for expert in chosen]))
            experts.append(chosen)
        return hidden @ gate.weight.t(), torch.stack(weights), torch.tensor(experts)

    return forward


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_same_weights_chose_changes_no_bit(build, models, kind):
    shard = make_shard()
    recorded = own_choices(models[kind], shard)
    found = []
    for replays, given in ((False, shard), (True, recorded)):
        backend = build(make_job(model=models[kind], seq_len=64, router_replay=replays), gradient_checkpointing=replays)
        found.append((backend.logprobs(given), backend.train_step(given).metrics, backend.gradients))
    (logprobs, metrics, gradients), (again, replayed, others) = found
    assert np.array_equal(logprobs, again, equal_nan=True)
    assert replayed["loss"] == metrics["loss"]
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    assert replayed["router_difference"] == 0.0
    assert replayed["router_replayed_fraction"] == pytest.approx(1 - 8 / 143), (
        "of 143 tokens the last ones of 8 samples are not"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_experts_are_followed_with_weights_and_gradients_of_the_models_own_router(build, models, kind):
    """Drawn ones, which no router chose."""
    shard = with_routing(make_shard(), **SIZES)
    backend = build(make_job(model=models[kind], seq_len=64, router_replay=True), gradient_checkpointing=True)
    logprobs = backend.logprobs(shard)
    metrics = backend.train_step(shard).metrics
    lm = plain(models[kind])
    loss, expected = loss_of_forced(lm, shard)
    np.testing.assert_allclose(logprobs[shard.mask.astype(bool)], torch.cat(expected).numpy(), rtol=0, atol=1e-4)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    gradients = {f"lm.{name}": parameter.grad for name, parameter in lm.named_parameters()}
    assert all(float(gradients[name].norm()) > 0 for name in gradients if "gate.weight" in name)
    assert distance(gradients, backend.gradients) < 1e-4
    assert 0.7 < metrics["router_replayed_fraction"] < 0.9
    assert 0.3 < metrics["router_difference"] < 0.7, "two of four, drawn, are half of the time those of the router"


def test_a_run_that_does_not_ask_for_replay_looks_at_no_record(build, models):
    shard = make_shard()
    backend = build(make_job(model=models["qwen3_moe"], seq_len=64))
    expected = backend.logprobs(shard)
    assert np.array_equal(backend.logprobs(with_routing(shard, **SIZES)), expected, equal_nan=True)
    assert "router_replayed_fraction" not in backend.train_step(with_routing(shard, **SIZES)).metrics


def test_the_model_that_is_compared_with_routes_by_itself(build, models):
    """A record is of the policy's own version."""
    from tests.digits.batches import VARIANTS

    shard = with_routing(make_shard(), **SIZES)
    algorithm = VARIANTS["grpo, penalties of all kinds"]
    backend = build(make_job(model=models["qwen3_moe"], seq_len=64, router_replay=True, algorithm=algorithm))
    row = backend._on_device(next(rows_of(backend, shard)))[1]
    alone = backend._on_device(next(rows_of(backend, replace(shard, routed=None))))[1]
    of = backend._reference.logprobs_only
    assert torch.equal(of(row, 16), of(alone, 16))
    assert not torch.equal(backend._policy.logprobs_only(row, 16), backend._policy.logprobs_only(alone, 16))


def rows_of(backend: Any, shard: TrainShard) -> Any:
    from telescope.backends.common import shards
    from telescope.maths import packing

    trajectories = shards.trajectories(shard)
    return (packing.arrange(row, trajectories, shard.items) for plan in backend._plan(shard) for row in plan)


def test_records_that_do_not_go_with_the_model_are_refused_by_name(build, models):
    backend = build(make_job(model=models["qwen3_moe"], seq_len=64, router_replay=True))
    shard = make_shard(3)
    with pytest.raises(ValueError, match=r"the samples of step 3 brought no record: their servers keep none; set it to false"):
        backend.train_step(shard)
    assert np.isfinite(backend.logprobs(shard)[shard.mask.astype(bool)]).all(), "of what nobody trains no record is needed"
    wrong = {
        r"shape \[143, 3, 2\], and the model's is \[tokens, 2, 2\]": with_routing(shard, 3, 4, 2),
        r"shape \[143, 2, 3\]": with_routing(shard, 2, 4, 3),
        r"names expert \d+, and the model has 4": with_routing(shard, 2, 200, 2),
        r"is of int16, and that of 4 experts is of uint8": with_routing(shard, 2, 300, 2),
    }
    for sentence, given in wrong.items():
        with pytest.raises(ValueError, match=f"step 3: recorded routing .*{sentence}"):
            backend.train_step(given)
        with pytest.raises(ValueError, match=sentence):
            backend.logprobs(given)


def test_models_whose_routers_are_not_known_are_refused(build, tmp_path):
    for folder in (random_model(tmp_path / "dense"), random_experts(tmp_path / "glm4_moe", "glm4_moe")):
        with pytest.raises(
            UnfitModel, match=r"trainer\.router_replay=true .* has none of those that are known here .* to false"
        ):
            build(make_job(model=folder, router_replay=True))


def test_padding_counts_in_no_metric_and_a_pass_that_is_computed_again_once(build, models):
    """143 tokens in rows of 64, filled up to 192: each goes to two experts, in two layers."""
    shard, found = make_shard(), []
    for settings in ({"gradient_checkpointing": False}, {"gradient_checkpointing": True}):
        backend = build(make_job(model=models["qwen3_moe"], seq_len=64), **settings)
        told: list[np.ndarray] = []
        finish = backend._load.finish
        backend._load.finish = lambda load=backend._load, told=told, finish=finish: (
            told.append(load._tokens.clone().numpy()), finish()
        )[1]  # fmt: skip
        backend.logprobs(shard)
        found.append({name: value for name, value in backend.train_step(shard).metrics.items() if "expert" in name})
        assert told[0].sum(1).tolist() == [2 * 143, 2 * 143]
    assert found[0] == found[1]
    assert 1.0 <= found[0]["expert_load_mean"] <= found[0]["expert_load_max"] <= 2.0


def test_load_metrics_to_the_digit():
    tokens = np.array([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert load_metrics(tokens, 8.0, 4.0, 4.0, 2.0, top_k=2) == {
        "expert_load_max": 3.0, "expert_load_mean": 2.0, "experts_idle_fraction": 0.25, "router_entropy": 0.5,
        "router_replayed_fraction": 0.5, "router_difference": 0.25,
    }  # fmt: skip
    assert load_metrics(tokens, 0.0, 0.0, 0.0, 0.0, top_k=2) == {}, "a step without a token has none"


def test_a_record_has_the_smallest_dtype_with_room_for_its_mark():
    assert [dtype_of(experts) for experts in (8, 255, 256, 512)] == [np.uint8, np.uint8, np.int16, np.int16]
    assert (unrecorded(np.uint8), unrecorded(np.int16)) == (255, 32767)


def test_pieces_without_a_record_are_marked_when_they_are_joined():
    piece = np.arange(4, dtype=np.uint8).reshape(2, 1, 2)
    whole = joined([None, piece, None], [1, 2, 1])
    assert whole.tolist() == [[[255, 255]], [[0, 1]], [[2, 3]], [[255, 255]]]
    assert joined([None, None], [3, 4]) is None
    with pytest.raises(ValueError, match="of different models"):
        joined([piece, piece.astype(np.int16)], [2, 2])


def test_a_dialogues_record_of_another_model_does_not_go_on():
    known, later = np.zeros((2, 1, 2), np.uint8), np.ones((4, 2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"record of \(4, 1, 2\) uint8 can't go on with one of \(4, 2, 2\) uint8"):
        continued(known, later, 4)


def test_a_token_cannot_go_to_an_expert_twice():
    twice = np.array([[[1, 1]], [[255, 255]]], np.uint8)
    assert find_wrong(twice, layers=1, experts=4, top_k=2) == "recorded routing sends a token to the same expert twice"
    assert find_wrong(twice[1:], layers=1, experts=4, top_k=2) == ""


def test_a_part_of_a_shard_takes_its_record_along():
    shard = with_routing(make_shard(), **SIZES)
    assert np.array_equal(part(shard, [1]).routed, shard.routed[5:28])


def test_a_compiled_router_is_one_graph_that_counts_as_it_is_told_and_follows_the_record():
    """For all lengths of rows; a second one with records, a third one where there is nothing to look at."""
    from torch._dynamo.utils import counters
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    torch.manual_seed(0)
    gate = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=2))
    torch.nn.init.normal_(gate.weight)
    watching = Routers([gate], "cpu")
    compiled = torch.compile(lambda hidden: gate(hidden), backend="aot_eager", fullgraph=True, dynamic=True)
    before = counters["stats"]["unique_graphs"]
    for recorded in (False, True):
        for length in (12, 20, 7):
            hidden, counted = torch.randn(length, 16, requires_grad=True), torch.arange(length) < length - 2
            row = RowRouting(counted, torch.randint(0, 8, (length, 1, 2)) if recorded else None)
            for counts in (True, False):
                with watching.told(row, counts=counts):
                    eager = gate(hidden)
                expected = taken(watching)
                with watching.told(row, counts=counts):
                    found = compiled(hidden)
                assert taken(watching) == expected
                assert (sum(expected[0]) > 0) == counts
                assert torch.equal(found[2], eager[2])
                torch.testing.assert_close(found[1], eager[1])
    assert counters["stats"]["unique_graphs"] == before + 3


def test_compiled_layers_share_their_graphs():
    """A layer's number is no part of a graph: torch compiles the same code eight times, and then no more."""
    from torch._dynamo.utils import counters
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=2)
    gates = [Qwen3MoeTopKRouter(config) for _ in range(12)]
    for gate in gates:
        torch.nn.init.normal_(gate.weight)
    watching = Routers(gates, "cpu")

    def layer(gate: Any, hidden: torch.Tensor) -> Any:
        return gate(hidden)

    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    before = counters["stats"]["unique_graphs"]
    row = RowRouting(torch.ones(9, dtype=torch.bool))
    hidden = torch.randn(9, 16)
    with watching.told(row, counts=True):
        for gate in gates:
            gate(hidden)
    expected = taken(watching)
    with watching.told(row, counts=True):
        for gate in gates:
            compiled(gate, hidden)
    assert taken(watching) == expected
    assert counters["stats"]["unique_graphs"] <= before + 2


def test_what_does_not_count_is_not_looked_at():
    """Not even where it is no number."""
    load = ExpertLoad(1, 4, 2, "cpu")
    load.open(False)
    bad = torch.full((3, 4), torch.nan)
    load.add(torch.tensor(0), bad, torch.zeros(3, 2, dtype=torch.int64), RowRouting(torch.ones(3, dtype=torch.bool)))
    assert load._sums.tolist() == [0.0] * 4


def taken(watching: Routers) -> tuple[list[float], list[float]]:
    """What was counted, and is no more."""
    load = watching.load
    found = load._tokens.reshape(-1).tolist(), load._sums.round(decimals=6).tolist()
    load._tokens.zero_()
    load._sums.zero_()
    return found
