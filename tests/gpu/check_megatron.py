"""backend=megatron on one, two or four GPUs against backend=fsdp:
`python -m tests.gpu.check_megatron [--gpus 2] [--only "PP 2"] [--speed]`.

The same batch and weights by both: log-probs, loss, every parameter's gradient, the weights after one step of AdamW. In
float32 (TF32 off) a gradient is within 1e-5 of FSDP's, by ‖g - g′‖ / ‖g‖ of each tensor; in bfloat16 within 2e-2 of FSDP's in
float32, or within twice FSDP's own distance in bfloat16. The worst tensor is named. Then two checks of itself: a checkpoint is
gone on with, in float32 to the bit, and a sum over ranks that is left out is found. Models with experts share them out over two
GPUs, with and without recorded routing (`--models experts "experts, replayed"`: those alone). `--only` takes worlds whose name
has that in it. `--states` steps weights and moments of 0.9 GB that lie in host memory, or moments in bfloat16, beside torch's
AdamW, to the bit, and nothing else. `--speed` times a model of Qwen3-0.6B's shape beside FSDP, with `--only hosted` or
`--only rounded` one with such states alone. Exits 0 only if all hold. `--device cpu` runs the same on a CPU. No pytest module:
it needs GPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from benchmarks.shapes import SHAPES, make_model
from telescope.algorithms.grpo import GRPO
from telescope.backends.base import Job, World
from telescope.backends.common.staging import host_tensor
from telescope.backends.common.stored_states import Home, StoredStates
from telescope.backends.fsdp import FSDP
from telescope.backends.megatron import Megatron
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
WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "1, hosted": (1, HOSTED),
    "1, hosted in part, rounded": (1, HOSTED | ROUNDED | {"optimizer_offload_fraction": 0.5}),
    "DP 2, hosted": (2, HOSTED),
    "DP 2, hosted in part, rounded": (2, HOSTED | ROUNDED | {"optimizer_offload_fraction": 0.5}),
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
}
COLD = "one row, cold"
"""Worlds whose ranks are processes of their own and begin with a step, of fewer rows than stages: kernels are loaded and
memory is found while a stage waits for the other."""
RESUMED_WORLDS = (
    "1", "TP 2", "DP 2", "EP 2", "PP 2", "PP 2, round", "CP 2", "CP 2, TP 2", "PP 2, EP 2", "1, hosted",
    "1, hosted in part, rounded", "DP 2, hosted", "DP 2, hosted in part, rounded", "PP 2, hosted, rounded",
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
    cold: bool = False
    """See `COLD`."""
    shape: str = ""
    """Of a model to be timed."""
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


def agreement(folder: Path, gpus: int, device: str, models: list[str], only: str) -> bool:
    plain, mixed, ours = dict[tuple[str, str], Order](), dict[str, Order](), dict[str, tuple[str, str, Order]]()
    for name in models:
        changes = MODELS[name]
        model, replayed = make_one(name, changes, folder / name), name.endswith("replayed")
        for precision, how in PRECISIONS.items():
            if name == "experts" and precision != "float32":
                continue
            out = folder / f"fsdp-{name}-{precision}"
            plain[name, precision] = Order("fsdp", model, 1, how, out, replayed=replayed, device=device)
            for world, (size, settings) in (EXPERT_WORLDS if "experts" in name else WORLDS).items():
                resumed, cold, out = world in RESUMED_WORLDS, COLD in world, folder / f"{name}-{world}-{precision}"
                order = Order(
                    "megatron", model, size, settings | how, out, resumed=resumed, cold=cold, replayed=replayed, device=device
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
    asked = {each: found for each, found in ours.items() if found[2].size <= gpus and only in each}
    if not asked:
        raise SystemExit(f"no world of {gpus} GPUs has {only!r} in its name: {', '.join(ours)}")
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
    else:
        apart = {each.removeprefix("lm."): tensor for each, tensor in exact["gradients"].items()}
        fine = all(worst({each: t}, {each: found["gradients"][each]})[0] <= limits[each] for each, t in apart.items())
        fine &= (gap or 0.0) <= 0.2
    behind = float(found.get("resumed", 0.0))
    fine &= behind <= (0.0 if precision == "float32" else RESUMED)
    loss = abs(found["metrics"]["loss"] - exact["metrics"]["loss"])
    print(
        f"{name}: gradient {far:.1e} ({whose}), {'' if gap is None else f'log-probs {gap:.1e}, '}loss {loss:.1e}, "
        f"weights {moved:.1e}{f', went on {behind:.1e} apart' if order.resumed else ''} {'ok' if fine else 'BAD'}",
        flush=True,
    )
    return fine


STATE_SIZES = (150_000_000, 1_024, 60_000_000, 4_096, 20_000_000, 1_000_003)
"""Of parameters, of which the first comes alone."""


def states(device: str) -> bool:
    """Four steps by the same gradients: torch's AdamW, whose moments are rounded by hand after each, beside stored states."""
    sizes = STATE_SIZES if device == "cuda" else tuple(size // 1000 + 1 for size in STATE_SIZES)
    good = True
    for dtypes in ({}, {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}):
        expected = stepped(sizes, device, dtypes, None)
        for share, hosted in (("none", ()), ("half", (2, 3, 4)), ("all", tuple(range(len(sizes))))):
            found = stepped(sizes, device, dtypes, hosted)
            same = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
            print(f"moments in {'bfloat16' if dtypes else 'float32'}, {share} hosted: {'ok' if same else 'BAD'}", flush=True)
            good &= same
    return good


def stepped(
    sizes: tuple[int, ...], device: str, dtypes: dict[str, torch.dtype], hosted: tuple[int, ...] | None
) -> list[torch.Tensor]:  # fmt: skip
    """Weights and moments, in float32 on the CPU; prints how long the last step took, and its peak of memory. `hosted`: places
    of the parameters in host memory; None: by torch alone."""
    random = torch.Generator(device).manual_seed(1)
    drawn = [torch.randn(size, generator=random, device=device) for size in sizes]
    for place in hosted or ():
        drawn[place] = host_tensor((sizes[place],), torch.float32, pinned=device == "cuda").copy_(drawn[place])
    parameters = [nn.Parameter(tensor) for tensor in drawn]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    away = [parameters[place] for place in hosted or ()]
    homes = {id(parameter) for parameter in away}

    def home(parameter: torch.Tensor, kind: str) -> Home:
        return Home(on_host=id(parameter) in homes, dtype=dtypes.get(kind))

    kept = None if hosted is None else StoredStates(optimizer, device, home, away)
    for _ in range(4):
        gradients = [torch.randn(size, generator=random, device=device) * 1e-3 for size in sizes]
        started = begin_measuring(device)
        if kept is not None:
            kept.step_with(list(zip(parameters, gradients, strict=True)))
        else:
            step_rounded(optimizer, parameters, gradients, dtypes)
        said = say_measured(device, started)
    print(f"  {'torch' if hosted is None else 'stored'}: {said}", flush=True)
    moments = [optimizer.state[parameter][kind] for parameter in parameters for kind in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().float().cpu() for tensor in (*parameters, *moments)]


def step_rounded(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[torch.Tensor],
    dtypes: dict[str, torch.dtype],
) -> None:  # fmt: skip
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    for state in optimizer.state.values():
        for kind, dtype in dtypes.items():
            state[kind].copy_(state[kind].to(dtype))


def begin_measuring(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    return time.perf_counter()


def say_measured(device: str, started: float) -> str:
    if device == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - started
    peak = f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at the most" if device == "cuda" else ""
    return f"the last step took {taken * 1e3:.0f} ms{peak}"


def time_of(rank: int, order: Order, world: World) -> None:
    """Tokens a second of the third step, and the fullest rank's peak of memory beside its estimate: rows of 16,384 tokens of
    samples of 2,048, two rows a rank."""
    length, count = 2048, 16 * order.size
    job = make_job(model=order.model, world=world, seq_len=16_384, entropy_chunk_size=2048)
    settings = (FSDP if order.backend == "fsdp" else Megatron)(**order.settings)
    backend = settings.build(job)
    shard = make_shard(lengths=[length] * count, logprob=-12.0)
    own = part(shard, range(order.model_of(rank), count, order.models))
    torch.cuda.reset_peak_memory_stats()
    for step in (1, 2, 3):
        metrics = backend.train_step(replace(own, step=step)).metrics
    most = torch.tensor(torch.cuda.max_memory_allocated(), device=world.device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    backend.close()
    if rank == 0:
        told = settings.rank_memory(SHAPES[order.shape], job.model, job.trainer, ranks=order.size, longest=length)
        assert told is not None
        peak, told_gib = int(most) / 2**30, told.total / 2**30
        print(
            f"{order.backend} {order.settings}: {metrics['trainer_tokens_per_s']:.0f} tokens/s, {peak:.2f} GiB, estimated "
            f"{told_gib:.2f} ({told_gib / peak - 1:+.1%})",
            flush=True,
        )


OF_STATES = {"hosted": HOSTED, "rounded": ROUNDED}


def speed(folder: Path, gpus: int, shape: str, only: str) -> None:
    model = make_model(SHAPES[shape], folder / shape)
    torch.cuda.empty_cache()
    for size in range(1, min(gpus, 2) + 1):
        kinds: list[tuple[str, dict[str, Any]]] = [("fsdp", {}), ("megatron", {})]
        kinds += [("megatron", each) for each in (TP2, PP2, ROUND, CP2) if size == 2]
        of_states: list[tuple[str, dict[str, Any]]] = [("megatron", each) for name, each in OF_STATES.items() if only in name]
        kinds = of_states if only in OF_STATES else kinds + of_states
        orders = []
        for backend, settings in kinds:
            for again in (True, False):
                chosen = {**settings, "mixed_precision_dtype": "bfloat16", "gradient_checkpointing": again}
                orders.append(Order(backend, str(model), size, chosen, folder / "speed", shape=shape))
        run(orders)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="part of a world's name")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shape", default="0.6B", choices=SHAPES)
    given = parser.parse_args()
    if given.device == "cuda":
        need_gpus(given.gpus, instead="try `--device cpu`")
        print(torch.cuda.get_device_name())
    print("torch", torch.__version__)
    if given.states:
        return 0 if states(given.device) else 1
    with tempfile.TemporaryDirectory() as name:
        good = agreement(Path(name), given.gpus, given.device, given.models, given.only)
        if given.speed:
            speed(Path(name), given.gpus, given.shape, given.only)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
