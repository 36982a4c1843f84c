"""A worker's sandboxes: a few started ahead, a bound on those in use, first come first served, and what each of them cost.

A sandbox is used by one rollout and then deleted; what is handed out is always a new one, so nothing needs to be cleaned.
Owns an environment's settings of sandboxes, counts, times and the circuit breaker; refuses to know what a sandbox is used for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, to_json

from telescope.config import plugins
from telescope.config.words import did_you_mean
from telescope.environments.breaker import Breaker, BreakerOpen
from telescope.environments.sandboxes.base import Isolation, Limits, Outcome, Provider, Sandbox, SandboxError
from telescope.settings import Settings

log = logging.getLogger(__name__)


class SandboxSettings(Settings):
    """Where code that a model wrote is run. docs/sandboxes.md says what each provider holds.

    The provider's own settings stand beside these, e.g. `{"provider": "docker", "image": "mine:1"}`, and are checked by its
    class. One that lies in a folder of the user's is found where the validation's context names that folder (`plugin_path`).
    """

    model_config = ConfigDict(extra="allow")

    provider: str = "bubblewrap"
    """What makes sandboxes: a file name in telescope/environments/sandboxes, or in a folder of your own. `unsafe_subprocess`
    is not a wall at all and is never chosen by itself."""
    limits: Limits = Limits()
    """What one sandbox may use."""
    ready: int = Field(default=2, ge=0, le=1000)
    """Sandboxes started ahead in each worker process; a rollout takes one of these at once."""
    most: int = Field(default=16, ge=1, le=10_000)
    """Sandboxes in use at a time in each worker process; further rollouts wait in the order they came."""

    _plugin_path: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _provider_takes_its_settings(self, info: ValidationInfo) -> Self:
        self._plugin_path = tuple((info.context or {}).get("plugin_path", ()))
        mistakes: list[tuple[tuple[str, ...], ValidationError | str]] = []
        kind: type[Settings] = Provider
        try:
            kind = self._kind()
            known = {*kind.model_fields, *type(self).model_fields}
            unknown = [name for name in self.model_extra or {} if name not in known]
            mistakes += [((name,), f"there is no such setting.{did_you_mean(name, known)}") for name in unknown]
            if not unknown:
                self.make_provider()
        except plugins.PluginError as error:
            mistakes.append((("provider",), str(error)))
        except ValidationError as error:
            mistakes.append(((), error))
        if mistakes:
            text = "; ".join(f"{'.'.join(place)}: {error}" if place else str(error) for place, error in mistakes)
            raise PydanticCustomError("nested", "{text}", {"text": text, "errors": mistakes, "model": kind})
        return self

    def make_provider(self) -> Provider:
        """The provider that the settings name, not started yet. Imports its module alone."""
        return plugins.make(plugins.SANDBOXES, self.provider, self._plugin_path, to_json(self.model_extra or {}).decode())

    def _kind(self) -> type[Provider]:
        return plugins.load(plugins.SANDBOXES, self.provider, self._plugin_path)


@dataclass
class Use:
    """What one sandbox was used for and how long it took; a row of the rollout's `info`, and numbers for its metrics."""

    provider: str
    wait_s: float = 0.0
    """From asking for it to having it: the queue, and the start where none was ready."""
    start_s: float = 0.0
    """What its start took, whether or not anyone waited for it."""
    exec_s: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        times = {name: round(getattr(self, name), 4) for name in ("wait_s", "start_s", "exec_s")}
        return {"provider": self.provider, **times, "commands": dict(self.endings)}

    def metrics(self) -> dict[str, float]:
        return {
            "sandbox_wait_s": self.wait_s,
            "sandbox_start_s": self.start_s,
            "sandbox_exec_s": self.exec_s,
            "sandbox_commands": float(sum(self.endings.values())),
        }


