"""How fast a folder takes bytes, by a short try: for a forecast of a save, and for what fits before a walltime."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

LONGEST_S = 0.5
"""After so long no further piece is begun."""
MOST_BYTES = 64 << 20
PIECE_BYTES = 4 << 20


def measure_write_speed(folder: Path, nbytes: int) -> float | None:
    """Bytes a second, forced to the disk, of `nbytes` or `MOST_BYTES` if that is less. None where the folder takes none:
    whoever saves there says why. Leaves nothing behind."""
    todo, piece = min(nbytes, MOST_BYTES), os.urandom(PIECE_BYTES)
    if todo <= 0:
        return None
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began, written = time.perf_counter(), 0
        while written < todo and time.perf_counter() - began < LONGEST_S:
            written += file.write(piece[: todo - written])
            os.fsync(file.fileno())
        return written / max(time.perf_counter() - began, 1e-9)
    return None
