"""Which run of each parameter's numbers this rank updates, and where the numbers are that are updated.

megatron-core's buffers hold gradients one after another, and with its distributed optimizer each of D data-parallel ranks sums
up and keeps 1/D of every buffer: whole parameters, and pieces of two. Without it each rank updates all. Where weights compute
in another dtype than they are updated in, the latter lie here, or of some pieces in host memory. Owns these pieces, the norm of
their gradient, and the way back to whole parameters. Refuses to know optimisers and names of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from telescope.backends.common.staging import pin
from telescope.backends.megatron.parallel import Copies, Parallel


@dataclass(frozen=True)
class UpdatedPiece:
    """Numbers `start` to `stop` of a parameter, as it lies on this rank of its model, in a row."""

    start: int
    stop: int
    updated: nn.Parameter
    """[stop - start]: in the parameter itself, or apart; in host memory where it is hosted."""
    computing: Tensor
    """[stop - start] in the parameter."""
    gradient: Tensor
    """[stop - start] in megatron-core's buffer."""

    @property
    def apart(self) -> bool:
        return self.updated.data_ptr() != self.computing.data_ptr()


class Masters:
    """Of the stretches of a model that megatron-core's DistributedDataParallel holds, each in one of `ddps`."""

    def __init__(
        self, ddps: Sequence[Any], parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, parallel: Parallel, *,
        spread: bool, counted_elsewhere: Set[str] = frozenset(), hosted: float = 0.0,
    ) -> None:  # fmt: skip
        """`parameters` by name. `dtype`: what weights are updated in. `spread`: over the ranks with equal parts, as buffers
        are. `counted_elsewhere`: names of parameters that another stage has too, and counts and saves. `hosted`: of what this
        rank updates, the part that is in host memory between updates."""
        self._ddps, self._parallel, self._spread = ddps, parallel, spread
        self.dtype, self.counted_elsewhere = dtype, counted_elsewhere
        self.parameters = dict(parameters)
        runs = self._runs() if self._spread else {name: (0, p.numel()) for name, p in self.parameters.items()}
        self.hosted = choose_share({name: stop - start for name, (start, stop) in runs.items()}, hosted)
        """Names of parameters whose piece is in host memory between updates, with what the optimiser knows of it."""
        self.pieces = {name: self._piece(name, *run) for name, run in runs.items()}
        self._by_updated = {id(piece.updated): piece for piece in self.pieces.values()}

    def of_expert(self, name: str) -> bool:
        """Whether megatron-core sums the parameter's gradient over the ranks with the same experts, and not over the
        data-parallel ones."""
        return not getattr(self.parameters[name], "allreduce", True)

    def copies(self, name: str) -> Copies:
        """The ranks that have the same of this parameter."""
        return self._parallel.copies(of_expert=self.of_expert(name))

    def _runs(self) -> dict[str, tuple[int, int]]:
        """By name; of a parameter that is all other ranks' there is none."""
        runs, names = {}, {parameter: name for name, parameter in self.parameters.items()}
        for buffer in (each for ddp in self._ddps for each in (*ddp.buffers, *ddp.expert_parallel_buffers)):
            for bucket in buffer.buckets:
                copies = self.copies(names[bucket.params_list[0]])
                share = bucket.grad_data.numel() // copies.size
                begin = bucket.offset + copies.rank * share
                for parameter in bucket.params_list:
                    first, last, _ = buffer.param_index_map[parameter]
                    start, stop = max(begin, first), min(begin + share, last)
                    if start < stop:
                        runs[names[parameter]] = (start - first, stop - first)
        return runs

    def _piece(self, name: str, start: int, stop: int) -> UpdatedPiece:
        parameter = self.parameters[name]
        computing = parameter.detach().view(-1)[start:stop]
        gradient: Tensor = parameter.main_grad.view(-1)[start:stop]  # type: ignore[attr-defined]
        if computing.dtype == self.dtype:
            return UpdatedPiece(start, stop, nn.Parameter(computing), computing, gradient)
        on_host = name in self.hosted
        where = "cpu" if on_host else computing.device
        updated = nn.Parameter(torch.empty_like(computing, dtype=self.dtype, device=where))
        if on_host and computing.is_cuda:
            pin(updated)
        return UpdatedPiece(start, stop, updated, computing, gradient)

    # ---- values

    @torch.no_grad()
    def put(self, name: str, whole: Tensor) -> None:
        """All of a parameter as it lies on this rank of its model."""
        self.parameters[name].copy_(whole)
        if (piece := self.pieces.get(name)) is not None and piece.apart:
            piece.updated.copy_(whole.reshape(-1)[piece.start : piece.stop])

    @torch.no_grad()
    def put_piece(self, name: str, whole: Tensor, of: Callable[[UpdatedPiece], Tensor]) -> None:
        """Of something beside the parameters, e.g. a moment: `of` gives where it lies."""
        if (piece := self.pieces.get(name)) is not None:
            of(piece).copy_(whole.reshape(-1)[piece.start : piece.stop])

    @torch.no_grad()
    def whole(self, name: str, of: Callable[[UpdatedPiece], Tensor], dtype: torch.dtype, owner: int = 0) -> Tensor | None:
        """A parameter's weights (or gradient, or moments, as `of` says) in the parameter's shape on rank `owner` of its
        `copies`; None on the others. A collective where masters are spread.

        Each number is on one rank and 0 elsewhere, so that adding up bytes is joining them, to the bit.
        """
        parameter, piece, copies = self.parameters[name], self.pieces.get(name), self.copies(name)
        mine = copies.rank == owner
        if not self._spread or copies.size == 1:
            assert piece is not None
            return of(piece).detach().to(parameter.device).view(parameter.shape) if mine else None
        flat = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
        if piece is not None:
            flat[piece.start : piece.stop].copy_(of(piece).detach())
        dist.reduce(flat.view(torch.uint8), group_dst=owner, op=dist.ReduceOp.SUM, group=copies.group)
        return flat.view(parameter.shape) if mine else None

    @property
    def apart(self) -> bool:
        """Whether weights are updated in another dtype than they compute in."""
        return any(parameter.dtype != self.dtype for parameter in self.parameters.values())

    @torch.no_grad()
    def follow(self, updated: Sequence[nn.Parameter]) -> None:
        """What computes of these pieces is what was updated, which is on the device now."""
        apart = [piece for piece in (self._by_updated[id(each)] for each in updated) if piece.apart]
        if apart:
            torch._foreach_copy_([piece.computing for piece in apart], [piece.updated for piece in apart])

    @torch.no_grad()
    def publish(self) -> None:
        """After an update of all pieces: what computes is the same on all ranks."""
        if self._spread:
            for ddp in self._ddps:
                ddp.start_param_sync(force_sync=True)

    # ---- gradients

    def gradients(self) -> list[Tensor]:
        return [piece.gradient for piece in self.pieces.values()]

    @torch.no_grad()
    def norm(self, everywhere: Mapping[str, bool]) -> Tensor:
        """[] float32: of the gradient over all ranks, each parameter once. `everywhere`: by name, whether all ranks of a stage
        have all of it. A collective."""
        first = self._parallel.tensor_rank == 0

        def counts(name: str) -> bool:
            once = self._spread or self.copies(name).rank == 0
            return once and (first or not everywhere[name]) and name not in self.counted_elsewhere

        counted = [piece.gradient for name, piece in self.pieces.items() if counts(name)]
        total = torch.zeros((), dtype=torch.float32, device=next(iter(self.parameters.values())).device)
        if counted:
            total += torch.stack(torch._foreach_norm(counted, 2.0, torch.float32)).square().sum()
        dist.all_reduce(total)
        return total.sqrt()


def choose_share(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Names whose sizes are that fraction of all, or less by not as much as the smallest of the others: largest ones first.
    `choose_share({"a": 5, "b": 3, "c": 2}, 0.7)` is a and c."""
    room, chosen = fraction * sum(sizes.values()), set[str]()
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= room:
            chosen.add(name)
            room -= size
    return frozenset(chosen)
