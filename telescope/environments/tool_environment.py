"""A dialogue in which the policy calls tools: read the calls, run them, give the results back, count all of it.

    answer ─parse_calls─▶ calls ─run, each within its time─▶ results as `tool` turns ─▶ next answer
                        └ none ─▶ `reply_to_text(state, text)`: by default the final answer

Owns whose fault a call gone wrong is. A call that cannot be read, a tool that is not there, arguments that don't fit, a tool
that raises or takes too long: the policy is told and it is counted. An `InfrastructureError` out of a tool fails the rollout, a
`PolicyError` ends it with its score. Refuses to know a task: subclasses give tools, `initial_state` and `reward`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field, PrivateAttr, model_validator

from telescope.environments.base import Chat, KnowsTemplate, Prompt, Reward, ToolSchema, Turn
from telescope.environments.failures import GraderError, InfrastructureError, PolicyError
from telescope.environments.lru import LruCache
from telescope.environments.multi_turn import MultiTurn
from telescope.environments.threads import TimeLimit, run_function
from telescope.environments.tools.call_parsers import (
    CallFormat,
    MalformedCall,
    ParsedAnswer,
    ParsedCall,
    explain_format,
    parse_calls,
)
from telescope.environments.tools.redact import redact
from telescope.environments.tools.schema import BadArguments, HiddenState, Tool, ToolFunction, format_result, make_tool
from telescope.environments.tools.vllm_parsers import VllmParsers, load_vllm_parsers
from telescope.environments.validate import formerly

REMEMBERED_TOOLS = 1024
MAX_NAME = 64

_PER_TOOL = "{}_calls"


@dataclass
class ToolState(HiddenState):
    """What one rollout remembers; derive from it (as a dataclass) for the task's own things. Tools get it as `state`."""

    final_answer: str = field(default="", kw_only=True)
    """The first answer without a call."""
    done: bool = field(default=False, kw_only=True)
    """Set it to end the dialogue; a tool may do so too."""
    calls: Counter[str] = field(default_factory=Counter, kw_only=True)
    """Well-formed calls by the name the policy gave, right or wrong."""
    successes: int = field(default=0, kw_only=True)
    errors: int = field(default=0, kw_only=True)
    malformed: int = field(default=0, kw_only=True)
    """Texts that were meant as calls and could not be read."""
    opened: bool = field(default=False, kw_only=True)
    tokenizer: Any = field(default=None, kw_only=True, repr=False, compare=False)
    """The policy's, where the chat has one; for vLLM's parsers."""

    def metrics(self, tools: Sequence[str]) -> dict[str, float]:
        """Counts of calls; `tool_success_rate` is 0 where there was none. Names the policy made up count in the total alone."""
        total = self.calls.total()
        return {
            "total_tool_calls": float(total),
            "tool_success_count": float(self.successes),
            "tool_error_count": float(self.errors),
            "tool_success_rate": self.successes / total if total else 0.0,
            "unique_tools_used": float(sum(self.calls[name] > 0 for name in tools)),
            "malformed_tool_calls": float(self.malformed),
            **{_PER_TOOL.format(name): float(self.calls[name]) for name in tools},
        }


@dataclass(frozen=True)
class CallResult:
    """What becomes of one call. `text` is what the policy reads."""

    name: str
    text: str

    def turn(self, call_id: str) -> Turn:
        return {"role": "tool", "tool_call_id": call_id, "name": self.name, "content": self.text}


@runtime_checkable
class TriesTurns(Protocol):
    """A chat that can say whether its template takes turns here. Of one that can't, it is expected to take them all."""

    def takes(self, *turns: Turn) -> bool: ...


