"""DictConfig → plain values: every interpolation followed, secrets left as references, and what failed in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from telescope.config.secrets import is_secret_name, parse_reference
from telescope.config.validate import must_be_given
from telescope.config.words import ConfigProblem

MISSING = "???"
_LEFT_OUT = object()
_ENV = re.compile(r"\$\{oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)")


def resolve(config: DictConfig, environ: Mapping[str, str]) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The values of a composed configuration and what is wrong with them; wrong ones are left out of the values."""
    raw = OmegaConf.to_container(config, resolve=False)
    walk = _Walk(environ)
    container = walk.mapping(config, raw, "")
    return container, [*walk.problems, *_leaks(container, environ)]


class _Walk:
    """One pass over the tree, the composed node and its unresolved text side by side."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[ConfigProblem] = []

    def mapping(self, node: Any, raw: Any, path: str) -> dict[str, Any]:
        values = {str(key): self.value(node, key, raw[key], f"{path}.{key}" if path else str(key)) for key in raw}
        return {key: value for key, value in values.items() if value is not _LEFT_OUT}

    def value(self, node: Any, key: Any, raw: Any, path: str) -> Any:
        if raw == MISSING:
            return self.refuse(path, must_be_given(path))
        name = path.rpartition(".")[2]
        if isinstance(raw, str) and self.is_secret(name, raw):
            return self.secret(raw, path)
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            return self.refuse(path, self.unresolved(path, raw, error))
        return self.deeper(value, raw, path)

    def deeper(self, value: Any, raw: Any, path: str) -> Any:
        if isinstance(value, DictConfig):
            inner = raw if isinstance(raw, dict) else OmegaConf.to_container(value, resolve=False)
            return self.mapping(value, inner, path)
        if isinstance(value, ListConfig):
            inner = raw if isinstance(raw, list) else list(OmegaConf.to_container(value, resolve=False) or ())
            items = [self.value(value, index, item, f"{path}.{index}") for index, item in enumerate(inner)]
            return [item for item in items if item is not _LEFT_OUT]
        return value

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
