"""Call a user's function without holding up the event loop: `async def` is awaited, `def` runs in a thread, with a time limit.

A thread cannot be stopped: one that outlives its limit is lost to the pool, and the worker counts those. The caller has its
answer in time all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any

from telescope.environments.failures import InfrastructureError


class TimeLimit(InfrastructureError):
    """A function has not returned within its limit."""


async def run_function(
    function: Callable[..., Any], *arguments: Any, limit_s: float | None = None, in_thread: bool = True
) -> Any:
    """What the function returns, or raises. `in_thread=False` is for what takes microseconds and cannot hang.

    Arguments by name go in a `functools.partial`. `limit_s` counts from when the function begins, not from when it waits for
    a free thread. Raises `TimeLimit`.
    """
    if in_thread and not inspect.iscoroutinefunction(function):
        result = await _run_in_thread(function, arguments, limit_s)
    else:
        result = function(*arguments)
    if not inspect.isawaitable(result):
        return result
    return await _await_within(result, limit_s, function)


async def _run_in_thread(function: Callable[..., Any], arguments: Any, limit_s: float | None) -> Any:
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[None] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> Any:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(_mark_begun, begun)
        try:
            return context.run(function, *arguments)
        except StopIteration as error:  # no future can carry it out of a thread: whoever waits would wait for ever
            said = f"{_name_of(function)} raised StopIteration {error}".rstrip()
            raise RuntimeError(said).with_traceback(error.__traceback__) from error

    running = loop.run_in_executor(None, run)
    try:
        await asyncio.wait((running, begun), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        running.cancel()  # it may not have begun
        raise
    return await _await_within(running, limit_s, function)


async def _await_within(result: Any, limit_s: float | None, function: Callable[..., Any]) -> Any:
    try:
        async with asyncio.timeout(limit_s) as clock:
            return await result
    except TimeoutError as error:
        if not clock.expired():  # the function's own
            raise
        raise TimeLimit(f"{_name_of(function)} did not return within {limit_s:g} s") from error


def _mark_begun(begun: asyncio.Future[None]) -> None:
    if not begun.done():
        begun.set_result(None)


def _name_of(function: Callable[..., Any]) -> str:
    named = function.func if isinstance(function, functools.partial) else function
    return str(getattr(named, "__qualname__", type(named).__name__))