class ToolEnvironment(MultiTurn):
    """Subclasses give `tools` (or `tools_for`), `prompts` and `reward`; `initial_state` where a rollout remembers something.

    A tool is a function or a method, `def` or `async def`. A parameter typed as the state (or a bare `state`) is filled in and
    hidden from the policy.
    """

    tools: ClassVar[tuple[ToolFunction, ...]] = ()
    """Functions, or methods written in the class body before this line."""
    concurrent_calls: ClassVar[bool] = False
    """True where tools share nothing: the calls of one answer then run side by side, and not in their order."""

    call_format: CallFormat = "json"
    """How a call is written: `json`, `function`, `python`, `bare` or `harmony` (docs/tools.md)."""
    call_tag: str = Field(default="tool_call", pattern=r"^\w+$")
    """The tag that calls stand in: `<tool_call>…</tool_call>`."""
    tool_prompt: Literal["auto", "template", "listing", "none"] = "auto"
    """How the policy hears of its tools: from the chat template (`template`), a text in the system turn (`listing`), or the
    prompts alone (`none`); `auto` takes the template where it writes tools and `call_format` is json or harmony, else the
    listing."""
    result_role: Literal["auto", "tool", "user"] = "auto"
    """Role of the turns that hold results; `auto` is `tool` where the chat template writes such turns, else `user`. What the
    template refuses as `tool` is said as `user` all the same."""
    vllm_tool_parser: str = ""
    """A parser of vLLM's to read calls with instead of `call_format`, e.g. `deepseek_v3`; the worker needs vLLM then."""
    vllm_reasoning_parser: str = ""
    """vLLM's parser that takes thoughts off first, beside `vllm_tool_parser`; empty: all up to `</think>` is."""
    tool_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one call may take; afterwards the policy is told that it took too long."""
    max_calls_per_answer: int = Field(default=16, ge=1)
    """Calls of one answer that are looked at; the rest is told so in one sentence and counted as errors."""
    max_tool_calls: int = Field(default=256, ge=1)
    """Calls of one rollout that are run; any more are refused and counted as errors."""
    max_result_characters: int = Field(default=8000, ge=100)
    """Longer results are cut, and say so."""

    @model_validator(mode="after")
    def _a_reasoning_parser_goes_with_a_tool_parser(self) -> ToolEnvironment:
        if self.vllm_reasoning_parser and not self.vllm_tool_parser:
            raise ValueError(
                f"vllm_reasoning_parser={self.vllm_reasoning_parser} is used beside a vllm_tool_parser only: name one, or "
                "leave both away (thoughts up to </think> are taken off anyway)"
            )
        return self

    @functools.cached_property
    def _vllm_parsers(self) -> VllmParsers:
        return load_vllm_parsers(self.vllm_tool_parser, self.vllm_reasoning_parser)

    async def set_up(self) -> None:
        """Imports vLLM before the first rollout, where its parsers are wanted."""
        if self.vllm_tool_parser:
            await run_function(getattr, self, "_vllm_parsers")

    _made: LruCache[Any, Tool] = PrivateAttr(default_factory=lambda: LruCache(REMEMBERED_TOOLS))

    def initial_state(self, prompt: Prompt) -> Any:
        return ToolState()

    def tools_for(self, state: Any) -> Sequence[ToolFunction]:
        """The tools of this rollout: those of the class, unless the state has its own (methods of an object in it, say)."""
        return [self._bind(function) for function in self.tools]

    @formerly("answered")
    def reply_to_text(self, state: Any, text: str) -> Sequence[Turn] | Awaitable[Sequence[Turn]]:
        """An answer without any call. Here it is the final one; override it where someone answers back."""
        state.final_answer, state.done = text, True
        return ()

    def format_error(self, name: str, error: str) -> str:
        """What the policy reads where a call failed."""
        return f"Error: {error}"

    def time_limit_of(self, tool: str) -> float | None:
        """Seconds that a call of this tool may take; None for one that holds a limit of its own."""
        return self.tool_timeout_s

    def parse(self, state: Any, answer: str) -> ParsedAnswer:
        """What the answer calls; override it for a format of your own."""
        if not self.vllm_tool_parser:
            return parse_calls(answer, self.call_format, self.call_tag)
        schemas = [tool.schema for tool in self.toolset(state).values()]
        return self._vllm_parsers.parse(state.tokenizer, schemas, answer)

    async def is_done(self, state: Any) -> bool:
        return bool(state.done)

    async def reply(self, state: Any, answer: str) -> Sequence[Turn]:
        parsed = self.parse(state, answer)
        if not parsed.calls:
            turns: Sequence[Turn] = await run_function(self.reply_to_text, state, parsed.text, in_thread=self.in_threads)
            return turns
        taken, surplus = parsed.calls[: self.max_calls_per_answer], parsed.calls[self.max_calls_per_answer :]
        tools = self.toolset(state)
        if self.concurrent_calls:
            results = list(await _gather(self._answer_call(tools, state, each) for each in taken))
        else:
            results = [await self._answer_call(tools, state, each) for each in taken]
        if surplus:
            results.append(self._refuse_surplus(state, surplus))
        ids = [make_call_id(sum(state.calls.values()) + state.malformed, at) for at in range(len(results))]
        called_for = [(each, name) for each, name in zip(taken, ids, strict=False) if isinstance(each, ParsedCall)]
        said = restate(parsed.text, called_for)
        return [*said, *(result.turn(name) for result, name in zip(results, ids, strict=True))]

    async def say(self, chat: Chat, state: Any, turns: Sequence[Turn]) -> str:
        able = chat if isinstance(chat, KnowsTemplate) else None
        as_tool = (able is None or able.has_tool_role) if self.result_role == "auto" else self.result_role == "tool"
        turns = _choose_form(chat, turns) if as_tool else to_user_turn(turns)
        if state.opened:
            return await chat.say(*turns)
        state.opened, state.tokenizer = True, able.tokenizer if able is not None else None
        turns, schemas = self._tell_tools(turns, [tool.schema for tool in self.toolset(state).values()], able)
        return await chat.say(*turns, tools=schemas)

    def first_request(self, prompt: Prompt, template: KnowsTemplate) -> tuple[Sequence[Turn], Sequence[ToolSchema]]:
        """With the tools of the class; those that follow from the rollout's state are not known here."""
        if type(self).tools_for is not ToolEnvironment.tools_for:
            return prompt.turns, ()
        return self._tell_tools(prompt.turns, [self._tool(self._bind(each)).schema for each in self.tools], template)

    def _tell_tools(
        self, turns: Sequence[Turn], schemas: Sequence[ToolSchema], able: KnowsTemplate | None
    ) -> tuple[Sequence[Turn], Sequence[ToolSchema]]:
        """The opening turns, and what the chat template is to write of the tools itself."""
        if not schemas or self.tool_prompt == "none":
            return turns, ()
        by_template = (
            able is not None and able.shows_tools and (self.call_format in ("json", "harmony") or bool(self.vllm_tool_parser))
        )
        if self.tool_prompt == "template" or (self.tool_prompt == "auto" and by_template):
            return turns, schemas
        return add_listing(turns, schemas, explain_format(self.call_format, self.call_tag)), ()

    async def run_reward(self, function: Callable[..., Any], *arguments: Any, in_thread: bool = True) -> Reward:
        """The reward, with the counts of calls among its metrics (its own of the same name win)."""
        reward = await super().run_reward(function, *arguments, in_thread=in_thread)
        state = arguments[-1] if arguments else None
        if not isinstance(state, ToolState):
            return reward
        return replace(reward, metrics={**self.get_tool_metrics(state), **reward.metrics})

    def get_tool_metrics(self, state: Any) -> Mapping[str, float]:
        metrics: dict[str, float] = state.metrics(list(self.toolset(state)))
        return metrics

    def toolset(self, state: Any) -> dict[str, Tool]:
        """The rollout's tools by name. Raises `ValueError` for two of one name."""
        made: dict[str, Tool] = {}
        for function in self.tools_for(state):
            tool = self._tool(function)
            if tool.name in made:
                raise ValueError(f"{type(self).__name__} has two tools called {tool.name}: rename one of them")
            made[tool.name] = replace(tool, function=function)
        return made

    def _tool(self, function: ToolFunction) -> Tool:
        """The schema of a method is made once; which object it is bound to changes from rollout to rollout."""
        plain = getattr(function, "__func__", function)
        return self._made.get((plain, function is plain), lambda: make_tool(function))

    def _bind(self, function: ToolFunction) -> ToolFunction:
        first = next(iter(inspect.signature(function).parameters), "")
        return function.__get__(self) if first == "self" and inspect.isfunction(function) else function

    async def _answer_call(self, tools: Mapping[str, Tool], state: Any, call: ParsedCall | MalformedCall) -> CallResult:
        if isinstance(call, MalformedCall):
            state.malformed += 1
            how = explain_format(self.call_format, self.call_tag)
            return self._make_failure("", f"{call.reason}. To call a tool, {how}. What you wrote: {call.text}")
        name = call.name[:MAX_NAME]
        state.calls[name] += 1
        try:
            result = CallResult(name, self._cut(await self._run(tools, state, call)))
        except _ToolCallFailed as failed:
            state.errors += 1
            return self._make_failure(name, str(failed))
        state.successes += 1
        return result

    async def _run(self, tools: Mapping[str, Tool], state: Any, call: ParsedCall) -> str:
        """The tool's result as a text. Raises `_ToolCallFailed` for what the policy is told, and the typed failures."""
        tool = tools.get(call.name)
        if tool is None:
            known = ", ".join(tools) or "none"
            raise _ToolCallFailed(f"there is no tool {call.name[:MAX_NAME]!r} (there are: {known})")
        if state.calls.total() > self.max_tool_calls:
            raise _ToolCallFailed(f"no more than {self.max_tool_calls} calls are run in one dialogue")
        try:
            arguments = tool.arguments(call.arguments, textual=call.textual)
            injected = dict.fromkeys(tool.injected, state)
            run = functools.partial(tool.function, **arguments, **injected)
            return format_result(await run_function(run, limit_s=self.time_limit_of(tool.name), in_thread=self.in_threads))
        except TimeLimit as error:
            raise _ToolCallFailed(f"{tool.name} took longer than {self.time_limit_of(tool.name):g} s") from error
        except (InfrastructureError, PolicyError, GraderError):
            raise
        except BadArguments as error:
            raise _ToolCallFailed(str(error)) from error
        except (Exception, SystemExit) as error:
            raise _ToolCallFailed(str(error) or type(error).__name__) from error

    def _make_failure(self, name: str, error: str) -> CallResult:
        return CallResult(name, self._cut(self.format_error(name, redact(error))))

    def _refuse_surplus(self, state: Any, surplus: Sequence[ParsedCall | MalformedCall]) -> CallResult:
        state.malformed += sum(isinstance(each, MalformedCall) for each in surplus)
        wrong = [each.name[:MAX_NAME] for each in surplus if isinstance(each, ParsedCall)]
        state.calls.update(wrong)
        state.errors += len(wrong)
        said = f"{len(surplus)} more calls were not run: an answer may have {self.max_calls_per_answer}"
        return self._make_failure("", said)

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_result_characters:
            return text
        return f"{text[: self.max_result_characters]}… ({len(text)} characters, cut at {self.max_result_characters})"


