"""Ask a model behind an address with patience: again where that may help, and not at all while it is down.

    read(messages, what) ─▶ the breaker lets it ─▶ POST ─▶ what(text)
              ▲                                     │ down, or an answer that `what` can't use
              └───────── a pause that doubles ◀─────┘

Owns the settings of such a model, the tries, their pauses and the circuit breaker. Whose failure it is when patience ends, its
users say: a judge's is the grader's (judge.py), a simulated customer's the infrastructure's (tau/users.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import Field, SecretStr, model_validator

from telescope.environments.breaker import Breaker, BreakerOpen
from telescope.environments.endpoint import ChatEndpoint, EndpointDown, Message, parsed, sendable_key
from telescope.environments.failures import InfrastructureError
from telescope.settings import Settings

T = TypeVar("T")
LONGEST_PAUSE_S = 60.0
LEAST_PAUSE_S = 1.0
"""Between two looks at a breaker that is open."""
SHOWN = 300


class EndpointSettings(Settings):
    """Where a model is asked and how patiently; a part of the settings of environments that need one beside the policy."""

    base_url: str
    """OpenAI-compatible address of the model, e.g. `http://localhost:8000/v1`."""
    model: str = Field(min_length=1)
    """Its name there."""
    api_key: SecretStr = SecretStr("")
    """Its key, as a reference to an environment variable: `'${oc.env:JUDGE_API_KEY}'`; empty: none is sent."""
    temperature: float | None = Field(default=0.0, ge=0)
    """How its answers are drawn; null: not said, for models that refuse it."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest answer, thoughts included."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one request may take."""
    max_concurrent: int = Field(default=32, ge=1)
    """Requests of one worker process at once; each has a connection, which is kept."""
    max_attempts: int = Field(default=4, ge=1)
    """Requests for one answer that can be used."""
    retry_backoff_s: float = Field(default=1.0, ge=0)
    """Pause before the second request; it doubles up to 60 s, and is what the server asks for where that is longer."""
    patience_s: float = Field(default=300.0, gt=0)
    """Seconds after which no further request is made for an answer, those included in which the breaker is open."""
    breaker_failures: int = Field(default=5, ge=1)
    """Failures in a row, of any samples, after which the model is left alone for a while."""
    breaker_pause_s: float = Field(default=10.0, gt=0, le=300)
    """How long at first; then one request tries, and each that fails doubles the pause."""

    @model_validator(mode="after")
    def _an_address(self) -> EndpointSettings:
        parsed(self.base_url)
        sendable_key(self.api_key.get_secret_value())
        return self


class GaveUp(InfrastructureError):
    """No answer that can be used came of `requests` requests; `cause` is what was wrong with the last one."""

    def __init__(self, model: str, requests: int, cause: str) -> None:
        super().__init__(f"{model} gave no answer that can be used in {requests} requests; at last: {cause}")
        self.requests = requests
        self.cause = cause


class PatientEndpoint:
    """One for each worker process and event loop: make it in `set_up`, close it in `tear_down`."""

    def __init__(
        self,
        role: str,
        settings: EndpointSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`role` is what the model is to the run, e.g. "the judge"; it begins every message about it."""
        self._settings, self._clock, self._pause = settings, clock, pause
        self._called = f"{role} {settings.model} at {settings.base_url}"
        self._endpoint = ChatEndpoint(
            settings.base_url,
            settings.model,
            api_key=settings.api_key.get_secret_value(),
            timeout_s=settings.timeout_s,
            connections=settings.max_concurrent,
        )
        self.breaker = Breaker(self._called, failures=settings.breaker_failures, pause_s=settings.breaker_pause_s, clock=clock)

    async def close(self) -> None:
        await self._endpoint.close()

    async def read(self, messages: Sequence[Message], what: Callable[[str], T]) -> T:
        """What `what` makes of the model's answer. An answer for which it raises `ValueError` is asked for again.

        Raises `GaveUp`, and `EndpointRefused` at once where the server does not take the request.
        """
        settings = self._settings
        deadline, pause_s = self._clock() + settings.patience_s, settings.retry_backoff_s
        asked, cause = 0, ""
        while True:
            least_s = 0.0
            try:
                return what(await self._once(messages))
            except BreakerOpen as error:  # nobody was asked
                cause = cause or str(error)
                least_s = LEAST_PAUSE_S
            except EndpointDown as error:
                asked, cause, least_s = asked + 1, str(error), error.retry_after_s
            except ValueError as error:
                asked, cause = asked + 1, str(error)
            wait_s = max(pause_s, least_s)
            if asked >= settings.max_attempts or self._clock() + wait_s > deadline:
                raise GaveUp(self._called, asked, cause[:SHOWN])
            await self._pause(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _once(self, messages: Sequence[Message]) -> str:
        settings = self._settings
        drawn = {} if settings.temperature is None else {"temperature": settings.temperature}
        async with self.breaker.call():
            return await self._endpoint.chat(messages, max_tokens=settings.max_tokens, **drawn)
