"""The text of a user's message with a place for the question, as several environments have it in their settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _asks(instruction: str) -> str:
    if "{question}" not in instruction:
        raise ValueError(f"instruction={instruction!r} must contain {{question}}")
    return instruction


Instruction = Annotated[str, AfterValidator(_asks)]
