"""The threads in which synchronous reward functions run, and how many of them will never come back.

A thread cannot be stopped. A reward function that hangs costs its rollout (the time limit sees to that) and one thread; when
all are gone the worker has to end with that reason, rather than fail every rollout in silence.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class RewardThreads(ThreadPoolExecutor):
    def __init__(self, size: int) -> None:
        super().__init__(max_workers=size, thread_name_prefix="reward")
        self.size = size
        self._numbers = itertools.count()
        self._since: dict[int, float] = {}

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        number = next(self._numbers)

        def run() -> T:
            self._since[number] = time.monotonic()
            try:
                return fn(*args, **kwargs)
            except StopIteration as error:  # no future can carry it: whoever waits would wait for ever
                raise RuntimeError(f"it raised StopIteration {error}".rstrip()).with_traceback(error.__traceback__) from error
            finally:
                del self._since[number]

        return super().submit(run)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Never waits, whatever is asked: the event loop's own end would wait for a thread that hangs."""
        super().shutdown(wait=False, cancel_futures=True)

    def count_hung(self, longer_than_s: float) -> int:
        """Threads that have been in one call for longer than this."""
        now = time.monotonic()
        return sum(now - since > longer_than_s for since in list(self._since.values()))
