"""A Python function as a tool: its OpenAI schema, and arguments made of what a policy wrote.

The signature is the truth: pydantic makes the JSON schema from the type hints and judges the arguments by the same hints;
docstrings.py adds the words. Refuses to run a tool (tool_environment.py does) and to read calls out of a text (call_parsers.py
does).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import to_json

from telescope.environments.tools.docstrings import read_docstring

ToolFunction = Callable[..., Any]
ToolSchema = Mapping[str, Any]
"""What the OpenAI API calls a tool: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

HIDDEN = "state"
"""Name of a parameter that the environment fills in and the policy never hears of; see `_is_hidden`."""
MAX_SHOWN = 80
MAX_ERRORS = 8


class HiddenState:
    """Base of states that tools are given: a parameter with such a hint is hidden from the policy."""


class BadArguments(ValueError):
    """The arguments don't fit the tool's parameters; the text is written for the policy."""


@dataclass(frozen=True)
class Tool:
    """One function a policy may call. `make_tool` makes it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, without titles and with its references written out."""
    function: ToolFunction
    injected: tuple[str, ...]
    """Parameters that the environment fills in."""
    _model: type[BaseModel]

    @property
    def schema(self) -> ToolSchema:
        inner = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": inner}

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def arguments(self, given: Mapping[str, Any], *, textual: bool = False) -> dict[str, Any]:
        """Keyword arguments of the function, with the types of its hints; what was not given is left to its defaults.

        `textual` values were written as plain text (`<parameter=x>3</parameter>`): each is read as JSON where its parameter
        is not a text. Raises `BadArguments`.
        """
        values = {name: self._read_text(name, value) for name, value in given.items()} if textual else dict(given)
        try:
            made = self._model.model_validate(values)
        except ValidationError as error:
            raise BadArguments(self._explain(error)) from error
        except RecursionError as error:
            raise BadArguments(f"the arguments of {self.name} are nested too deeply") from error
        fields = type(made).model_fields
        return {str(fields[name].alias): getattr(made, name) for name in fields if name in made.model_fields_set}

    def _read_text(self, name: str, value: Any) -> Any:
        wanted = self.parameters.get("properties", {}).get(name, {})
        if not isinstance(value, str) or wanted.get("type") == "string":
            return value
        try:
            read = orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
        kinds = {each.get("type") for each in wanted.get("anyOf", ())}
        return value if "string" in kinds and not (read is None and "null" in kinds) else read

    def _explain(self, error: ValidationError) -> str:
        problems = []
        for each in error.errors(include_url=False, include_context=False)[:MAX_ERRORS]:
            where = ".".join(str(part) for part in each["loc"]) or "the arguments"
            if each["type"] == "missing":
                problems.append(f"`{where}` is missing")
            elif each["type"] == "extra_forbidden":
                problems.append(f"there is no parameter `{where}`")
            else:
                problems.append(f"`{where}`={_shorten(each['input'])}: {each['msg'].lower()}")
        known = ", ".join(self.parameters.get("properties", {})) or "none"
        return f"{self.name}: {'; '.join(problems)} (parameters: {known})"


