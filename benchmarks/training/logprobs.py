"""Memory and time of log-probs and entropies, forward and backward: ours in chunks, and what else could do it.

    python -m benchmarks.training.logprobs [--device cuda] [--tokens 16384] [--hidden 128] [--others compiled liger]

The others are plain PyTorch's whole [T, V]; `compiled`, plain PyTorch's chunks of 1,024 through torch.compile, each computed
again in the backward pass; and `liger`, the fused Triton kernel of liger-kernel where installed (GPU; it gives log-probs
alone: no entropy, no temperature, no top-k, and is no dependency of the project).

Each measurement runs in a process of its own, so that its peak is its own: on a CPU the highest resident size that Linux has
seen (less that before the first operation), on a GPU the allocator's peak. Inputs and gradients are counted apart, as any
method has them. Plain PyTorch is run on fewer tokens where the whole would not fit; its memory is linear in them.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from telescope.backends.common.logprobs import logprobs

MIB = 2**20
Method = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Measured:
    """Sizes in MiB, time in seconds. `extra` is the peak beyond inputs, their gradients and the results."""

    method: str
    device: str
    dtype: str
    tokens: int
    vocabulary: int
    hidden: int
    bonus: bool
    extra: float
    kept: float
    whole_logits: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunks", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--plain-tokens", type=int, default=1024, help="0: leave plain PyTorch out")
    parser.add_argument("--others", nargs="*", default=[], choices=["compiled", "liger"])
    parser.add_argument("--runs", type=int, default=3, help="the fastest counts: kernels are compiled in the first")
    parser.add_argument("--bonus", action="store_true", help="a gradient of the entropy too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(asdict(measure(given.one, given))))
        return
    found = [alone(str(chunk), given, given.tokens) for chunk in given.chunks]
    found += [alone(name, given, given.tokens) for name in given.others]
    if given.plain_tokens:
        found.append(alone("plain", given, given.plain_tokens))
    print(f"{'method':>8} {'tokens':>7} {'extra MiB':>10} {'[T, V] MiB':>11} {'inputs, gradients':>18} {'seconds':>8}")
    for each in found:
        row = f"{each.method:>8} {each.tokens:>7} {each.extra:>10.0f} {each.whole_logits:>11.0f}"
        print(f"{row} {each.kept:>18.0f} {each.seconds:>8.2f}")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def alone(method: str, given: argparse.Namespace, tokens: int) -> Measured:
    """In a process of its own."""
    sizes = ("--vocabulary", str(given.vocabulary), "--hidden", str(given.hidden), "--dtype", given.dtype)
    bonus = ("--runs", str(given.runs), *(("--bonus",) if given.bonus else ()))
    command = [sys.executable, "-m", "benchmarks.training.logprobs", "--one", method, "--tokens", str(tokens), *sizes]
    said = subprocess.run(
        [*command, *bonus, "--device", given.device], check=True, capture_output=True, text=True, timeout=3600
    )
    return Measured(**json.loads(said.stdout))


def measure(name: str, given: argparse.Namespace) -> Measured:
    """`name`: a chunk's size, or another method's name."""
    torch.manual_seed(0)
    dtype, device = getattr(torch, given.dtype), given.device
    warm_up(method_of(name), dtype, device)
    hidden = torch.randn(given.tokens, given.hidden, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(given.vocabulary, given.hidden, device=device) * 0.1).to(dtype).requires_grad_()
    targets = torch.randint(given.vocabulary, (given.tokens,), device=device)
    kept = 2 * (hidden.nbytes + weight.nbytes) + 2 * 4 * given.tokens
    before = peak(device, reset=True)
    times = []
    for _ in range(given.runs):
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        logprob, entropy = method_of(name)(hidden, weight, targets)
        loss = logprob.sum() + entropy.sum() if given.bonus else logprob.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        del logprob, entropy, loss
    seconds = min(times)
    results = kept - hidden.nbytes - weight.nbytes  # gradients and results did not exist before
    extra = max(peak(device) - before - results, 0)
    return Measured(
        method=name,
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        dtype=given.dtype,
        tokens=given.tokens,
        vocabulary=given.vocabulary,
        hidden=given.hidden,
        bonus=given.bonus,
        extra=extra / MIB,
        kept=kept / MIB,
        whole_logits=4 * given.tokens * given.vocabulary / MIB,
        seconds=seconds,
    )


def method_of(name: str) -> Method:
    if name in OTHERS:
        return OTHERS[name]
    return lambda hidden, weight, targets: logprobs(hidden, weight, targets, 1.0, int(name))


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.t()).float().log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def compiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    chunk = compiled_plain()
    parts = [
        checkpoint(chunk, hidden[start : start + CHUNK], weight, targets[start : start + CHUNK], use_reentrant=False)
        for start in range(0, len(targets), CHUNK)
    ]
    logprob, entropy = zip(*parts, strict=True)
    return torch.cat(logprob), torch.cat(entropy)


@functools.cache
def compiled_plain() -> Method:
    return torch.compile(plain, dynamic=True)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="none")(weight, hidden, targets)
    return -loss, torch.zeros_like(loss, requires_grad=True)


CHUNK = 1024
OTHERS: dict[str, Method] = {"plain": plain, "compiled": compiled, "liger": liger}


def warm_up(method: Method, dtype: torch.dtype, device: str) -> None:
    """Libraries allocate at their first call."""
    hidden, weight = (torch.randn(4, 64, dtype=dtype, device=device).requires_grad_() for _ in range(2))
    logprob, entropy = method(hidden, weight, torch.zeros(4, dtype=torch.int64, device=device))
    torch.autograd.backward((logprob.sum(), entropy.sum()))


def peak(device: str, *, reset: bool = False) -> int:
    """Highest bytes so far; with `reset`, the bytes of now, from which the next peak is counted."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    (high,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(high) * 1024


if __name__ == "__main__":
    main()
