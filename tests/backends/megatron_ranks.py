"""Four ranks that train with backend=megatron in one world after the other: `python -m tests.backends.megatron_ranks FOLDER`.

One process imports everything and forks the ranks, before anything has threads; they meet by files, so no port is needed.
"""

from __future__ import annotations

import gc
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
from torch.distributed import distributed_c10d

from telescope.algorithms.base import Algorithm
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, Saved, TrainShard, World
from telescope.backends.common import attention, ranks, vocabulary
from telescope.backends.common.logprobs import logprobs
from telescope.backends.megatron import MOMENTS
from telescope.backends.megatron.layers import AttentionRow
from telescope.backends.megatron.masters import Masters
from telescope.backends.megatron.policy import ParallelRow
from telescope.backends.megatron.stages import EMBEDDING as EMBEDDING_NAME
from telescope.maths.support import WHOLE, Support
from telescope.weights.buckets import buckets, lay_out
from tests.backends import engine_stub
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
    "qwen3": {"tie_word_embeddings": True},
    "qwen3 untied": {"tie_word_embeddings": False, "rope_parameters": YARN},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 6},
    "llama few": {"tie_word_embeddings": False, "num_key_value_heads": 2},
    "experts": {"seed": 4, "num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "experts tied": {
        "seed": 2, "num_experts": 8, "num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": False,
        "sliding_window": 6, "use_sliding_window": True, "num_experts_per_tok": 3, "tie_word_embeddings": True,
    },
    "experts deep": {"seed": 4, "num_experts": 8, "num_hidden_layers": 4, "mlp_only_layers": [1, 2]},
    "qwen3 deep": {"num_hidden_layers": 9, "tie_word_embeddings": True},
    "llama deep": {"num_hidden_layers": 5, "tie_word_embeddings": False},
    "qwen3 deep windows": {
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
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
    seq_len: int = 64
    shares: tuple[list[int], ...] = ()
    """Trajectories of each model; (): as `SHARES` has them."""
    bucket_size: int | None = None
    """Numbers of a bucket of gradients, where buckets are summed up as they are full; None: megatron-core's 40 million."""
    replayed: bool = False
    """Four of five tokens go to experts that were recorded."""
    missing: str = ""
    """A sum of gradients that is left out: over the ranks of a model as megatron-core calls it, or `EXPERTS`, or `ROWS`: over
    the parts of rows."""

    @property
    def tensor_size(self) -> int:
        return int(self.settings.get("tensor_parallel_size", 1))

    @property
    def stages(self) -> int:
        return int(self.settings.get("pipeline_parallel_size", 1))

    @property
    def stage_ranks(self) -> int:
        """Of one stage of a model, whether they have other parts of its matrices or of each row."""
        return self.tensor_size * int(self.settings.get("context_parallel_size", 1))

    def share(self, rank: int) -> list[int]:
        """Trajectories of a rank."""
        model = self.stage_ranks * self.stages
        return (self.shares or SHARES[self.ranks // model])[rank // model]


TP2, TP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
EP2, EP4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
PP2, PP4 = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 4}
ROUND = {"virtual_pipeline_size": 2}
OVERLAPPED = {"overlap_grad_reduce": True}
WHOLE_ROWS, WHOLE_MOMENTS = {"sequence_parallel": False}, {"use_distributed_optimizer": False}
ENGINE = {"use_transformer_engine": True}
"""Modules named like those of Transformer Engine, which a CPU has."""
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
    **{f"TP 2, DP 2, {model}": Case(4, model, TP2) for model in MODELS if model != "qwen3" and "deep" not in model},
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
    "PP 2": Case(2, settings=PP2),
    "PP 2, computed again, untied": Case(2, "qwen3 untied", PP2 | {"gradient_checkpointing": True}),
    "PP 2, one row": Case(2, settings=PP2, seq_len=256),
    "PP 2, round, 2 minibatches": Case(
        2, "llama deep", PP2 | ROUND, algorithm=VARIANTS["sapo token mean, TIS"], minibatches=(4, 4)
    ),
    "PP 2, mixed temperatures, cut": Case(2, settings=PP2, support=CUT, temperatures=MIXED, algorithm=ALL_PENALTIES),
    "PP 2, windows": Case(2, "qwen3 deep windows", PP2),
    "PP 2, round, windows": Case(2, "qwen3 deep windows", PP2 | ROUND),
    "PP 4": Case(4, "qwen3 deep", PP4),
    "PP 4, round": Case(4, "qwen3 deep", PP4 | ROUND),
    "PP 2, TP 2": Case(4, settings=PP2 | TP2),
    "PP 2, TP 2, whole rows, round": Case(4, "llama deep", PP2 | TP2 | ROUND | WHOLE_ROWS),
    "PP 2, DP 2, 2 minibatches": Case(
        4, settings=PP2, algorithm=VARIANTS["sapo token mean, TIS"], minibatches=(4, 4)
    ),
    "PP 2, DP 2, whole moments, overlapped": Case(4, settings=PP2 | WHOLE_MOMENTS | OVERLAPPED),
    "PP 2, DP 2, round, overlapped": Case(4, "qwen3 deep", PP2 | ROUND | OVERLAPPED, algorithm=ALL_PENALTIES),
    "PP 2, DP 2, an empty share": Case(4, settings=PP2, shares=([0, 3, 1, 2, 6, 7, 5, 4], [])),
    "CP 2": Case(2, settings=CP2),
    "CP 2, one row": Case(2, settings=CP2, seq_len=256),
    "CP 2, whole moments, selective": Case(2, "llama", CP2 | WHOLE_MOMENTS | {"gradient_checkpointing": "selective"}),
    "CP 2, overlapped, in buckets, windows": Case(
        2, "mistral", CP2 | OVERLAPPED | {"gradient_checkpointing": True}, bucket_size=1500
    ),
    "CP 2, mixed temperatures, cut": Case(2, settings=CP2, support=CUT, temperatures=MIXED, algorithm=ALL_PENALTIES),
    "CP 4, untied": Case(4, "qwen3 untied", CP4),
    "CP 4, fewer key heads": Case(4, "llama few", CP4 | {"gradient_checkpointing": "full"}),
    "CP 2, TP 2": Case(4, settings=CP2 | TP2),
    "CP 2, TP 2, fewer key heads": Case(4, "llama few", CP2 | TP2 | {"gradient_checkpointing": "selective"}),
    "CP 2, TP 2, whole rows, penalties": Case(4, "qwen2", CP2 | TP2 | WHOLE_ROWS, algorithm=ALL_PENALTIES),
    "CP 2, DP 2, 2 minibatches": Case(
        4, settings=CP2, algorithm=VARIANTS["sapo token mean, TIS"], minibatches=(4, 4)
    ),
    "CP 2, DP 2, whole moments, an empty share": Case(
        4, settings=CP2 | WHOLE_MOMENTS, shares=([0, 3, 1, 2, 6, 7, 5, 4], [])
    ),
    "CP 2, PP 2": Case(4, settings=CP2 | PP2),
    "CP 2, PP 2, round, windows": Case(4, "qwen3 deep windows", CP2 | PP2 | ROUND | OVERLAPPED, algorithm=ALL_PENALTIES),
    "PP 2, TP 2, experts": Case(4, "experts tied", PP2 | TP2 | {"gradient_checkpointing": "selective"}),
    "PP 2, EP 2, experts": Case(4, "experts", PP2 | EP2 | OVERLAPPED, algorithm=ALL_PENALTIES),
    "PP 2, TP 2, EP 2, experts": Case(4, "experts tied", PP2 | TP2 | EP2),
    "PP 2, CP 2, EP 2, experts": Case(4, "experts", PP2 | CP2 | EP2),
    "PP 2, EP 2, experts, round, replayed": Case(
        4, "experts deep", PP2 | ROUND | EP2 | {"gradient_checkpointing": "full"}, minibatches=(4, 4), replayed=True,
        algorithm=VARIANTS["sapo token mean, TIS"],
    ),
    "CP 2, experts": Case(2, "experts", CP2 | {"gradient_checkpointing": "full"}),
    "CP 2, EP 2, experts": Case(2, "experts", CP2 | EP2),
    "CP 2, TP 2, EP 4, experts": Case(4, "experts tied", CP2 | TP2 | EP4),
    "CP 2, TP 2, EP 2, experts, replayed": Case(
        4, "experts", CP2 | TP2 | EP2 | {"gradient_checkpointing": "full"}, algorithm=ALL_PENALTIES, replayed=True
    ),
    "1, of an engine, qwen2": Case(1, "qwen2", ENGINE),
    "TP 2, of an engine, computed again": Case(2, settings=TP2 | ENGINE | {"gradient_checkpointing": True}),
    "TP 2, of an engine, whole rows": Case(2, settings=TP2 | ENGINE | WHOLE_ROWS),
    "EP 2, TP 2, of an engine, experts": Case(2, "experts", EP2 | TP2 | ENGINE),
    "PP 2, TP 2, of an engine, round": Case(4, "qwen3 deep", PP2 | TP2 | ROUND | ENGINE, algorithm=ALL_PENALTIES),
}  # fmt: skip
ROWS = "rows"
EXPERTS, NORMS, EMBEDDING = "experts", "_allreduce_non_tensor_model_parallel_grads", "_allreduce_word_embedding_grads"
PLANTED = {
    "TP 2": Case(2, settings=TP2, missing=NORMS),
    "TP 2, whole rows": Case(2, settings=TP2 | WHOLE_ROWS, missing=NORMS),
    "TP 2, experts": Case(2, "experts", TP2, missing=EXPERTS),
    "PP 2": Case(2, settings=PP2, missing=EMBEDDING),
    "PP 2, experts": Case(4, "experts", PP2, missing=EXPERTS),
    "CP 2": Case(2, settings=CP2, missing=ROWS),
    "CP 2, TP 2": Case(4, settings=CP2 | TP2, missing=ROWS),
}
OWN_NORMS = Case(2, settings=PP2)
"""Each stage takes the norm of its own gradients."""


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
    for kind, changes in KEEPING.items():
        for layers in (1, 3):
            make_one = random_model if kind == "qwen3" else partial(random_other, kind=kind)
            make_one(keeping_model(folder, kind, layers), **{**SIZES, "head_dim": 8, "num_hidden_layers": layers, **changes})
    return made


def make(case: Case, model: str, world: World) -> Job:
    job = make_job(
        model=model,
        seq_len=case.seq_len,
        pad_to_multiple_of=1,
        world=world,
        algorithm=case.algorithm,
        router_replay=case.replayed,
    )
    return replace(job, support=case.support)


def whole_shard(step: int = 1, sizes: tuple[int, ...] = (8,), temperatures: tuple[float, ...] = (1.0,)) -> TrainShard:
    return in_minibatches(make_shard(step, seed=step, temperatures=temperatures), sizes)


def shard_of(case: Case, step: int = 1) -> TrainShard:
    whole = whole_shard(step, case.minibatches, case.temperatures)
    return with_routing(whole, layers=2, experts=8, top_k=2) if case.replayed else whole


def share(case: Case, rank: int, step: int = 1) -> TrainShard:
    return part(shard_of(case, step), case.share(rank))


def build(case: Case, model: str, rank: int, **changes: Any) -> Watching:
    job = replace(make(case, model, World(rank, case.ranks, "cpu")), **changes)
    if case.settings.get("use_transformer_engine"):
        with mock.patch("telescope.backends.megatron.backend.engine_modules", engine_stub.modules):
            return watch(job, **case.settings)
    if case.bucket_size is None:
        return watch(job, **case.settings)
    config = partial(DistributedDataParallelConfig, bucket_size=case.bucket_size)
    with mock.patch("telescope.backends.megatron.backend.DistributedDataParallelConfig", config):
        backend = watch(job, **case.settings)
    assert all(len(buffer.buckets) >= 5 for ddp in backend._ddps for buffer in ddp.buffers), "many buckets"
    return backend


def run(name: str, case: Case, model: str, rank: int, folder: Path) -> None:
    """Log-probs and metrics of each rank; gradients of each stage's first rank; weights after a step of rank 0, and what `pack`
    gives before and after."""
    backend = build(case, model, rank)
    begun = pack_all(backend, rank)
    plain = backend.logprobs(share(case, rank))
    result = backend.train_step(share(case, rank))
    weights, packed = dict(backend.weights()), pack_all(backend, rank)
    np.save(folder / f"{name}-{rank}.npy", plain)
    (folder / f"{name}-{rank}.json").write_bytes(msgspec.json.encode(result.metrics))
    if rank < case.stage_ranks * case.stages and rank % case.stage_ranks == 0:
        torch.save(backend.updates[-1], folder / f"{name}-gradients-{rank // case.stage_ranks}.pt")
    if rank == 0:
        torch.save({"weights": weights, "packed": packed, "begun": begun}, folder / f"{name}.pt")
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
    if case.missing == EXPERTS:
        left_out: Any = mock.patch.object(DistributedDataParallel, "finish_grad_sync", without_experts)
    elif case.missing == ROWS:
        left_out = mock.patch.object(DistributedDataParallel, "finish_grad_sync")
    else:
        left_out = mock.patch(f"megatron.core.distributed.finalize_model_grads.{case.missing}", return_value=None)
    with left_out:
        run(f"planted {name}", case, model, rank, folder)


def without_experts(ddp: Any, **_: Any) -> None:
    for group in ddp.bucket_groups:
        group.finish_grad_sync()


def own_norms(model: str, rank: int, folder: Path) -> None:
    norm = Masters.norm

    def own(masters: Masters, everywhere: dict[str, bool]) -> torch.Tensor:
        with mock.patch("torch.distributed.all_reduce"):
            return norm(masters, everywhere)

    with mock.patch.object(Masters, "norm", own):
        run("own norms", OWN_NORMS, model, rank, folder)


HALF = {"mixed_precision_dtype": "bfloat16"}
HOSTED = {"optimizer_cpu_offload": True}
ROUNDED = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
RESUMED = {
    "TP 2, DP 2": Case(4, settings=TP2),
    "TP 2, DP 2, half": Case(4, settings=TP2 | HALF),
    "DP 2, half, whole moments": Case(2, settings=HALF | WHOLE_MOMENTS),
    "DP 2, half, again": Case(2, settings=HALF),
    "DP 2, half, in buckets": Case(2, settings=HALF | OVERLAPPED, bucket_size=1500),
    "PP 2, TP 2": Case(4, settings=PP2 | TP2),
    "PP 2, DP 2, half": Case(4, settings=PP2 | HALF),
    "EP 2, TP 2, DP 2, experts": Case(4, "experts", EP2 | TP2),
    "EP 2, half, experts": Case(2, "experts", EP2 | HALF),
    "PP 2, EP 2, experts": Case(4, "experts", PP2 | EP2),
    "CP 2, TP 2": Case(4, settings=CP2 | TP2),
    "CP 2, PP 2, half": Case(4, settings=CP2 | PP2 | HALF),
    "CP 2, whole moments": Case(2, settings=CP2 | WHOLE_MOMENTS),
    "TP 2, DP 2, of an engine": Case(4, settings=TP2 | ENGINE),
    "1": Case(1),
    "DP 2, half, half of it hosted": Case(2, settings=HALF | HOSTED | {"optimizer_offload_fraction": 0.5}),
    "EP 2, half, hosted, experts": Case(2, "experts", EP2 | HALF | HOSTED),
    "DP 2, half, whole moments, hosted": Case(2, settings=HALF | WHOLE_MOMENTS | HOSTED),
    "DP 2, half, hosted, rounded": Case(2, settings=HALF | HOSTED | ROUNDED),
    "PP 2, DP 2, hosted, rounded": Case(4, settings=PP2 | HOSTED | ROUNDED),
}
"""Each goes on from its own checkpoint."""
AS_WITHOUT = {
    "DP 2, half, half of it hosted": "DP 2, half, again",
    "EP 2, half, hosted, experts": "EP 2, half, experts",
    "DP 2, half, whole moments, hosted": "DP 2, half, whole moments",
}
"""Of these, whose weights and moments are in host memory between updates: the one that is the same without."""
MOVED = {
    "1 of four": ("TP 2, DP 2", Case(1)),
    "an engine of four": ("TP 2, DP 2", Case(2, settings=TP2 | ENGINE)),
    "1 of an engine": ("TP 2, DP 2, of an engine", Case(1)),
    "PP 2 of four": ("TP 2, DP 2", Case(2, settings=PP2)),
    "1 of two stages": ("PP 2, TP 2", Case(1)),
    "EP 2 of four": ("EP 2, TP 2, DP 2, experts", Case(2, "experts", EP2)),
    "EP 2 of two stages": ("PP 2, EP 2, experts", Case(2, "experts", EP2)),
    "CP 2 of four": ("TP 2, DP 2", Case(2, settings=CP2)),
    "1 of shared rows": ("CP 2, TP 2", Case(1)),
    "TP 2 of shared rows": ("CP 2, TP 2", Case(2, settings=TP2)),
    "1 of rounded moments": ("PP 2, DP 2, hosted, rounded", Case(1, settings=HOSTED | ROUNDED)),
}
"""Each goes on from the checkpoint of one of `RESUMED`, by its name, which has four ranks."""
OF_FSDP = {
    "TP 2": Case(2, settings=TP2),
    "PP 2": Case(2, settings=PP2),
    "CP 2": Case(2, settings=CP2),
    "EP 2, TP 2, experts": Case(2, "experts", EP2 | TP2),
}
"""Each goes on from a checkpoint of FSDP, which lies in the folder before the ranks begin."""


def resume(name: str, case: Case, model: str, rank: int, folder: Path, begin: Path | None) -> None:
    """Steps 2 and 3, after step 1 and a save or from a checkpoint. Of a tied embedding on two stages, what each rank has of it
    before and after each of these steps."""
    backend = build(case, model, rank, resume=begin)
    if begin is None:
        backend.train_step(share(case, rank))
        outcomes: queue.Queue[Any] = queue.Queue()
        backend.save(1, folder / f"saved {name}", outcomes.put)
        outcome = outcomes.get(timeout=60)
        assert isinstance(outcome, Saved), outcome
        dist.barrier()  # files of all ranks
        store(folder / f"saved {name}.pt", backend, [], rank)
    how, metrics, copies = "went on" if begin is None else "resumed", [], [embedding(backend)]
    for step in (2, 3):
        metrics.append(backend.train_step(share(case, rank, step)).metrics)
        copies.append(embedding(backend))
    store(folder / f"{how} {name}.pt", backend, metrics, rank)
    if case.stages > 1:
        torch.save(copies, folder / f"{how} {name}-embedding-{rank}.pt")
    backend.close()


def embedding(backend: Watching) -> dict[str, torch.Tensor]:
    """What computes, all that this rank has of it, and this rank's piece of what is updated and of its moments, if any; nothing
    on a stage without it."""
    found, masters = dict[str, torch.Tensor](), backend._masters
    if (whole := masters.parameters.get(EMBEDDING_NAME)) is not None:
        found["computing"] = whole
    if (piece := masters.pieces.get(EMBEDDING_NAME)) is not None:
        found["updated"] = piece.updated
        found |= {kind: backend._updater.moment(kind, piece) for kind in MOMENTS}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def store(file: Path, backend: Any, metrics: list[dict[str, float]], rank: int) -> None:
    weights = dict(backend.weights())
    if rank == 0:
        torch.save({"metrics": metrics, "weights": weights}, file)


KEPT = {
    "1": Case(1),
    "TP 2": Case(2, settings=TP2),
    "TP 2, whole rows": Case(2, settings=TP2 | WHOLE_ROWS),
    "CP 2": Case(2, settings=CP2),
    "CP 2, TP 2": Case(4, settings=CP2 | TP2),
}
"""Whose layers are asked what they keep for their backward pass, in models of one and of three layers of each of `KEEPING`."""
KEEPING: dict[str, dict[str, Any]] = {"qwen3": {}, "qwen2": {}, "llama": {"num_key_value_heads": 2}}
"""The last one's key heads are fewer than four ranks need."""
KEPT_TOKENS = 64
"""Of a row that ranks share each has so many."""


def keeping_model(folder: Path, kind: str, layers: int) -> Path:
    return folder / f"{kind}-of-{layers}"


def count_kept(name: str, case: Case, kind: str, layers: int, rank: int, folder: Path) -> None:
    """Bytes that autograd keeps of the layers of one row, in bfloat16, on the first rank."""
    model = str(keeping_model(folder, kind, layers))
    backend = watch(make(case, model, World(rank, case.ranks, "cpu")), **case.settings, **HALF)
    policy = backend._policy
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    context = backend._parallel.context
    ids = torch.zeros(1, KEPT_TOKENS, dtype=torch.int64)
    row = np.array([0, KEPT_TOKENS * (1 if context is None else context.size)])
    cos, sin = policy._rotation(torch.empty(0, dtype=torch.bfloat16), torch.arange(KEPT_TOKENS)[None])
    told = AttentionRow(qkv_format="sbhd", segments=attention.segments(policy.kind, row, "cpu", context), cos=cos, sin=sin)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.passed(0, ParallelRow(ids, told, ids[0], ids[0], 1.0), None)
    if rank == 0:
        (folder / f"kept {name} {kind} {layers}").write_text(str(sum(storage.nbytes() for storage in kept.values())))
    backend.close()


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


def end_groups() -> None:
    """Of a backend, but for the one of all ranks: each has threads that wake a hundred times a second, as long as anything
    refers to it. What the backend before left in cycles goes first."""
    gc.collect()
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def main() -> int:
    folder = Path(sys.argv[1])
    made = {name: str(folder / name.replace(" ", "-")) for name in MODELS}

    def one_rank(rank: int) -> None:
        with on_cpu():
            for size in (4, 2, 1):
                if rank < size:
                    meet(folder / f"meeting-{size}", rank, size)
                    ranks.leave = end_groups
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
        for name, (begun, case) in MOVED.items():
            if case.ranks == size:
                resume(name, case, made[case.model], rank, folder, folder / f"saved {begun}")
        for name, case in OF_FSDP.items():
            if case.ranks == size:
                resume(f"{name} of FSDP", case, made[case.model], rank, folder, folder / f"saved by FSDP {case.model}")
        for name, case in KEPT.items():
            if case.ranks == size:
                for kind in KEEPING:
                    for layers in (1, 3):
                        count_kept(name, case, kind, layers, rank, folder)
        if size == 2:
            own_norms(made["qwen3"], rank, folder)

    return forked(one_rank)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
