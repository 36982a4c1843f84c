"""What a process has read in the model's folder, fact by fact, so that processes on several hosts can be compared.

Owns the one list of facts and how each is told: by a short text that a person can compare too. Whoever loads the weights tells
of them as well: of each file its size, and a digest of its header and of a piece from the middle of each tensor, so that other
weights of the same shapes are seen without reading all. Times are not told: hosts may have copies. Refuses torch and
transformers, and to compare (orchestrator/peers.py does, when a process joins).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from telescope.config.models import ModelBroken, check_weights, end_ids, read_json_object, weight_files
from telescope.records import ModelFacts

PIECE_BYTES = 4096
"""Of each tensor, around its middle."""
TEMPLATES = ("chat_template*", "additional_chat_templates/*")
TOKENIZER = ("tokenizer.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "*_tokens*.json")
CODE = ("*.py",)
_NO_DEFAULTS = ("eos_token_id", "transformers_version", "_from_model_config")
"""Of generation_config.json what is a fact of its own, or none."""


def read_model_facts(name: str, folder: Path, *, weights: bool) -> ModelFacts:
    """What `folder` holds of the model `name`; `weights`: for a process that loads them. Raises `ModelBroken`."""
    try:
        facts = {**_read_texts(name, folder), **(_read_weights(name, folder) if weights else {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelBroken):
            raise
        raise ModelBroken(f"model.name={name}: {folder} can't be read: {error}") from error
    return ModelFacts(name, str(folder), facts)


def has_chat_template(name: str, folder: Path) -> bool:
    """Whether the folder brings a chat template. Raises `ModelBroken`."""
    return bool(_find(folder, TEMPLATES) or _read_own(name, folder, "tokenizer_config.json").get("chat_template"))


def describe_no_template(name: str) -> str:
    return f"model.name={name} has no chat template (a base model?): give one as model.chat_template, in Jinja"


def _read_texts(name: str, folder: Path) -> dict[str, str]:
    config = _read_own(name, folder, "config.json")
    inner = config.get("text_config") or {}
    tokenizer = _read_own(name, folder, "tokenizer_config.json")
    template = tokenizer.pop("chat_template", None)
    defaults = {
        key: value for key, value in _read_own(name, folder, "generation_config.json").items() if key not in _NO_DEFAULTS
    }
    dtypes = (part.get(key) for part in (config, inner) for key in ("dtype", "torch_dtype"))
    return {
        "end tokens": ", ".join(map(str, end_ids(folder))) or "none",
        "dtype": next((str(dtype) for dtype in dtypes if dtype), "none"),
        "generation defaults": _write(defaults),
        "chat template": _digest(*_read_all(folder, TEMPLATES), _write(template).encode()),
        "tokenizer": _digest(*_read_all(folder, TOKENIZER), _write(tokenizer).encode()),
        "model code": _digest(*_read_all(folder, CODE)),
        "config.json": _digest((folder / "config.json").read_bytes()),
    }


def _read_weights(name: str, folder: Path) -> dict[str, str]:
    check_weights(name, folder)
    files = weight_files(name, folder)
    told = {file.name: f"{file.stat().st_size:,} bytes, {_digest_weights(file)}" for file in files}
    return {"weight files": ", ".join(told) or "none", **told}


def _digest_weights(file: Path) -> str:
    """Of a safetensors file, e.g. one of 10 GB in some milliseconds."""
    found = hashlib.blake2b(digest_size=8)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = os.fstat(stream.fileno()).st_size
        if not 0 < length <= size - 8:
            raise ValueError(f"{file} is not a safetensors file: it has {size} bytes, and its header would have {length}")
        header = stream.read(length)
        found.update(size.to_bytes(8, "little") + header)
        for begin, end in sorted(_places(json.loads(header))):
            stream.seek(8 + length + max(begin, (begin + end - PIECE_BYTES) // 2))
            found.update(stream.read(min(PIECE_BYTES, end - begin)))
    return f"digest {found.hexdigest()}"


def _places(header: dict[str, dict[str, list[int]]]) -> list[tuple[int, int]]:
    """Of each tensor, in bytes behind the header."""
    return [(fact["data_offsets"][0], fact["data_offsets"][1]) for name, fact in header.items() if name != "__metadata__"]


def _read_own(name: str, folder: Path, file: str) -> dict[str, Any]:
    return read_json_object(name, folder / file) if (folder / file).is_file() else {}


def _find(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _read_all(folder: Path, patterns: tuple[str, ...]) -> Iterator[bytes]:
    """Name and content of each, in order of names."""
    for path in _find(folder, patterns):
        yield path.name.encode()
        yield path.read_bytes()


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return f"digest {found.hexdigest()}"


def _write(value: object) -> str:
    return json.dumps(value, sort_keys=True)
