"""Python functions as OpenAI schemas, and arguments as the functions want them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from telescope.environments.tools.docstrings import read_docstring
from telescope.environments.tools.schema import BadArguments, HiddenState, format_result, make_tool


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


class Node(BaseModel):
    """A node."""

    value: int
    children: list[Node] = []


class Titled(TypedDict):
    title: str


def properties(function: Any) -> dict[str, Any]:
    return dict(make_tool(function).parameters["properties"])


def test_a_function_becomes_the_schema_that_the_openai_api_takes():
    def weather(city: str, days: int = 3) -> str:
        """Look up the weather.

        Args:
            city: Where, e.g. Oslo.
            days (int, optional): How many days
                ahead.
        """
        return ""

    assert make_tool(weather).schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where, e.g. Oslo."},
                    "days": {"type": "integer", "default": 3, "description": "How many days ahead."},
                },
                "required": ["city"],
            },
        },
    }


def test_optional_union_literal_enum_and_containers():
    def f(
        a: Optional[int],  # noqa: UP045 - both spellings are to work
        b: Union[int, str],  # noqa: UP007
        c: Literal["x", "y"],
        d: Colour,
        e: list[int],
        g: dict[str, float],
        h: str | None = None,
    ) -> None: ...

    assert properties(f) == {
        "a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "b": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "c": {"enum": ["x", "y"], "type": "string"},
        "d": {"enum": ["red", "blue"], "type": "string"},
        "e": {"items": {"type": "integer"}, "type": "array"},
        "g": {"additionalProperties": {"type": "number"}, "type": "object"},
        "h": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    }
    assert make_tool(f).parameters["required"] == ["a", "b", "c", "d", "e", "g"]


def test_nested_models_dataclasses_and_typed_dicts_are_written_out_and_titles_kept_where_they_are_names():
    def f(p: Point, t: list[Titled]) -> None: ...

    assert properties(f)["p"]["properties"] == {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.5}}
    assert properties(f)["t"]["items"]["properties"] == {"title": {"type": "string"}}
    assert "$defs" not in make_tool(f).parameters


def test_a_type_that_contains_itself_keeps_a_reference():
    def f(n: Node) -> None: ...

    parameters = make_tool(f).parameters
    assert parameters["properties"]["n"]["description"] == "A node."
    assert parameters["properties"]["n"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    assert parameters["$defs"]["Node"]["properties"]["value"] == {"type": "integer"}
    made = make_tool(f).arguments({"n": {"value": 1, "children": [{"value": 2}]}})["n"]
    assert made.children[0].value == 2


def test_descriptions_come_from_annotated_texts_and_fields_before_the_docstring():
    def f(a: Annotated[int, "the first"], b: Annotated[int, Field(description="the second", ge=1)], c: int = 0) -> None:
        """:param a: not this
        :param int c: the third
        """

    assert properties(f) == {
        "a": {"type": "integer", "description": "the first"},
        "b": {"type": "integer", "description": "the second", "minimum": 1},
        "c": {"type": "integer", "description": "the third", "default": 0},
    }
    with pytest.raises(BadArguments, match="`b`=0: input should be greater than or equal to 1"):
        make_tool(f).arguments({"a": 1, "b": 0})


@pytest.mark.parametrize(
    "docstring",
    [
        "Add.\n\nBoth.\n\nArgs:\n    a: first\n    *rest (tuple[int, ...]): others,\n        many\n\nReturns:\n    a: no\n",
        "Add.\n\nBoth.\n\nParameters\n---\na : int\n    first\nrest : tuple\n    others,\n    many\n\nReturns\n---\nx\n",
        "Add.\n\nBoth.\n\n:param a: first\n:param tuple rest: others,\n    many\n:returns: a: no\n:raises KeyError: no\n",
    ],
)
def test_google_numpy_and_rest_docstrings_say_the_same(docstring: str):
    described = read_docstring(docstring)
    assert described.summary == "Add.\n\nBoth."
    assert described.parameters == {"a": "first", "rest": "others, many"}


def test_no_docstring_describes_nothing():
    assert read_docstring(None).summary == ""


def test_arguments_get_the_types_of_their_hints_and_defaults_stay_the_function_s():
    def f(n: int, c: Colour, p: Point, later: str = "x") -> None: ...

    made = make_tool(f).arguments({"n": "3", "c": "red", "p": {"x": 1}})
    assert made == {"n": 3, "c": Colour.RED, "p": Point(1, 0.5)}


def test_texts_of_a_function_call_are_read_by_the_type_of_their_parameter():
    def f(code: str, n: int, xs: list[int], o: str | None = None) -> None: ...

    given = {"code": "007", "n": "7", "xs": "[1, 2]", "o": "null"}
    assert make_tool(f).arguments(given, textual=True) == {"code": "007", "n": 7, "xs": [1, 2], "o": None}


def test_a_wrong_call_is_told_what_is_wrong_and_what_there_is():
    def f(a: int, b: int) -> None: ...

    with pytest.raises(BadArguments) as error:
        make_tool(f).arguments({"a": "z", "c": 1})
    said = str(error.value)
    assert "`a`='z': input should be a valid integer" in said
    assert "`b` is missing" in said
    assert "there is no parameter `c`" in said
    assert said.endswith("(parameters: a, b)")


class Remembered(HiddenState): ...


def test_the_hidden_state_is_no_parameter_and_names_of_pydantic_s_own_may_be_used():
    async def f(memory: Remembered, state, schema: str, copy: int = 1, model_config: int = 2) -> None: ...

    tool = make_tool(f)
    assert list(tool.parameters["properties"]) == ["schema", "copy", "model_config"]
    assert tool.injected == ("memory", "state")
    assert tool.is_async
    assert tool.arguments({"schema": "s", "copy": 3}) == {"schema": "s", "copy": 3}


def test_the_state_of_an_address_is_the_policy_s():
    def move(city: str, state: str) -> None: ...

    assert list(properties(move)) == ["city", "state"]
    assert make_tool(move).injected == ()


def test_a_signature_that_no_call_by_name_can_serve_is_refused():
    def several(*numbers: int) -> None: ...

    def by_place(a: int, /) -> None: ...

    for function in (several, by_place):
        with pytest.raises(ValueError, match="a policy gives every argument by its name"):
            make_tool(function)


def test_a_hint_without_a_schema_is_refused_with_the_tool_s_name():
    class Odd: ...

    def f(a: Any) -> None: ...

    f.__annotations__["a"] = Odd
    with pytest.raises(ValueError, match="the tool f has a type hint without a JSON schema"):
        make_tool(f)


def test_results_are_texts_or_json():
    assert [format_result(value) for value in ("a", 1, None, {"p": Point(1)}, [Node(value=1)])] == [
        "a",
        "1",
        "null",
        '{"p":{"x":1,"y":0.5}}',
        '[{"value":1,"children":[]}]',
    ]
