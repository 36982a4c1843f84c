"""A circuit breaker: stop asking a provider that fails, and try again after a while with a single call.

    closed ─ `failures` in a row ─▶ open ─ `pause_s` later ─▶ half-open ─ success ─▶ closed
                                     ▲                            └─ failure ─▶ open again, for twice as long

Pure: the clock is handed in. One breaker serves one provider (a sandbox service, a judge) in one process, on one event loop.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum

from telescope.environments.failures import InfrastructureError


class BreakerOpen(InfrastructureError):
    """The provider is not asked at the moment; the message says since when and why."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """`async with breaker.call():` around each request, or `allow`, `record_success`, `record_failure` by hand."""

    def __init__(
        self,
        provider: str,
        *,
        failures: int = 5,
        pause_s: float = 10.0,
        longest_pause_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if failures < 1 or not 0 < pause_s <= longest_pause_s:
            raise ValueError(
                f"failures={failures} must be at least 1, and pause_s={pause_s} above 0 and not above "
                f"longest_pause_s={longest_pause_s}"
            )
        self.provider = provider
        self.trips = 0
        """How often it has opened."""
        self._limit = failures
        self._first_pause_s = self._pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._clock = clock
        self._row = 0
        self._opened_at: float | None = None
        self._probing = False
        self._cause = ""

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._clock() - self._opened_at >= self._pause_s else BreakerState.OPEN

    def allow(self) -> None:
        """Raises `BreakerOpen` where the provider must not be asked. In the half-open state one caller at a time may."""
        state = self.state
        if state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._probing):
            raise BreakerOpen(
                f"{self.provider} is not asked for {self._pause_s:g} s after {self._row} failures in a row: {self._cause}"
            )
        self._probing = state is BreakerState.HALF_OPEN

    def record_success(self) -> None:
        self._row, self._opened_at, self._probing, self._pause_s = 0, None, False, self._first_pause_s

    def record_failure(self, cause: str) -> None:
        """One more failure of the provider itself (not of what it was asked to do)."""
        self._row += 1
        self._cause = cause
        if self._probing:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        if self._probing or (self._opened_at is None and self._row >= self._limit):
            self._opened_at, self._probing = self._clock(), False
            self.trips += 1

    def release(self) -> None:
        """The call ended without saying anything of the provider (it was cancelled): another may try."""
        self._probing = False

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Around one request: an `InfrastructureError` out of it is a failure, anything else but a cancellation a success."""
        self.allow()
        try:
            yield
        except InfrastructureError as error:
            self.record_failure(str(error))
            raise
        except Exception:  # the provider has answered; what it was asked for is another's fault
            self.record_success()
            raise
        except BaseException:
            self.release()
            raise
        self.record_success()
