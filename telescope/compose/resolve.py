"""DictConfig → plain values: every interpolation followed, references in free text left as they are, and what failed in
sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from telescope.config.free_text import is_free_text
from telescope.config.redaction import is_public_path
from telescope.config.secrets import find_missing, find_references, is_secret_name, make_reference, parse_reference
from telescope.config.validate import must_be_given
from telescope.config.words import ConfigProblem

MISSING = "???"
_LEFT_OUT = object()
_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)")


_BEGIN, _END = "\ue000", "\ue001"
"""Around a reference while its text is put together: between them nothing is an interpolation."""


def resolve(
    config: DictConfig, environ: Mapping[str, str], plugin_path: Sequence[str] = ()
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The values of a composed configuration and what is wrong with them; wrong ones are left out of the values."""
    raw: Any = OmegaConf.to_container(config, resolve=False)
    walk = _Walk(environ, raw, plugin_path)
    container = walk.mapping(config, raw, ())
    return container, [*walk.problems, *_leaks(container, environ)]


def _made_of_a_variable(path: str) -> str:
    return (
        f"{path} is made by a resolver of what an environment variable holds, which would stand in the run's files: write the "
        f"structure itself and refer to variables in its texts, e.g. {path}={{password: '${{oc.env:PASSWORD}}'}}"
    )


@contextmanager
def _keeping_references() -> Iterator[None]:
    """Within it an interpolation gives the variable's name, wherever in a chain of interpolations it stands."""
    OmegaConf.register_new_resolver("oc.env", _mark, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _mark(name: str, *default: Any) -> str:
    given = None if not default else "" if default[0] is None else str(default[0])
    return f"{_BEGIN}{make_reference(name, given)[2:-1]}{_END}"


class _Walk:
    """One pass over the tree, the composed node and its unresolved text side by side."""

    def __init__(self, environ: Mapping[str, str], root: Mapping[str, Any], plugin_path: Sequence[str]) -> None:
        self.environ = environ
        self.root = root
        self.plugin_path = plugin_path
        self.problems: list[ConfigProblem] = []

    def mapping(self, node: Any, raw: Any, place: tuple[str | int, ...]) -> dict[str, Any]:
        values = {str(key): self.value(node, key, raw[key], (*place, str(key))) for key in raw}
        return {key: value for key, value in values.items() if value is not _LEFT_OUT}

    def value(self, node: Any, key: Any, raw: Any, place: tuple[str | int, ...]) -> Any:
        path = ".".join(map(str, place))
        if raw == MISSING:
            return self.refuse(path, must_be_given(path))
        if isinstance(raw, str) and "${" in raw and is_free_text(place, self.root, self.plugin_path):
            kept = self.keeping_references(node, key)
            if not isinstance(kept, str) and _BEGIN in str(kept):
                return self.refuse(path, _made_of_a_variable(path))
            reference = kept.replace(_BEGIN, "${").replace(_END, "}") if isinstance(kept, str) and _BEGIN in kept else None
            if reference is not None and (is_secret_name(str(place[-1])) or not self.is_public(reference)):
                return self.keep(reference, path)
        if isinstance(raw, str) and self.is_secret(str(place[-1]), raw):
            return self.secret(raw, path)
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            return self.refuse(path, self.unresolved(path, raw, error))
        return self.deeper(value, raw, place)

    def deeper(self, value: Any, raw: Any, place: tuple[str | int, ...]) -> Any:
        if isinstance(value, DictConfig):
            inner = raw if isinstance(raw, dict) else OmegaConf.to_container(value, resolve=False)
            return self.mapping(value, inner, place)
        if isinstance(value, ListConfig):
            inner = raw if isinstance(raw, list) else list(OmegaConf.to_container(value, resolve=False) or ())
            items = [self.value(value, index, item, (*place, index)) for index, item in enumerate(inner)]
            return [item for item in items if item is not _LEFT_OUT]
        return value

    def keeping_references(self, node: Any, key: Any) -> Any:
        """What a setting is with its references to variables, marked. What can't be made of their names is made of their
        values: it is given as marked, too; None where it can't be made at all."""
        try:
            with _keeping_references():
                return node[key]
        except (OmegaConfBaseException, ValueError):
            pass
        try:
            node[key]
        except (OmegaConfBaseException, ValueError):
            return None
        return (_BEGIN,)

    def is_public(self, reference: str) -> bool:
        """Whether all that it names is a path of this host, which is written down as any path is."""
        names = find_references(reference)
        return all(not is_secret_name(name) and is_public_path(self.environ.get(name, "")) for name in names)

    def keep(self, reference: str, path: str) -> Any:
        """A reference stays one: its value is read by the process that needs it and written nowhere."""
        if is_secret_name(path.rpartition(".")[2]) and parse_reference(reference) is None:
            return self.secret(reference, path)
        if missing := find_missing(reference, self.environ):
            return self.refuse(path, f"{path} refers to the environment variable {missing[0]}, which is not set")
        return reference

    def is_secret(self, name: str, raw: str) -> bool:
        return is_secret_name(name) or any(is_secret_name(variable) for variable in _ENV.findall(raw))

    def secret(self, raw: str, path: str) -> Any:
        """A secret stays a reference: its value is read by the process that needs it and written nowhere."""
        variable = parse_reference(raw)
        if variable is None:
            wanted = path.rpartition(".")[2].upper()
            return self.refuse(
                path, f"{path} is a secret: give a reference and nothing else, e.g. {path}='${{oc.env:{wanted}}}'"
            )
        if variable not in self.environ:
            return self.refuse(path, f"{path} refers to the environment variable {variable}, which is not set")
        return raw

    def unresolved(self, path: str, raw: Any, error: Exception) -> str:
        for variable in _ENV.findall(raw) if isinstance(raw, str) else ():
            if variable not in self.environ:
                return f"{path}='{raw}' refers to the environment variable {variable}, which is not set"
        return f"{path}='{raw}' can't be resolved: {_first_line(error)}"

    def refuse(self, path: str, sentence: str) -> Any:
        self.problems.append(ConfigProblem(path, sentence))
        return _LEFT_OUT


def _leaks(container: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[ConfigProblem]:
    """Settings that hold the value of a secret environment variable, however it got there."""
    secrets = {value: name for name, value in environ.items() if is_secret_name(name) and len(value) >= 8}
    for path, text in _texts(container, ""):
        for value, name in secrets.items():
            if value in text:
                yield ConfigProblem(
                    path, f"{path} holds the value of the environment variable {name}: refer to it, ${{oc.env:{name}}}"
                )


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _texts(item, f"{path}.{key}" if path else str(key))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
