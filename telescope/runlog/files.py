"""How a file of a run directory is opened: a regular file of a sensible size, or a sentence with its name.

A folder, a pipe, a file of terabytes or one that holds something else may lie where a run has a file. Whoever reads here never
waits for a pipe's other end, and never takes up more memory than `MOST_BYTES`. Refuses to know what the files mean.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

T = TypeVar("T")

MOST_BYTES = 256 << 20
"""Of a file that is read whole, and of a line of any other."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DamagedFile(ValueError):
    """The file is there and can't be used; the sentence begins with its name."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.path, self.why = path, why


def open_file(path: Path) -> BinaryIO:
    """Raises FileNotFoundError where nothing is there, and `DamagedFile`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:  # below a file nothing is there either
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
    except OSError as error:
        raise DamagedFile(path, f"can't be read: {error.strerror or error}") from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise DamagedFile(path, f"is {KINDS.get(kind, 'something else')}, not a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """All of it. Raises FileNotFoundError and `DamagedFile`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise DamagedFile(path, f"has {size:,} bytes: none that a run writes is that long")
        try:
            return file.read()
        except OSError as error:
            raise DamagedFile(path, f"can't be read: {error.strerror or error}") from error


def read_lines(path: Path) -> Iterator[bytes]:
    """Line by line, each with its newline where it has one. Raises FileNotFoundError and `DamagedFile`."""
    with open_file(path) as file:
        for number in range(1, 1 << 62):
            try:
                line = file.readline(MOST_BYTES + 1)
            except OSError as error:
                raise DamagedFile(path, f"can't be read: {error.strerror or error}") from error
            if not line:
                return
            if len(line) > MOST_BYTES:
                raise DamagedFile(path, f"is damaged: line {number} does not end")
            yield line


def read_json(path: Path, kind: type[T]) -> T:
    """What the file holds. Raises FileNotFoundError and `DamagedFile`."""
    held = read_bytes(path)
    if not held.strip():
        raise DamagedFile(path, "is empty")
    try:
        return msgspec.json.decode(held, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(path, f"is damaged: {error}") from error


def read_object(path: Path) -> Mapping[str, Any]:
    """A JSON object; empty where it is not there or can't be used: for those who look at a run that goes on."""
    try:
        return read_json(path, dict[str, Any])
    except (OSError, DamagedFile):
        return {}
