"""A run directory with keys, a hub, and links to it; all of it torn down by the end of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from telescope.runlog.layout import RunDirectory
from telescope.wire.hub import Delivery, Hub, PeerJoined
from telescope.wire.link import Link
from telescope.wire.security import make_keys
from tests.wire.samples import hello

NAMES = ("orchestrator", "worker-0", "worker-1", "server-0", "trainer-0")
DEADLINE_S = 60.0
IDENTITY = {"run": "run-1", "attempt": "attempt-1", "config_hash": "c0ffee"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run")
    make_keys(directory, NAMES)
    return directory


@pytest.fixture
async def open_hub(run: RunDirectory) -> AsyncIterator[Callable[..., Awaitable[Hub]]]:
    hubs: list[Hub] = []

    async def open_one(**settings: Any) -> Hub:
        hubs.append(await Hub.open(run, **(IDENTITY | settings)))
        return hubs[-1]

    yield open_one
    for hub in hubs:
        await hub.close("the test has ended", timeout_s=0.0)


@pytest.fixture
async def hub(open_hub: Callable[..., Awaitable[Hub]]) -> Hub:
    return await open_hub()


@pytest.fixture
def connect(run: RunDirectory) -> Iterator[Callable[..., Awaitable[Link]]]:
    links: list[Link] = []

    async def connect_one(name: str, hub: Hub | None = None, **changes: Any) -> Link:
        deadline_s = changes.pop("deadline_s", DEADLINE_S)
        link = await asyncio.to_thread(Link.connect, run, hello(name, **changes), deadline_s)
        links.append(link)
        if hub is not None:
            assert isinstance(await hub.next(DEADLINE_S), PeerJoined)
        return link

    yield connect_one
    for link in links:
        link.close("the test has ended")


async def delivered(hub: Hub) -> Delivery:
    """The next happening, which must be a message."""
    happening = await hub.next(DEADLINE_S)
    assert isinstance(happening, Delivery), happening
    return happening
