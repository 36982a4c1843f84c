"""Where a model is found by its name: embedded in the package, a local folder, or the Hugging Face hub. Loads nothing."""

from __future__ import annotations

import re
from pathlib import Path

from telescope.config.words import Problem, did_you_mean

EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"
_HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")


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