class Guest(Sandbox):
    """A sandbox out of the pool: the same five verbs, each counted and timed."""

    def __init__(self, sandbox: Sandbox, use: Use, breaker: Breaker) -> None:
        self._sandbox = sandbox
        self._breaker = breaker
        self.use = use

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        started = time.monotonic()
        with self._blamed():
            outcome = await self._sandbox.exec(argv, stdin=stdin, cwd=cwd, env=env, timeout_s=timeout_s)
        self.use.exec_s += time.monotonic() - started
        self.use.endings[outcome.ending] += 1
        return outcome

    async def upload(self, path: str, content: bytes) -> None:
        with self._blamed():
            await self._sandbox.upload(path, content)

    async def download(self, path: str) -> bytes:
        with self._blamed():
            return await self._sandbox.download(path)

    async def delete(self) -> None:
        await self._sandbox.delete()

    @contextlib.contextmanager
    def _blamed(self) -> Any:
        try:
            yield
        except SandboxError as error:
            self._breaker.record_failure(str(error))
            raise


@dataclass(frozen=True)
class _Ready:
    sandbox: Sandbox
    start_s: float
    since: float


class Pool:
    """`async with pool.sandbox() as guest:`. Open it in an environment's `set_up`, close it in `tear_down`."""

    def __init__(self, provider: Provider, settings: SandboxSettings, breaker: Breaker | None = None) -> None:
        self._provider = provider
        self._settings = settings
        self._fresh_s = provider.ends_after_s / 2
        self._breaker = breaker or Breaker(f"sandbox provider {provider.name}")
        self._slots = asyncio.Semaphore(settings.most)
        self._ready: deque[_Ready] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._deleting: set[asyncio.Task[None]] = set()
        self._closed = False
        self.isolation: Isolation | None = None

    @classmethod
    async def open(cls, settings: SandboxSettings) -> Pool:
        """Probe the provider, say what it holds, and start what is to be ready. Raises `SandboxUnavailable`."""
        provider = settings.make_provider()
        pool = cls(provider, settings)
        pool.isolation = await provider.start(settings.limits)
        log.info("sandboxes: %s", pool.isolation.sentence)
        pool._fill()
        return pool

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Guest]:
        """A fresh sandbox for one rollout; deleted at the end, whatever happened. Raises `SandboxError`, `BreakerOpen`."""
        asked = time.monotonic()
        async with self._slots:
            if self._closed:
                raise SandboxError("the pool of sandboxes is closed")
            taken = self._take() or await self._create()
            guest = Guest(taken.sandbox, Use(self._provider.name, time.monotonic() - asked, taken.start_s), self._breaker)
            self._fill()
            try:
                yield guest
            finally:
                # In a task: a cancelled rollout must not wait for it, and must not leave it undone.
                await asyncio.shield(self._delete(taken.sandbox))

    async def close(self) -> None:
        """Delete everything, the provider's own leftovers too."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        await asyncio.gather(*(self._delete(ready.sandbox) for ready in self._ready), *self._deleting)
        self._ready.clear()
        await self._provider.close()

    def _take(self) -> _Ready | None:
        """One that was started ahead; those that may have run out of their life time are dropped."""
        while self._ready:
            ready = self._ready.popleft()
            if time.monotonic() - ready.since < self._fresh_s:
                return ready
            self._delete(ready.sandbox)
        return None

    async def _create(self) -> _Ready:
        started = time.monotonic()
        async with self._breaker.call():
            sandbox = await self._provider.create(self._settings.limits)
        now = time.monotonic()
        return _Ready(sandbox, now - started, now)

    def _fill(self) -> None:
        if not self._closed and (self._filling is None or self._filling.done()) and len(self._ready) < self._settings.ready:
            self._filling = asyncio.ensure_future(self._start_ahead())

    async def _start_ahead(self) -> None:
        while len(self._ready) < self._settings.ready and not self._closed:
            try:
                self._ready.append(await self._create())
            except BreakerOpen:
                return
            except SandboxError as error:  # whoever needs one will be told; here nobody waits
                log.warning("no sandbox could be started ahead: %s", error)
                return

    def _delete(self, sandbox: Sandbox) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._deleted(sandbox))
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)
        return task

    async def _deleted(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.delete()
        except SandboxError as error:
            log.warning("a sandbox could not be deleted: %s", error)
