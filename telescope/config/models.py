"""Where a model's files lie: an embedded model by its short name, a local folder, or a Hugging Face id. No torch."""

from __future__ import annotations

import json
from pathlib import Path

EMBEDDED = Path(__file__).parent.parent / "embedded"


class ModelNotFound(ValueError):
    """`model.name` leads to no folder with a model in it."""


def embedded_models() -> list[str]:
    """Short names of the models that come with the package, e.g. `["tiny", "tiny_reverse"]`."""
    return sorted(folder.name for folder in EMBEDDED.iterdir() if (folder / "config.json").is_file()) if EMBEDDED.is_dir() else []


def model_folder(name: str) -> Path:
    """The folder of the model `name`; a Hugging Face id is looked up in its local cache first, and else downloaded.

    Raises `ModelNotFound` with a sentence that names what was tried.
    """
    if name in embedded_models():
        return EMBEDDED / name
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"model.name={name} is a folder without a config.json, so no model in Hugging Face's layout")
        return path.absolute()
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelNotFound(
            f"model.name={name} is neither a folder, nor a Hugging Face id (owner/name), nor an embedded model "
            f"({', '.join(embedded_models())})"
        )
    return _from_hub(name)


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
    """Token ids that end an answer, by the folder's generation_config.json and config.json, e.g. `(151645, 151643)`.

    The tokenizer's own end-of-sequence token is not looked up here.
    """
    found: list[int] = []
    for file in (folder / "generation_config.json", folder / "config.json"):
        given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        found += given if isinstance(given, list) else [] if given is None else [given]
    return tuple(dict.fromkeys(found))
