"""The engine's processes as seen from the server: told at once when one ends, and none left behind. No vLLM in here."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess

import psutil


class Children:
    """Watches the child processes that appeared since it was made. Needs a running event loop."""

    def __init__(self) -> None:
        self._before = {process.pid for process in multiprocessing.active_children()}
        self._watched: dict[int, BaseProcess] = {}  # by process descriptor
        self._ended: asyncio.Future[str] | None = None

    def watch_new(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for process in multiprocessing.active_children():
            if process.pid is None or process.pid in self._before:
                continue
            descriptor = os.pidfd_open(process.pid)
            self._watched[descriptor] = process
            loop.add_reader(descriptor, self._on_end, descriptor)

    async def first_end(self) -> str:
        """Return when one ends, with a sentence."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._ended)

    def stop_watching(self) -> None:
        for descriptor in self._watched:
            asyncio.get_running_loop().remove_reader(descriptor)

    def end_all(self, deadline_s: float) -> None:
        """Wait for them to end by themselves, then kill them and all their descendants."""
        deadline = time.monotonic() + deadline_s
        for descriptor, process in self._watched.items():
            process.join(max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
            if process.is_alive() and process.pid is not None:
                kill_tree(process.pid)
                process.join(deadline_s)
        self._watched.clear()

    def _on_end(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        process = self._watched[descriptor]
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(
                f"the engine's process (pid {process.pid}) {_how(descriptor)}; nothing can be served any more"
            )


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _how(descriptor: int) -> str:
    """How the process ended, without reaping it: that is its owner's part."""
    try:
        status = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        status = None
    if status is None:
        return "ended"
    if status.si_code == os.CLD_EXITED:
        return f"ended with exit code {status.si_status}"
    return f"was killed by {signal.Signals(status.si_status).name}"
