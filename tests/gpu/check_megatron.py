"""backend=megatron on one, two or four GPUs against backend=fsdp:
`python -m tests.gpu.check_megatron [--gpus 2] [--only "PP 2"] [--speed [NAME ...]]`.

The same batch and weights by both: log-probs, loss, every parameter's gradient, the weights after one step of AdamW. In
float32 (TF32 off) a gradient is within 1e-5 of FSDP's, by ‖g - g′‖ / ‖g‖ of each tensor; in bfloat16 within 2e-2 of FSDP's in
float32, or within twice FSDP's own distance in bfloat16. The worst tensor is named. Then two checks of itself: a checkpoint is
gone on with, in float32 to the bit, and a sum over ranks that is left out is found. Models with experts share them out over two
GPUs, with and without recorded routing (`--models experts "experts, replayed"`: those alone).

Worlds whose name has `TE` or `FP8` in it want Transformer Engine, and are left out where it is not installed: its layers are
held to what bfloat16 is, FP8 to `FP8_FAR`. On one GPU a sample's log-probs must not depend on what else is in its row, to the
bit (but where FP8 has one scale for all of a tensor), and those taken without a gradient are those that training computes. A
checkpoint of one kind of layers is gone on with by the other. In worlds whose name has `hosted` in it, what lies in host memory
must be pinned.

`--only` takes worlds whose name has one of these in it. `--speed` times models of real shapes (`--shape 0.6B 4B`) beside FSDP's
compiled layers, `--profile` says where that time goes on the GPU, and `--no-agreement` leaves all else out. Exits 0 only if all
hold. `--device cpu` runs the same on a CPU. No pytest module: it needs GPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.shapes import SHAPES, make_model
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, World
from telescope.backends.common import shards
from telescope.backends.fsdp import FSDP
from telescope.backends.megatron import MOMENTS, Megatron, has_engine
from telescope.maths import packing
from telescope.maths.support import Support
from tests.backends.megatron_watching import on_cpu
from tests.backends.megatron_watching import watch as watch_megatron
from tests.backends.models import random_experts, random_model, random_other
from tests.backends.shards import make_job, make_shard, part, with_routing
from tests.backends.watching import watch
from tests.gpu.needed import need_gpus
from tests.ports import free_ports

LENGTHS = (50, 230, 110, 300, 70, 180, 400, 90, 33, 129)
SHARES = {1: [list(range(10))], 2: [[0, 2, 4, 6, 8], [9, 7, 5, 3, 1]]}
FLOAT32, HALF, TWICE, RESUMED = 1e-5, 2e-2, 2.0, 0.1
FP8_FAR, FP8_LOGPROBS = 0.5, 0.6
"""In FP8, of a tensor's gradient and of a log-prob: e4m3 has three bits behind the point."""
TRAINED = 1e-2
"""Of log-probs with and without a gradient: compiled or not, they are made of the same operations in the same precision."""
ACROSS = 0.5
"""In bfloat16, of a run that goes on with other layers, as `RESUMED`: a tensor that is put elsewhere is tens of steps away."""
RATE = 1e-3
"""That of `make_job`."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "experts": {"seed": 4},
    "experts, replayed": {"seed": 4},
}
"""The last one's tokens go to experts that were recorded: in half precision each backend's own router may choose others, so the
one before is compared in float32 alone."""
EXPERTS = {
    "num_experts": 8, "moe_intermediate_size": 128, "num_hidden_layers": 3, "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {
    "hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 1003, "initializer_range": 0.05, "max_position_embeddings": 1024, "num_hidden_layers": 4,
}  # fmt: skip
TP2, PP2, CP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"context_parallel_size": 2}
ROUND = PP2 | {"virtual_pipeline_size": 2}
HOSTED = {"optimizer_cpu_offload": True}
ROUNDED = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
HALF_HOSTED = HOSTED | {"optimizer_offload_fraction": 0.5}
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "1, hosted": (1, HOSTED),
    "1, hosted in part, rounded": (1, HALF_HOSTED | ROUNDED),
    "DP 2, hosted": (2, HOSTED),
    "DP 2, hosted in part, rounded": (2, HALF_HOSTED | ROUNDED),
    "PP 2, hosted, rounded": (2, PP2 | HOSTED | ROUNDED),
    "1, selective": (1, {"gradient_checkpointing": "selective"}),
    "TP 2": (2, TP2),
    "TP 2, whole rows": (2, TP2 | {"sequence_parallel": False}),
    "TP 2, selective": (2, TP2 | {"gradient_checkpointing": "selective"}),
    "DP 2": (2, {}),
    "DP 2, overlapped": (2, {"overlap_grad_reduce": True}),
    "DP 2, whole moments": (2, {"use_distributed_optimizer": False}),
    "CP 2": (2, CP2),
    "CP 2, selective": (2, CP2 | {"gradient_checkpointing": "selective"}),
    "CP 2, overlapped, whole moments": (2, CP2 | {"overlap_grad_reduce": True, "use_distributed_optimizer": False}),
    "CP 2, TP 2": (4, CP2 | TP2),
    "CP 2, PP 2": (4, CP2 | PP2),
    "CP 2, DP 2": (4, CP2),
    "PP 2": (2, PP2),
    "PP 2, one row, cold": (2, PP2),
    "PP 2, round, one row, cold": (2, ROUND),
    "PP 2, round": (2, ROUND),
    "PP 2, round, overlapped, not computed again": (2, ROUND | {"overlap_grad_reduce": True, "gradient_checkpointing": False}),
}
KEPT, FUSED = {"gradient_checkpointing": False}, {"gradient_accumulation_fusion": True}
OWN, ENGINE = {"use_transformer_engine": False}, {"use_transformer_engine": True}
FP8, TENSORWISE = {"fp8": True}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
OWN_WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "own layers, compiled": (1, OWN | {"compile": True}),
    "own layers, checkpoint for TE": (1, OWN),
    "own layers, TP 2": (2, OWN | TP2),
}
ENGINE_WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "TE": (1, ENGINE),
    "TE, compiled, fused sums, not computed again": (1, ENGINE | KEPT | FUSED | {"compile": True}),
    "TE, fused sums": (1, ENGINE | FUSED),
    "TE, selective": (1, ENGINE | {"gradient_checkpointing": "selective"}),
    "TE, checkpoint for own layers": (1, ENGINE),
    "TE, TP 2": (2, ENGINE | TP2),
    "TE, TP 2, whole rows": (2, ENGINE | TP2 | {"sequence_parallel": False}),
    "TE, TP 2, fused sums, not computed again": (2, ENGINE | TP2 | KEPT | FUSED),
    "TE, DP 2, overlapped": (2, ENGINE | {"overlap_grad_reduce": True}),
    "TE, PP 2, round": (2, ENGINE | ROUND),
    "TE, CP 2": (2, ENGINE | CP2),
    "FP8": (1, FP8),
    "FP8, fused sums, not computed again": (1, FP8 | KEPT | FUSED),
    "FP8, tensorwise": (1, TENSORWISE),
    "FP8, ends in bfloat16": (1, FP8 | {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}),
    "FP8, TP 2": (2, FP8 | TP2),
    "FP8, TP 2, whole rows": (2, FP8 | TP2 | {"sequence_parallel": False}),
    "FP8, tensorwise, TP 2": (2, TENSORWISE | TP2),
    "FP8, PP 2": (2, FP8 | PP2),
    "FP8, CP 2": (2, FP8 | CP2),
    "FP8, hosted, fused sums": (1, FP8 | HOSTED | FUSED),
    "FP8, DP 2, hosted in part, rounded": (2, FP8 | HALF_HOSTED | ROUNDED),
}
"""In bfloat16 alone; FP8's widths divide by 128 on two ranks of a model, too."""
CROSSED = {"TE, checkpoint for own layers": OWN, "own layers, checkpoint for TE": ENGINE}
"""What is set otherwise where a checkpoint of these is gone on with."""
COMPILED, SELECTIVE = {"compile": True}, {"gradient_checkpointing": "selective"}
FASTEST = FUSED | COMPILED
SPEEDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "TE fastest": (1, "megatron", ENGINE | KEPT | FASTEST),
    "FSDP compiled": (1, "fsdp", KEPT | COMPILED | {"reshard_after_forward": False}),
    "FP8 fastest": (1, "megatron", FP8 | KEPT | FASTEST),
    "own layers, compiled, selective": (1, "megatron", OWN | SELECTIVE | COMPILED),
    "FP8 tensorwise fastest": (1, "megatron", TENSORWISE | KEPT | FASTEST),
    "TE, compiled": (1, "megatron", ENGINE | KEPT | COMPILED),
    "TE": (1, "megatron", ENGINE | KEPT),
    "TE, computed again": (1, "megatron", ENGINE | FASTEST),
    "TE, selective": (1, "megatron", ENGINE | FASTEST | SELECTIVE),
    "FP8, computed again": (1, "megatron", FP8 | FASTEST),
    "own layers, selective": (1, "megatron", OWN | SELECTIVE),
    "own layers, computed again": (1, "megatron", OWN),
    "FSDP compiled, computed again": (1, "fsdp", COMPILED),
    "FSDP": (1, "fsdp", {}),
    "TE, hosted": (1, "megatron", ENGINE | KEPT | FASTEST | HOSTED),
    "TE, rounded": (1, "megatron", ENGINE | KEPT | FASTEST | ROUNDED),
    "FP8, hosted, rounded": (1, "megatron", FP8 | KEPT | FASTEST | HOSTED | ROUNDED),
    "FSDP compiled on two": (2, "fsdp", KEPT | COMPILED | {"reshard_after_forward": False}),
    "TE on two": (2, "megatron", ENGINE | KEPT | FASTEST),
    "TE, TP 2": (2, "megatron", ENGINE | TP2 | KEPT | FASTEST),
    "FP8, TP 2": (2, "megatron", FP8 | TP2 | KEPT | FASTEST),
    "TE, PP 2": (2, "megatron", ENGINE | PP2 | FASTEST),
    "TE, PP 2, round": (2, "megatron", ENGINE | ROUND | FASTEST),
    "TE, CP 2": (2, "megatron", ENGINE | CP2 | KEPT | FASTEST),
    "own layers, TP 2": (2, "megatron", OWN | TP2 | SELECTIVE),
    "own layers, PP 2": (2, "megatron", OWN | PP2),
    "own layers, CP 2": (2, "megatron", OWN | CP2 | SELECTIVE),
}
"""By name: GPUs, backend, settings; the most telling ones first."""
ROW = 16_384
"""Tokens of a row that is timed."""
EP2 = {"expert_parallel_size": 2}
EXPERT_WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "TP 2": (2, TP2),
    "EP 2": (2, EP2 | {"overlap_grad_reduce": True}),
    "EP 2, TP 2": (2, EP2 | TP2),
    "EP 2, TP 2, selective": (2, EP2 | TP2 | {"gradient_checkpointing": "selective"}),
    "CP 2": (2, CP2),
    "EP 2, CP 2": (2, EP2 | CP2),
    "PP 2": (2, PP2),
    "PP 2, EP 2": (4, PP2 | EP2 | {"overlap_grad_reduce": True}),
    "PP 2, EP 2, TP 2": (4, PP2 | EP2 | TP2),
    "PP 2, EP 2, hosted in part, rounded": (4, PP2 | EP2 | HALF_HOSTED | ROUNDED),
}
COLD = "one row, cold"
"""Worlds whose ranks are processes of their own and begin with a step, of fewer rows than stages: kernels are loaded and
memory is found while a stage waits for the other."""
RESUMED_WORLDS = (
    "1", "TP 2", "DP 2", "EP 2", "PP 2", "PP 2, round", "CP 2", "CP 2, TP 2", "PP 2, EP 2", "1, hosted",
    "1, hosted in part, rounded", "DP 2, hosted", "DP 2, hosted in part, rounded", "PP 2, hosted, rounded",
    "FP8, hosted, fused sums", "FP8, DP 2, hosted in part, rounded", "PP 2, EP 2, hosted in part, rounded",
)  # fmt: skip
MIXED = "TP 2, temperatures, cut, entropy"
"""A world of two whose trajectories have temperatures of their own, of which `CUT` leaves few tokens, with an entropy bonus. In
float32 alone: in bfloat16 other tokens are among the likeliest."""
CUT, TEMPERATURES, BONUS = Support(top_k=100, top_p=0.95), (0.7, 1.0, 1.4), 0.1
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"mixed_precision_dtype": None, "attention": "sdpa"},
    "bfloat16": {"mixed_precision_dtype": "bfloat16"},
}
SUMS = "megatron.core.distributed.finalize_model_grads."
NORMS, EMBEDDING = f"{SUMS}_allreduce_non_tensor_model_parallel_grads", f"{SUMS}_allreduce_word_embedding_grads"
ROWS = "megatron.core.distributed.DistributedDataParallel.finish_grad_sync"


