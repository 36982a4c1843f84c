"""Short-lived folders of our processes. Each holds a lock as long as its process or a child of it lives, so that whoever comes
later knows whether it is still needed: process numbers would lie where containers share a folder. Paths are short, because
sockets in them must stay under 107 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "telescope-tmp-"
LONGEST_BASE = 40
_LOCK = ".lock"
_BEING_MADE_S = 60.0


def make(prefix: str = PREFIX) -> Path:
    """A new folder for this process, readable by its user alone. It goes when somebody sweeps after the process's end."""
    sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_base()))
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open as long as the process lives
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return folder


def sweep(prefix: str = PREFIX) -> None:
    """Remove this user's folders that nobody holds any more."""
    for folder in _base().glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and _left(folder):
                shutil.rmtree(folder, ignore_errors=True)


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
