"""Where a model's files lie: embedded in the package, in a local folder, or on the Hugging Face hub. Imports no torch."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telescope.config.words import ConfigProblem, did_you_mean
from telescope.maths.memory import EXPERTS

EMBEDDED = Path(__file__).resolve().parent.parent / "embedded"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEMPLATE_FILES = ("chat_template*", "additional_chat_templates/*")
TOKENIZER_FILES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "*_tokens*.json")
CODE_FILES = ("*.py",)
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", *TEMPLATE_FILES, *TOKENIZER_FILES, *CODE_FILES)
"""All that is read of a model of the hub by anyone: what `config.model_facts` tells must be there before it is told."""
PICKLED_FILES = ("pytorch_model*.bin",)
"""Weights of a model without safetensors files."""
HUB_TIMEOUT_S = 10.0
"""For the hub to say whether it has a model: a name with eight addresses, none of which answers, costs no more."""
HUB_TRIES = 2
HUB_IS_BUSY = (429, *range(500, 600))
"""Answers that say nothing of the model."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")


class ModelNotFound(ValueError):
    """`model.name` leads to no folder with a model in it."""


class ModelBroken(ModelNotFound):
    """A file of the model's folder can't be used; the message names `model.name` and the file."""


def embedded_models() -> list[str]:
    """Names of the models that ship with Telescope, e.g. `["tiny", "tiny_reverse", "tiny_turns"]`."""
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


def model_problem(name: str) -> ConfigProblem | None:
    """Why no model can be found under this name, before any process starts. A hub id is taken on trust."""
    if model_path(name) is not None:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return ConfigProblem("model.name", f"model.name='{name}' is a folder without config.json, so it holds no model")
    if name.startswith(("/", "./", "../", "~")):
        return ConfigProblem("model.name", f"model.name='{name}': there is no such folder")
    if _HUB_ID.match(name):
        return None
    return ConfigProblem(
        "model.name",
        f"model.name='{name}' is neither an embedded model, nor a local folder, nor a Hugging Face id (owner/name)."
        + did_you_mean(name, embedded_models()),
    )


def hub_problem(name: str) -> ConfigProblem | None:
    """Why the hub has no model of this id for us, asked before any process starts; None also for embedded and local ones, for
    what is in the cache, and where the hub is too busy to say. Takes `HUB_TIMEOUT_S` at most."""
    if model_path(name) is not None or not _HUB_ID.match(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return None
    answer: Future[ConfigProblem | None] = Future()

    def ask() -> None:
        try:
            answer.set_result(_asked_of_hub(name))
        except Exception as error:  # noqa: BLE001 the edge of a thread: raised again by the one that waits
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="hub").start()  # its sockets' limits hold for each address anew
    try:
        return answer.result(HUB_TIMEOUT_S)
    except TimeoutError:
        return ConfigProblem("model.name", _not_on_hub(name, f"no answer within {HUB_TIMEOUT_S:g} s"))


def _asked_of_hub(name: str) -> ConfigProblem | None:
    """Only the head of its config.json is asked for, which costs a private or gated model the same refusal."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    why = ""
    for _ in range(HUB_TRIES):
        try:
            head = get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
        except HfHubHTTPError as error:
            busy = getattr(error.response, "status_code", None) in HUB_IS_BUSY
            return None if busy else ConfigProblem("model.name", _not_on_hub(name, _said(error)))
        except hub_errors() as error:
            why = _said(error)
        else:
            why = "" if head.commit_hash else "what answers is not a hub"
            break
    return ConfigProblem("model.name", _not_on_hub(name, why)) if why else None


def hub_errors() -> tuple[type[Exception], ...]:
    """What asking the hub may raise: the library's own errors, and those of its HTTP client (a proxy's, say), which is another
    one from version to version."""
    from huggingface_hub.errors import HfHubHTTPError

    clients = (base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    return (OSError, ValueError, *clients)


def _said(error: Exception) -> str:
    """`ConnectError: [Errno -2] Name or service not known`"""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _not_on_hub(name: str, why: str) -> str:
    return (
        f"model.name={name} is not in the Hugging Face cache and can't be downloaded ({why}); check the id, the network or "
        "HF_HUB_OFFLINE"
    )


def model_folder(name: str) -> Path:
    """The folder of the model `name`; a Hugging Face id is looked up in its local cache first, and else downloaded.

    Raises `ModelNotFound` with a sentence that names what was tried, and `ModelBroken` where a JSON file in it is none.
    """
    problem = model_problem(name)
    if problem is not None:
        raise ModelNotFound(problem.sentence)
    folder = model_path(name) or _from_hub(name)
    check_files(name, folder)
    return folder


def check_files(name: str, folder: Path) -> None:
    """Raise `ModelBroken` where one of the folder's JSON files is broken, with its name."""
    for file in (folder / part for part in JSON_FILES):
        if not file.is_file():
            continue
        found = read_json_object(name, file)
        given = found.get("eos_token_id")
        if not all(isinstance(token, int) for token in (given if isinstance(given, list) else [given or 0])):
            raise ModelBroken(f"model.name={name}: eos_token_id={given!r} in {file} is neither a token id nor a list of them")


def check_weights(name: str, folder: Path) -> None:
    """Raise `ModelBroken` where a safetensors file is missing, unreadable or cut off, and where the folder has others beside
    its model: servers would load them over it, and the trainer would not. Reads headers and sizes only."""
    files = weight_files(name, folder)
    whole = folder / "model.safetensors"
    if whole in files and len(files) > 1:
        other = next(file for file in files if file != whole)
        raise ModelBroken(
            f"model.name={name}: {other} lies beside {whole.name}, and a server would load both: move it out of the folder"
        )
    for file in files:
        _check_safetensors(name, file)


