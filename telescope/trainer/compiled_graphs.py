"""Where torch.compile keeps what it has made, so that the next run's ranks find it: a folder of the user's, rather than torch's
own in TMPDIR, which a job or a container may lose at its end.

Owns the place alone; what is in it is torch's, named by code, versions and card, and safe to delete at any time. Code is loaded
from it, so nobody else may write there, and hosts of another processor or C library, which may share a home, have another one.
"""

from __future__ import annotations

import logging
import os
import platform
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

GRAPHS, KERNELS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""Torch's variables. Kernels of compiled graphs lie in a folder of the first, unless the second names another."""


def keep_graphs(environ: MutableMapping[str, str]) -> Path | None:
    """Before the first compilation. A folder that the user has named in GRAPHS stays; None where none can be made and written
    that is the user's alone: then torch takes its own."""
    if named := environ.get(GRAPHS):
        return Path(named)
    try:
        base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
        folder = Path(base)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("telescope", "compiled", "-".join(filter(None, (platform.machine(), *platform.libc_ver())))):
            folder /= name
            _make_own(folder)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(b"0")
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        log.info("compiled layers are kept where torch keeps them: %s", error)
        return None
    environ[GRAPHS] = str(folder)
    return folder


def _make_own(folder: Path) -> None:
    """Make a folder for this user, or raise OSError: also of one that is there and belongs to another, is a link, or can be
    written by others."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is a link, of another user, or writable by others (chmod go-w would mend the last)")
