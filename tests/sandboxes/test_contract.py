"""Every provider that runs on this machine keeps the contract; those whose program is missing here are skipped by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from telescope.environments.sandboxes.base import Isolation, Provider, Sandbox, Wall
from tests.sandboxes.contract import CONTRACT, LIMITS, two_sandboxes_share_nothing
from tests.sandboxes.machine import PROVIDERS, provider_named

WALLS = {"gvisor": Wall.KERNEL, "unsafe_subprocess": Wall.NONE}


@pytest.fixture(params=PROVIDERS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def started(name: str) -> AsyncIterator[tuple[Provider, Isolation]]:
    provider = provider_named(name)
    isolation = await provider.start(LIMITS)
    yield provider, isolation
    await provider.close()


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
async def test_a_sandbox_keeps_the_contract(
    rule: Callable[[Sandbox], Awaitable[None]], started: tuple[Provider, Isolation]
) -> None:
    provider, _ = started
    sandbox = await provider.create(LIMITS)
    try:
        await rule(sandbox)
    finally:
        await sandbox.delete()


async def test_sandboxes_share_nothing_and_none_is_left(started: tuple[Provider, Isolation]) -> None:
    await two_sandboxes_share_nothing(started[0])


def test_it_says_what_it_holds(name: str, started: tuple[Provider, Isolation]) -> None:
    provider, found = started
    assert found.provider == provider.name == PROVIDERS[name]["provider"]
    assert found.wall is WALLS.get(name, Wall.NAMESPACES)
    assert ("no network" in found.holds) == (name != "unsafe_subprocess")
    assert any("MB" in held for held in found.holds)
