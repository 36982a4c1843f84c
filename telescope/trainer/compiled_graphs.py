"""Where torch.compile keeps what it has made, so that the next run's ranks find it: a folder of the user's, rather than torch's
own in TMPDIR, which a job or a container may lose at its end.

Owns the place alone; what is in it is torch's, named by code, versions and card, and safe to delete at any time. Code is loaded
from it, so nobody else may write there.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

GRAPHS, KERNELS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""Torch's variables. Kernels of compiled graphs lie in a folder of the first, unless the second names another."""


def keep_graphs(environ: MutableMapping[str, str]) -> Path | None:
    """Before the first compilation. A folder that the user has named in GRAPHS stays; None where none can be made: then torch
    takes its own."""
    if named := environ.get(GRAPHS):
        return Path(named)
    try:
        base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
        folder = Path(base, "telescope", "compiled")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        log.info("compiled layers are kept where torch keeps them: %s", error)
        return None
    environ[GRAPHS] = str(folder)
    return folder
