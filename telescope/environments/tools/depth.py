"""How deeply a value is nested: whoever writes JSON or walks a value by recursion wants to know before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Of what a policy writes into a call, and of what an agent program sends."""


def deeper_than(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and dicts stand in each other more than `most` times; without recursion."""
    level = [value]
    for _ in range(most + 1):
        inner = [each for each in level if isinstance(each, list | tuple | Mapping)]
        if not inner:
            return False
        level = [part for each in inner for part in (each.values() if isinstance(each, Mapping) else each)]
    return True
