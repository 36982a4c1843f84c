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
FIRST_BYTES = 1 << 20


def measure_write_speed(folder: Path, nbytes: int) -> float | None:
    """Bytes a second, forced to the disk, of `nbytes` or `MOST_BYTES` if that is less. Each piece is twice the one before, and
    the fastest counts: with small ones a disk spends its time on the way. None where the folder takes none: whoever saves
    there says why. Leaves nothing behind."""
    todo, piece, fastest = min(nbytes, MOST_BYTES), os.urandom(FIRST_BYTES), 0.0
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        while todo > 0 and (started := time.perf_counter()) - began < LONGEST_S:
            written = file.write(piece[:todo])
            os.fsync(file.fileno())
            fastest = max(fastest, written / (time.perf_counter() - started))
            todo, piece = todo - written, piece + piece
    return fastest or None
