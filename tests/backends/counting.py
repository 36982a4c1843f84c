"""What tensors are alive, and which operators ran, while a block runs: on the CPU, where no allocator tells."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counting(TorchDispatchMode):
    """`ran` counts operators; `alive()` is of tensors made in here; `peak_bytes` is what was the most."""

    def __init__(self, *, peaks: bool = False) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()
        self.peak_bytes = 0
        self._peaks = peaks
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self.ran[func.overloadpacket.__name__] += 1
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata in given:
                    continue  # a view
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._peaks:
            self.peak_bytes = max(self.peak_bytes, self.alive())
        return result

    def alive(self) -> int:
        """Bytes."""
        self._made = {key: (reference, size) for key, (reference, size) in self._made.items() if not reference.expired()}
        return sum(size for _, size in self._made.values())
