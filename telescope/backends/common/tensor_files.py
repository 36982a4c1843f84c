"""A rank's tensors written as safetensors files: straight from where they lie, several files at a time, digests on the way.

Owns the bytes of a file. torch's writer builds each file in memory before it writes it, one after another, and with threads
loses their errors; its reader reads these. Refuses to know which tensors, and which file each goes to.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from telescope.runlog.digests import Tally

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
"""The names of safetensors for those that torch's reader of checkpoints knows."""
PIECE_BYTES = 8 << 20
THREADS = 4


@dataclass(frozen=True)
class Part:
    """A tensor, or what of one lies here: where in the whole it begins, one number a dimension."""

    tensor: Tensor
    offsets: Sequence[int]


def write(files: Mapping[Path, Mapping[str, Part]]) -> dict[str, str]:
    """Write the files and force them to the disk; gives their digests by name. Raises OSError, and `TypeError` for a tensor of
    a type that the format has no name for: files that were under way are then written to their end, others are not begun."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as writers:
        digests = [(path.name, writers.submit(_write, path, parts)) for path, parts in files.items()]
        try:
            return {name: digest.result() for name, digest in digests}
        except BaseException:
            writers.shutdown(wait=False, cancel_futures=True)
            raise


def _write(path: Path, parts: Mapping[str, Part]) -> str:
    tally = Tally()
    # widest first, so that each begins at a multiple of its width
    ordered = sorted(parts.items(), key=lambda item: (-item[1].tensor.element_size(), item[0]))
    with path.open("wb", buffering=0) as file:
        _put(file.fileno(), memoryview(_header(ordered)), tally)
        for _, part in ordered:
            flat = part.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            _put(file.fileno(), flat.numpy().data, tally)
        os.fsync(file.fileno())
    return str(tally)


def _header(parts: Sequence[tuple[str, Part]]) -> bytes:
    """Its length in 8 bytes, and the JSON, filled up with spaces to a multiple of 8."""
    where = {name: {"saved_offsets": list(part.offsets)} for name, part in parts}
    told: dict[str, object] = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(where), "DCP_VERSION": "1.0", "format": "pt"},
    }  # fmt: skip
    begin = 0
    for name, part in parts:
        tensor = part.tensor
        if tensor.dtype not in TYPES:
            raise TypeError(f"{name} is of {tensor.dtype}, which a checkpoint's files have no name for")
        end = begin + tensor.nbytes
        told[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _put(descriptor: int, held: memoryview, tally: Tally) -> None:
    """All of it, in pieces that a processor's cache may still hold when they are written."""
    for begin in range(0, len(held), PIECE_BYTES):
        piece = held[begin : begin + PIECE_BYTES]
        tally.add(piece)
        while piece:
            piece = piece[os.write(descriptor, piece) :]