def make_tool(function: ToolFunction, *, name: str = "") -> Tool:
    """The tool of a function or bound method, `def` or `async def`.

    Descriptions come from the docstring, from `Annotated[int, "..."]` or from `Annotated[int, Field(description="...")]`.
    Raises `ValueError` for a signature that no call by name can serve, and for a hint that is not a type.
    """
    called = name or getattr(function, "__name__", type(function).__name__)
    described = read_docstring(inspect.getdoc(function))
    hints = _read_hints(function, called)
    fields: dict[str, Any] = {}
    unseen = []
    for parameter in inspect.signature(function).parameters.values():
        if _is_hidden(parameter, hints):
            unseen.append(parameter.name)
            continue
        # Fields are numbered and go by alias: a parameter may be called `schema`, `copy` or `_x`, a field may not.
        fields[f"p{len(fields)}"] = _make_field(parameter, hints.get(parameter.name, Any), described.parameters, called)
    try:
        model = create_model(called, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = _inline_refs(model.model_json_schema(by_alias=True, schema_generator=_QuietJsonSchema))
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise ValueError(f"the tool {called} has a type hint without a JSON schema: {str(error).splitlines()[0]}") from error
    parameters.pop("description", None)
    parameters.pop("additionalProperties", None)
    parameters.setdefault("properties", {})
    return Tool(called, described.summary, parameters, function, tuple(unseen), model)


def format_result(result: object) -> str:
    """What a tool returned, as the policy reads it: a text as it is, all else as JSON."""
    return result if isinstance(result, str) else to_json(result, fallback=str).decode()


def _read_hints(function: ToolFunction, called: str) -> dict[str, Any]:
    plain = function if inspect.isroutine(function) else type(function).__call__
    try:
        return typing.get_type_hints(plain, include_extras=True)
    except NameError as error:
        raise ValueError(f"the tool {called} has a type hint that can't be looked up: {error}") from error


def _is_hidden(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    """A `state` without a type, or any parameter typed as a `HiddenState`. A `state: str` (of an address) is the policy's."""
    hint = hints.get(parameter.name)
    if hint is None:
        return parameter.name == HIDDEN
    return (isinstance(hint, type) and issubclass(hint, HiddenState)) or (parameter.name == HIDDEN and hint is Any)


def _make_field(parameter: inspect.Parameter, hint: Any, described: Mapping[str, str], called: str) -> Any:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if parameter.kind not in by_name:
        raise ValueError(f"the tool {called} has the parameter {parameter}: a policy gives every argument by its name")
    default = ... if parameter.default is inspect.Parameter.empty else parameter.default
    if isinstance(default, FieldInfo):
        raise ValueError(f"the tool {called} has a Field as the default of {parameter.name}: put it into Annotated[...]")
    text = _find_description(hint) or described.get(parameter.name)
    return Annotated[hint, Field(alias=parameter.name, description=text)], default


def _find_description(hint: Any) -> str | None:
    """A bare text in `Annotated[...]`, or the description of a Field there."""
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, str):
            return extra
        if isinstance(extra, FieldInfo) and extra.description:
            return extra.description
    return None


class _QuietJsonSchema(GenerateJsonSchema):
    """Leaves out a default that is not JSON without a warning: the function still has it."""

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        return None


def _inline_refs(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without titles and with `$ref` replaced by what it names; a type that contains itself keeps its `$ref`."""
    definitions = schema.pop("$defs", {})
    writer = _RefInliner(definitions)
    made: dict[str, Any] = writer.write(schema, ())
    written: dict[str, Any] = {}
    while left := writer.recursive - set(written):  # writing one out may meet another
        written |= {name: writer.write(definitions[name], (name,)) for name in sorted(left)}
    return made | {"$defs": written} if written else made


class _RefInliner:
    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self.recursive: set[str] = set()

    def write(self, part: Any, inside: tuple[str, ...]) -> Any:
        """`inside`: the definitions that this part stands in."""
        if isinstance(part, list):
            return [self.write(each, inside) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return self._resolve(part, inside)
        made = {}
        for key, value in part.items():
            if key == "properties":  # below it, keys are names given by people: one may well be `title`
                made[key] = {name: self.write(each, inside) for name, each in value.items()}
            elif key in _AS_THEY_ARE:
                made[key] = value
            elif key != "title":
                made[key] = self.write(value, inside)
        return made

    def _resolve(self, part: dict[str, Any], inside: tuple[str, ...]) -> Any:
        name = part["$ref"].rpartition("/")[2]
        if name in inside:
            self.recursive.add(name)
            return part
        beside = {key: value for key, value in part.items() if key != "$ref"}
        return self.write(self._definitions[name], (*inside, name)) | self.write(beside, inside)


_AS_THEY_ARE = frozenset({"default", "enum", "const", "examples", "required"})


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"
