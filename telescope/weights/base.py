"""How one version of the weights gets from the trainer to the servers: publish on one side, read on the other.

Owns the interface and the checksum; a transport is one file beside this one. Knows bytes and names, not torch modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from telescope.records import TensorSpec, WeightManifest


class Publisher(Protocol):
    """The trainer's side (rank 0). At most two versions exist at once: the served and the next."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Any]]) -> WeightManifest: ...

    def retire(self, version: int) -> None:
        """Free what the version held; servers no longer read it."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """The server's side. Raises `WeightsCorrupt` where bytes and manifest disagree."""

    def read(self, manifest: WeightManifest) -> Iterator[tuple[TensorSpec, memoryview]]: ...

    def close(self) -> None: ...


class WeightsCorrupt(RuntimeError):
    """The bytes found are not those of the manifest."""
