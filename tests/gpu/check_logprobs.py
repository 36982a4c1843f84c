"""The Triton kernels of log-probs on one GPU against PyTorch's operators in float64: `python -m tests.gpu.check_logprobs`.

Exits 0 only if values and gradients agree. `TRITON_INTERPRET=1 … --device cpu` runs the kernels' code on a CPU, where Triton is
installed. No pytest module: machines without a GPU have no Triton.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch
from torch import Tensor

from telescope.backends.common import logprobs as subject
from telescope.maths.support import WHOLE, Support, left_out
from tests.gpu.needed import need_gpus

TOKENS, WIDTH, VOCABULARY = 37, 64, 9001
FAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Of gradients, which are in the dtype of the weights. Values are float32 in any case."""
VALUES = 1e-4


def expected(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, support: Support) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().t() / temperature
    if not support.is_whole:
        logits = logits.masked_fill(left_out(logits.detach().float(), targets, support), -torch.inf)
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def check(device: str, dtype: torch.dtype, temperature: float, which: str, support: Support) -> bool:
    random = torch.Generator().manual_seed(4)
    hidden = torch.randn(TOKENS, WIDTH, generator=random).to(device, dtype).requires_grad_()
    weight = (0.3 * torch.randn(VOCABULARY, WIDTH, generator=random)).to(device, dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=random).to(device)
    upstream = torch.randn(2, TOKENS, generator=random).to(device)
    results = []
    for found in (
        expected(hidden, weight, targets, temperature, support),
        subject.logprobs(hidden, weight, targets, temperature, 16, support),
    ):
        loss = sum(
            (one * up).sum() for one, up, name in zip(found, upstream, ("logprob", "entropy"), strict=True) if name in which
        )
        results.append([*(one.detach() for one in found), *torch.autograd.grad(loss, (hidden, weight))])
    apart = [float((a.double() - b.double()).abs().max() / b.double().abs().max()) for b, a in zip(*results, strict=True)]
    good = max(apart[:2]) < VALUES and max(apart[2:]) < FAR[dtype]
    said = ", ".join(f"{value:.1e}" for value in apart)
    print(f"{str(dtype).removeprefix('torch.')} temperature={temperature} {which} {support}: {said} {'ok' if good else 'BAD'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    given = parser.parse_args()
    if given.device == "cuda":
        need_gpus(instead="TRITON_INTERPRET=1 and --device cpu run the kernels' code on a CPU, where Triton is installed")
    kernels = subject._kernels()
    assert kernels is not None, "Triton is not installed"
    if given.device == "cpu":
        subject.fused_kernels = lambda tensor: kernels
    dtypes = (torch.float32, torch.bfloat16) if given.device == "cuda" else (torch.float32,)
    cases = itertools.product(dtypes, (1.0, 0.7), ("logprob", "entropy", "logprob and entropy"), (WHOLE, Support(top_k=50)))
    results = [check(given.device, *case) for case in cases]  # each is said, whatever those before found
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
