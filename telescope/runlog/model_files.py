"""What the files of a run's model were when its first process read them: whoever finds others later is refused.

A server that is started again loads its model anew, and a trained adapter belongs to the base that it was trained on. Owns
`model.json` and what is compared: of each file its size and header, and of each tensor a piece from its middle, so that other
weights of the same shapes are seen without reading all. Times are not compared: hosts may have copies. Refuses to know torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from telescope.records import Record
from telescope.runlog.layout import RunDirectory, write_atomically

PIECE_BYTES = 4096
"""Of each tensor, around its middle."""
SHOWN = 3


class ModelFilesChanged(ValueError):
    """The model's files are not those that the run began with; the message names them and what to do."""


class ModelFiles(Record, frozen=True):
    process: str
    """Who read them first, e.g. `server-0`."""
    digests: dict[str, str]
    """By the name of the file."""


def check_model_files(run: RunDirectory, process: str, model: str, folder: Path, files: Sequence[Path]) -> None:
    """Note the digests of config.json and of these safetensors files where no process of this attempt has, else compare.

    `model` is `model.name`. Raises `ModelFilesChanged`, and OSError or ValueError for what can't be read.
    """
    own = ModelFiles(process, {file.name: digest(file) for file in (folder / "config.json", *files)})
    first = _first(run.model_json, own)
    other = sorted(name for name in {*own.digests, *first.digests} if own.digests.get(name) != first.digests.get(name))
    if other:
        more = f" and {len(other) - SHOWN} more" if len(other) > SHOWN else ""
        raise ModelFilesChanged(
            f"model.name={model}: {', '.join(other[:SHOWN])}{more} in {folder} are not as {first.process} read them when this "
            "run began, so that it would go on with another model; put the files back that were there, or begin a new run"
        )


def digest(file: Path) -> str:
    """64 hex digits for config.json, or for a safetensors file, e.g. of 10 GB in some milliseconds."""
    found = hashlib.blake2b(digest_size=32)
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            found.update(stream.read())
            return found.hexdigest()
        length = int.from_bytes(stream.read(8), "little")
        size = os.fstat(stream.fileno()).st_size
        if not 0 < length <= size - 8:
            raise ValueError(f"{file} is not a safetensors file: it has {size} bytes, and its header would have {length}")
        header = stream.read(length)
        found.update(size.to_bytes(8, "little") + header)
        for begin, end in sorted(_places(json.loads(header))):
            stream.seek(8 + length + max(begin, (begin + end - PIECE_BYTES) // 2))
            found.update(stream.read(min(PIECE_BYTES, end - begin)))
    return found.hexdigest()


def _places(header: dict[str, dict[str, list[int]]]) -> list[tuple[int, int]]:
    """Of each tensor, in bytes behind the header."""
    return [(fact["data_offsets"][0], fact["data_offsets"][1]) for name, fact in header.items() if name != "__metadata__"]


def _first(path: Path, own: ModelFiles) -> ModelFiles:
    """What the first process has noted, which may be this one: of several at once one writes, and all read that."""
    if not path.exists():
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        write_atomically(draft, msgspec.json.format(msgspec.json.encode(own)).decode() + "\n", mode=0o600)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links: of two at the same instant the later one's note stays, and both read it
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return msgspec.json.decode(path.read_bytes(), type=ModelFiles)
