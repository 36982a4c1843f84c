"""What the launcher makes of its terminal before anything else: a Ctrl-C is one line, a closed stream is not an error.

Imports next to nothing: `telescope.run` calls it before its own imports, which take a moment in which people change their
minds.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT
READER_GONE = 128 + signal.SIGPIPE
UNPRINTED = 1


def prepare() -> None:
    """Call it once, first of all, in the process that is the command; `supervise` takes signals over while a run goes on."""
    _fill_closed_streams()
    _say_anything()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it, and goes on to
        signal.signal(signal.SIGINT, _leave)


def _fill_closed_streams() -> None:
    """Where the shell closed a stream (`2>&-`), the next file opened would get its number and then our words."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 -- for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _say_anything() -> None:
    """In a locale without UTF-8 stdout can't write all that a sentence or a path has: the rest is escaped, as on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say_lost(command: str, error: OSError) -> int:
    """The exit code of a command whose words its standard output did not take. A reader that has seen enough (`| head`) is not
    told of it."""
    with contextlib.suppress(OSError, ValueError):  # what Python still holds of them would fail once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return READER_GONE
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{command}: standard output can't be written: {error.strerror or error}\n")
    return UNPRINTED


def _leave(*_: object) -> None:
    """At once, and not as an exception: inside an import or a library's callback it could be swallowed or printed."""
    try:
        if select.select([], [2], [], 0)[1]:  # a terminal that is stopped (Ctrl-S) takes nothing
            os.write(2, b"Interrupted.\n")
    finally:  # the terminal may be gone
        os._exit(INTERRUPTED)
