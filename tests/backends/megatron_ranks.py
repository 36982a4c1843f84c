"""Four ranks that train with backend=megatron in one world after the other: `python -m tests.backends.megatron_ranks FOLDER`.

One process imports everything and forks the ranks, before anything has threads; they meet by files, so no port is needed.
"""

from __future__ import annotations

import os
import queue
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from telescope.algorithms.base import Algorithm
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, Saved, TrainShard, World
from telescope.backends.common import vocabulary
from telescope.backends.common.logprobs import logprobs
from telescope.maths.support import WHOLE, Support
from telescope.weights.buckets import buckets, lay_out
from tests.backends.four_ranks import forked, meet
from tests.backends.megatron_watching import Watching, on_cpu, watch
from tests.backends.models import random_experts, random_model, random_other
from tests.backends.shards import in_minibatches, make_job, make_shard, part, with_routing
from tests.digits.batches import VARIANTS

SHARES = {1: ([0, 1, 2, 3, 4, 5, 6, 7],), 2: ([0, 3, 1, 2], [6, 7, 5, 4]), 4: ([0, 3], [1, 2, 4], [6, 7], [5])}
"""Trajectories of the data-parallel ranks, by their number."""
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 129}
"""A vocabulary that no number of ranks divides."""
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 untied": {"tie_word_embeddings": False, "rope_parameters": YARN},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 6},
    "experts": {"seed": 4, "num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "experts tied": {
        "seed": 2, "num_experts": 8, "num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": False,
        "sliding_window": 6, "use_sliding_window": True, "num_experts_per_tok": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Seeds are such that no token of the tests finds two experts that are nearly as probable: rounding would choose."""
ALL_PENALTIES = VARIANTS["grpo, penalties of all kinds"]
"""Asks for the base model's log-probs, and trains the entropy."""


@dataclass(frozen=True)
class Case:
    """`settings` are the backend's; `minibatches`: trajectories of each."""

    ranks: int
    model: str = "qwen3"
    settings: dict[str, Any] = field(default_factory=dict)
    algorithm: Algorithm = field(default_factory=GRPO)
    support: Support = WHOLE
    temperatures: tuple[float, ...] = (1.0,)
    """Of the trajectories in turn: a batch may have several."""
    minibatches: tuple[int, ...] = (8,)
    bucket_size: int | None = None
    """Numbers of a bucket of gradients, where buckets are summed up as they are full; None: megatron-core's 40 million."""
    replayed: bool = False
    """Four of five tokens go to experts that were recorded."""
    planted: str = ""
    """Whose sum of gradients is left out: of `norms` over the ranks of a model, or of `experts` over those with the same."""

    @property
    def tensor_size(self) -> int:
        return int(self.settings.get("tensor_parallel_size", 1))

    @property
    def models(self) -> int:
        return self.ranks // self.tensor_size


TP2, TP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
EP2, EP4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
OVERLAPPED = {"overlap_grad_reduce": True}
WHOLE_ROWS, WHOLE_MOMENTS = {"sequence_parallel": False}, {"use_distributed_optimizer": False}
CUT, MIXED = Support(top_k=40, top_p=0.9), (0.7, 1.0, 1.6)
CASES = {
    "1": Case(1),
    "1, selective": Case(1, settings={"gradient_checkpointing": "selective"}),
    "TP 2": Case(2, settings=TP2),
    "TP 2, whole rows": Case(2, settings=TP2 | WHOLE_ROWS),
    "TP 2, whole rows, computed again": Case(2, settings=TP2 | WHOLE_ROWS | {"gradient_checkpointing": "full"}),
    "TP 2, computed again": Case(2, settings=TP2 | {"gradient_checkpointing": True}),
    "TP 2, selective": Case(2, settings=TP2 | {"gradient_checkpointing": "selective"}),
    "TP 2, cut": Case(2, settings=TP2, support=CUT, temperatures=(0.7,)),
    "TP 2, mixed temperatures": Case(2, settings=TP2, temperatures=MIXED),
    "TP 2, mixed temperatures, cut": Case(2, settings=TP2, support=CUT, temperatures=MIXED, algorithm=ALL_PENALTIES),
    "TP 2, penalties": Case(2, settings=TP2, algorithm=ALL_PENALTIES),
    "DP 2": Case(2),
    "DP 2, whole moments": Case(2, settings=WHOLE_MOMENTS),
    "DP 2, overlapped": Case(2, settings=OVERLAPPED),
    "DP 2, overlapped, in buckets": Case(2, settings=OVERLAPPED, bucket_size=1500),
    "DP 2, overlapped, in buckets, whole moments": Case(2, settings=OVERLAPPED | WHOLE_MOMENTS, bucket_size=1500),
    "TP 4": Case(4, settings=TP4),
    "DP 4": Case(4),
    "TP 2, DP 2": Case(4, settings=TP2),
    "TP 2, DP 2, whole rows": Case(4, settings=TP2 | WHOLE_ROWS),
    "TP 2, DP 2, whole moments": Case(4, settings=TP2 | WHOLE_MOMENTS),
    "TP 2, DP 2, 2 minibatches": Case(
        4, settings=TP2 | OVERLAPPED, algorithm=VARIANTS["sapo token mean, TIS"], minibatches=(4, 4)
    ),
    "TP 2, DP 2, in buckets": Case(4, settings=TP2 | OVERLAPPED, bucket_size=1500),
    **{f"TP 2, DP 2, {model}": Case(4, model, TP2) for model in MODELS if model != "qwen3"},
    "TP 2, whole rows, qwen2": Case(2, "qwen2", TP2 | WHOLE_ROWS),
    "1, experts": Case(1, "experts", {"gradient_checkpointing": "selective"}),
    "TP 2, experts": Case(2, "experts", TP2, algorithm=ALL_PENALTIES),
    "EP 2, experts": Case(2, "experts", EP2 | {"gradient_checkpointing": "full"}),
    "EP 2, TP 2, experts": Case(2, "experts", EP2 | TP2 | {"gradient_checkpointing": "selective"}),
    "EP 2, DP 4, experts": Case(4, "experts", EP2 | OVERLAPPED, bucket_size=1500),
    "EP 2, TP 2, DP 2, experts": Case(4, "experts tied", EP2 | TP2),
    "EP 2, TP 2, DP 2, experts, whole moments": Case(4, "experts", EP2 | TP2 | WHOLE_MOMENTS),
    "EP 4, TP 2, experts": Case(4, "experts tied", EP4 | TP2),
    "EP 2, TP 2, experts, replayed": Case(
        2, "experts", EP2 | TP2 | {"gradient_checkpointing": "full"}, algorithm=ALL_PENALTIES, replayed=True
    ),
    "EP 2, DP 4, experts, replayed": Case(
        4, "experts", EP2, algorithm=VARIANTS["sapo token mean, TIS"], minibatches=(4, 4), replayed=True
    ),
}  # fmt: skip
PLANTED = {
    "TP 2": Case(2, settings=TP2, planted="norms"),
    "TP 2, whole rows": Case(2, settings=TP2 | WHOLE_ROWS, planted="norms"),
    "TP 2, experts": Case(2, "experts", TP2, planted="experts"),
}


def models(folder: Path) -> dict[str, str]:
    made = {}
    for name, changes in MODELS.items():
        kind, place = name.partition(" ")[0], folder / name.replace(" ", "-")
        given = {**SIZES, "head_dim": 8, **changes}
        match kind:
            case "qwen3":
                made[name] = random_model(place, **given)
            case "experts":
                made[name] = random_experts(place, **given)
            case _:
                made[name] = random_other(place, kind, **given)
    return made


def make(case: Case, model: str, world: World) -> Job:
    job = make_job(
        model=model, seq_len=64, pad_to_multiple_of=1, world=world, algorithm=case.algorithm, router_replay=case.replayed
    )  # fmt: skip
    return replace(job, support=case.support)


def whole_shard(step: int = 1, sizes: tuple[int, ...] = (8,), temperatures: tuple[float, ...] = (1.0,)) -> TrainShard:
    return in_minibatches(make_shard(step, seed=step, temperatures=temperatures), sizes)


def shard_of(case: Case, step: int = 1) -> TrainShard:
    whole = whole_shard(step, case.minibatches, case.temperatures)
    return with_routing(whole, layers=2, experts=8, top_k=2) if case.replayed else whole


def share(case: Case, rank: int, step: int = 1) -> TrainShard:
    return part(shard_of(case, step), SHARES[case.models][rank // case.tensor_size])


def build(case: Case, model: str, rank: int, **changes: Any) -> Watching:
    job = replace(make(case, model, World(rank, case.ranks, "cpu")), **changes)
    if case.bucket_size is None:
        return watch(job, **case.settings)
    config = partial(DistributedDataParallelConfig, bucket_size=case.bucket_size)
    with mock.patch("telescope.backends.megatron.backend.DistributedDataParallelConfig", config):
        backend = watch(job, **case.settings)
    assert all(len(buffer.buckets) >= 5 for buffer in backend._ddp.buffers), "many buckets"
    return backend


def run(name: str, case: Case, model: str, rank: int, folder: Path) -> None:
    """Log-probs of each rank; gradients, metrics and weights after a step of rank 0, and what `pack` gives before and after."""
    backend = build(case, model, rank)
    begun = pack_all(backend, rank)
    plain = backend.logprobs(share(case, rank))
    result = backend.train_step(share(case, rank))
    weights, packed = dict(backend.weights()), pack_all(backend, rank)
    np.save(folder / f"{name}-{rank}.npy", plain)
    (folder / f"{name}-{rank}.json").write_bytes(msgspec.json.encode(result.metrics))
    if rank == 0:
        found = {"gradients": backend.updates[-1], "weights": weights, "packed": packed, "begun": begun}
        torch.save(found, folder / f"{name}.pt")
    backend.close()


def pack_all(backend: Any, rank: int) -> dict[str, torch.Tensor]:
    """A version in bfloat16, flat, by name; empty on other ranks than the first."""
    specs, _ = lay_out(backend.layout(), "bfloat16")
    found = {}
    for bucket in buckets(specs, 5000):
        out = torch.empty(bucket.nbytes, dtype=torch.uint8) if rank == 0 else None
        backend.pack(bucket, out)
        if out is not None:
            for spec in bucket.specs:
                first = spec.offset - bucket.start
                found[spec.name] = out[first : first + spec.nbytes].view(torch.bfloat16)
    return found


def planted(name: str, case: Case, model: str, rank: int, folder: Path) -> None:
    norms = "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"
    left_out: dict[str, Any] = {
        "norms": mock.patch(norms, return_value=None),
        "experts": mock.patch.object(DistributedDataParallel, "finish_grad_sync", without_experts),
    }
    with left_out[case.planted]:
        run(f"planted {name}", case, model, rank, folder)


def without_experts(ddp: Any, **_: Any) -> None:
    for group in ddp.bucket_groups:
        group.finish_grad_sync()


HALF = {"mixed_precision_dtype": "bfloat16"}
RESUMED = {
    "TP 2, DP 2": Case(4, settings=TP2),
    "TP 2, DP 2, half": Case(4, settings=TP2 | HALF),
    "DP 2, half, whole moments": Case(2, settings=HALF | WHOLE_MOMENTS),
    "DP 2, half, again": Case(2, settings=HALF),
    "DP 2, half, in buckets": Case(2, settings=HALF | OVERLAPPED, bucket_size=1500),
    "EP 2, TP 2, DP 2, experts": Case(4, "experts", EP2 | TP2),
    "EP 2, half, experts": Case(2, "experts", EP2 | HALF),
    "1": Case(1),
}
"""Each goes on from its own checkpoint."""
MOVED = {
    "qwen3": {"of four": Case(1), "of FSDP": Case(2, settings=TP2)},
    "experts": {"of four": Case(2, "experts", EP2), "of FSDP": Case(2, "experts", EP2 | TP2)},
}
"""Of each model a case that goes on from the checkpoint of four ranks, and one that goes on from FSDP's, which lies there
before the ranks begin."""
OF_FOUR = {"qwen3": "TP 2, DP 2", "experts": "EP 2, TP 2, DP 2, experts"}


def resume(name: str, case: Case, model: str, rank: int, folder: Path, begin: Path | None) -> None:
    """Steps 2 and 3, after step 1 and a save or from a checkpoint."""
    backend = build(case, model, rank, resume=begin)
    if begin is None:
        backend.train_step(share(case, rank))
        outcomes: queue.Queue[Any] = queue.Queue()
        backend.save(1, folder / f"saved {name}", outcomes.put)
        outcome = outcomes.get(timeout=60)
        assert isinstance(outcome, Saved), outcome
        dist.barrier()  # files of all ranks
        store(folder / f"saved {name}.pt", backend, [], rank)
    metrics = [backend.train_step(share(case, rank, step)).metrics for step in (2, 3)]
    store(folder / f"{'went on' if begin is None else 'resumed'} {name}.pt", backend, metrics, rank)
    backend.close()


def store(file: Path, backend: Any, metrics: list[dict[str, float]], rank: int) -> None:
    weights = dict(backend.weights())
    if rank == 0:
        torch.save({"metrics": metrics, "weights": weights}, file)


def check_logprobs(rank: int, size: int) -> None:
    """Of a head that is cut into `size` parts, beside the head as a whole: values and gradients."""
    torch.manual_seed(5)
    tokens, width, count = 37, 16, 129
    hidden, head = torch.randn(tokens, width), torch.randn(count, width)
    targets, wanted = torch.randint(0, count, (tokens,)), torch.randn(2, tokens)
    shard = vocabulary.cut(count, rank, size, dist.group.WORLD)
    for support in (WHOLE, Support(top_k=20), Support(top_p=0.8, min_p=0.001)):
        for both in (True, False):
            h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
            expected = logprobs(h, w, targets, 0.7, 8, support)
            loss(expected, wanted, both).backward()
            for temperature in (0.7, torch.full((tokens,), 0.7)):
                part = head[shard.first : shard.first + shard.count].clone().requires_grad_()
                own = hidden.clone().requires_grad_()
                found = vocabulary.logprobs(own, part, targets, temperature, 8, shard, support)
                loss(found, wanted, both).backward()
                dist.all_reduce(own.grad)
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
                near(own.grad, h.grad)
                near(part.grad, w.grad[shard.first : shard.first + shard.count])


def loss(found: tuple[torch.Tensor, torch.Tensor], wanted: torch.Tensor, both: bool) -> torch.Tensor:
    total = (found[0] * wanted[0]).sum()
    return total + (found[1] * wanted[1]).sum() if both else total


def near(ours: Any, theirs: Any) -> None:
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-6


def main() -> int:
    folder = Path(sys.argv[1])
    made = {name: str(folder / name.replace(" ", "-")) for name in MODELS}

    def one_rank(rank: int) -> None:
        with on_cpu():
            for size in (4, 2, 1):
                if rank < size:
                    meet(folder / f"meeting-{size}", rank, size)
                    all_of(size, rank)
                    dist.destroy_process_group()

    def all_of(size: int, rank: int) -> None:
        if size > 1:
            check_logprobs(rank, size)
        for name, case in CASES.items():
            if case.ranks == size:
                run(name, case, made[case.model], rank, folder)
        for name, case in PLANTED.items():
            if case.ranks == size:
                planted(name, case, made[case.model], rank, folder)
        for name, case in RESUMED.items():
            if case.ranks == size:
                resume(name, case, made[case.model], rank, folder, None)
                resume(name, case, made[case.model], rank, folder, folder / f"saved {name}")
        for model, cases in MOVED.items():
            begun = {"of four": folder / f"saved {OF_FOUR[model]}", "of FSDP": folder / f"saved by FSDP {model}"}
            for name, case in cases.items():
                if case.ranks == size:
                    resume(f"{model} {name}", case, made[model], rank, folder, begun[name])

    return forked(one_rank)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
