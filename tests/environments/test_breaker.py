"""The circuit breaker with a clock that is turned by hand."""

from __future__ import annotations

import asyncio

import pytest

from telescope.environments.breaker import Breaker, BreakerOpen, BreakerState
from telescope.environments.failures import InfrastructureError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(**options: float) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker("prime", failures=3, pause_s=10.0, longest_pause_s=25.0, clock=clock), clock


def test_it_opens_after_as_many_failures_in_a_row() -> None:
    cut, _ = breaker()
    for _ in range(2):
        cut.record_failure("503")
    cut.record_success()
    for _ in range(2):
        cut.record_failure("503")
    assert cut.state is BreakerState.CLOSED
    cut.record_failure("503 again")
    assert (cut.state, cut.trips) == (BreakerState.OPEN, 1)
    with pytest.raises(BreakerOpen, match="prime is not asked for 10 s after 3 failures in a row: 503 again"):
        cut.allow()


def test_after_the_pause_one_call_may_try_and_its_success_closes() -> None:
    cut, clock = breaker()
    for _ in range(3):
        cut.record_failure("503")
    clock.now = 10.0
    assert cut.state is BreakerState.HALF_OPEN
    cut.allow()
    with pytest.raises(BreakerOpen):
        cut.allow()
    cut.record_success()
    cut.allow()
    cut.allow()
    assert cut.state is BreakerState.CLOSED


def test_a_failed_try_doubles_the_pause_up_to_the_longest() -> None:
    cut, clock = breaker()
    for _ in range(3):
        cut.record_failure("503")
    for pause_s in (20.0, 25.0, 25.0):
        clock.now += 25.0
        cut.allow()
        cut.record_failure("still 503")
        opened = clock.now
        clock.now = opened + pause_s - 0.1
        assert cut.state is BreakerState.OPEN
        clock.now = opened + pause_s
        assert cut.state is BreakerState.HALF_OPEN
    assert cut.trips == 4


def test_failures_that_were_under_way_when_it_opened_do_not_prolong_it() -> None:
    cut, clock = breaker()
    for _ in range(3):
        cut.record_failure("503")
    clock.now = 9.0
    cut.record_failure("a late one")
    clock.now = 10.0
    assert cut.state is BreakerState.HALF_OPEN


async def test_around_a_call_only_failures_of_the_infrastructure_count() -> None:
    cut, clock = breaker()
    for error in (InfrastructureError("down"), InfrastructureError("down"), ValueError("not its fault")):
        with pytest.raises(type(error)):
            async with cut.call():
                raise error
    assert cut.state is BreakerState.CLOSED
    for _ in range(3):
        with pytest.raises(InfrastructureError):
            async with cut.call():
                raise InfrastructureError("down")
    assert cut.state is BreakerState.OPEN
    clock.now = 10.0
    with pytest.raises(asyncio.CancelledError):
        async with cut.call():
            raise asyncio.CancelledError
    assert cut.state is BreakerState.HALF_OPEN  # the try said nothing
    async with cut.call():
        pass
    assert cut.state is BreakerState.CLOSED


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="failures=0 must be at least 1"):
        Breaker("x", failures=0)
