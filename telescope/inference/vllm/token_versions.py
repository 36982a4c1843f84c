"""Which weight version sampled each token of a request, exactly, though nothing is paused when the version changes.

All orders reach vLLM's engine through one socket, in order. So a request that is sent after a commit is of the new version from
its first token on, and of one that was sent before, the engine tells with the commit's answer how many tokens it had by then.
The same place marks each request for the prefix cache: blocks are shared only among requests of one version.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telescope.inference.vllm.patches import salt


@dataclass
class VersionSpans:
    """Versions of one request: from token `first` on, `version`. Ascending; the first entry is where it was born."""

    firsts: list[int] = field(default_factory=lambda: [0])
    versions: list[int] = field(default_factory=lambda: [0])

    def begin(self, first: int, version: int) -> None:
        self.firsts.append(first)
        self.versions.append(version)

    def of(self, tokens: int) -> np.ndarray:
        """[tokens] int32."""
        return np.asarray([self.versions[bisect_right(self.firsts, token) - 1] for token in range(tokens)], dtype=np.int32)


class TokenVersions:
    """Stands between vLLM's client and its socket. One event loop."""

    def __init__(self, client: Any, ours: Callable[[str, str], VersionSpans | None], salted: bool, version: int = 0) -> None:
        """`ours(external id, internal id)`: where to write a request's versions down; None for one that came over HTTP.
        `version`: served at first."""
        self.current = version
        """The version that requests sent from now on are sampled by."""
        self._ours = ours
        self._salted = salted
        self._send = client.add_request_async
        self._answered = asyncio.Event()
        self._answered.set()
        client.add_request_async = self._add_request

    def commit_is_sent(self, version: int) -> None:
        """Call directly before the order is sent, without a turn of the event loop between."""
        self.current = version
        self._answered.clear()

    def commit_is_answered(self, version: int, sampled: Mapping[str, int], requests: Mapping[str, VersionSpans]) -> None:
        """`requests`: ours, by vLLM's id."""
        for name, tokens in sampled.items():
            if (spans := requests.get(name)) is not None:
                spans.begin(tokens, version)
        self._answered.set()

    async def settled(self) -> None:
        """Return once no commit is on its way, so that the versions of a finished request are known."""
        await self._answered.wait()

    async def _add_request(self, request: Any) -> None:
        """Nothing is awaited before the send, so `current` holds for it."""
        if (spans := self._ours(request.external_req_id, request.request_id)) is not None:
            spans.versions[0] = self.current
        if self._salted:
            request.cache_salt = salt(self.current, request.cache_salt)
        await self._send(request)