def weight_files(name: str, folder: Path) -> list[Path]:
    """The safetensors files of a model, those that its index names where it has one. Raises `ModelBroken`."""
    return _list_weights(name, folder, "model.safetensors.index.json", "*.safetensors")


def pickled_files(name: str, folder: Path) -> list[Path]:
    """The same of `pytorch_model.bin`, which count where there are no safetensors files."""
    return _list_weights(name, folder, "pytorch_model.bin.index.json", *PICKLED_FILES)


def _list_weights(name: str, folder: Path, index_name: str, pattern: str) -> list[Path]:
    index = folder / index_name
    if not index.is_file():
        return sorted(folder.glob(pattern))
    listed = read_json_object(name, index).get("weight_map")
    if not isinstance(listed, dict):
        raise ModelBroken(f"model.name={name}: {index} has no weight_map")
    return sorted({folder / str(part) for part in listed.values()})


def _check_safetensors(name: str, file: Path) -> None:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 0 < length <= size - 8:
                raise ValueError(f"it has {size} bytes and its header would have {length}")
            header = json.loads(stream.read(length))
        tensors = [fact["data_offsets"][1] for key, fact in header.items() if key != "__metadata__"]
        expected = 8 + length + max(tensors, default=0)
        if size != expected:
            raise ValueError(f"it has {size} bytes, and should have {expected}: it was cut off or overwritten")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelBroken(f"model.name={name}: the weights in {file} can't be read: {error}") from error


def read_json_object(name: str, file: Path) -> dict[str, Any]:
    """Of a file in the model's folder. Raises `ModelBroken`."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelBroken(f"model.name={name}: {file} can't be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelBroken(f"model.name={name}: {file} holds a {type(found).__name__}, not a JSON object")
    return found


def _from_hub(name: str) -> Path:
    """A snapshot with all that any process reads: what lies in the cache where that is whole, so that all processes of a host
    have one commit; else the rest of that commit is fetched. Offline a part is given as it is."""
    cached = _in_cache(name)
    if cached is not None and _is_whole(name, cached):
        return cached
    commit = None if cached is None else cached.name
    try:
        found = _fetch(name, HUB_FILES, commit)
        if not weight_files(name, found):
            found = _fetch(name, (*HUB_FILES, *PICKLED_FILES), commit)
    except hub_errors() as error:
        if isinstance(error, ModelBroken):
            raise
        raise ModelNotFound(_not_on_hub(name, _said(error))) from error
    return found


def _in_cache(name: str) -> Path | None:
    """The cached snapshot, of which nobody says that it is whole: the library knows only where it has made a listing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), local_files_only=True))
    except LocalEntryNotFoundError as error:
        listed = getattr(error, "snapshot_path", None)  # of one with a listing, which lacks some of it
        return None if listed is None else Path(listed)
    except HFValidationError:
        return None


def _fetch(name: str, patterns: tuple[str, ...], commit: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=commit, allow_patterns=list(patterns)))


def _is_whole(name: str, folder: Path) -> bool:
    """Whether there are config, tokenizer and all weights. Former loads leave a part: a tokenizer alone, or some shards."""
    tokenizers = [file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)]
    weights = weight_files(name, folder) or pickled_files(name, folder)
    indexed = any(folder.glob("*.index.json")) or not any("-of-" in file.name for file in weights)
    there = indexed and bool(weights) and all(file.is_file() for file in weights)
    return there and bool(tokenizers) and (folder / "config.json").is_file()


def end_ids(folder: Path) -> tuple[int, ...]:
    """Token ids that end an answer, e.g. `(151645, 151643)`: those of generation_config.json, else of config.json.

    The tokenizer's own end-of-sequence token is not looked up here.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for part in (found, found.get("text_config") or {}):  # a model of several modalities keeps it with its language model
            given = part.get("eos_token_id")
            if given is not None:
                return tuple(given) if isinstance(given, list) else (given,)
    return ()


@dataclass(frozen=True)
class ModelCounts:
    """What of a model a backend's settings have to go with; None: not known."""

    layers: int | None = None
    heads: int | None = None
    key_heads: int | None = None
    experts: int = 0
    """Of each layer that has some; 0: no layer has."""


def read_counts(name: str) -> ModelCounts | None:
    """Of an embedded or local model by its config.json; None where that can't be told here."""
    own = _own_config(name)
    layers, heads = (_count(own, key) for key in ("num_hidden_layers", "num_attention_heads"))
    if layers is None and heads is None:
        return None
    experts = next((found for key in EXPERTS if (found := _count(own, key))), 0)
    return ModelCounts(layers, heads, _count(own, "num_key_value_heads") or heads, experts)


def write_divisors(number: int) -> str:
    """Of 4: `1, 2, 4`."""
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)


def positions(name: str) -> int | None:
    """Tokens that an embedded or local model was made for, e.g. 256; None where that can't be told here, or where its
    positions are stretched."""
    own = _own_config(name)
    rope = own.get("rope_parameters") or own.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else ""
    stretched = kind != "default" or any(isinstance(each, dict) for each in rope.values())
    found = None if stretched or "model_max_length" in own else own.get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def _count(config: Mapping[str, Any], key: str) -> int | None:
    found = config.get(key)
    return found if isinstance(found, int) and found > 0 else None


def _own_config(name: str) -> dict[str, Any]:
    folder = model_path(name)
    if folder is None:
        return {}
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # whoever loads the model says what is wrong with its files
    return found if isinstance(found, dict) else {}
