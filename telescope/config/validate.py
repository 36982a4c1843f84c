"""Resolved values → a RunConfig, or every mistake in them at once: a sentence with the setting's full path, its value, what it
must be, and the nearest name for a typo.

Wrong settings are set aside one round after another, so that a typo does not hide an impossible combination elsewhere.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from telescope.config import plugins
from telescope.config.conflicts import conflicts
from telescope.config.evals import EvalEntry
from telescope.config.foreign_names import find_hint
from telescope.config.redaction import Redactor
from telescope.config.run import RunConfig
from telescope.config.secrets import find_references
from telescope.config.words import ConfigProblem, allowed_values, bare_type, did_you_mean, in_words, nearest, typed
from telescope.settings import Settings

Place = tuple[str | int, ...]
_ROUNDS = 8
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_CHOSEN_BY_ENV = ": env=[countdown] chooses environments, and environments.countdown holds the settings of one"
ELSEWHERE = 0.75
"""How much alike names must be where one stands in another section: `nope` is not meant to be cluster.nodes."""
_LENGTHS = {
    "string_too_short": ("min_length", "at least"),
    "string_too_long": ("max_length", "at most"),
    "too_short": ("min_length", "at least"),
    "too_long": ("max_length", "at most"),
}


@dataclass(frozen=True)
class Mistake:
    """A problem and its place in the container, e.g. `("trainer", "betas")`."""

    place: Place
    kind: str
    sentence: str

    @property
    def path(self) -> str:
        return ".".join(map(str, self.place))


def validate(
    container: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> tuple[RunConfig | None, list[ConfigProblem]]:
    """The configuration, or None and all its problems. `container` holds plain JSON values, which may refer to variables of
    `environ`: what a class of the user's says of their values is shown without them."""
    config, problems = _judge(container, environ)
    hide = Redactor.of(environ, find_references(container))
    return config, [ConfigProblem(problem.path, hide.text(problem.sentence)) for problem in problems]


