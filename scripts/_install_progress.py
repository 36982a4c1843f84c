"""Runs pip and tells how far it is, for scripts/_environment.sh. Standard library only: it runs in an empty environment.

_install_progress.py BEGUN WHAT COMMAND...   WHAT is installed; BEGUN: when the installation began, in seconds since 1970

On a terminal it is one line that is written over, elsewhere a line now and then. Where pip fails, its
last lines are shown. The exit code is pip's.
"""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

LIVE_EVERY_S, LINE_EVERY_S = 1.0, 15.0
"""How often a terminal, and any other output, is told where nothing new has happened, or much."""
LAST_LINES = 30
"""Of pip's output, where it has failed."""
CLEAR = "\r\x1b[K"
_FOUND = re.compile(r"\s*Collecting ([\w.-]+)")
_FETCHED = re.compile(r"\s*(?:Downloading|Using cached|Processing) (?:\S*/)?(\S+)( \(.+\))?$")
_TAGS = re.compile(r"-(?:py|cp)\d\S*")
_BUILT = re.compile(r"\s*Building wheels? for (?:collected packages: )?(\S+)")
_INSTALLED = re.compile(r"Installing collected packages: (.*)")


class PipStage:
    """What pip is doing, told from the lines that it has printed."""

    def __init__(self) -> None:
        self.found = 0
        """Packages that it has chosen so far."""
        self.doing = ""
        self.total = 0
        """Packages that it unpacks; 0: it has not come to that."""

    def hear(self, line: str) -> None:
        """One line of pip's. What it does not tell of changes nothing."""
        if found := _FOUND.match(line):
            self.found += 1
            self.doing = f"package {self.found}: {found[1]}"
        elif fetched := _FETCHED.match(line):
            if not fetched[1].endswith(".metadata"):
                self.doing = f"fetching {_TAGS.sub('', fetched[1])}{fetched[2] or ''}"
        elif built := _BUILT.match(line):
            self.doing = f"building {built[1].rstrip(',')}"
        elif installed := _INSTALLED.match(line):
            self.total = installed[1].count(",") + 1

    def describe(self, unpacked: int) -> str:
        """`unpacked`: packages that are there and were not before."""
        return f"{min(unpacked, self.total)} of {self.total} unpacked" if self.total else self.doing


def count_packages() -> int:
    """In the environment of this Python."""
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


def format_elapsed(seconds: float) -> str:
    """`1:05`."""
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes}:{second:02d}"


def read_lines(output: IO[bytes]) -> Iterator[str | None]:
    """Each line as it comes, and None whenever a second has brought nothing."""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        rest = b""
        while True:
            if not selector.select(LIVE_EVERY_S):
                yield None
                continue
            data = os.read(output.fileno(), 65_536)
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if not data:
                yield from [rest.decode(errors="replace")] if rest else []
                return


def run(begun: float, what: str, command: Sequence[str]) -> int:
    """pip's exit code."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1"},
        close_fds=False,  # it holds the lock of the environment as long as it lives
    )
    try:
        return follow(process, begun, what)
    except KeyboardInterrupt:  # pip had it too: it is in the same process group
        process.wait()
        raise


def follow(process: subprocess.Popen[bytes], begun: float, what: str) -> int:
    """Until its end; gives its exit code."""
    tty, before = sys.stderr.isatty(), count_packages()
    stage, last = PipStage(), deque[str](maxlen=LAST_LINES)
    told, told_at = "", time.time()
    assert process.stdout is not None
    for line in read_lines(process.stdout):
        if line is not None:
            last.append(line)
            stage.hear(line)
        now = time.time()
        doing = stage.describe(count_packages() - before if stage.total else 0)
        text = " · ".join(filter(None, (format_elapsed(now - begun), what, doing)))
        if tty and text != told:
            sys.stderr.write(CLEAR + text[: os.get_terminal_size(sys.stderr.fileno()).columns - 1])
        elif not tty and now - told_at >= LINE_EVERY_S:
            sys.stderr.write(f"{text}\n")
            told_at = now
        told = text
        sys.stderr.flush()
    code = process.wait()
    sys.stderr.write(CLEAR if tty else "")
    if code:
        sys.stderr.write("".join(f"{line}\n" for line in last))
        sys.stderr.write(f"{what}: pip ended with exit code {code}; its last lines are above.\n")
    return code


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return run(float(arguments[0]), arguments[1], arguments[2:])
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
