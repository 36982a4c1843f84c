"""vLLM's own parsers of tool calls and thoughts, for formats that call_parsers.py does not know (DeepSeek, GLM, Kimi, …).

They need vLLM importable in the worker, which takes some ten seconds once a process, and the policy's tokenizer. A text that
holds the mark with which the parser's calls begin, and of which the parser makes none, is a call gone wrong: vLLM itself would
hand it on as the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from telescope.environments.answer_parsers import strip_thought
from telescope.environments.base import ToolSchema
from telescope.environments.tools.call_parsers import MAX_SHOWN, MalformedCall, ParsedAnswer, ParsedCall


@dataclass(frozen=True)
class VllmParsers:
    """Classes of one tool parser and, if there is one, a reasoning parser. `load_vllm_parsers` finds them."""

    tool_parser: Any
    reasoning_parser: Any
    request: Any

    def parse(self, tokenizer: Any, schemas: Sequence[ToolSchema], answer: str) -> ParsedAnswer:
        """A fresh parser for each answer: they remember what they have read."""
        request = self.request(model="policy", messages=[], tools=[dict(schema) for schema in schemas])
        text = self._drop_thought(tokenizer, request, answer)
        parser = self.tool_parser(tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request)
        calls = tuple(_read_call(each.function.name, each.function.arguments) for each in found.tool_calls)
        if not calls and (mark := _find_mark(parser, text)):
            calls = (MalformedCall(text[:MAX_SHOWN], f"{mark} begins a call that can't be read"),)
        return ParsedAnswer((found.content or "").strip(), calls)

    def _drop_thought(self, tokenizer: Any, request: Any, answer: str) -> str:
        if self.reasoning_parser is None:
            return strip_thought(answer, channels=False)
        _, content = self.reasoning_parser(tokenizer).extract_reasoning(answer, request)
        return str(content or "")


def load_vllm_parsers(tool_parser: str, reasoning_parser: str = "") -> VllmParsers:
    """The parsers of these names. Imports vLLM; raises `ValueError` with the names there are, or where there is no vLLM."""
    try:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        except ImportError:  # releases before the protocols were divided
            from vllm.entrypoints.openai.protocol import ChatCompletionRequest
    except ImportError as error:
        raise ValueError(
            f"vllm_tool_parser={tool_parser} needs vLLM in the worker, and it can't be imported ({error}): install it, or "
            "choose a call_format"
        ) from error
    tool = _check_name(ToolParserManager, "vllm_tool_parser", tool_parser).get_tool_parser(tool_parser)
    reasoning = None
    if reasoning_parser:
        manager = _check_name(ReasoningParserManager, "vllm_reasoning_parser", reasoning_parser)
        reasoning = manager.get_reasoning_parser(reasoning_parser)
    return VllmParsers(tool, reasoning, ChatCompletionRequest)


def _check_name(manager: Any, setting: str, name: str) -> Any:
    names = sorted(manager.list_registered())
    if name not in names:
        raise ValueError(f"{setting}={name} is not a parser of this vLLM, which has {', '.join(names)}")
    return manager


def _read_call(name: str, arguments: str) -> ParsedCall | MalformedCall:
    try:
        read = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError as error:
        return MalformedCall(arguments[:MAX_SHOWN], f"the arguments of {name} are not JSON: {error}")
    return (
        ParsedCall(name, read)
        if isinstance(read, dict)
        else MalformedCall(arguments[:MAX_SHOWN], f"the arguments of {name} are not an object")
    )


def _find_mark(parser: Any, text: str) -> str:
    """The first mark of the parser's own that the text holds, e.g. `<tool_call>` or `[TOOL_CALLS]`; "" if none."""
    names = [name for name in dir(type(parser)) + list(vars(parser)) if "tool" in name or "bot" in name]
    marks = {name: getattr(parser, name, None) for name in names if name.endswith(("start_token", "bot_token", "begin_token"))}
    return next((mark for mark in marks.values() if isinstance(mark, str) and mark and mark in text), "")