def _judge(container: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[RunConfig | None, list[ConfigProblem]]:
    rest = copy.deepcopy(dict(container))
    mistakes: list[Mistake] = []
    for _ in range(_ROUNDS):
        try:
            config = RunConfig.model_validate_json(json.dumps(rest), strict=True, context={"environ": environ})
        except ValidationError as error:
            found = explain(error, rest)
            said = {mistake.path for mistake in mistakes}  # what was set aside is missing now, which is not a second mistake
            mistakes += [mistake for mistake in found if not (mistake.kind == "missing" and mistake.path in said)]
            if not _set_aside(rest, found):
                return None, _problems(mistakes)
        else:
            wrong = {mistake.path for mistake in mistakes}
            impossible = [ConfigProblem(c.paths[0], c.sentence) for c in conflicts(config) if not wrong.intersection(c.paths)]
            problems = [*_problems(mistakes), *impossible]
            return (None if problems else config), problems
    return None, _problems(mistakes)


def _problems(mistakes: Sequence[Mistake]) -> list[ConfigProblem]:
    return list(dict.fromkeys(ConfigProblem(mistake.path, mistake.sentence) for mistake in mistakes))


def _set_aside(rest: dict[str, Any], mistakes: Sequence[Mistake]) -> bool:
    """Remove what is wrong, so that the class default stands there; False where that is not possible."""
    progress = False
    for mistake in mistakes:
        if mistake.kind in ("missing", "plugin"):
            return False
        parent = value_at(rest, mistake.place[:-1])
        if not isinstance(parent, dict) or mistake.place[-1] not in parent:
            continue
        wrong = parent.pop(str(mistake.place[-1]))
        if isinstance(wrong, dict) and "name" in wrong:
            parent[str(mistake.place[-1])] = {"name": wrong["name"]}
        progress = True
    return progress


def explain(error: ValidationError, root: Mapping[str, Any]) -> list[Mistake]:
    """All mistakes that made `RunConfig` refuse the container `root`. Where a word or a number may stand, one out of bounds is
    one mistake."""
    found = list(_mistakes(error, RunConfig, (), root))
    otherwise_wrong = {mistake.place for mistake in found if mistake.kind != "literal_error"}
    return [mistake for mistake in found if mistake.kind != "literal_error" or mistake.place not in otherwise_wrong]


def misplaced_containers(values: Any, annotation: Any = RunConfig, place: Place = ()) -> Iterator[ConfigProblem]:
    """Lists where settings have names, and the other way round, in a part of a container: what can't be merged."""
    inner, path = bare_type(annotation), ".".join(map(str, place))
    is_section, is_list = isinstance(inner, type) and issubclass(inner, Settings), get_origin(inner) in (tuple, list)
    named = is_section or get_origin(inner) is dict
    if (named and isinstance(values, list)) or (is_list and isinstance(values, Mapping)):
        more = _CHOSEN_BY_ENV if path == "environments" else ""
        yield ConfigProblem(path, f"{path}={typed(values)} must be {in_words(annotation)}{more}")
    elif is_section and isinstance(values, Mapping):
        for name, field in inner.model_fields.items():
            yield from misplaced_containers(values.get(name), field.annotation, (*place, name))
    elif named and isinstance(values, Mapping):
        for name, value in values.items():
            yield from misplaced_containers(value, get_args(inner)[1], (*place, name))


def must_be_given(path: str) -> str:
    return f"{path} must be given"


def value_at(container: Any, place: Place) -> Any:
    """What lies at a place of a tree of mappings and lists; None where there is none."""
    for key in place:
        inside = isinstance(container, Mapping) and key in container
        if not inside and not (isinstance(container, list) and isinstance(key, int) and key < len(container)):
            return None
        container = container[key]
    return container


def _mistakes(error: ValidationError, model: type[Settings], above: Place, root: Mapping[str, Any]) -> Iterator[Mistake]:
    for detail in error.errors(include_url=False):
        place, context = detail["loc"], detail.get("ctx", {})
        if detail["type"] == "nested":
            for below, inner in context["errors"]:
                yield from _inner(inner, (*above, *place, *below), root, context.get("model"))
        else:
            yield _mistake(str(detail["type"]), detail["msg"], context, model, above, place, root)


def _inner(
    error: ValidationError | str, place: Place, root: Mapping[str, Any], model: type[Settings] | None
) -> Iterator[Mistake]:
    """`model`: the class that refused what stands at `place`; None: the plug-in that is named there."""
    if isinstance(error, str):
        yield Mistake(place, "plugin", f"{'.'.join(map(str, place))}: {error}")
        return
    yield from _mistakes(error, model or _plugin_class(place, root), place, root)


def _plugin_class(place: Place, root: Mapping[str, Any]) -> type[Settings]:
    """The settings class that stands at a place of the container: `("algorithm",)` or `("environments", "x", "kwargs")`."""
    kinds: dict[str | int, plugins.Kind[Any]] = {"algorithm": plugins.ALGORITHMS, "backend": plugins.BACKENDS}
    holder = value_at(root, place[:-1] if place[0] in ("environments", "evals") else place)
    if place[0] == "evals":
        name = str(holder.get("environment") or place[1])
        return plugins.load(plugins.ENVIRONMENTS, name, root.get("plugin_path", ()))
    return plugins.load(kinds.get(place[0], plugins.ENVIRONMENTS), holder["name"], root.get("plugin_path", ()))


def _mistake(
    kind: str,
    message: str,
    context: Mapping[str, Any],
    model: type[Settings],
    above: Place,
    below: Place,
    root: Mapping[str, Any],
) -> Mistake:
    field, annotation = _field(model, below)
    place = (*above, *field)
    path = ".".join(map(str, place))
    value = value_at(root, place)
    given = f"{path}={typed(value)}"
    if kind == "extra_forbidden":
        return Mistake(place, kind, f"{given}: there is no such setting.{_suggestion(place, model, below, root)}")
    if kind == "missing" and len(field) == len(below):
        return Mistake(place, kind, must_be_given(path))
    if kind == "frozen_instance":
        said = f"{model.__name__} sets {'.'.join(map(str, field))}: settings are fields of the class, with a type"
        return Mistake(
            place, kind, f"{'.'.join(map(str, above))}: {said}, and what set_up makes is a private field (docs/environments.md)"
        )
    if kind == "plugin":
        return Mistake(place, kind, f"{path}: {message}")
    if kind == "value_error":
        sentence = str(context["error"])
        return Mistake(place, kind, sentence if sentence.startswith(path) else f"{path}: {sentence}" if path else sentence)
    if kind == "literal_error":
        choices = allowed_values(annotation)
        guess = nearest(str(value), choices)
        return Mistake(place, kind, f"{given} must be {' | '.join(choices)}.{f' Did you mean {guess}?' if guess else ''}")
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        instead = ", or null" if type(None) in get_args(annotation) else ""
        return Mistake(place, kind, f"{given} must be {words} {context[key]}{instead}")
    if kind in _LENGTHS:
        key, words = _LENGTHS[kind]
        return Mistake(place, kind, f"{given} must have {words} {context[key]} {'characters' if 'string' in kind else 'items'}")
    if kind == "string_pattern_mismatch":
        return Mistake(place, kind, f"{given} must match {context['pattern']}")
    return Mistake(
        place, "type", f"{given} must be {in_words(annotation)}" if annotation is not None else f"{given}: {message}"
    )


def _field(model: type[Settings], below: Place) -> tuple[Place, Any]:
    """The setting that an error's location belongs to, and its annotation: an item of a list belongs to the list."""
    annotation: Any = model
    for depth, key in enumerate(below):
        inner = bare_type(annotation)
        if isinstance(inner, type) and issubclass(inner, Settings):
            if key not in inner.model_fields:
                return below[: depth + 1], None
            annotation = inner.model_fields[str(key)].annotation
        elif get_origin(inner) is dict:
            annotation = get_args(inner)[1]
        else:
            return below[:depth], annotation
    return below, annotation


def _suggestion(place: Place, model: type[Settings], below: Place, root: Mapping[str, Any]) -> str:
    """What another trainer's name is called here, a setting of the same name elsewhere, the nearest beside the unknown one, or
    what stands beside it."""
    wrong, holder = str(place[-1]), _holder(model, below)
    if place[0] == "env":
        return " Settings of an environment stand at environments.<name>: environments.countdown.kwargs.…, for example."
    if (told := find_hint(wrong)) is not None:
        return told
    elsewhere = [path for path in setting_paths(root) if path.rpartition(".")[2] == wrong]
    if elsewhere:
        return f" Did you mean {' or '.join(elsewhere)}?"
    beside = list(holder.model_fields)
    guess = nearest(wrong, beside)
    if guess is not None:
        return f" Did you mean {'.'.join([*map(str, place[:-1]), guess])}?"
    near = nearest(wrong, [path.rpartition(".")[2] for path in setting_paths(root)], alike=ELSEWHERE)
    if near is not None:
        return f" Did you mean {' or '.join(path for path in setting_paths(root) if path.rpartition('.')[2] == near)}?"
    return did_you_mean(wrong, beside)


def _holder(model: type[Settings], below: Place) -> type[Settings]:
    _, annotation = _field(model, below[:-1]) if len(below) > 1 else ((), model)
    inner = bare_type(annotation)
    return inner if isinstance(inner, type) and issubclass(inner, Settings) else model


def setting_paths(root: Mapping[str, Any]) -> list[str]:
    """Every setting that this container can hold, with the chosen plug-ins' own, e.g. `trainer.learning_rate`."""
    paths: list[str] = []
    for name, field in RunConfig.model_fields.items():
        inner = bare_type(field.annotation)
        if name in ("algorithm", "backend"):
            paths += _plugin_paths((name,), root)
        elif name == "environments":
            entries = root.get(name)
            for entry in entries if isinstance(entries, Mapping) else ():
                paths += [f"environments.{entry}.weight", *_plugin_paths((name, entry, "kwargs"), root)]
        elif name == "evals":
            entries = root.get(name)
            for entry in entries if isinstance(entries, Mapping) else ():
                paths += [f"evals.{entry}.{setting}" for setting in EvalEntry.model_fields]
        elif isinstance(inner, type) and issubclass(inner, Settings):
            paths += [f"{name}.{setting}" for setting in inner.model_fields]
        else:
            paths.append(name)
    return paths


def _plugin_paths(place: Place, root: Mapping[str, Any]) -> list[str]:
    try:
        settings = _plugin_class(place, root)
    except (plugins.PluginError, KeyError, TypeError):
        return []  # no such plug-in: reported where it is chosen
    return [".".join([*map(str, place), name]) for name in settings.model_fields]
