"""How a setting refers to a secret: `${oc.env:NAME}`, whole or inside a text, never the value itself.

A reference stays text in every file of a run; `reveal` reads the variable in the process that needs the value. What must not be
written down, and how it is found, is in redaction.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from telescope.config.redaction import REDACTED, find_secret_values, is_hidden, redact_shapes, spell_all
from telescope.config.redaction import is_secret_name as is_secret_name

_WHOLE = re.compile(r"^\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}$")
_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,\s*(?:'([^'{}\\]*)'|([^'{},\\]*)))?\}")
"""The name, and what stands there where the variable is not set."""


class SecretMissing(ValueError):
    """An environment variable that a setting refers to is not set."""


def parse_reference(value: Any) -> str | None:
    """The variable's name where `${oc.env:NAME}` is all that the value is, None for anything else."""
    match = _WHOLE.match(value) if isinstance(value, str) else None
    return match.group(1) if match else None


def make_reference(name: str, default: str | None = None) -> str:
    """`${oc.env:NAME}` or `${oc.env:NAME,'default'}`. Raises `ValueError` for a default that can't stand in one."""
    reference = f"${{oc.env:{name}}}" if default is None else f"${{oc.env:{name},'{default}'}}"
    if not _REFERENCE.fullmatch(reference):
        raise ValueError("the default of a reference has none of ' \\ { }")
    return reference


def has_reference(value: Any) -> bool:
    return isinstance(value, str) and _REFERENCE.search(value) is not None


def replace_references(text: str, write: Callable[[str, str | None], str]) -> str:
    """The text with what `write` makes of each reference's name and default."""
    return _REFERENCE.sub(lambda match: write(match[1], match[3] if match[2] is None else match[2]), text)


def reveal(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """The value a setting stands for. Raises `SecretMissing` with the variable's name."""
    return _REFERENCE.sub(lambda match: _read(match, environ), value) if isinstance(value, str) else value


def _read(match: re.Match[str], environ: Mapping[str, str]) -> str:
    name, quoted, plain = match.groups()
    if name in environ:
        return environ[name]
    if quoted is None and plain is None:
        raise SecretMissing(f"the environment variable {name} is not set, but a setting refers to it (${{oc.env:{name}}})")
    return quoted if quoted is not None else plain


def reveal_all(settings: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """`reveal` for every value of a tree of dicts and lists."""
    return {key: _reveal_deep(value, environ) for key, value in settings.items()}


def _reveal_deep(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _reveal_deep(item, environ) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_reveal_deep(item, environ) for item in value]
    return reveal(value, environ)


def find_references(settings: Any) -> frozenset[str]:
    """The variables that the texts of a tree of dicts and lists refer to."""
    return frozenset(match.group(1) for text in _find_texts(settings) for match in _REFERENCE.finditer(text))


def find_missing(settings: Any, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Those of them that are not set and have no default."""
    found = (match.groups() for text in _find_texts(settings) for match in _REFERENCE.finditer(text))
    return sorted({name for name, quoted, plain in found if name not in environ and quoted is None and plain is None})


def _find_texts(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    items = settings.values() if isinstance(settings, Mapping) else settings if isinstance(settings, list | tuple) else ()
    for value in items:
        yield from _find_texts(value)


def secret_values(environ: Mapping[str, str], settings: Any = ()) -> frozenset[str]:
    """What must not be written down: the values of environment variables with a secret's name, and of those that the settings
    refer to, in every form in which they travel."""
    return spell_all(find_secret_values(environ, find_references(settings)))


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """The text with `<redacted>` in place of each secret value, and of what has the shape of a key."""
    found = [secret for secret in secrets if secret in text]
    for secret in sorted(found, key=len, reverse=True):  # one may be the beginning of another
        text = text.replace(secret, REDACTED)
    return redact_shapes(text)


def redacted(settings: Any, name: str = "") -> Any:
    """A copy for logs and mirrors: text under a name that hides it becomes `<redacted>` unless it is a reference."""
    if isinstance(settings, Mapping):
        return {key: redacted(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [redacted(value, name) for value in settings]
    return REDACTED if isinstance(settings, str) and is_hidden(name) and not has_reference(settings) else settings