class _ToolCallFailed(Exception):
    """A call whose failure is told to the policy."""


async def _gather(results: Any) -> Sequence[CallResult]:
    """Side by side; where one raises a typed failure, the others are cancelled and it is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in results]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def make_call_id(total: int, at: int) -> str:
    """Nine letters and digits, as the strictest templates want them, and no id twice in a dialogue."""
    return f"c{total:05d}{at:03d}"[:9]


def restate(text: str, calls: Sequence[tuple[ParsedCall, str]]) -> list[Turn]:
    """The answer as a message with those of its calls that could be read, each with its id: for templates that take a result
    behind nothing else (see `Dialogue.say`)."""
    written = [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for call, name in calls
    ]
    return [{"role": "assistant", "content": text, "tool_calls": written}] if written else []


def _choose_form(chat: Chat, turns: Sequence[Turn]) -> Sequence[Turn]:
    """The first form of the results that the template takes: each a `tool` turn; only those of calls that stand in the answer
    restated, the others' texts in the last of them; one `user` turn."""
    forms = [to_tool_turns(turns), keep_called_results(turns), to_user_turn(turns)]
    if not any(turn.get("role") == "tool" for turn in turns) or not isinstance(chat, TriesTurns):
        return forms[0]
    return next((form for form in forms if form and chat.takes(*form)), forms[-1])


