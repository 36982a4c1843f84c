"""Moments, and weights, that are kept otherwise between updates than a step needs them: in host memory, or in fewer bits. They
come to the device a few parameters at a time.

Owns the way there and back. The step itself is the optimiser's own, on the device and in the precision of the weights. So one
whose states are in host memory is the same to the bit, and one whose moments have fewer bits differs by their rounding alone:
to the nearest number, after each step. (Weights and gradients that fully_shard keeps in host memory are its own affair.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from telescope.backends.common.local_parts import local, placed_like, share_bytes
from telescope.backends.common.staging import host_tensor

AT_ONCE_BYTES = 256 << 20
"""Of parameters on this rank whose states are on the device at the same time; a larger one comes alone."""

Gradients = Sequence[tuple[nn.Parameter, Tensor]]


@dataclass(frozen=True)
class Home:
    """Where a state is between updates, and how."""

    on_host: bool = False
    """In host memory, pinned where a GPU steps."""
    dtype: torch.dtype | None = None
    """None: as the optimiser has made it."""


ON_HOST = Home(on_host=True)


def tell_nobody(parameters: Sequence[nn.Parameter]) -> None:
    """Nobody else needs to know what was stepped."""


class StoredStates:
    """Steps an optimiser in pieces. Its state dict is the optimiser's own, with tensors as they are stored."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: str, home: Callable[[Tensor, str], Home],
        hosted: Iterable[nn.Parameter] = (),
    ) -> None:  # fmt: skip
        """`home` of a parameter's state by its name. `hosted`: parameters that lie in host memory themselves, plain ones; their
        memory stays theirs."""
        self._optimizer, self._home = optimizer, home
        self._device = torch.device(device)
        self._stores: dict[tuple[int, str], Tensor] = {}
        self._hosted = {id(parameter): parameter.data for parameter in hosted}
        self._visiting: list[nn.Parameter] | None = None
        optimizer.register_step_post_hook(lambda *_: self.send_home())
        optimizer.register_load_state_dict_post_hook(lambda _: self.send_home())

    def step(self) -> None:
        """One step of all parameters that have a gradient, which they keep. None of them is hosted."""
        every = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        given = [(parameter, parameter.grad) for parameter in every if parameter.grad is not None]
        for parameter, _ in given:
            parameter.grad = None
        self.step_with(given)
        for parameter, gradient in given:
            parameter.grad = gradient

    def step_with(self, given: Gradients, stepped: Callable[[Sequence[nn.Parameter]], None] = tell_nobody) -> None:
        """One step by these gradients, which may lie in another precision than the parameters. `stepped` is told which of them
        have new numbers, while these are on the device."""
        for piece in pieces(given, AT_ONCE_BYTES):
            self._visiting = [parameter for parameter, _ in piece]
            for parameter, gradient in piece:
                self._fetch(parameter)
                parameter.grad = gradient.to(parameter.dtype)
            self._optimizer.step()  # its hook sends states home
            for parameter in self._visiting:
                parameter.grad = None
            stepped(self._visiting)
            self._send_weights_home(self._visiting)
        self._visiting = None
        if any(store.device.type != self._device.type for store in (*self._stores.values(), *self._hosted.values())):
            torch.cuda.current_stream(self._device).synchronize()  # a checkpoint may read the host's memory from now on

    @torch.no_grad()
    def send_home(self) -> None:
        """Store every state that is not; in the midst of a step, of the parameters that have come for it."""
        for parameter in list(self._optimizer.state) if self._visiting is None else self._visiting:
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if self._travels(parameter, name, value) and not self._is_stored(parameter, name, value):
                    state[name] = self._store(parameter, name, value)

    @torch.no_grad()
    def _send_weights_home(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if (store := self._hosted.get(id(parameter))) is not None:
                parameter.data = store.copy_(parameter.data, non_blocking=True)

    @torch.no_grad()
    def _fetch(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._hosted:
            parameter.data = self._bring(parameter.data, parameter.dtype)
        state = self._optimizer.state.get(parameter, {})
        for name, value in state.items():
            if self._travels(parameter, name, value):
                wanted = value.dtype if self._home(parameter, name).dtype is None else parameter.dtype
                state[name] = placed_like(value, self._bring(local(value), wanted))

    def _bring(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(stored, dtype=dtype, device=self._device).copy_(stored, non_blocking=True)

    def _store(self, parameter: Tensor, name: str, value: Tensor) -> Tensor:
        key, part = (id(parameter), name), local(value)
        if key not in self._stores:
            self._stores[key] = self._make_store(part, self._home(parameter, name))
        return placed_like(value, self._stores[key].copy_(part, non_blocking=True))

    def _make_store(self, part: Tensor, home: Home) -> Tensor:
        dtype = home.dtype or part.dtype
        if home.on_host:
            return host_tensor(part.shape, dtype, pinned=self._device.type == "cuda")
        return torch.empty(part.shape, dtype=dtype, device=self._device)

    def _is_stored(self, parameter: Tensor, name: str, value: Tensor) -> bool:
        store = self._stores.get((id(parameter), name))
        return store is not None and local(value).data_ptr() == store.data_ptr()

    def _travels(self, parameter: Tensor, name: str, value: Any) -> bool:
        """A moment that is kept otherwise, and no count of steps."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return False
        home = self._home(parameter, name)
        return home.on_host or home.dtype not in (None, parameter.dtype)


def pieces(given: Gradients, nbytes: int) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Neighbours whose shares have at most `nbytes` together: the same on each rank, as a step may be a collective."""
    piece: list[tuple[nn.Parameter, Tensor]] = []
    held = 0
    for parameter, gradient in given:
        size = share_bytes(parameter)
        if piece and held + size > nbytes:
            yield piece
            piece, held = [], 0
        piece.append((parameter, gradient))
        held += size
    if piece:
        yield piece
