"""CRC-32 of a checkpoint's files: made of the bytes while they are written, compared with the disk's before they are used.

They guard against bytes that a disk, a copy or a network file system has changed, not against forgers. About 0.24 CPU-seconds
a gigabyte. Files and sums only; what a difference means is checkpoints.py's.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from telescope.runlog.layout import write_atomically

NOTES = "digests-*.json"
"""What those who write a part leave beside their files: the digests of these."""
PIECE_BYTES = 8 << 20
THREADS = 8


class FileDigests:
    """Of bytes in the order in which they are written, e.g. `crc32:0d4a1185`."""

    def __init__(self) -> None:
        self._crc = self.nbytes = 0

    def add(self, piece: bytes | memoryview) -> None:
        self._crc = zlib.crc32(piece, self._crc)
        self.nbytes += len(piece)

    def __str__(self) -> str:
        return f"crc32:{self._crc:08x}"


def note(folder: Path, writer: str, digests: Mapping[str, str]) -> None:
    """Leave the digests of `writer`'s files in the folder, by their names there. Raises OSError."""
    text = msgspec.json.format(msgspec.json.encode(dict(sorted(digests.items())))).decode()
    write_atomically(folder / NOTES.replace("*", writer), text + "\n", mode=0o600)


def of_files(folder: Path, names: list[str]) -> dict[str, str]:
    """The digest of each file, by its path in the folder: as noted by its writer, else of what is on the disk.

    Raises OSError, and `msgspec.DecodeError` where a note is none.
    """
    noted: dict[str, str] = {}
    for path in sorted(folder.rglob(NOTES)):
        own = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        place = path.parent.relative_to(folder)
        noted |= {str(place / name): digest for name, digest in own.items()}
    return {name: noted[name] if name in noted else of_file(folder / name) for name in names}


def of_file(path: Path) -> str:
    """Of what is on the disk. Raises OSError."""
    tally, piece = FileDigests(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            tally.add(piece[:count])
    return str(tally)


def differing(folder: Path, expected: Mapping[str, str]) -> str | None:
    """The first file, in order of names, whose bytes are other than they were; None if none is. Several are read at a time.
    Raises OSError."""
    names = sorted(expected)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="digest") as readers:
        found = readers.map(lambda name: of_file(folder / name), names)
        return next((name for name, digest in zip(names, found, strict=True) if digest != expected[name]), None)
