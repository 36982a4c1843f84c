"""When two prompts are one: by what is put to the model, whatever else they carry, and however an accent is written.

Splits are cut by it, so that a row that a file has twice is never on both sides; and what is evaluated is compared with what is
trained on.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from telescope.environments.base import Prompt
from telescope.environments.hashed_random import HashedRandom

T = TypeVar("T")


def identify(prompt: Prompt) -> str:
    """A hash of its turns, 32 hexadecimal digits."""
    return _hash([dict(turn) for turn in prompt.turns])


def identify_question(prompt: Prompt) -> str:
    """The same of what is asked alone: whatever system message stands before it, and whatever white space within it."""
    asked = [dict(turn) for turn in prompt.turns if turn["role"] != "system"]
    return _hash([{**turn, "content": " ".join(str(turn.get("content", "")).split())} for turn in asked])


def _hash(turns: Sequence[object]) -> str:
    text = json.dumps(_compose(turns), sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _compose(value: Any) -> Any:
    """The same with texts in NFC, in which a letter and its accent are one character."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, Mapping):
        return {key: _compose(one) for key, one in value.items()}
    return [_compose(one) for one in value] if isinstance(value, list | tuple) else value


def divide(items: Sequence[T], count: int, key: Sequence[str | int], identity: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """(the rest, `count` of the items), both in their own order; those of one identity lie on one side. The second has more
    only where the others that are left are repeated too often to fit. The rest may be empty.

    Chosen are the identities with the lowest hashes, which follow from `key` and each identity: the order of the items does not
    matter. One that has more items than are still wanted is passed over. Where none is repeated, each item that is added brings
    one other at most from the second side to the first.
    """
    names = [identity(item) for item in items]
    sizes: dict[str, int] = {}
    for name in names:
        sizes[name] = sizes.get(name, 0) + 1
    chosen, wanted, passed = set[str](), count, list[str]()
    for name in sorted(sizes, key=lambda name: (HashedRandom(*key, name).below(1 << 62), name)):
        if wanted <= 0:
            break
        if sizes[name] > wanted:
            passed.append(name)
            continue
        chosen.add(name)
        wanted -= sizes[name]
    if wanted > 0 and passed:
        chosen.add(min(passed, key=sizes.__getitem__))
    rest = [item for item, name in zip(items, names, strict=True) if name not in chosen]
    return rest, [item for item, name in zip(items, names, strict=True) if name in chosen]
