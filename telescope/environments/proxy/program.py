"""Run an agent program beside a rollout: its own process group, no shell, a time limit, output that cannot grow without end.

The group is killed when the program ends, whatever it has started. Not a sandbox: the program may do what the worker may.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telescope.environments.passed_on import passed_on

MAX_OUTPUT_BYTES = 1024 * 1024
FINEST_S = 0.1
"""A program is killed at most this much behind its limit."""
PIPES_S = 10.0
"""For what is left in the pipes once the whole group is dead."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended. `exit_code` is None where it was killed at its limit."""

    exit_code: int | None
    stdout: str
    stderr: str
    """Of both the first MAX_OUTPUT_BYTES."""

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None


async def run_program(
    argv: Sequence[str],
    *,
    variables: Mapping[str, str],
    stdin: str,
    limit_s: float,
    give_up: asyncio.Event,
    waited_s: Callable[[], float] = lambda: 0.0,
    below: Path | None = None,
) -> Outcome:
    """Run it in an empty folder of its own until it ends, `limit_s` has passed or `give_up` is set.

    `below`: where that folder is made; the system's folder for temporary files by default.
    `waited_s`: how many seconds so far were none of the program's; they do not count against `limit_s`.
    Raises OSError where it can't be started.
    """
    with tempfile.TemporaryDirectory(prefix="agent-", dir=below, ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env={**passed_on(), **variables},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = asyncio.create_task(_head(process.stdout)), asyncio.create_task(_head(process.stderr))
        writing = asyncio.create_task(_write(process.stdin, stdin.encode("utf-8", "replace")))
        ended, stopped = asyncio.create_task(process.wait()), asyncio.create_task(give_up.wait())
        try:
            await _ended_or(limit_s, waited_s, ended, stopped)
            code = ended.result() if ended.done() else None
        finally:
            _kill_group(process.pid)
            writing.cancel()
            stopped.cancel()
            # A child that left the group may hold the pipes open: what it says is not waited for.
            await asyncio.wait((out, err, ended), timeout=PIPES_S)
            out.cancel()
            err.cancel()
            await asyncio.gather(out, err, writing, stopped, return_exceptions=True)
        said = [b"" if task.cancelled() else task.result() for task in (out, err)]
        return Outcome(code, *(text.decode("utf-8", "replace") for text in said))


async def _ended_or(limit_s: float, waited_s: Callable[[], float], *tasks: asyncio.Task[Any]) -> None:
    """Until one of the tasks has ended, or `limit_s` have passed that `waited_s` does not count."""
    started = time.monotonic()
    while (left := limit_s - (time.monotonic() - started - waited_s())) > 0:
        done, _ = await asyncio.wait(tasks, timeout=max(left, FINEST_S), return_when=asyncio.FIRST_COMPLETED)
        if done:
            return


async def _head(stream: asyncio.StreamReader) -> bytes:
    """The first MAX_OUTPUT_BYTES; the rest is read and dropped, so that the program does not wait for a reader."""
    kept = bytearray()
    while part := await stream.read(64 * 1024):
        kept += part[: MAX_OUTPUT_BYTES - len(kept)]
    return bytes(kept)


async def _write(stream: asyncio.StreamWriter, text: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it has ended, or does not read
        stream.write(text)
        await stream.drain()
    stream.close()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left
        os.killpg(leader, signal.SIGKILL)
