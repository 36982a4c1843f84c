"""The pool, on a provider of the test's own that counts: fresh sandboxes, bounds, order, what is left, and whom it blames."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from telescope.environments.breaker import Breaker, BreakerOpen
from telescope.environments.sandboxes.base import Ending, Isolation, Limits, Outcome, Provider, Sandbox, SandboxError, Wall
from telescope.environments.sandboxes.pool import Pool, SandboxSettings


class Counted(Sandbox):
    def __init__(self, number: int, provider: Counting) -> None:
        self.number, self.provider = number, provider

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        if argv[0] == "lose":
            raise SandboxError("the machine is gone")
        return Outcome(0, str(self.number).encode(), b"", Ending.EXITED, 0.5)

    async def upload(self, path: str, content: bytes) -> None: ...

    async def download(self, path: str) -> bytes:
        return b""

    async def delete(self) -> None:
        self.provider.living.discard(self.number)


class Counting(Provider, frozen=False, extra="allow"):
    name: ClassVar[str] = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.made, self.living, self.most, self.closed, self.down = 0, set[int](), 0, False, False

    async def start(self, limits: Limits) -> Isolation:
        return Isolation(self.name, Wall.NONE, ())

    async def create(self, limits: Limits) -> Sandbox:
        if self.down:
            raise SandboxError("no capacity")
        self.made += 1
        self.living.add(self.made)
        self.most = max(self.most, len(self.living))
        await asyncio.sleep(0)
        return Counted(self.made, self)

    async def close(self) -> None:
        self.closed = True


async def test_each_rollout_gets_a_sandbox_that_nobody_had_before() -> None:
    provider = Counting()
    pool = Pool(provider, SandboxSettings(ready=2, most=2))
    seen = []
    for _ in range(5):
        async with pool.sandbox() as guest:
            seen.append((await guest.exec(["who"])).text)
    assert len(set(seen)) == 5
    await pool.close()
    assert provider.living == set()
    assert provider.closed


async def test_no_more_are_in_use_than_allowed_and_first_come_is_first_served() -> None:
    provider = Counting()
    pool = Pool(provider, SandboxSettings(ready=0, most=3))
    order: list[int] = []
    inside = most = 0

    async def rollout(number: int) -> None:
        nonlocal inside, most
        async with pool.sandbox() as guest:
            order.append(number)
            inside += 1
            most = max(most, inside)
            for _ in range(3):
                await guest.exec(["work"])
                await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(rollout(number) for number in range(12)))
    assert (most, order) == (3, list(range(12)))
    await pool.close()


async def test_a_cancelled_rollout_leaves_no_sandbox() -> None:
    provider = Counting()
    pool = Pool(provider, SandboxSettings(ready=0, most=1))
    inside = asyncio.Event()

    async def rollout() -> None:
        async with pool.sandbox():
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(rollout())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with pool.sandbox() as guest:  # its place is free again
        assert (await guest.exec(["who"])).text == "2"
    await pool.close()
    assert provider.living == set()


async def test_what_a_sandbox_cost_is_told() -> None:
    pool = Pool(Counting(), SandboxSettings(ready=0))
    async with pool.sandbox() as guest:
        await guest.exec(["a"])
        await guest.exec(["b"])
    assert guest.use.row()["commands"] == {"exited": 2}
    assert guest.use.row()["provider"] == "counting"
    assert guest.use.metrics().keys() == {"sandbox_wait_s", "sandbox_start_s", "sandbox_exec_s", "sandbox_commands"}
    assert guest.use.metrics()["sandbox_commands"] == 2.0
    await pool.close()


async def test_a_provider_that_keeps_failing_is_left_alone_and_tried_again_later() -> None:
    provider, now = Counting(), [0.0]
    pool = Pool(provider, SandboxSettings(ready=0), Breaker("counting", failures=3, pause_s=10.0, clock=lambda: now[0]))
    provider.down = True
    for _ in range(3):
        with pytest.raises(SandboxError, match="no capacity"):
            async with pool.sandbox():
                pass
    with pytest.raises(BreakerOpen, match="no capacity"):
        async with pool.sandbox():
            pass
    provider.down, now[0] = False, 11.0
    async with pool.sandbox() as guest:
        assert (await guest.exec(["who"])).ok
    await pool.close()


async def test_a_command_that_the_provider_loses_counts_against_it() -> None:
    breaker = Breaker("counting", failures=1, pause_s=10.0, clock=lambda: 0.0)
    pool = Pool(Counting(), SandboxSettings(ready=0), breaker)
    with pytest.raises(SandboxError, match="the machine is gone"):
        async with pool.sandbox() as guest:
            await guest.exec(["lose"])
    assert breaker.trips == 1
    await pool.close()
