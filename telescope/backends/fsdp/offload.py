"""Moments that lie in host memory between updates, and come to the GPU a few parameters at a time for their step.

Owns the way there and back. The step itself is the optimiser's own, on the GPU, so what is trained is the same to the bit; what
it costs is 16 bytes a parameter over the bus with AdamW. (Weights and gradients in host memory are fully_shard's own affair.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from telescope.backends.fsdp.sharding import local, placed_like, share_bytes

AT_ONCE_BYTES = 256 << 20
"""Of parameters on this rank whose moments are on the GPU at the same time; a larger one comes alone."""


class HostedStates:
    """Steps an optimiser in pieces. Its state dict is the optimiser's own, with tensors in host memory."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: str) -> None:
        self._optimizer = optimizer
        self._device = torch.device(device)
        self._homes: dict[tuple[int, str], Tensor] = {}
        optimizer.register_step_post_hook(lambda *_: self.send_home())
        optimizer.register_load_state_dict_post_hook(lambda _: self.send_home())

    def step(self) -> None:
        """One step of all parameters that have a gradient."""
        given = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in given]
        for p in given:
            p.grad = None
        for piece in pieces(given, gradients):
            for parameter, gradient in piece:
                parameter.grad = gradient
                self._fetch(parameter)
            self._optimizer.step()
            for parameter, _ in piece:
                parameter.grad = None
        for p, gradient in zip(given, gradients, strict=True):
            p.grad = gradient
        if self._device.type == "cuda":  # a checkpoint may read the host's memory from now on
            torch.cuda.current_stream(self._device).synchronize()

    @torch.no_grad()
    def send_home(self) -> None:
        """Put every moment into host memory that is not there."""
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if _travels(value) and not self._is_home(parameter, name, value):
                    state[name] = self._home(parameter, name, value)

    def _fetch(self, parameter: nn.Parameter) -> None:
        state = self._optimizer.state.get(parameter, {})
        for name, value in state.items():
            if _travels(value):
                here = torch.empty_like(local(value), device=self._device)
                state[name] = placed_like(value, here.copy_(local(value), non_blocking=True))

    def _home(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        key = (id(parameter), name)
        if key not in self._homes:
            pinned = self._device.type == "cuda"
            self._homes[key] = torch.empty(local(value).shape, dtype=value.dtype, pin_memory=pinned)
        self._homes[key].copy_(local(value), non_blocking=True)
        return placed_like(value, self._homes[key])

    def _is_home(self, parameter: Tensor, name: str, value: Tensor) -> bool:
        home = self._homes.get((id(parameter), name))
        return home is not None and local(value).data_ptr() == home.data_ptr()


def _travels(value: Any) -> bool:
    """A moment, and no count of steps."""
    return isinstance(value, Tensor) and value.ndim > 0


def pieces(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None], nbytes: int = AT_ONCE_BYTES
) -> Iterator[list[tuple[nn.Parameter, Tensor | None]]]:
    """Neighbours whose shares have at most `nbytes` together: the same on each rank, as a step may be a collective."""
    piece: list[tuple[nn.Parameter, Tensor | None]] = []
    held = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        size = share_bytes(parameter)
        if piece and held + size > nbytes:
            yield piece
            piece, held = [], 0
        piece.append((parameter, gradient))
        held += size
    if piece:
        yield piece