@dataclass(frozen=True)
class Order:
    """One run of one backend, told to each of its ranks."""

    backend: str
    model: str
    size: int
    settings: dict[str, Any]
    out: Path
    missing: str = ""
    """A sum over ranks that is left out."""
    mixed: bool = False
    """See `MIXED`."""
    replayed: bool = False
    """Tokens go to experts that were recorded."""
    resumed: bool = False
    crossed: dict[str, Any] = field(default_factory=dict)
    """See `CROSSED`."""
    cold: bool = False
    """See `COLD`."""
    shape: str = ""
    """Of a model to be timed."""
    samples: tuple[int, ...] = ()
    """Lengths of samples that it is timed with."""
    profiled: bool = False
    device: str = "cuda"

    @property
    def tensor_size(self) -> int:
        return int(self.settings.get("tensor_parallel_size", 1))

    @property
    def stages(self) -> int:
        return int(self.settings.get("pipeline_parallel_size", 1))

    @property
    def stage_ranks(self) -> int:
        return self.tensor_size * int(self.settings.get("context_parallel_size", 1))

    @property
    def row_tokens(self) -> int:
        """Stages want more rows than two."""
        if self.cold:
            return 2048
        return 1024 if self.stages == 1 else 448

    @property
    def chooses_layers(self) -> bool:
        return "use_transformer_engine" in self.settings or "fp8" in self.settings

    @property
    def models(self) -> int:
        return self.size // (self.stage_ranks * self.stages)

    def model_of(self, rank: int) -> int:
        return rank // (self.stage_ranks * self.stages)

    def share(self, rank: int) -> list[int]:
        """Trajectories of a rank."""
        return SHARES[self.models][self.model_of(rank)]


