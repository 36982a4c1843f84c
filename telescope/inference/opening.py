"""What a server's process and its engine's workers tell each other about updates. No torch, no vLLM."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Place = Literal["full", "host", "none"]
"""Where a version waits until it is committed; see staging.py."""


class BellPlace(msgspec.Struct, frozen=True):
    """Where a server hears its workers (bell.py): a socket's name in hex, empty where there is none, and the word to say."""

    address: str = ""
    word: str = ""


class Opening(msgspec.Struct, frozen=True):
    """What a worker needs to know before its first update."""

    run: str
    server: str
    place: Place
    deadline_s: float
    init_timeout_s: float
    bell: BellPlace = BellPlace()
    plugin_path: tuple[str, ...] = ()
    transport_kwargs: dict[str, Any] = {}
    """Of a transport of the user's own: where its file lies, and its settings."""


class Opened(msgspec.Struct, frozen=True):
    """How a worker will take updates. `refused`: a sentence if it can't; `no_plan`: why it uses vLLM's own loader, or empty;
    `arranged`: layers whose experts are arranged for vLLM's kernel at each update; `idle`: the checkpoint's tensors that the
    engine computes nothing with."""

    refused: str = ""
    no_plan: str = ""
    copies: int = 0
    arranged: int = 0
    nbytes: int = 0
    staging_bytes: int = 0
    seconds: float = 0.0
    idle: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """How versions are put in place, for the log."""
        if self.no_plan:
            return f"updates go through vLLM's own loader, which takes longer: {self.no_plan}"
        return (
            f"updates are {self.copies} copies of {self.nbytes / 1e9:.2f} GB in all, found and checked in {self.seconds:.1f} "
            f"s; staging buffer {self.staging_bytes / 1e9:.2f} GB; {self.arranged} layers' experts are arranged for "
            "their kernel"
        )


class StageState(msgspec.Struct, frozen=True):
    """How far a version has come in a worker. `cause`: why it will not come; `touched`: parameters may have been written;
    `missing`: the members of its group that this worker waited for in vain."""

    over: bool
    cause: str = ""
    checksum: str = ""
    touched: bool = False
    missing: tuple[str, ...] = ()


class Comparison(msgspec.Struct, frozen=True):
    """Parameters against a staged version: how many of its tensors were compared (0: there was no way), and which are other."""

    tensors: int
    other: tuple[str, ...]
