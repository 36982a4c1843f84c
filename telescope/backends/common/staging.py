"""A copy of one rank's tensors in host memory, taken as fast as the bus allows, into the same memory each time.

Owns that memory. torch's own stager frees it after each copy (and in 2.11 takes no second one), so that every save would pay
for pinning gigabytes. Refuses to know what is written from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from telescope.backends.common.local_parts import local, placed_like

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""

Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Tensors by name, all there at once or made one after another."""


def pairs(tensors: Named) -> Iterable[tuple[str, Tensor]]:
    return tensors.items() if isinstance(tensors, Mapping) else tensors


class HostCopies:
    """Of tensors by name, on `device`: of a GPU's the copies are pinned."""

    def __init__(self, device: str) -> None:
        self._device, self._pinned = device, device.startswith("cuda")
        self._homes: dict[str, Tensor] = {}

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the memory for these tensors: seconds for tens of gigabytes, which `take` is then spared. Pages are touched
        first, so that the GPU's driver, which others wait for while it pins, finds them there. For a thread of its own."""
        if self._pinned:
            torch.cuda.set_device(self._device)  # a new thread has the first GPU, and would open a context there
        for name, tensor in tensors.items():
            self._home(name, local(tensor), touched=True)

    def take(self, tensors: Named) -> dict[str, Tensor]:
        """The tensors as they are now; sharded ones stay so, with this rank's part in host memory. They hold until the next
        call. Those that are made one after another are let go one after another, too. Raises RuntimeError or MemoryError where
        there is not as much host memory."""
        taken = {}
        for name, tensor in pairs(tensors):
            part = local(tensor)
            home = self._home(name, part)
            home.copy_(part, non_blocking=self._pinned)
            taken[name] = placed_like(tensor, home)
        if self._pinned:
            torch.cuda.synchronize()
        return taken

    def _home(self, name: str, part: Tensor, *, touched: bool = False) -> Tensor:
        home = self._homes.get(name)
        if home is None or home.shape != part.shape or home.dtype != part.dtype:
            home = self._homes[name] = host_tensor(part.shape, part.dtype, pinned=self._pinned, touched=touched)
        return home


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool, touched: bool = False) -> Tensor:
    """Not filled yet. `pinned`: see `pin`; `touched`: its pages are there before that, see `HostCopies.reserve`."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    if touched:
        tensor.zero_()
    if pinned:
        pin(tensor)
    return tensor


def pin(tensor: Tensor) -> None:
    """Let GPUs copy from and to its memory by themselves, as long as this very object lives: not one that shares the memory.

    In place, and exactly its bytes: torch's allocator of pinned memory rounds up to powers of two. Raises RuntimeError where
    that much can't be pinned."""
    if not tensor.nbytes:
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    if code := int(runtime.cudaHostRegister(address, tensor.nbytes, PORTABLE)):
        raise RuntimeError(f"{tensor.nbytes / 1e9:.2f} GB of host memory can't be pinned (CUDA says {code})")
    # not at the interpreter's end, when CUDA may be gone already
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
