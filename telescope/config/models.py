"""Where a model's files lie: embedded in the package, in a local folder, or on the Hugging Face hub. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from telescope.config.words import Problem, did_you_mean

EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"
_HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")


class ModelNotFound(ValueError):
    """`model.name` leads to no folder with a model in it."""


def embedded_models() -> list[str]:
    """Names of the models that ship with Telescope, e.g. `["tiny", "tiny_reverse"]`."""
    folders = EMBEDDED.iterdir() if EMBEDDED.is_dir() else ()
    return sorted(folder.name for folder in folders if (folder / "config.json").is_file())


def model_path(name: str) -> Path | None:
    """The folder of an embedded or local model; None for a hub id, which the loading library fetches or finds in its cache."""
    if name in embedded_models():
        return EMBEDDED / name
    folder = Path(name).expanduser()
    return folder.absolute() if (folder / "config.json").is_file() else None


def model_source(name: str) -> str:
    """What to hand to `from_pretrained` and to vLLM: a folder's path, or the hub id."""
    path = model_path(name)
    return name if path is None else str(path)


def model_problem(name: str) -> Problem | None:
    """Why no model can be found under this name, before any process starts. A hub id is taken on trust."""
    if model_path(name) is not None:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Problem("model.name", f"model.name='{name}' is a folder without config.json, so it holds no model")
    if name.startswith(("/", "./", "../", "~")):
        return Problem("model.name", f"model.name='{name}': there is no such folder")
    if _HUB_ID.match(name):
        return None
    return Problem(
        "model.name",
        f"model.name='{name}' is neither an embedded model, nor a local folder, nor a Hugging Face id (owner/name)."
        + did_you_mean(name, embedded_models()),
    )


def model_folder(name: str) -> Path:
    """The folder of the model `name`; a Hugging Face id is looked up in its local cache first, and else downloaded.

    Raises `ModelNotFound` with a sentence that names what was tried.
    """
    problem = model_problem(name)
    if problem is not None:
        raise ModelNotFound(problem.sentence)
    return model_path(name) or _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        raise ModelNotFound(
            f"model.name={name} is not in the Hugging Face cache and can't be downloaded "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); check the id, the network or HF_HUB_OFFLINE"
        ) from error


def end_ids(folder: Path) -> tuple[int, ...]:
    """Token ids that end an answer, e.g. `(151645, 151643)`: those of generation_config.json, else of config.json.

    The tokenizer's own end-of-sequence token is not looked up here.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        given = _read(file).get("eos_token_id")
        if given is not None:
            return tuple(given) if isinstance(given, list) else (given,)
    return ()


def _read(file: Path) -> dict[str, Any]:
    """A JSON object, empty for a file that is not there. Raises `ModelNotFound` naming a file that is none."""
    if not file.is_file():
        return {}
    try:
        given: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"the model's file {file} is no JSON ({error}): mend it or fetch it again") from error
    return given
