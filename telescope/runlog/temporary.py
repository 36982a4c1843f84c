"""Short-lived folders of our processes. Each holds a lock as long as its process or a child of it lives, so that whoever comes
later knows whether it is still needed: process numbers would lie where containers share a folder. Paths are short, because
sockets in them must stay under 107 bytes. What a process could leave behind elsewhere, shared memory say, is noted in its
folder and goes with it. A sweep believes only what lies in a folder that this user alone may write to: anybody may put one, or
a link, beside ours. The standard library only: a shim on another node runs this file, which sweeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PREFIX = "telescope-tmp-"
LONGEST_BASE = 40
_LOCK = ".lock"
_NOTED = ".elsewhere"
_BEING_MADE_S = 60.0
_MOST_NOTED_BYTES = 1 << 20


def make(prefix: str = PREFIX, base: Path | None = None) -> Path:
    """A new folder for this process, readable by its user alone, below `base` (None: where the system has its temporary ones).
    It goes when somebody sweeps there after the process's end."""
    sweep(prefix, base)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base or _base()))
    making = folder / f"{_LOCK}.new"
    descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open as long as the process lives
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    making.rename(folder / _LOCK)  # nobody sees it unlocked: a sweep in that instant would take the folder
    return folder


def sweep(prefix: str = PREFIX, base: Path | None = None) -> None:
    """Remove this user's folders that nobody holds any more."""
    for folder in (base or _base()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _open_own_folder(folder) as own:
            if _left(own):
                discard(folder)


def discard(folder: Path) -> None:
    """Remove a folder that is needed no more, with what was noted in it."""
    remove_noted(folder)
    shutil.rmtree(folder, ignore_errors=True)


def note(folder: Path, files: Iterable[Path]) -> None:
    """Have `files`, which lie elsewhere, go with the folder; any process may add some. One that is not there is passed over.

    Raises `OSError` where the note can't be written."""
    lines = b""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found = file.lstat()
            lines += f"{found.st_dev} {found.st_ino} {file}\n".encode()
    if lines:
        descriptor = os.open(folder / _NOTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, lines)  # in one piece: several processes write
        finally:
            os.close(descriptor)


def remove_noted(folder: Path) -> list[Path]:
    """Remove what was noted in the folder, and give its paths. What has the name by now and is another file stays."""
    try:
        with _open_own_folder(folder) as own, os.fdopen(_open_own_file(own, _NOTED, os.O_RDONLY), "rb") as file:
            lines = os.fsdecode(file.read(_MOST_NOTED_BYTES)).splitlines()
    except OSError:  # nothing is noted, or what is there is not ours
        return []
    removed = []
    for device, inode, path in (line.split(" ", 2) for line in lines if line.count(" ") >= 2):
        with contextlib.suppress(OSError):
            found = Path(path).lstat()
            if (str(found.st_dev), str(found.st_ino)) == (device, inode):
                Path(path).unlink()
                removed.append(Path(path))
    return removed


def _left(folder: int) -> bool:
    try:
        descriptor = _open_own_file(folder, _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - os.fstat(folder).st_mtime > _BEING_MADE_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextlib.contextmanager
def _open_own_folder(folder: Path) -> Iterator[int]:
    """A descriptor of the folder. Raises `OSError` where it is a link, another user's, or one that others may write to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{folder} is not a folder that this user alone may write to")
        yield descriptor
    finally:
        os.close(descriptor)


def _open_own_file(folder: int, name: str, how: int) -> int:
    """A descriptor of the file. Raises `OSError` where it is a link or a pipe, or another user's; waits for nobody."""
    descriptor = os.open(name, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(f"{name} is not a file of this user")
    return descriptor


def _base() -> Path:
    found = tempfile.gettempdir()
    return Path(found if len(found) <= LONGEST_BASE else "/tmp")


if __name__ == "__main__":
    sweep()