def _find_call_ids(turns: Sequence[Turn]) -> set[str]:
    """Ids of the calls of the answer restated."""
    return {call["id"] for turn in turns for call in turn.get("tool_calls", ())}


def to_tool_turns(turns: Sequence[Turn]) -> list[Turn]:
    """A `tool` turn for each result. Where some have no call of their own, the answer stands as the policy wrote it alone."""
    known = _find_call_ids(turns)
    whole = all(turn.get("tool_call_id") in known for turn in turns if turn.get("role") == "tool")
    return [turn for turn in turns if whole or "tool_calls" not in turn]


def keep_called_results(turns: Sequence[Turn]) -> list[Turn]:
    """`tool` turns for results of calls alone; what else there is to be said of the answer stands in the last. [] without."""
    known = _find_call_ids(turns)
    others = [turn for turn in turns if turn.get("role") == "tool" and turn.get("tool_call_id") not in known]
    kept = [turn for turn in turns if turn not in others]
    last = max((at for at, turn in enumerate(kept) if turn.get("role") == "tool"), default=-1)
    if last < 0:
        return []
    kept[last] = {**kept[last], "content": "\n".join(str(turn["content"]) for turn in (kept[last], *others))}
    return kept


def add_listing(turns: Sequence[Turn], schemas: Sequence[ToolSchema], how: str) -> list[Turn]:
    """The opening turns with the tools written into the system turn, which is made where there is none."""
    listed = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
    text = f"You have tools. To call one, {how}; several calls may follow each other. The tools, one a line:\n{listed}"
    if turns and turns[0].get("role") == "system":
        return [{**turns[0], "content": f"{turns[0].get('content', '')}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def to_user_turn(turns: Sequence[Turn]) -> list[Turn]:
    """Results as one user turn, for templates without a tool role (many demand that user and assistant take turns)."""
    results = [turn for turn in turns if turn.get("role") == "tool"]
    if not results:
        return list(turns)
    turns = [turn for turn in turns if "tool_calls" not in turn]
    text = "\n".join(f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in results)
    return [*(turn for turn in turns if turn.get("role") != "tool"), {"role": "user", "content": text}]
