"""Muon for the matrices of the layers, AdamW for everything else: one optimiser with ordinary states.

After K. Jordan, Muon (2024), and for the size of a step J. Liu et al., Muon is Scalable for LLM Training (2025): an
orthogonalised update times 0.2 · sqrt(its longer side), which is as large as AdamW's, so that one learning rate serves both.
Owns the orthogonalisation of matrices that are spread over ranks: each is put together on one of them, another one for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from telescope.backends.common.local_parts import local

MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic that drives singular values towards 1, as fast as it may."""
RMS = 0.2


def orthogonalised(matrix: Tensor) -> Tensor:
    """[M, N] -> [M, N] bfloat16: its singular values all near 1, by five steps of Newton and Schulz."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    upright = x.shape[0] > x.shape[1]
    x = x.T if upright else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if upright else x


def step_size(shape: Sequence[int]) -> float:
    """By which an orthogonalised [M, N] is multiplied besides the rate: 0.2 · sqrt(max(M, N))."""
    return RMS * math.sqrt(max(shape))


class Muon(torch.optim.AdamW):
    """Groups with `muon: True` hold matrices. The others are AdamW's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """A collective where parameters are spread over ranks."""
        matrices = [(p, group) for group in self.param_groups if group.get("muon") for p in group["params"]]
        self._step_matrices([(p, group) for p, group in matrices if p.grad is not None])
        with _without_gradients([p for p, _ in matrices]):
            super().step()

    def _step_matrices(self, matrices: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> None:
        width = _ranks(matrices[0][0]) if matrices else 1
        for start in range(0, len(matrices), width):
            batch = matrices[start : start + width]
            updates = orthogonalised_shares([p for p, _ in batch], [self._momentum(p) for p, _ in batch])
            for (parameter, group), update in zip(batch, updates, strict=True):
                weight = local(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * step_size(parameter.shape))

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        """The share's update before it is orthogonalised, by Nesterov's rule."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # AdamW asks each state for it when one is loaded
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        gradient, momentum = local(parameter.grad), local(state["momentum_buffer"])  # type: ignore[arg-type]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    held = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, held, strict=True):
            p.grad = gradient


def orthogonalised_shares(parameters: Sequence[Tensor], shares: Sequence[Tensor]) -> list[Tensor]:
    """Of each matrix this rank's rows, orthogonalised as a whole. At most as many matrices as ranks: one rank works on each.

    What travels is bfloat16, as the iteration is. A collective.
    """
    if _ranks(parameters[0]) == 1:
        return [orthogonalised(share) for share in shares]
    group = _group(parameters[0])
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine: Tensor | None = None
    for owner, (parameter, share) in enumerate(zip(parameters, shares, strict=True)):
        each = -(-parameter.shape[0] // size)
        message = share.new_zeros((each, parameter.shape[1]), dtype=torch.bfloat16)
        message[: share.shape[0]] = share
        parts = [torch.empty_like(message) for _ in range(size)] if rank == owner else None
        dist.gather(message, parts, dst=dist.get_global_rank(group, owner), group=group)
        if parts is not None:
            mine = torch.cat(parts)[: parameter.shape[0]]
    done = orthogonalised(mine) if mine is not None else None
    return [_share_of(parameter, done, owner, group) for owner, parameter in enumerate(parameters)]


def _share_of(parameter: Tensor, done: Tensor | None, owner: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of what `owner` has worked out."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    part = local(parameter)
    each = -(-parameter.shape[0] // size)
    received = part.new_empty((each, parameter.shape[1]), dtype=torch.bfloat16)
    parts = None
    if rank == owner and done is not None:
        padded = done.new_zeros((each * size, parameter.shape[1]))
        padded[: done.shape[0]] = done
        parts = list(padded.chunk(size))
    dist.scatter(received, parts, src=dist.get_global_rank(group, owner), group=group)
    return received[: part.shape[0]]


def _ranks(parameter: Tensor) -> int:
    """Over how many a matrix is spread."""
    return dist.get_world_size(_group(parameter)) if isinstance(parameter, DTensor) else 1


def _group(parameter: Tensor) -> dist.ProcessGroup:
    """The ranks that hold a matrix together: the last dimension of the mesh."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    return mesh.get_group(mesh.ndim - 1)
