"""What a process has read in the model's folder, fact by fact, so that processes on several hosts can be compared.

Owns the one list of facts and how each is told: by a short text that a person can compare too, with the file or the key in it.
What makes no other model is left out: who wrote a file with which version, and files that nobody reads. Whoever loads the
weights tells of them as well: of each file its size, and a digest of its header and of a piece from the middle of some tensors,
so that other weights of the same shapes are seen without reading all. Times are not told: hosts may have copies. Refuses torch
and transformers, and to compare (orchestrator/peers.py does, when a process joins).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from telescope.config.models import (
    CODE_FILES,
    TEMPLATE_FILES,
    TOKENIZER_FILES,
    ModelBroken,
    check_weights,
    end_ids,
    pickled_files,
    read_json_object,
    weight_files,
)
from telescope.config.sections import ModelSettings
from telescope.records import ModelFacts

PIECE_BYTES = 4096
"""Of a tensor, around its middle."""
PIECES = 64
"""Of a file, at equal distances, the first and the last tensor among them; each may be a read from network storage."""
PIECES_IN_ALL = 1024
"""Of a model with many files, but `FEWEST_PIECES` of each."""
FEWEST_PIECES = 4
SHOWN_CHARACTERS = 60
"""Of one setting in a file; a longer value is told by its digest."""
_FAST_TOKENIZER = ("tokenizer.json", "tekken.json", "*_tokens*.json")
"""What counts where there is a tokenizer.json and no code of the model's own."""
_NO_DEFAULTS = ("eos_token_id", "transformers_version", "_from_model_config")
"""Of generation_config.json what is a fact of its own, or none."""
_NO_CONFIG = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash")
_NO_TOKENIZER = (
    *_NO_CONFIG,
    "backend",
    "chat_template",
    "is_local",
    "local_files_only",
    "special_tokens_map_file",
    "tokenizer_file",
)
"""Of config.json and tokenizer_config.json what says only whence they came."""


def read_model_facts(model: ModelSettings, folder: Path, *, weights: bool) -> ModelFacts:
    """What `folder` holds of the model; `weights`: for a process that loads them. Raises `ModelBroken`."""
    name = model.name
    try:
        facts = {**_read_texts(model, folder), **(_read_weights(name, folder) if weights else {})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelBroken):
            raise
        raise ModelBroken(f"model.name={name}: {folder} can't be read: {error}") from error
    return ModelFacts(name, str(folder), facts)


def has_chat_template(name: str, folder: Path) -> bool:
    """Whether the folder brings a chat template. Raises `ModelBroken`."""
    return bool(_find(folder, TEMPLATE_FILES) or _read_own(name, folder, "tokenizer_config.json").get("chat_template"))


def describe_no_template(name: str) -> str:
    return f"model.name={name} has no chat template (a base model?): give one as model.chat_template, in Jinja"


def _read_texts(model: ModelSettings, folder: Path) -> dict[str, str]:
    name = model.name
    config = _read_own(name, folder, "config.json")
    inner = config.get("text_config") or {}
    tokenizer = _read_own(name, folder, "tokenizer_config.json")
    own_code = model.trust_remote_code and ("auto_map" in config or "auto_map" in tokenizer)
    plain = not own_code and (folder / "tokenizer.json").is_file()
    dtypes = (part.get(key) for part in (config, inner) for key in ("dtype", "torch_dtype"))
    return {
        "end tokens": ", ".join(map(str, end_ids(folder))) or "none",
        "dtype": next((str(dtype) for dtype in dtypes if dtype), "none"),
        "generation defaults": _write(_without(_read_own(name, folder, "generation_config.json"), _NO_DEFAULTS)),
        "chat template": _tell_template(model, folder, tokenizer.get("chat_template")),
        "tokenizer": _tell_files(folder, _FAST_TOKENIZER if plain else TOKENIZER_FILES),
        "tokenizer_config.json": _tell_settings(_without(tokenizer, _NO_TOKENIZER)),
        "model code": _tell_files(folder, CODE_FILES if own_code else ()),
        "config.json": _tell_settings(_without(config, _NO_CONFIG)),
    }


def _tell_template(model: ModelSettings, folder: Path, written: object) -> str:
    """Of the one in force: the setting's, which all have; else the folder's files; else that in tokenizer_config.json."""
    if model.chat_template is not None:
        return "model.chat_template"
    if files := _find(folder, TEMPLATE_FILES):
        return ", ".join(f"{file.name} {_digest(file.read_bytes())}" for file in files)
    return "none" if written is None else f"tokenizer_config.json {_digest(_write(written).encode())}"


def _tell_files(folder: Path, patterns: tuple[str, ...]) -> str:
    """Name and digest of each; white space at its end is nothing."""
    return ", ".join(f"{file.name} {_digest(file.read_bytes().rstrip())}" for file in _find(folder, patterns)) or "none"


def _tell_settings(settings: dict[str, Any]) -> str:
    """Each with its value, so that the one that differs is shown; of a long value the digest."""
    told = {key: _write(value) for key, value in sorted(settings.items())}
    short = {key: text if len(text) <= SHOWN_CHARACTERS else _digest(text.encode()) for key, text in told.items()}
    return ", ".join(f"{key}: {text}" for key, text in short.items()) or "none"


def _without(settings: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Also in what is nested: a model of several modalities has a config of each."""
    return {
        key: _without(value, keys) if isinstance(value, dict) else value for key, value in settings.items() if key not in keys
    }


def _read_weights(name: str, folder: Path) -> dict[str, str]:
    check_weights(name, folder)
    files = weight_files(name, folder)
    most = max(FEWEST_PIECES, min(PIECES, PIECES_IN_ALL // max(1, len(files))))
    told = {file.name: f"{file.stat().st_size:,} bytes, {_digest_weights(file, most)}" for file in files}
    if not files:
        told = {file.name: f"{file.stat().st_size:,} bytes" for file in pickled_files(name, folder)}
    return {"weight files": ", ".join(told) or "none", **told}


def _digest_weights(file: Path, most: int) -> str:
    """Of a safetensors file, however large it is: its header and at most `most` pieces."""
    found = hashlib.blake2b(digest_size=8)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = os.fstat(stream.fileno()).st_size
        if not 0 < length <= size - 8:
            raise ValueError(f"{file} is not a safetensors file: it has {size} bytes, and its header would have {length}")
        header = stream.read(length)
        found.update(size.to_bytes(8, "little") + header)
        for begin, end in _spread(sorted(_places(json.loads(header))), most):
            stream.seek(8 + length + max(begin, (begin + end - PIECE_BYTES) // 2))
            found.update(stream.read(min(PIECE_BYTES, end - begin)))
    return f"digest {found.hexdigest()}"


def _places(header: dict[str, dict[str, list[int]]]) -> list[tuple[int, int]]:
    """Of each tensor, in bytes behind the header."""
    return [(fact["data_offsets"][0], fact["data_offsets"][1]) for name, fact in header.items() if name != "__metadata__"]


def _spread(places: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """At most so many of them, at equal distances, with both ends."""
    last = len(places) - 1
    return places if last < most else [places[at * last // (most - 1)] for at in range(most)]


def _read_own(name: str, folder: Path, file: str) -> dict[str, Any]:
    return read_json_object(name, folder / file) if (folder / file).is_file() else {}


def _find(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _digest(*parts: bytes) -> str:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return f"digest {found.hexdigest()}"


def _write(value: object) -> str:
    return json.dumps(value, sort_keys=True)
