"""What graders do at their worst; run in grader processes by test_graders.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time


def double(number: int) -> int:
    return 2 * number


def process_id() -> int:
    return os.getpid()


def variables() -> list[str]:
    return sorted(os.environ)


def tower() -> int:
    height = 9
    return 9**height**height


def deaf() -> int:
    return sum(range(10**15))  # inside C all the while: no handler of Python's can run


def loop() -> None:
    while True:
        pass


def swallow() -> None:
    while True:
        try:
            loop()
        except Exception:  # noqa: BLE001 - a library that swallows
            continue


def sleep() -> None:
    time.sleep(3600)


def allocate(megabytes: int) -> int:
    return len(bytearray(megabytes << 20))


def explode(what: str) -> None:
    raise ValueError(what)


def leave() -> None:
    raise SystemExit(3)


def die() -> None:
    os._exit(7)


def chatter() -> str:
    print("to be ignored " * 1000, flush=True)
    os.write(1, b"and this")
    return input_of_mine()


def input_of_mine() -> str:
    try:
        return input()
    except EOFError:
        return "nothing to read"


def thing() -> object:
    return object()


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def echo(*values: object) -> object:
    return list(values)


def long_value() -> str:
    return "x" * (20 << 20)


def half_a_pair() -> str:
    return "\ud800"


def raises_half_a_pair() -> None:
    raise ValueError("\ud800")


def shuts_its_pipe() -> None:
    for descriptor in range(3, 20):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    threading.Event().wait()


def writes_into_the_pipe() -> None:
    for descriptor in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 8)
    threading.Event().wait()