def rank_of(rank: int, orders: list[Order], ports: list[int]) -> None:
    """One order after another: imports are paid once. Each has two ports, the second one to meet at again."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for number, order in enumerate(orders):
        size = str(order.size)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[2 * number])}
        world = World(rank, order.size, "cpu" if order.device == "cpu" else f"cuda:{rank}")
        if order.shape:
            time_of(rank, order, world)
        else:
            compute(rank, order, world, ports[2 * number + 1])
        gc.collect()
        torch.cuda.empty_cache()


def compute(rank: int, order: Order, world: World, again: int) -> None:
    planted: Any = mock.patch(order.missing, return_value=None) if order.missing else nullcontext()
    with planted, on_cpu() if order.device == "cpu" else nullcontext():
        job = make_job(model=order.model, seq_len=order.row_tokens, world=world, router_replay=order.replayed)
        if order.mixed:
            job = replace(job, support=CUT, algorithm=GRPO(entropy_coef=BONUS))
        backend = build(order, job)
        shard = make_shard(lengths=LENGTHS, temperatures=TEMPERATURES if order.mixed else (1.0,))
        if order.replayed:
            shard = with_routing(shard, layers=2, experts=8, top_k=2, share=1.0)
        own = part(shard, order.share(rank))
        logprobs = np.empty(0) if order.cold else backend.logprobs(own)
        found: dict[str, Any] = {"metrics": backend.train_step(own).metrics}
        gradients = {name: tensor.cpu() for name, tensor in backend.updates[-1].items()}
        found["weights"] = dict(backend.weights())
        if order.size == 1 and order.chooses_layers:
            found |= found_alone(backend, own)
        if order.device == "cuda" and order.settings.get("optimizer_cpu_offload"):
            found["pinned"] = all_pinned(backend)
        if order.resumed:
            found["resumed"] = gone_on(backend, order, own, world, again)
        else:
            backend.close()
    np.save(f"{order.out}-{rank}.npy", logprobs)
    if order.model_of(rank) == 0 and rank % order.stage_ranks == 0:
        torch.save(gradients, f"{order.out}-gradients-{rank // order.stage_ranks}")
    if rank == 0:
        torch.save(found, order.out)


def build(order: Order, job: Job) -> Any:
    settings = {"gradient_checkpointing": True, **order.settings}
    if order.backend == "fsdp":
        return watch(job, **settings)
    return watch_megatron(job, **settings)


def found_alone(backend: Any, own: Any) -> dict[str, float]:
    """How far a sample's log-probs are from those with other neighbours in rows of the same lengths, and log-probs without a
    gradient from those with one."""
    ends = np.cumsum([item.length for item in own.items])
    first, last = int(ends[3]), int(ends[4])
    other = replace(own, ids=own.ids.copy())
    other.ids[:first] = other.ids[:first] // 2 + 1
    other.ids[last:] = other.ids[last:] // 3 + 2
    one, two = (backend.logprobs(shard)[first:last] for shard in (own, other))
    apart = 0.0
    for row in (row for rows in backend._plan(own) for row in rows):
        given = backend._on_device(packing.arrange(row, shards.trajectories(own), own.items))[1]
        trained = backend._policy(given, 256)[0].detach()
        apart = max(apart, float((trained - backend._policy.logprobs_only(given, 256)).abs().max()))
    return {"neighbours": float(np.nanmax(np.abs(one - two))), "trained": apart}


def all_pinned(backend: Any) -> bool:
    """Of weights and moments, those in host memory."""
    pieces = [backend._masters.pieces[name] for name in backend._masters.hosted]
    found = [
        *(piece.updated for piece in pieces),
        *(backend._updater.moment(kind, piece) for piece in pieces for kind in MOMENTS),
    ]
    return all(each.is_cuda or each.is_pinned() for each in found)


def gone_on(backend: Any, order: Order, own: Any, world: World, port: int) -> float:
    """How far two steps after a save are from those after its checkpoint: weights in steps of AdamW, as in `otherwise`, and
    losses. 0: to the bit. Kernels of attention in half precision add up in no fixed order, so there a little is left."""
    outcomes: queue.Queue[Any] = queue.Queue()
    backend.save(1, order.out.with_suffix(".saved"), outcomes.put)
    outcomes.get(timeout=60)
    torch.distributed.barrier()
    first = [backend.train_step(replace(own, step=step)).metrics["loss"] for step in (2, 3)]
    weights = dict(backend.weights())
    backend.close()
    os.environ["MASTER_PORT"] = str(port)
    job = make_job(model=order.model, seq_len=order.row_tokens, world=world, router_replay=order.replayed)
    order = replace(order, settings=order.settings | order.crossed)
    again = build(order, replace(job, resume=order.out.with_suffix(".saved")))
    second = [again.train_step(replace(own, step=step)).metrics["loss"] for step in (2, 3)]
    apart: float = otherwise(weights, dict(again.weights())) + max(
        abs(one - other) for one, other in zip(first, second, strict=True)
    )
    again.close()
    return apart


def run(orders: list[Order]) -> None:
    """Orders of one size."""
    ports = free_ports(2 * len(orders))
    spawn(rank_of, args=(orders, ports), nprocs=orders[0].size)  # type: ignore[no-untyped-call]


def read(order: Order) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(order.out)
    found["gradients"] = {}
    for stage in range(order.stages):
        found["gradients"] |= torch.load(f"{order.out}-gradients-{stage}")
    found["logprobs"] = [np.load(f"{order.out}-{rank}.npy") for rank in range(order.size)]
    return found


def worst(expected: dict[str, Any], found: dict[str, Any]) -> tuple[float, str]:
    named = {name.removeprefix("lm."): tensor.cpu() for name, tensor in expected.items()}
    assert named.keys() == found.keys()
    return max((float((found[name].cpu() - tensor).norm() / tensor.norm()), name) for name, tensor in named.items())


def otherwise(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Of the tensor where it is the most: how far weights are apart after a step of AdamW, in steps, on average. (A number
    whose gradient is rounding alone may go either way.)"""
    assert expected.keys() == found.keys()
    return max((float((found[name] - tensor).abs().mean()) for name, tensor in expected.items()), default=0.0) / RATE


