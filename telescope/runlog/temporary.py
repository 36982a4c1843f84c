"""Short-lived folders of our processes. Each holds a lock as long as its process or a child of it lives, so that whoever comes
later knows whether it is still needed: process numbers would lie where containers share a folder. Paths are short, because
sockets in them must stay under 107 bytes. What a process could leave behind elsewhere, shared memory say, is noted in its
folder and goes with it. The standard library only: a shim on another node runs this file, which sweeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

PREFIX = "telescope-tmp-"
LONGEST_BASE = 40
_LOCK = ".lock"
_NOTED = ".elsewhere"
_BEING_MADE_S = 60.0


def make(prefix: str = PREFIX) -> Path:
    """A new folder for this process, readable by its user alone. It goes when somebody sweeps after the process's end."""
    sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_base()))
    making = folder / f"{_LOCK}.new"
    descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open as long as the process lives
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    making.rename(folder / _LOCK)  # nobody sees it unlocked: a sweep in that instant would take the folder
    return folder


def sweep(prefix: str = PREFIX) -> None:
    """Remove this user's folders that nobody holds any more."""
    for folder in _base().glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and _left(folder):
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
        lines = (folder / _NOTED).read_text().splitlines()
    except FileNotFoundError:
        return []
    removed = []
    for device, inode, path in (line.split(" ", 2) for line in lines if line.count(" ") >= 2):
        with contextlib.suppress(OSError):
            found = Path(path).lstat()
            if (str(found.st_dev), str(found.st_ino)) == (device, inode):
                Path(path).unlink()
                removed.append(Path(path))
    return removed


def _left(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _BEING_MADE_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _base() -> Path:
    found = tempfile.gettempdir()
    return Path(found if len(found) <= LONGEST_BASE else "/tmp")


if __name__ == "__main__":
    sweep()
