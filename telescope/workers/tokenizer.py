"""Load the model's tokenizer and what ends its answers. The only file of the workers that imports transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from telescope.config.parts import ModelSettings
from telescope.environments.template import ChatTemplate


class TokenizerError(RuntimeError):
    """The tokenizer can't be loaded or used; the message names the setting."""


def load_template(model: ModelSettings, folder: Path) -> ChatTemplate:
    """The chat template and tokenizer in the model's folder. Raises `TokenizerError`."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise TokenizerError(f"model.name={model.name}: its tokenizer can't be loaded: {first_line(error)}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):  # transformers makes an empty one where there are no files
        raise TokenizerError(f"model.name={model.name}: {folder} has no tokenizer files (tokenizer.json or the like)")
    if model.chat_template is None and not tokenizer.chat_template:
        raise TokenizerError(
            f"model.name={model.name} has no chat template (a base model?): give one as model.chat_template, in Jinja"
        )
    if tokenizer.eos_token_id is None:
        raise TokenizerError(f"model.name={model.name}: its tokenizer names no end-of-sequence token")
    return ChatTemplate(
        tokenizer,
        _eos_ids(tokenizer.eos_token_id, folder),
        chat_template=model.chat_template,
        enable_thinking=model.enable_thinking,
    )


def _eos_ids(own: int, folder: Path) -> list[int]:
    """The tokenizer's end token first, then those of the generation config, which vLLM stops at as well."""
    try:
        listed = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:  # many models have none
        listed = None
    except ValueError as error:
        raise TokenizerError(f"{folder / 'generation_config.json'} is no JSON ({error}): mend or remove it") from error
    more = [listed] if isinstance(listed, int) else list(listed or [])
    return list(dict.fromkeys([own, *more]))


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