def allowed(exact: dict[str, Any], half: dict[str, Any]) -> dict[str, float]:
    """Of each tensor in bfloat16."""
    own = {name: float((half[name].cpu() - tensor.cpu()).norm() / tensor.norm()) for name, tensor in exact.items()}
    return {name.removeprefix("lm."): max(HALF, TWICE * far) for name, far in own.items()}


def logprob_gap(expected: np.ndarray, found: list[np.ndarray], order: Order) -> float:
    ends = np.cumsum(LENGTHS)
    most = 0.0
    for rank, mine in enumerate(found):
        wanted = np.concatenate([expected[ends[i] - LENGTHS[i] : ends[i]] for i in order.share(rank)])
        most = max(most, float(np.nanmax(np.abs(mine - wanted))))
    return most


def agreement(folder: Path, gpus: int, device: str, models: list[str], only: list[str]) -> bool:
    plain, mixed, ours = dict[tuple[str, str], Order](), dict[str, Order](), dict[str, tuple[str, str, Order]]()
    for name in models:
        changes = MODELS[name]
        model, replayed = make_one(name, changes, folder / name), name.endswith("replayed")
        for precision, how in PRECISIONS.items():
            if name == "experts" and precision != "float32":
                continue
            out = folder / f"fsdp-{name}-{precision}"
            plain[name, precision] = Order("fsdp", model, 1, how, out, replayed=replayed, device=device)
            for world, (size, settings) in worlds(name, precision, engine=device == "cuda" and has_engine()).items():
                crossed, out = CROSSED.get(world, {}), folder / f"{name}-{world}-{precision}"
                order = Order(
                    "megatron", model, size, settings | how, out, resumed=world in RESUMED_WORLDS or bool(crossed),
                    crossed=crossed, cold=COLD in world, replayed=replayed, device=device,
                )  # fmt: skip
                ours[f"{name}, {world}, {precision}"] = name, precision, order
        if replayed:
            continue
        how = PRECISIONS["float32"]
        planted = {"TP 2": (TP2, NORMS), "CP 2": (CP2, ROWS)}
        if changes.get("tie_word_embeddings"):
            planted["PP 2"] = PP2, EMBEDDING
        for world, (settings, missing) in planted.items():
            out = folder / f"planted-{name}-{world}"
            order = Order("megatron", model, 2, settings | how, out, missing=missing, device=device)
            ours[f"{name}, {world}, a sum that is left out"] = name, "float32", order
        if name == "experts":
            continue
        mixed[name] = Order("fsdp", model, 1, how, folder / f"fsdp-{name}-mixed", mixed=True, device=device)
        order = Order("megatron", model, 2, TP2 | how, folder / f"{name}-mixed", mixed=True, device=device)
        ours[f"{name}, {MIXED}, float32"] = name, "float32", order
    asked = {each: found for each, found in ours.items() if found[2].size <= gpus and any(part in each for part in only)}
    if not asked:
        raise SystemExit(f"no world of {gpus} GPUs has one of {only} in its name: {', '.join(ours)}")
    for size in range(1, gpus + 1):
        every = *plain.values(), *(mixed.values() if gpus > 1 else ()), *(found[2] for found in asked.values())
        if orders := [order for order in every if order.size == size and not order.cold]:
            run(orders)
        for order in (order for order in every if order.size == size and order.cold):
            run([order])
    exact = {name: read(plain[name, "float32"]) for name in models}
    limits = {
        name: allowed(exact[name]["gradients"], read(plain[name, "bfloat16"])["gradients"])
        for name in models if (name, "bfloat16") in plain
    }  # fmt: skip
    found = [
        tell(each, order, read(mixed[name]) if order.mixed else exact[name], limits.get(name, {}), how)
        for each, (name, how, order) in asked.items()
    ]
    return all(found)


