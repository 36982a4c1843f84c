"""The Triton kernels of log-probs on one GPU against PyTorch's operators in float64: `python -m tests.gpu.check_logprobs`.

By a head that is whole (common/logprobs.py), and by one or two shards of a vocabulary (common/vocabulary.py), computed one
after the other in this process. Half of the tokens have most probability in the first shard, the others in the second one, so
that a cut leaves nothing of a shard. Exits 0 only if values and gradients agree. `--device cpu` does the same with PyTorch's
operators in the kernels' place, and `TRITON_INTERPRET=1 … --device cpu` with the kernels' code, where Triton is installed. No
pytest module: machines without a GPU have no Triton.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from telescope.backends.common import logprobs as subject
from telescope.backends.common import vocabulary
from telescope.maths.support import WHOLE, Support, left_out
from tests.gpu.needed import need_gpus

TOKENS, WIDTH, VOCABULARY = 37, 64, 9001
FAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Of gradients, which are in the dtype of the weights. Values are float32 in any case."""
VALUES = 1e-4
CHUNK = 16
APART = 4.0
"""What half of the tokens add to logits of the first shard and take from those of the second; the others do the reverse."""


def expected(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, support: Support
) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().t()
    logits = logits / (temperature[:, None].double() if isinstance(temperature, Tensor) else temperature)
    if not support.is_whole:
        logits = logits.masked_fill(left_out(logits.detach().float(), targets, support), -torch.inf)
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


class Others:
    """In the place of torch.distributed, for ranks that are computed one after another, twice: in the second round each is
    given what the others sent in the first. What a rank sends depends on what the others sent before; a round is enough, as
    the last rank has all of it at once."""

    def __init__(self, size: int) -> None:
        self.size, self.rank, self.call = size, 0, 0
        self.sent: dict[tuple[int, int], Tensor] = {}

    def get_world_size(self, group: object) -> int:
        return self.size

    def become(self, rank: int) -> None:
        self.rank, self.call = rank, 0

    def all_gather_into_tensor(self, out: Tensor, own: Tensor, group: object) -> None:
        self.sent[self.rank, self.call] = own.detach().clone()
        out.copy_(torch.cat([self.sent.get((rank, self.call), own) for rank in range(self.size)]))
        self.call += 1


def by_shards(
    size: int, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, support: Support,
    upstream: Tensor, which: str,
) -> list[Tensor]:  # fmt: skip
    """Values and gradients, the head's put together and those to hidden states summed, as the ranks would."""
    others = Others(size)
    with mock.patch.object(vocabulary, "dist", others):
        for _ in range(size):
            of_hidden, of_weight, values = torch.zeros_like(hidden, dtype=torch.float32), [], []
            for rank in range(size):
                others.become(rank)
                shard = vocabulary.cut(VOCABULARY, rank, size, "of the ranks")
                part = weight.detach()[shard.first : shard.first + shard.count].clone().requires_grad_()
                found = vocabulary.logprobs(hidden, part, targets, temperature, CHUNK, shard, support)
                *value, to_hidden, to_weight = with_gradients(found, (hidden, part), upstream, which)
                of_hidden += to_hidden
                of_weight.append(to_weight)
                values.append(torch.stack(value))
    assert all(torch.equal(values[0], each) for each in values), "the ranks find the same"
    return [*values[0], of_hidden, torch.cat(of_weight)]


def with_gradients(found: tuple[Tensor, Tensor], of: tuple[Tensor, Tensor], upstream: Tensor, which: str) -> list[Tensor]:
    named = zip(found, upstream, ("logprob", "entropy"), strict=True)
    loss: Any = sum((one * up).sum() for one, up, name in named if name in which)
    return [*(one.detach() for one in found), *torch.autograd.grad(loss, of)]


def check(device: str, dtype: torch.dtype, temperature: float | None, which: str, support: Support, shards: int) -> bool:
    """`temperature` None: each token has its own. `shards` 0: by a head that is whole."""
    random = torch.Generator().manual_seed(4)
    first = -(-VOCABULARY // 2)
    hidden, weight = torch.randn(TOKENS, WIDTH, generator=random), 0.3 * torch.randn(VOCABULARY, WIDTH, generator=random)
    hidden[:, 0], weight[:, 0] = APART, 1.0
    hidden[::2, 0], weight[first:, 0] = -APART, -1.0
    hidden, weight = (each.to(device, dtype).requires_grad_() for each in (hidden, weight))
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=random).to(device)
    upstream = torch.randn(2, TOKENS, generator=random).to(device)
    each = torch.linspace(0.6, 1.5, TOKENS, device=device) if temperature is None else temperature
    if not support.is_whole:
        logits = (hidden @ weight.t()).detach().float() / (each[:, None] if isinstance(each, Tensor) else each)
        out = left_out(logits, targets, support)
        assert out[:, :first].all(1).any(), "of the first shard nothing is left for a token"
        assert out[:, first:].all(1).any(), "of the second one, too"
    wanted = with_gradients(expected(hidden, weight, targets, each, support), (hidden, weight), upstream, which)
    if shards:
        found = by_shards(shards, hidden, weight, targets, each, support, upstream, which)
    else:
        by_whole = subject.logprobs(hidden, weight, targets, each, CHUNK, support)
        found = with_gradients(by_whole, (hidden, weight), upstream, which)
    apart = [float((a.double() - b.double()).abs().max() / b.double().abs().max()) for b, a in zip(wanted, found, strict=True)]
    good = max(apart[:2]) < VALUES and max(apart[2:]) < FAR[dtype]
    said, by = ", ".join(f"{value:.1e}" for value in apart), f"shards={shards}" if shards else "whole"
    print(
        f"{str(dtype).removeprefix('torch.')} temperature={temperature or 'of each'} {which} {support} {by}: {said} "
        f"{'ok' if good else 'BAD'}",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    given = parser.parse_args()
    if given.device == "cuda":
        need_gpus(instead="TRITON_INTERPRET=1 and --device cpu run the kernels' code on a CPU, where Triton is installed")
    interpreted = given.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    kernels = subject._kernels() if given.device == "cuda" or interpreted else None
    assert kernels is not None or given.device == "cpu", "Triton is not installed"
    if interpreted:
        for module in (subject, vocabulary):
            vars(module)["fused_kernels"] = lambda tensor: kernels
    dtypes = (torch.float32, torch.bfloat16) if given.device == "cuda" else (torch.float32,)
    asked = ("logprob", "entropy", "logprob and entropy")
    cases = itertools.product(dtypes, (1.0, 0.7, None), asked, (WHOLE, Support(top_k=50)), (0, 1, 2))
    results = [check(given.device, *case) for case in cases]  # each is said, whatever those before found
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
