"""An environment's own beginning and end in a worker, each within its time and with its name in what goes wrong.

Refuses to decide what becomes of the worker: a beginning that fails is raised, an end that fails is logged.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from telescope.environments.validate import describe_not_awaitable
from telescope.workers.load import EnvironmentBroken, Loaded, describe, users_line

log = logging.getLogger(__name__)


async def set_up(loaded: Loaded) -> None:
    """Raises `EnvironmentBroken`, also after `set_up_timeout_s`."""
    place, limit_s = f"environments.{loaded.label}", loaded.set_up_timeout_s
    try:
        async with asyncio.timeout(limit_s) as limit:
            await _begun(f"{type(loaded.environment).__name__}.set_up", loaded.environment.set_up)
    except (Exception, SystemExit) as error:
        if limit.expired():
            raise EnvironmentBroken(
                f"{place}: its set_up was not done within {place}.set_up_timeout_s={limit_s:g}; it waited in "
                f"{users_line(error.__cause__) or 'code of a library'}: see what for, or give it longer"
            ) from error
        raise EnvironmentBroken(f"{place}: its set_up failed: {describe(error)}") from error


async def tear_down(loaded: Loaded) -> None:
    """Waits at most `tear_down_timeout_s`."""
    place, limit_s = f"environments.{loaded.label}", loaded.tear_down_timeout_s
    try:
        async with asyncio.timeout(limit_s) as limit:
            await _begun(f"{type(loaded.environment).__name__}.tear_down", loaded.environment.tear_down)
    except (Exception, SystemExit) as error:  # noqa: BLE001 user code at the process's end: the others have theirs too
        why = f"not done within {place}.tear_down_timeout_s={limit_s:g}" if limit.expired() else describe(error)
        log.warning("%s: its tear_down failed: %s", place, why)


async def _begun(name: str, hook: Callable[[], Any]) -> None:
    waiting = hook()
    if not inspect.isawaitable(waiting):
        raise TypeError(describe_not_awaitable(name, waiting))
    await waiting