def worlds(model: str, precision: str, *, engine: bool) -> dict[str, tuple[int, dict[str, Any]]]:
    """Those that a model is compared in. `engine`: Transformer Engine is there."""
    if "experts" in model:
        return EXPERT_WORLDS
    if precision == "float32":
        return WORLDS
    if engine:
        return WORLDS | OWN_WORLDS | ENGINE_WORLDS
    return WORLDS | {world: found for world, found in OWN_WORLDS.items() if world not in CROSSED}


def make_one(name: str, changes: dict[str, Any], place: Path) -> str:
    given = {**SIZES, **changes}
    if name == "qwen3":
        return random_model(place, **given)
    if name.startswith("experts"):
        return random_experts(place, **{**given, **EXPERTS})
    return random_other(place, name, **given)


def tell(name: str, order: Order, exact: dict[str, Any], limits: dict[str, float], precision: str) -> bool:
    """Print one line; `exact` is what FSDP found in float32."""
    found = read(order)
    far, whose = worst(exact["gradients"], found["gradients"])
    if order.missing:
        print(f"{name}: {whose} is {far:.1e} apart {'ok' if far > FLOAT32 else 'BAD'}", flush=True)
        return far > FLOAT32
    gap = None if order.cold else logprob_gap(exact["logprobs"][0], found["logprobs"], order)
    moved = otherwise(exact["weights"], found["weights"])
    if precision == "float32":
        fine = far <= FLOAT32 and (gap or 0.0) <= 1e-4 and moved <= 1e-2
    elif order.settings.get("fp8"):
        fine = far <= FP8_FAR and (gap or 0.0) <= FP8_LOGPROBS
    else:
        apart = {each.removeprefix("lm."): tensor for each, tensor in exact["gradients"].items()}
        fine = all(worst({each: t}, {each: found["gradients"][each]})[0] <= limits[each] for each, t in apart.items())
        fine &= (gap or 0.0) <= 0.2
    behind = float(found.get("resumed", 0.0))
    fine &= behind <= (0.0 if precision == "float32" else ACROSS if order.crossed else RESUMED)
    pinned = bool(found.get("pinned", True))
    alone = "" if pinned else ", NOT PINNED"
    fine &= pinned
    if "neighbours" in found:
        alone += f", neighbours {found['neighbours']:.1e}, trained {found['trained']:.1e}"
        fine &= found["trained"] <= TRAINED and (found["neighbours"] == 0.0 or order.settings.get("fp8_recipe") == "tensorwise")
    loss = abs(found["metrics"]["loss"] - exact["metrics"]["loss"])
    print(
        f"{name}: gradient {far:.1e} ({whose}), {'' if gap is None else f'log-probs {gap:.1e}, '}loss {loss:.1e}, "
        f"weights {moved:.1e}{f', went on {behind:.1e} apart' if order.resumed else ''}{alone} {'ok' if fine else 'BAD'}",
        flush=True,
    )
    return fine


