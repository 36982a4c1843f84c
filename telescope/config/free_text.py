"""Which settings are free text: there a reference to an environment variable stays one, and a key may stand by mistake.

Follows from the settings' classes alone: a setting of an open type is free, whoever adds it. A number, a choice or a path is
part of what makes a run reproducible, and is resolved and written down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, RootModel
from pydantic.fields import FieldInfo
from typing_extensions import TypeAliasType, is_typeddict

from telescope.config import plugins
from telescope.config.evals import EvalEntry
from telescope.config.redaction import has_key_shape
from telescope.config.run import RunConfig
from telescope.config.secrets import has_reference, is_secret_name
from telescope.config.sections import EnvironmentEntry, WeightSyncSettings
from telescope.config.words import bare_type
from telescope.settings import FreeText, Settings

Place = tuple[str | int, ...]
_FindName = Callable[[Mapping[str, Any], str], Any]
"""(the section that holds the setting, its own name there) -> the plug-in's name."""
_OF_PLUGINS: Mapping[tuple[type[Settings], str], tuple[plugins.Kind[Any], _FindName]] = {
    (EnvironmentEntry, "kwargs"): (plugins.ENVIRONMENTS, lambda entry, label: entry.get("name")),
    (EvalEntry, "kwargs"): (plugins.ENVIRONMENTS, lambda entry, name: entry.get("environment") or name),
    (WeightSyncSettings, "transport_kwargs"): (plugins.TRANSPORTS, lambda sync, name: sync.get("transport")),
}
"""Free settings whose parts a plug-in's class has types for: there only what may be a text is free. All other ones are free
as a whole."""
_RECORDED = (bool, int, float, complex, Decimal, Fraction, PurePath, Enum, date, time, timedelta, type(None))
"""What is resolved and written down, so that a run can be made again. Whatever else a text may become stays a reference."""
_SOUNDS_SECRET = re.compile(
    r"(^|[_.-])(pwd|pat|dsn|auth|cookies?|authorization)$|passw|pwd$|secret|credential|api_?keys?$|(auth|access|bearer)_?tokens?$",
    re.I,
)
_SHORTEST_KEY = 8


def is_free_text(place: Place, container: Mapping[str, Any], plugin_path: Sequence[str] = ()) -> bool:
    """Whether any text may stand at a place of a configuration, e.g. `("cluster", "env", "PGPASSWORD")`."""
    found = _find_free(place)
    if found is None:
        return False
    depth, holder = found
    if (holder, place[depth]) not in _OF_PLUGINS:
        return True
    kind, find_name = _OF_PLUGINS[holder, str(place[depth])]
    section: Any = container
    for above in place[:depth]:
        section = section.get(above) if isinstance(section, Mapping) else None
    name = find_name(section, str(place[depth - 1])) if isinstance(section, Mapping) else None
    return _takes_text(kind, name, place[depth + 1 :], plugin_path)


def _find_free(place: Place) -> tuple[int, type[Settings]] | None:
    """Where on the way to a place the free setting stands, and the class that has it; None where the way leads to none."""
    kind: Any = RunConfig
    for depth, name in enumerate(place):
        if isinstance(kind, type) and issubclass(kind, Settings):
            field = kind.model_fields.get(str(name))
            if field is None:
                return None
            if is_free(str(name), field):
                return depth, kind
            kind = bare_type(field.annotation)
        else:
            inner = get_args(kind)
            kind = bare_type(inner[-1 if _is_mapping(kind) else 0]) if inner else None
    return None


def is_free(name: str, field: FieldInfo) -> bool:
    """Whether a setting of a class takes any text: its type is open (`dict[str, Any]`, `dict[str, str]`), it is marked as
    `FreeText`, or its name is a secret's."""
    return FreeText in field.metadata or is_secret_name(name) or _is_open(field.annotation)


def _is_open(annotation: Any) -> bool:
    kind = bare_type(annotation)
    if kind in (Any, object, dict, list, tuple):
        return True
    inner = get_args(kind)
    if _is_mapping(kind):
        return bare_type(inner[1]) is str or _is_open(inner[1])
    return get_origin(kind) is not Literal and any(_is_open(one) for one in inner if one is not ...)


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _takes_text(kind: plugins.Kind[Any], name: Any, below: Place, plugin_path: Sequence[str]) -> bool:
    """Of a plug-in that can't be loaded any setting may be text: it is refused elsewhere, by its name."""
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
    return [
        f"{path} looks like a secret, and stands in clear in the files of the run: put it into an environment variable and "
        f"give {path}='${{oc.env:{_make_variable(path)}}}'"
        for above, settings in _find_free_settings(config, RunConfig)
        for path, text in _find_texts(settings, above)
        if not has_reference(text) and (has_key_shape(text) or _sounds_secret(path, text))
    ]


def _find_free_settings(value: Any, kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each free setting below a value of a class, by its path."""
    if isinstance(value, Settings):
        for name, field in kind.model_fields.items():
            place, inner = f"{path}.{name}".removeprefix("."), getattr(value, name)
            if is_free(name, field):
                yield place, inner
            else:
                yield from _find_free_settings(inner, bare_type(field.annotation), place)
    elif isinstance(value, Mapping) and _is_mapping(kind):
        for name, inner in value.items():
            yield from _find_free_settings(inner, bare_type(get_args(kind)[1]), f"{path}.{name}")


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
