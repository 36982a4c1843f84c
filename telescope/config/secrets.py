"""What counts as a secret, and how a setting refers to one: `${oc.env:NAME}`, never the value itself.

A reference stays text in every file of a run; `reveal` reads the variable in the process that needs the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_SECRET_NAME = re.compile(
    r"(^|[_.-])(api_?key|access_?key|private_?key|key|token|passw(or)?d|passphrase|secret|credentials?)$", re.I
)
_REFERENCE = re.compile(r"^\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}$")
REDACTED = "<redacted>"


class SecretMissing(ValueError):
    """An environment variable that a setting refers to is not set."""


def is_secret_name(name: str) -> bool:
    """True for `judge_api_key` and `HF_TOKEN`, False for `max_tokens`, `monkey` and `token_count`."""
    return _SECRET_NAME.search(name) is not None


def parse_reference(value: Any) -> str | None:
    """The variable's name in `${oc.env:NAME}`, None for anything else."""
    match = _REFERENCE.match(value) if isinstance(value, str) else None
    return match.group(1) if match else None


def reveal(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """The value a setting stands for. Raises `SecretMissing` with the variable's name."""
    name = parse_reference(value)
    if name is None:
        return value
    if name not in environ:
        raise SecretMissing(f"the environment variable {name} is not set, but a setting refers to it (${{oc.env:{name}}})")
    return environ[name]


def reveal_all(settings: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """`reveal` for every value of a tree of dicts and lists."""
    return {key: _reveal_deep(value, environ) for key, value in settings.items()}


def _reveal_deep(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _reveal_deep(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_reveal_deep(item, environ) for item in value]
    return reveal(value, environ)


SHORTEST_SCRUBBED = 8
"""A shorter value may be an ordinary word; it is no secret worth the name."""


def secret_values(environ: Mapping[str, str], settings: Any = ()) -> frozenset[str]:
    """The values that must not be written down: of environment variables with a secret's name, and of those that the settings
    refer to; also without the white space around them, as they are sent and quoted."""
    named = {value for name, value in environ.items() if is_secret_name(name)} | set(_find_references(settings, environ))
    return frozenset(value for value in named | {value.strip() for value in named} if len(value) >= SHORTEST_SCRUBBED)


def _find_references(settings: Any, environ: Mapping[str, str]) -> Iterator[str]:
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from _find_references(value, environ)
    elif (name := parse_reference(settings)) is not None:
        yield environ.get(name, "")


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """The text with `<redacted>` in place of each secret value."""
    for secret in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
        text = text.replace(secret, REDACTED)
    return text


def redacted(settings: Any, name: str = "") -> Any:
    """A copy for logs and mirrors: text under a secret name becomes `<redacted>` unless it is a reference."""
    if isinstance(settings, Mapping):
        return {key: redacted(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [redacted(value, name) for value in settings]
    return REDACTED if isinstance(settings, str) and is_secret_name(name) and parse_reference(settings) is None else settings