def time_of(rank: int, order: Order, world: World) -> None:
    """Of each length of samples: tokens a second of the faster of the last two of three steps; and the fullest rank's peak of
    memory beside its estimate. Two rows of 16,384 tokens a rank."""
    job = make_job(model=order.model, world=world, seq_len=ROW, entropy_chunk_size=2048)
    settings = (FSDP if order.backend == "fsdp" else Megatron)(**order.settings)
    torch.cuda.reset_peak_memory_stats()
    backend: Any = None
    try:
        backend = settings.build(job)
        for length in order.samples:
            told = steps_of(order, backend, rank, length)
            if rank == 0:
                print(f"{order.shape}, {order.out.name}, samples of {length}: {told}", flush=True)
        told_memory(rank, order, settings, job)
    except torch.OutOfMemoryError:
        if order.size > 1:
            raise  # the others would wait
        print(f"{order.shape}, {order.out.name}: does not fit", flush=True)
    finally:
        if backend is not None:
            backend.close()


def steps_of(order: Order, backend: Any, rank: int, length: int) -> str:
    count = 2 * (ROW // length) * order.size
    shard = make_shard(lengths=[length] * count, logprob=-12.0)
    own = part(shard, range(order.model_of(rank), count, order.models))
    found = [backend.train_step(replace(own, step=step)).metrics for step in (1, 2, 3)][1:]
    if order.profiled and rank == 0 and order.size == 1:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
            backend.train_step(replace(own, step=4))
        print(taken.key_averages().table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=70), flush=True)
    fastest = max(found, key=lambda metrics: metrics["trainer_tokens_per_s"])
    return f"{fastest['trainer_tokens_per_s']:.0f} tokens/s, MFU {fastest.get('mfu', 0.0):.1%}, loss {found[0]['loss']:.4f}"


