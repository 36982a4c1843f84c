"""Attention kernels over packed rows, forward and backward: `python -m benchmarks.training.attention [--row 16384]`.

Those of `backend.attention` that work here, as the models call them, for rows cut into samples in several ways. Useful
operations: 4 · H · D · Σ len² / 2 forward, 2.5 times that backward. Differences are from the first kernel of the list.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from telescope.backends.common import attention, kernels

CUTS: dict[str, Callable[[int], list[int]]] = {
    "one sample": lambda row: [row],
    "eight alike": lambda row: [row // 8] * 8,
    "drawn": lambda row: _drawn(row),
}


def _drawn(row: int) -> list[int]:
    lengths = np.random.default_rng(0).lognormal(np.log(row / 8) - 0.32, 0.8, 64).astype(int).clip(32)
    taken = [int(length) for length, end in zip(lengths, np.cumsum(lengths), strict=True) if end <= row]
    return [*taken, row - sum(taken)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--row", type=int, default=16_384)
    parser.add_argument("--heads", type=int, nargs=3, default=[16, 8, 128], metavar=("QUERY", "KEY", "WIDTH"))
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    here = kernels.machine(given.device, dtype)
    kinds = [kind for kind in get_args(kernels.Kind) if kernels.obstacle(kind, here) is None]
    for name, lengths_of in CUTS.items():
        lengths = lengths_of(given.row)
        print(f"{name}: {len(lengths)} of up to {max(lengths)} tokens, heads {given.heads}, {dtype}")
        first: list[Tensor] | None = None
        for kind in kinds:
            forward, backward, found = measure(kind, lengths, given, dtype)
            first = found if first is None else first
            apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, first, strict=True))
            useful = 2.0 * given.heads[0] * given.heads[2] * float(np.square(lengths, dtype=np.float64).sum())
            said = ", ".join(
                f"{what} {1e3 * seconds:7.3f} ms {times * useful / seconds / 1e12:4.0f} TFLOP/s"
                for what, seconds, times in (("forward", forward, 1.0), ("backward", backward, 2.5))
            )
            print(f"  {kind:>8}: {said}, {apart:.1e} from {kinds[0]}", flush=True)


def measure(
    kind: kernels.Kind, lengths: list[int], given: argparse.Namespace, dtype: torch.dtype
) -> tuple[float, float, list[Tensor]]:
    """Median seconds of both directions; the result and the gradients."""
    from transformers import AttentionInterface

    function = AttentionInterface()[attention.register(kind)]
    row = attention.segments(kind, np.cumsum([0, *lengths]), given.device)
    random = torch.Generator(given.device).manual_seed(1)
    query_heads, key_heads, width = given.heads
    inputs = [
        torch.randn(1, given.row, heads, width, generator=random, device=given.device)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (query_heads, key_heads, key_heads)
    ]
    upstream = torch.randn(1, given.row, query_heads, width, generator=random, device=given.device).to(dtype)
    seconds: list[tuple[float, float]] = []
    found: list[Tensor] = []
    for _ in range(given.repeats + 3):
        _wait(given.device)
        started = time.perf_counter()
        out, _ = function(torch.nn.Module(), *inputs, None, row=row, scaling=None, sliding_window=None)
        _wait(given.device)
        middle = time.perf_counter()
        gradients = torch.autograd.grad(out, inputs, upstream)
        _wait(given.device)
        seconds.append((middle - started, time.perf_counter() - middle))
        found = [out.detach().float(), *(gradient.float() for gradient in gradients)]
    forward, backward = zip(*seconds[3:], strict=True)
    return statistics.median(forward), statistics.median(backward), found


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
