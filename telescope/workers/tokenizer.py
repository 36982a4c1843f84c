"""Load the model's tokenizer and what ends its answers. The only file of the workers that imports transformers.

AutoTokenizer imports torch and all that generates text, 4 seconds of a processor and 300 MB in every worker, to look a class
up. Where the folder's own files leave no doubt which class that is, it is taken at once; AutoTokenizer decides the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from telescope.config.model_facts import describe_no_template
from telescope.config.models import end_ids
from telescope.config.sections import ModelSettings
from telescope.environments.template import ChatTemplate

_PLAIN = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
_QWEN = frozenset({"Qwen2Tokenizer", "Qwen2TokenizerFast"})
KNOWN = {
    **{(kind, name): "PreTrainedTokenizerFast" for kind in ("llama", "qwen3", "qwen3_moe") for name in _PLAIN},
    **{(kind, name): "Qwen2Tokenizer" for kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe") for name in _QWEN},
}
"""`model_type` of config.json and `tokenizer_class` of tokenizer_config.json -> the class of transformers that AutoTokenizer
takes for the two; a test asks it for each."""

_NAMING = ("config.json", "tokenizer_config.json")


class TokenizerError(RuntimeError):
    """The tokenizer can't be loaded or used; the message names the setting."""


def load_template(model: ModelSettings, folder: Path) -> ChatTemplate:
    """The chat template and tokenizer in the model's folder. Raises `TokenizerError`."""
    try:
        tokenizer: Any = _load(folder, model.trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise TokenizerError(f"model.name={model.name}: its tokenizer can't be loaded: {take_first_line(error)}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):  # transformers makes an empty one where there are no files
        raise TokenizerError(f"model.name={model.name}: {folder} has no tokenizer files (tokenizer.json or the like)")
    if model.chat_template is None and not tokenizer.chat_template:
        raise TokenizerError(describe_no_template(model.name))
    if tokenizer.eos_token_id is None:
        raise TokenizerError(f"model.name={model.name}: its tokenizer names no end-of-sequence token")
    template = ChatTemplate(
        tokenizer,
        _find_eos_ids(tokenizer.eos_token_id, folder),
        chat_template=model.chat_template,
        enable_thinking=model.enable_thinking,
    )
    if template.is_deaf:
        whose = f"model.name={model.name}: its chat template" if model.chat_template is None else "model.chat_template"
        raise TokenizerError(
            f"{whose} writes nothing of what a user says, so that all prompts would be alike: give model.chat_template a "
            "template that writes the content of each of `messages`"
        )
    return template


def _load(folder: Path, trust_remote_code: bool) -> Any:
    import transformers

    kind: Any = getattr(transformers, find_known_class(folder) or "AutoTokenizer")
    return kind.from_pretrained(folder, trust_remote_code=trust_remote_code)


def find_known_class(folder: Path) -> str | None:
    """The class of transformers that the folder's files name beyond doubt, e.g. `Qwen2Tokenizer`; None where they don't."""
    if not (folder / "tokenizer.json").is_file() or (folder / "tekken.json").exists():
        return None
    try:
        config, own = (json.loads((folder / name).read_text(encoding="utf-8")) for name in _NAMING)
    except (OSError, ValueError):  # AutoTokenizer finds words for it
        return None
    if not isinstance(config, dict) or not isinstance(own, dict) or "auto_map" in config or "auto_map" in own:
        return None
    return KNOWN.get((str(config.get("model_type")), str(own.get("tokenizer_class"))))


def _find_eos_ids(own: int, folder: Path) -> list[int]:
    """The tokenizer's end token first, then those that servers stop at as well."""
    try:
        more = end_ids(folder)
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"the end tokens of {folder} can't be read ({error}): mend its generation_config.json") from error
    return list(dict.fromkeys([own, *more]))


def take_first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