def told_memory(rank: int, order: Order, settings: Any, job: Job) -> None:
    most = torch.tensor(torch.cuda.max_memory_allocated(), device=job.world.device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    if rank:
        return
    longest = max(order.samples)
    told = settings.rank_memory(SHAPES[order.shape], job.model, job.trainer, ranks=order.size, longest=longest)
    assert told is not None
    peak, estimate = int(most) / 2**30, told.total / 2**30
    print(f"{order.shape}, {order.out.name}: {peak:.2f} GiB, estimated {estimate:.2f} ({estimate / peak - 1:+.1%})", flush=True)


def speed(
    folder: Path, shape: str, wanted: dict[str, tuple[int, str, dict[str, Any]]], samples: tuple[int, ...], *, profiled: bool
) -> None:  # fmt: skip
    """The wanted ones in their order, those of one size together."""
    model = make_model(SHAPES[shape], folder / shape)
    torch.cuda.empty_cache()
    for size in sorted({size for size, _, _ in wanted.values()}):
        orders = []
        for name, (ranks, backend, settings) in wanted.items():
            if ranks == size:
                chosen = {"mixed_precision_dtype": "bfloat16", **settings}
                order = Order(backend, str(model), size, chosen, folder / name, shape=shape, samples=samples, profiled=profiled)
                orders.append(order)
        run(orders)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of worlds' names")
    parser.add_argument("--no-agreement", action="store_true")
    parser.add_argument("--speed", nargs="*", choices=list(SPEEDS), help="all of them, or these")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shape", nargs="+", default=["0.6B"], choices=SHAPES)
    parser.add_argument("--samples", nargs="+", type=int, default=[2048], help="tokens of each")
    given = parser.parse_args()
    if given.device == "cuda":
        need_gpus(given.gpus, instead="try `--device cpu`")
        print(torch.cuda.get_device_name())
    print("torch", torch.__version__)
    good = True
    with tempfile.TemporaryDirectory() as name:
        if not given.no_agreement:
            good = agreement(Path(name), given.gpus, given.device, given.models, given.only)
        if given.speed is not None:
            wanted = {each: SPEEDS[each] for each in given.speed or SPEEDS if SPEEDS[each][0] <= given.gpus}
            for shape in given.shape:
                speed(Path(name), shape, wanted, tuple(given.samples), profiled=given.profile)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
