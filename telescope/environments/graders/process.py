"""The process that runs graders: `python -m telescope.environments.graders.process MEMORY_MB`, started by pool.py alone.

Reads calls from its standard input and answers on its standard output, one frame each: four bytes of length (big endian),
then JSON.

    {"module", "file", "function", "arguments", "cpu_s"} ─▶ {"begun": true} ─▶ {"value"} | {"error", "overrun"}

`begun` says that the module is imported: its time does not count. The call runs in the main thread, where signal.alarm works.
Two timers of processor time hold it: the first raises in Python code, after which the process goes on; the second ends the
process where the call is inside C and hears nothing. Refuses torch, sockets and pickle.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

HARD_FACTOR, HARD_MARGIN_S = 1.5, 0.2  # processor time until the second timer: Python code must have heard the first by then
MAX_ERROR_CHARACTERS = 500
MAX_FRAME = 1 << 24
"""The longest answer, in bytes."""


class _Overrun(BaseException):  # no Exception: a library's own `except Exception` must not swallow it
    pass


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the worker's to act on
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _set_soft_limit(resource.RLIMIT_AS, int(arguments[0]) * 2**20)
    calls, answers = _take_pipes()
    while (frame := _read(calls)) is not None:
        _answer(json.loads(frame), answers)
    return 0


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes out of reach of a grader that reads or prints: what it prints goes where errors go."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls, answers


def _answer(call: dict[str, Any], answers: BinaryIO) -> None:
    overrun = None
    try:
        function = _find_function(call["module"], call["file"], call["function"])
        _write(answers, {"begun": True})
        with _limit_cpu(call["cpu_s"]):
            value = function(*call["arguments"])
        _write(answers, {"value": value})
        return
    except _Overrun:
        overrun, said = "cpu", f"it used more than {call['cpu_s']:g} s of processor time"
    except MemoryError:
        overrun, said = "memory", "it needed more memory than a grader process may have"
    except BaseException as error:  # noqa: BLE001 - the edge of a process: a grader may raise anything, SystemExit too
        said = f"{type(error).__name__}: {error}"
    _write(answers, {"error": said[:MAX_ERROR_CHARACTERS], "overrun": overrun})


def _find_function(module: str, file: str | None, name: str) -> Callable[..., Any]:
    """The function, imported as the worker imports it: a user's own file has no package to be found in."""
    found = sys.modules.get(module)
    if found is None:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            if file is None:
                raise
            inside = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
            spec = importlib.util.spec_from_file_location(module, file, submodule_search_locations=inside)
            if spec is None or spec.loader is None:
                raise
            found = sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
    value: Any = found
    for part in name.split("."):
        value = getattr(value, part)
    call: Callable[..., Any] = value
    return call


@contextmanager
def _limit_cpu(seconds: float) -> Iterator[None]:
    def raise_overrun(number: int, frame: FrameType | None) -> None:
        raise _Overrun

    signal.signal(signal.SIGPROF, raise_overrun)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    hard = HARD_FACTOR * seconds + HARD_MARGIN_S
    signal.setitimer(signal.ITIMER_VIRTUAL, hard)  # user time; nobody handles it, so the kernel ends the process
    used = time.process_time()
    _set_soft_limit(resource.RLIMIT_CPU, math.ceil(used + hard + 1))  # whole seconds, the kernel's work included
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # one that is on its way still
        _set_soft_limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)


def _set_soft_limit(which: int, limit: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        limit = hard if limit == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (limit, hard))


def _read(pipe: BinaryIO) -> bytes | None:
    """The next frame; None at the end: the worker is gone."""
    head = pipe.read(4)
    return pipe.read(int.from_bytes(head, "big")) if len(head) == 4 else None


def _write(pipe: BinaryIO, value: dict[str, Any]) -> None:
    frame = json.dumps(value).encode()  # raises TypeError for what JSON has no form for; nothing is written
    if len(frame) > MAX_FRAME:
        raise ValueError(f"its value is {len(frame)} bytes long, more than {MAX_FRAME}")
    pipe.write(len(frame).to_bytes(4, "big") + frame)
    pipe.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
