"""A call to an engine whose process is gone, or hangs, raises `EngineDead` with how it went, whichever call finds out first."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from telescope.inference.engine import EngineDead

TOLD_S = 5.0
"""From vLLM's word that its engine is dead, or that an order failed, to the end of the process being seen."""
SAYS_SO = "vLLM's engine says that it is dead; its own words are further up in this log"


class Mortal(Protocol):
    async def dead(self) -> str:
        """Return when the engine's process ends, with a sentence."""


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Mortal)


def tells_its_death(
    method: Callable[Concatenate[M, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[M, P], Coroutine[Any, Any, T]]:
    """Break the call off when the engine's process ends, which vLLM does not do for all that it has been asked, and put its
    EngineDeadError, which knows no reason, in the words of `dead`."""

    @functools.wraps(method)
    async def call(self: M, /, *arguments: P.args, **named: P.kwargs) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        work, dying = asyncio.create_task(method(self, *arguments, **named)), asyncio.create_task(self.dead())
        try:
            await asyncio.wait({work, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EngineDead(dying.result())
            return work.result()
        except EngineDeadError as error:
            raise EngineDead(await _why(self) or SAYS_SO) from error
        except Exception as error:
            # vLLM's word for an order that failed in the engine, the death of a worker process among other reasons: the engine
            # then ends in a moment
            if type(error) is Exception and (why := await _why(self)):
                raise EngineDead(f"{why} ({error})") from error
            raise
        finally:
            dying.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=TOLD_S)

    return call


async def _why(engine: Mortal) -> str:
    """Empty where its process lives on."""
    try:
        async with asyncio.timeout(TOLD_S):
            return await engine.dead()
    except TimeoutError:
        return ""


@asynccontextmanager
async def answer_within(limit_s: float, what: str) -> AsyncIterator[None]:
    """What is asked of the engine within must be answered in time. Raises `EngineDead`: it hangs."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise EngineDead(f"the engine has not answered {what} within {limit_s:g} s: it hangs") from error
