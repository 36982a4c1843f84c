"""Which settings are free text: there a reference to an environment variable stays one, and a key may stand by mistake.

Decided by the setting's place and type, never by its name or the variable's. A number, a choice or a path is part of what makes
a run reproducible, and is resolved and written down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, RootModel
from typing_extensions import TypeAliasType, is_typeddict

from telescope.config import plugins
from telescope.config.redaction import has_key_shape
from telescope.config.secrets import has_reference

if TYPE_CHECKING:
    from telescope.config.run import RunConfig

Place = tuple[str | int, ...]
_OPEN: tuple[Place, ...] = (
    ("cluster", "env"),
    ("cluster", "slurm", "setup"),
    ("inference", "api_key"),
    ("inference", "remote", "api_key"),
    ("inference", "vllm"),
)
_RECORDED = (bool, int, float, complex, Decimal, Fraction, PurePath, Enum, date, time, timedelta, type(None))
"""What is resolved and written down, so that a run can be made again. Whatever else a text may become stays a reference."""
_SOUNDS_SECRET = re.compile(
    r"(^|[_.-])(pwd|pat|dsn|auth|cookies?|authorization)$|passw|pwd$|secret|credential|api_?keys?$|(auth|access|bearer)_?tokens?$",
    re.I,
)
_SHORTEST_KEY = 8


def is_free_text(place: Place, container: Mapping[str, Any], plugin_path: Sequence[str] = ()) -> bool:
    """Whether any text may stand at a place of a configuration, e.g. `("cluster", "env", "PGPASSWORD")`."""
    if any(place[: len(above)] == above for above in _OPEN):
        return True
    match place:
        case ("environments", label, "kwargs", *below):
            entry = (container.get("environments") or {}).get(label)
            return _takes_text(plugins.ENVIRONMENTS, entry, "name", below, plugin_path)
        case ("weight_sync", "transport_kwargs", *below):
            return _takes_text(plugins.TRANSPORTS, container.get("weight_sync"), "transport", below, plugin_path)
    return False


def _takes_text(
    kind: plugins.Kind[Any], entry: Any, named: str, below: Sequence[str | int], plugin_path: Sequence[str]
) -> bool:
    """Of a plug-in that can't be loaded any setting may be text: it is refused elsewhere, by its name."""
    name = entry.get(named) if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        return True
    try:
        return _may_be_text(plugins.load(kind, name, plugin_path), below)
    except plugins.PluginError:
        return True


def _may_be_text(annotation: Any, below: Sequence[str | int]) -> bool:
    """Whether something else than a number, a choice or a path may stand at `below` of a value of this type: a text, or what is
    made of one, such as a URL."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _may_be_text(inner[0], below)
    if isinstance(annotation, NewType):
        return _may_be_text(annotation.__supertype__, below)
    if isinstance(annotation, TypeAliasType):
        return _may_be_text(annotation.__value__, below)
    if origin in (Union, UnionType):
        return any(_may_be_text(one, below) for one in inner)
    if origin is Literal or (isinstance(annotation, type) and issubclass(annotation, _RECORDED)):
        return False
    if not below:
        return True
    fields = _find_fields(annotation)
    if fields is not None:
        field = fields.get(str(below[0]))
        return field is None or _may_be_text(field, below[1:])
    items = [one for one in inner[1 if isinstance(origin, type) and issubclass(origin, Mapping) else 0 :] if one is not ...]
    return not items or any(_may_be_text(one, below[1:]) for one in items)


def _find_fields(annotation: Any) -> Mapping[str, Any] | None:
    """Types by name; None for what has no fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if issubclass(annotation, RootModel):
            return None
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    if is_typeddict(annotation) or is_dataclass(annotation):
        try:
            return get_type_hints(annotation)
        except NameError:  # of a module that did not import what it names
            return {}
    return None


def find_literal_secrets(config: RunConfig) -> list[str]:
    """A sentence for each key that was typed in, by its shape or by what its setting is called, with the line to type."""
    places = {
        **{f"environments.{label}.kwargs": entry.kwargs for label, entry in config.environments.items()},
        **{f"evals.{name}.kwargs": entry.kwargs for name, entry in config.evals.items()},
        "weight_sync.transport_kwargs": config.weight_sync.transport_kwargs,
        "inference.vllm": config.inference.vllm,
        "cluster.env": config.cluster.env,
        "cluster.slurm.setup": config.cluster.slurm.setup if config.cluster.slurm else (),
    }
    return [
        f"{path} looks like a secret, and stands in clear in the files of the run: put it into an environment variable and "
        f"give {path}='${{oc.env:{_make_variable(path)}}}'"
        for above, settings in places.items()
        for path, text in _find_texts(settings, above)
        if not has_reference(text) and (has_key_shape(text) or _sounds_secret(path, text))
    ]


def _sounds_secret(path: str, text: str) -> bool:
    name = next((part for part in reversed(path.split(".")) if not part.isdigit()), "")
    return len(text) >= _SHORTEST_KEY and len(text.split()) <= 2 and _SOUNDS_SECRET.search(name) is not None


def _make_variable(path: str) -> str:
    name = next(part for part in reversed(path.split(".")) if not part.isdigit())
    return re.sub(r"\W", "_", name).upper()


def _find_texts(settings: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(settings, str):
        yield path, settings
    items = (
        settings.items() if isinstance(settings, Mapping) else enumerate(settings) if isinstance(settings, list | tuple) else ()
    )
    for name, value in items:
        yield from _find_texts(value, f"{path}.{name}")
