"""Texts from environments and tokenizers, made fit to travel: valid Unicode, and no longer than anyone would read."""

from __future__ import annotations

import re

MAX_CHARACTERS = 200_000
MAX_CAUSE_CHARACTERS = 4_000
_SURROGATES = re.compile("[\ud800-\udfff]")


def fit(text: object, most: int = MAX_CHARACTERS) -> str:
    """The text with a replacement character for each lone surrogate, which UTF-8 cannot hold, and cut off after `most`
    characters with a mark that says how many are missing."""
    whole = text if isinstance(text, str) else str(text)
    if len(whole) > most:
        whole = f"{whole[:most]} […cut: {len(whole) - most} more characters]"
    return _SURROGATES.sub("\ufffd", whole)
