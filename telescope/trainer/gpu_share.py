"""How much of a GPU a trainer rank may take that shares it with a server: its part, and all of it while the server sleeps.

Owns the limits, and the check that what is kept between steps is the rank's part. Refuses to know models and messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

GIB = 2**30


class NoRoomBeside(RuntimeError):
    """The rank keeps more of the card than the server leaves it; the sentence has the numbers and the remedy."""


class SharedCard(Protocol):
    """A GPU's memory as torch's allocator of this process sees it. Bytes."""

    @property
    def total(self) -> int: ...

    @property
    def held(self) -> int:
        """Taken from the driver, in use or not."""
        ...

    def release(self) -> None:
        """Give the driver back what is not in use."""
        ...

    def limit(self, share: float) -> None:
        """Take no more than this share of the whole, from now on."""
        ...


class CudaCard:
    """See `Card`; torch is imported when it is used."""

    def __init__(self, device: str) -> None:
        self._device = device

    @property
    def total(self) -> int:
        import torch

        return int(torch.cuda.get_device_properties(self._device).total_memory)

    @property
    def held(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved(self._device))

    def release(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def limit(self, share: float) -> None:
        import torch

        torch.cuda.set_per_process_memory_fraction(share, self._device)


@dataclass(frozen=True)
class GpuShare:
    """`share`: of the card, the rank's part. `outside`: bytes of it that torch's allocator does not know of (`Publisher`).
    `in_turns`: the server sleeps in each step (`inference.sleep_while_training`)."""

    card: SharedCard
    share: float
    outside: int = 0
    in_turns: bool = False

    @property
    def limit(self) -> int:
        """Bytes that torch's allocator may hold beside an awake server."""
        return max(0, int(self.share * self.card.total) - self.outside)

    def settle(self) -> None:
        """Keep to the rank's part from now on. Raises `NoRoomBeside` where it holds more already."""
        self.card.release()
        held, limit = self.card.held, self.limit
        if held > limit or not limit:
            handed = f", {self.outside / GIB:.2f} GiB of it for the version handed to the server" if self.outside else ""
            raise NoRoomBeside(
                f"this rank keeps {(held + self.outside) / GIB:.2f} GiB of its GPU between steps{handed}, and the server "
                f"leaves it {self.share:.0%} of {self.card.total / GIB:.2f} GiB: lower inference.gpu_memory_utilization to "
                f"{max(0.0, 1 - (held + self.outside) / self.card.total - SPARE):.2f} or less, take a smaller optimiser state "
                "(backend.optimizer, backend.offload), or a smaller model"
            )
        self.card.limit(limit / self.card.total)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step: the whole card where the server sleeps. After an error nothing is given back: the rank ends."""
        if not self.in_turns:
            yield
            return
        self.card.limit(1.0)
        yield
        self.settle()


SPARE = 0.01
"""Of the card, below what would just fit: the CUDA context of this process is not counted."""
