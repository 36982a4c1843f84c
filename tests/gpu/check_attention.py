"""Attention kernels of this machine against float32 on a CPU, and blind to neighbours: `python -m tests.gpu.check_attention`.

Exits 0 only if all agree; kernels that can't work here are named with the reason. With two GPUs or more, `--ranks 2` also
trains one step with rows that the ranks share, and compares it with one rank. No pytest module: machines without a GPU have
nothing to say about it; `--device cpu` runs what works there.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from telescope.backends.base import World
from telescope.backends.common import attention, kernels
from tests.backends.models import random_model
from tests.backends.shards import make_job, make_shard
from tests.backends.watching import distance, watch
from tests.gpu.needed import need_gpus

LENGTHS = (5, 130, 64, 2, 300, 31)
LONG = 100
"""What counts as a long sample for `cudnn` here: two of them are."""
REPEATED = (0, 0, 30, 0, 2, 31)
"""Of each sample the leading tokens of the one before it, where what they share is computed once; the last asks nothing."""
HEADS, KEY_HEADS, WIDTH = 8, 2, 64
LIMIT_S, HANGS_S = 300.0, 60.0
SHARED: dict[str, tuple[tuple[str, str | None, float], ...]] = {
    "cpu": (("sdpa", None, 1e-4),),
    "cuda": (("sdpa", None, 1e-4), ("varlen", "bfloat16", 3e-2), ("cudnn", "bfloat16", 3e-2)),
}
"""What ranks that share rows attend with: kernel, mixed precision, how far a gradient may be from that of one rank."""
DTYPES = ("float32", "bfloat16", "float16")


def drawn(device: str, dtype: torch.dtype, changed: int | None) -> tuple[Tensor, ...]:
    """Queries, keys, values [1, H, T, D] and the result's gradient [1, T, H, D]; `changed`: the sample that is another one."""
    random = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    found = [torch.randn(1, heads, total, WIDTH, generator=random) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    upstream = torch.randn(1, total, HEADS, WIDTH, generator=random)
    if changed is not None:
        start = sum(LENGTHS[:changed])
        for tensor in found:
            tensor[:, :, start : start + LENGTHS[changed]] += 3.0
    return *(tensor.to(device, dtype).requires_grad_() for tensor in found), upstream.to(device, dtype)


def run(
    kind: kernels.Kind, device: str, dtype: torch.dtype, window: int | None, changed: int | None = None,
    repeated: tuple[int, ...] = (),
) -> list[Tensor]:  # fmt: skip
    """Result and gradients, each with the tokens first, float32 on the CPU."""
    from transformers import AttentionInterface

    function = AttentionInterface()[attention.register(kind)]
    *inputs, upstream = drawn(device, dtype, changed)
    if computed := sum(LENGTHS) - sum(repeated):
        inputs = [tensor.detach()[:, :, :computed].requires_grad_() for tensor in inputs]
    row = attention.segments(kind, np.cumsum([0, *LENGTHS]), device, repeated=repeated)
    out, _ = function(torch.nn.Module(), *inputs, None, row=row, scaling=None, sliding_window=window)
    out.backward(upstream[:, :computed])
    gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
    return [out[0].detach().float().cpu(), *(grad[0].transpose(0, 1).float().cpu() for grad in gradients)]


def check(kind: kernels.Kind, device: str, dtype: torch.dtype, window: int | None) -> bool:
    found = run(kind, device, dtype, window)
    far = distance_from_float32(found, window)
    shared = distance_from_float32(run(kind, device, dtype, window, repeated=REPEATED), window, REPEATED)
    seen = max(leak(kind, device, dtype, window, found, changed) for changed in range(len(LENGTHS)))
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    fine = far < limit and shared < limit and seen < limit / 10
    name, said = str(dtype).removeprefix("torch."), f"{far:.1e} from float32, {shared:.1e} where samples share their beginnings"
    print(f"{kind} {name} window={window}: {said}, {seen:.1e} from a neighbour {'ok' if fine else 'BAD'}")
    return fine


def distance_from_float32(found: list[Tensor], window: int | None, repeated: tuple[int, ...] = ()) -> float:
    expected = run("sdpa", "cpu", torch.float32, window, repeated=repeated)
    return max(float((left - right).abs().max() / right.abs().max()) for left, right in zip(found, expected, strict=True))


def leak(kind: kernels.Kind, device: str, dtype: torch.dtype, window: int | None, before: list[Tensor], changed: int) -> float:
    """How far the other samples' results and gradients move when one sample is another; a sum of gradients may be taken in
    another order on a GPU."""
    start = sum(LENGTHS[:changed])
    kept = torch.tensor([token for token in range(sum(LENGTHS)) if not start <= token < start + LENGTHS[changed]])
    after = run(kind, device, dtype, window, changed)
    return max(
        float((left[kept] - right[kept]).abs().max() / left.abs().max()) for left, right in zip(before, after, strict=True)
    )


def kernels_agree(device: str, kinds: list[kernels.Kind], dtypes: list[str]) -> bool:
    good = True
    for kind, dtype in itertools.product(kinds, (getattr(torch, name) for name in dtypes)):
        reason = kernels.obstacle(kind, kernels.machine(device, dtype))
        if reason is not None:
            print(f"{kind} {reason}")
            continue
        for window in (None, 16):
            good &= check(kind, device, dtype, window)
    return good


def one_rank(model: str, folder: Path, device: str) -> None:
    """One of the ranks that share rows, or the one that shares none; its gradient is written down."""
    faulthandler.dump_traceback_later(HANGS_S)  # a rank that hangs says where
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = f"cuda:{rank}" if device == "cuda" else "cpu"
    for (kind, precision, _), port in zip(SHARED[device], os.environ["PORTS"].split(","), strict=True):
        os.environ["MASTER_PORT"] = port  # a process group can't be founded again at the port of the one before
        settings = {"attention": kind, "mixed_precision_dtype": precision, "context_parallel_size": size}
        backend = watch(make_job(model=model, world=World(rank, size, own), seq_len=512), **settings)
        backend.train_step(make_shard())
        torch.save({name: tensor.cpu() for name, tensor in backend.gradients.items()}, folder / f"{kind}-{size}-{rank}.pt")
        backend.close()


def ranks_agree(size: int, device: str) -> bool:
    """One step of `size` ranks that share their rows against one rank, by each kernel of `SHARED`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_model(folder / "model", num_attention_heads=8)
        for count in (1, size):
            common = {
                **os.environ,
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "PORTS": free_ports(len(SHARED[device])),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [sys.executable, "-m", "tests.gpu.check_attention", "--device", device, "--one", model, str(folder)]
            processes = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(count)]
            try:
                codes = [process.wait(LIMIT_S) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            if any(codes):
                return False
        good = True
        for kind, precision, limit in SHARED[device]:
            one, *shared = (torch.load(folder / f"{kind}-{name}.pt") for name in ("1-0", *(f"{size}-{n}" for n in range(size))))
            far = max(distance(one, other) for other in shared)
            good &= far < limit
            said = f"{size} ranks that share rows, {kind} in {precision or 'float32'}: gradient {far:.1e} from that of one"
            print(f"{said} {'ok' if far < limit else 'BAD'}")
    return good


def free_ports(count: int) -> str:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = ",".join(str(each.getsockname()[1]) for each in held)
    for each in held:
        each.close()
    return ports


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--kinds", nargs="*", default=list(get_args(kernels.Kind)), choices=get_args(kernels.Kind))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES, help="a slim package may lack one")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one_rank(given.one[0], Path(given.one[1]), given.device)
        os._exit(0)  # as the trainer's own process does: gloo's threads may not outlive the interpreter
    if given.device == "cuda":
        need_gpus(given.ranks, instead="--device cpu runs what works there")
    print(torch.cuda.get_device_name() if given.device == "cuda" else "cpu", "torch", torch.__version__)
    attention.LONG = LONG
    good = kernels_agree("cuda:0" if given.device == "cuda" else "cpu", given.kinds, given.dtypes)
    if given.ranks > 1:
        good &= ranks_agree(given.ranks, given.device)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
