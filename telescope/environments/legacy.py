"""Environments written for the older, Ray-based Telescope: a dataset of samples, `compute_reward`, `env_response`.

Change the import lines of such a file to this module, and it is an environment like any other: its `__init__` arguments become
settings, and a thin adapter (`adapt`) plays it. docs/environments.md has the table of what became what. Classes that have a
namesake in Telescope are called `Legacy…` here and may be imported by their old names (`Sample`, `Rubric`, `RolloutState`,
`ToolEnvironment`). Refuses one thing that was usual there: a reward function that raises is a failure of the grader, and not
a 0.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import PydanticUserError, TypeAdapter, create_model

from telescope.environments.base import Environment, Prompt, Reward, SingleTurn, Turn
from telescope.environments.failures import GraderError, InfrastructureError, PolicyError
from telescope.environments.multi_turn import MultiTurn
from telescope.environments.rubric import Rubric as CurrentRubric
from telescope.environments.threads import TimeLimit, run_function
from telescope.environments.tools.call_parsers import CallFormat, MalformedCall, explain_format, parse_calls
from telescope.environments.tools.redact import redact
from telescope.environments.tools.schema import BadArguments, format_result, make_tool

ChatMessage = dict[str, Any]
Messages = list[ChatMessage]
ENDLESS = 10_000
"""Turns of an environment whose `max_turns` is 0 or less: it ends by itself."""
NO_REPLY = "empty_env_response"
OBJECTS = ("tools", "error_formatter")
"""Arguments that subclasses give in code; no setting could hold them."""
_FORMATS: dict[str, CallFormat] = {"xml": "json", "function": "python"}


@dataclass
class LegacySample:
    """One task: a question (or messages), its answer, and what the reward needs."""

    prompt: str | Messages
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardResult:
    total_reward: float
    sample_metrics: dict[str, float] = field(default_factory=dict)
    golden_answers: dict[str, str | None] = field(default_factory=dict)
    info_turns: list[dict[str, Any]] = field(default_factory=list)
    sample_tags: dict[str, str] = field(default_factory=dict)


@dataclass
class TrajectoryStep:
    """One answer: the messages it was asked with, and what was said."""

    prompt: Messages
    completion: Messages


@dataclass
class LegacyRolloutState:
    sample: LegacySample
    trajectory: list[TrajectoryStep] = field(default_factory=list)
    custom: dict[str, Any] = field(default_factory=dict)
    messages: Messages = field(default_factory=list)
    """All that was said so far."""
    stop_reason: str | None = None

    @property
    def num_turns(self) -> int:
        return len(self.trajectory)


class _ClassName:
    """No data descriptor, so that an instance may set the attribute."""

    def __get__(self, instance: object, owner: type[Any]) -> str:
        return owner.__name__


class SourceEnvironment:
    """What such environments derive from. Plain objects: their `__init__` may set what it likes."""

    metrics_ranges: Any = MappingProxyType({})
    name: Any = _ClassName()
    """The class's own, unless a class gives another, as an attribute or as a property."""

    def __init__(self, *, system_prompt: str | None = None, instruction_prompt: str | None = None) -> None:
        self.system_prompt = system_prompt
        self.instruction_prompt = instruction_prompt

    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[LegacySample]:
        """All samples, the same ones in the same order in every process."""
        raise NotImplementedError(f"{type(self).__name__} defines no load_dataset")

    def compute_reward(self, *arguments: Any, **by_name: Any) -> Any:
        """The `RewardResult` of one rollout; subclasses say of what."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute_reward")

    def opening(self, sample: LegacySample) -> Messages:
        """The first messages: the system prompt, and the question with the instruction behind it after an empty line."""
        if isinstance(sample.prompt, str):
            parts = (sample.prompt, self.instruction_prompt or "")
            messages = [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]
        else:
            messages = [dict(message) for message in sample.prompt]
        if self.system_prompt and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages


class SingleTurnEnvironment(SourceEnvironment):
    """Subclasses give `load_dataset` and `compute_reward(completion, sample, eos_token="")`, `def` or `async def`."""


class MultiTurnEnvironment(SourceEnvironment):
    """Subclasses give `load_dataset`, `env_response(messages, state)` and `compute_reward(state, eos_token="")`."""

    def __init__(self, *, max_turns: int = 10, system_prompt: str | None = None, instruction_prompt: str | None = None) -> None:
        super().__init__(system_prompt=system_prompt, instruction_prompt=instruction_prompt)
        self.max_turns = max_turns

    def create_initial_state(self, sample: LegacySample) -> LegacyRolloutState:
        return LegacyRolloutState(sample)

    def env_response(self, messages: Messages, state: LegacyRolloutState) -> Any:
        """The messages that follow the last answer; none ends the dialogue."""
        raise NotImplementedError(f"{type(self).__name__} defines no env_response")

    def is_done(self, state: LegacyRolloutState) -> Any:
        """Whether it is over, or (whether, why). Asked after each answer, and again after each `env_response`."""
        return 0 < self.max_turns <= state.num_turns, "max_turns_reached"


@dataclass
class ToolCall:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    raw_text: str = ""
    error: str = ""
    """Why it cannot be read; empty for a call."""


@dataclass
class ToolResult:
    tool_name: str
    result: str
    success: bool
    error: str | None = None


class LegacyToolEnvironment(MultiTurnEnvironment):
    """Functions in `tools`, calls in XML tags or as `name(argument=1)`. A call that cannot be read is answered with what is
    wrong and counted as an error; it is not a final answer.

    Subclasses give `load_dataset` and `compute_reward(state, eos_token="")`, and may override what is public here.
    """

    def __init__(
        self,
        *,
        tools: list[Callable[..., Any]] | None = None,
        max_turns: int = 10,
        tool_call_format: str = "xml",
        include_tool_schemas_in_prompt: bool = True,
        error_formatter: Callable[[Exception], str] | None = None,
        tool_timeout_s: float = 10.0,
        system_prompt: str | None = None,
        instruction_prompt: str | None = None,
    ) -> None:
        """`tool_timeout_s`: seconds one call may take; afterwards the policy is told that it took too long."""
        super().__init__(max_turns=max_turns, system_prompt=system_prompt, instruction_prompt=instruction_prompt)
        if tool_call_format not in _FORMATS:
            raise ValueError(f"tool_call_format={tool_call_format!r} must be xml or function")
        self.tools = tools or []
        self.tool_timeout_s = tool_timeout_s
        self.tool_call_format = tool_call_format
        self.error_formatter = error_formatter or _format_error
        self.tool_map = {function.__name__: function for function in self.tools}
        self._tools = {function.__name__: make_tool(function) for function in self.tools}
        self.tool_schemas = [dict(tool.schema) for tool in self._tools.values()]
        if include_tool_schemas_in_prompt and self.tools:
            self.system_prompt = "\n\n".join(part for part in (system_prompt, self._describe_tools()) if part)

    def parse_tool_calls(self, completion: str) -> list[ToolCall]:
        """Calls in order; what was meant as one and cannot be read has an `error`."""
        found = []
        for call in parse_calls(completion, _FORMATS[self.tool_call_format]).calls:
            if isinstance(call, MalformedCall):
                found.append(ToolCall("", raw_text=call.text, error=call.reason))
            else:
                found.append(ToolCall(call.name, dict(call.arguments), json.dumps(dict(call.arguments), default=str)))
        return found

    def is_final_answer(self, completion: str, state: LegacyRolloutState) -> bool:
        return not self.parse_tool_calls(completion)

    async def execute_tool(self, tool_call: ToolCall) -> ToolResult:
        """Never raises but for failures of the infrastructure and those that a tool blames on the policy."""
        if tool_call.error:
            return ToolResult(tool_call.name, tool_call.error, success=False, error="malformed_call")
        tool = self._tools.get(tool_call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult(tool_call.name, f"there is no such tool; there are {known}", success=False, error="unknown_tool")
        try:
            run = functools.partial(tool.function, **tool.arguments(tool_call.arguments))
            result = await run_function(run, limit_s=self.tool_timeout_s)
        except BadArguments as error:
            return ToolResult(tool_call.name, str(error), success=False, error="argument_error")
        except TimeLimit:
            said = f"it took longer than {self.tool_timeout_s:g} s"
            return ToolResult(tool_call.name, said, success=False, error="timeout")
        except (InfrastructureError, PolicyError):
            raise
        except Exception as error:  # noqa: BLE001 the tool's own; the policy reads of it
            return ToolResult(tool_call.name, redact(self.error_formatter(error)), success=False, error=type(error).__name__)
        return ToolResult(tool_call.name, format_result(result), success=True)

    def format_tool_result(self, result: ToolResult) -> str:
        return f"[{result.tool_name}] {'' if result.success else 'Error: '}{result.result}"

    def format_multiple_tool_results(self, results: list[ToolResult]) -> str:
        return "\n".join(self.format_tool_result(result) for result in results)

    def create_initial_state(self, sample: LegacySample) -> LegacyRolloutState:
        state = super().create_initial_state(sample)
        state.custom |= {"tool_calls": [], "tool_results": [], "tools_by_name": {}}
        return state

    async def env_response(self, messages: Messages, state: LegacyRolloutState) -> Messages:
        completion = str(messages[-1]["content"])
        if self.is_final_answer(completion, state):
            return []
        results = []
        for call in self.parse_tool_calls(completion):
            result = await self.execute_tool(call)
            results.append(result)
            state.custom["tool_calls"].append({"name": call.name, "arguments": call.arguments, "raw": call.raw_text})
            state.custom["tool_results"].append(vars(result) | {"name": result.tool_name})
            if call.name in self._tools:
                by_name = state.custom["tools_by_name"]
                by_name[call.name] = by_name.get(call.name, 0) + 1
        return [{"role": "user", "content": self.format_multiple_tool_results(results)}] if results else []

    def get_tool_metrics(self, state: LegacyRolloutState) -> dict[str, float]:
        results = state.custom["tool_results"]
        successes = sum(result["success"] for result in results)
        return {
            "total_tool_calls": float(len(results)),
            "tool_success_count": float(successes),
            "tool_error_count": float(len(results) - successes),
            "tool_success_rate": successes / len(results) if results else 0.0,
            "unique_tools_used": float(len(state.custom["tools_by_name"])),
            **{f"{name}_calls": float(state.custom["tools_by_name"].get(name, 0)) for name in self._tools},
        }

    def _describe_tools(self) -> str:
        listed = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in self.tool_schemas)
        return (
            f"You may call these tools:\n{listed}\n\nTo call one, {explain_format(_FORMATS[self.tool_call_format])}. "
            "An answer without a call is your final one."
        )


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class LegacyRubric(CurrentRubric):
    """`add_reward` and `score`; functions get `completion`, `sample`, `state` and `eos_token` by name."""

    def __init__(self) -> None:
        super().__init__()
        self._known = ("completion", "sample", "state", "eos_token")
        self._golden: dict[str, str] = {}

    def add_reward(
        self,
        func: Callable[..., Any],
        weight: float = 1.0,
        *,
        name: str | None = None,
        golden_answer: str | None = None,
        range_min: float | None = None,
        range_max: float | None = None,
        invert: bool = False,
    ) -> LegacyRubric:
        """`invert` (smaller is better) is known and means nothing here."""
        ends = None if range_min is None or range_max is None else (float(range_min), float(range_max))
        called_as = name or func.__name__
        self.add(func, weight, name=called_as, ends=ends)
        if golden_answer is not None:
            self._golden[called_as] = golden_answer
        return self

    def add_metric(self, func: Callable[..., Any], **options: Any) -> LegacyRubric:
        return self.add_reward(func, 0.0, **options)

    @property
    def metrics_ranges(self) -> dict[str, dict[str, float]]:
        return {name: {"min": low, "max": high} for name, (low, high) in self.ranges.items()}

    async def score(
        self,
        *,
        completion: str | None = None,
        sample: LegacySample | None = None,
        state: LegacyRolloutState | None = None,
        eos_token: str = "",
        extra_sample_metrics: Mapping[str, float] | None = None,
        extra_golden_answers: Mapping[str, str | None] | None = None,
        extra_info_turns: Sequence[dict[str, Any]] | None = None,
        extra_sample_tags: Mapping[str, str] | None = None,
    ) -> RewardResult:
        """Raises `GraderError` where a function raises or gives no number."""
        given = {"completion": completion, "sample": sample, "state": state, "eos_token": eos_token}
        outcomes = await self._run_all(given)
        golden: dict[str, str | None] = {name: answer or self._golden.get(name) for name, (_, answer) in outcomes.items()}
        return RewardResult(
            total_reward=sum(self._parts[name].weight * value for name, (value, _) in outcomes.items()),
            sample_metrics={name: value for name, (value, _) in outcomes.items()} | dict(extra_sample_metrics or {}),
            golden_answers={**{name: answer for name, answer in golden.items() if answer}, **(extra_golden_answers or {})},
            info_turns=list(extra_info_turns or ()),
            sample_tags=dict(extra_sample_tags or {}),
        )


Sample = LegacySample
RolloutState = LegacyRolloutState
Rubric = LegacyRubric
ToolEnvironment = LegacyToolEnvironment


# ---- the adapter -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourcePrompt(Prompt):
    sample: LegacySample = field(default_factory=lambda: LegacySample(""))


class _LegacyAdapter(Environment):
    """What both shapes share: one source object for each environment object, made of its settings."""

    splits: ClassVar[tuple[str, ...]] = ("train",)
    source_class: ClassVar[type[SourceEnvironment]] = SourceEnvironment

    @functools.cached_property
    def source(self) -> Any:
        """Made with the settings that are not the default: of the others the class may give its own to its base."""
        given = {name: (getattr(self, name), default) for name, (_, default) in _read_parameters(self.source_class).items()}
        return self.source_class(**{name: value for name, (value, default) in given.items() if value != default})

    @property
    def metrics_ranges(self) -> Mapping[str, tuple[float, float]]:  # type: ignore[override]
        ranges: Mapping[str, Mapping[str, float]] = self.source.metrics_ranges
        known = {name: (ends.get("min"), ends.get("max")) for name, ends in ranges.items()}
        return {name: (low, high) for name, (low, high) in known.items() if low is not None and high is not None}

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [self._prompt(sample) for sample in self.source.load_dataset()]

    def _prompt(self, sample: LegacySample) -> SourcePrompt:
        answer = "" if sample.answer is None else str(sample.answer)
        return SourcePrompt(tuple(self.source.opening(sample)), answer, sample.metadata or {}, sample=sample)

    async def _compute_reward(self, *arguments: Any) -> Reward:
        function = self.source.compute_reward
        if "eos_token" in inspect.signature(function).parameters:
            function = functools.partial(function, eos_token="")  # what an answer ends with is never part of it here
        return _convert_reward(await run_function(function, *arguments))


class _LegacySingleTurn(_LegacyAdapter, SingleTurn):
    async def reward(self, prompt: Prompt, answer: str) -> Reward:
        return await self._compute_reward(answer, _copy_sample(prompt))


class _LegacyMultiTurn(_LegacyAdapter, MultiTurn):
    max_turns: int = 10

    @property
    def turn_limit(self) -> int:
        return self.source.max_turns if self.source.max_turns > 0 else ENDLESS

    async def initial_state(self, prompt: Prompt) -> LegacyRolloutState:
        state: LegacyRolloutState = await self.run_method(self.source.create_initial_state, _copy_sample(prompt))
        state.messages = copy.deepcopy([dict(turn) for turn in prompt.turns])
        return state

    async def reply(self, state: LegacyRolloutState, answer: str) -> Sequence[Turn]:
        said: ChatMessage = {"role": "assistant", "content": answer}
        state.trajectory.append(TrajectoryStep([dict(message) for message in state.messages], [said]))
        state.messages.append(said)
        await self._ask_whether_done(state)
        if state.stop_reason is not None:
            return ()
        turns: Messages = list(await self.run_method(self.source.env_response, list(state.messages), state) or ())
        if not turns:
            state.stop_reason = NO_REPLY
            return ()
        state.messages.extend(turns)
        await self._ask_whether_done(state)
        return turns

    def is_done(self, state: LegacyRolloutState) -> bool:
        return state.stop_reason is not None

    async def reward(self, prompt: Prompt, state: LegacyRolloutState) -> Reward:
        return await self._compute_reward(state)

    async def _ask_whether_done(self, state: LegacyRolloutState) -> None:
        answer = await self.run_method(self.source.is_done, state)
        done, reason = answer if isinstance(answer, tuple) else (answer, None)
        if done:
            state.stop_reason = reason or "done"


@functools.cache
def adapt(source: type) -> type[Environment] | None:
    """The environment class that plays a class of the older API; None for any other class and for the shapes themselves."""
    if not issubclass(source, SourceEnvironment) or source.__module__.startswith("telescope.environments.legacy"):
        return None
    shape = _LegacyMultiTurn if issubclass(source, MultiTurnEnvironment) else _LegacySingleTurn
    fields: dict[str, Any] = {name: (_check_hint(kind), default) for name, (kind, default) in _read_parameters(source).items()}
    made = create_model(source.__name__, __base__=shape, __module__=source.__module__, __doc__=source.__doc__, **fields)
    made.source_class = source
    made.requires = tuple(getattr(sys.modules[source.__module__], "REQUIRED_PACKAGES", ()))
    return made


def _read_parameters(source: type) -> dict[str, tuple[Any, Any]]:
    """(type, default) of the arguments of `__init__`, those of its bases included where it hands them on as `**kwargs`."""
    found: dict[str, tuple[Any, Any]] = {}
    for kind in source.__mro__:
        init = vars(kind).get("__init__")
        if init is None or kind is object:
            continue
        hints = typing.get_type_hints(init)
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and parameter.name not in OBJECTS:
                default = ... if parameter.default is parameter.empty else parameter.default
                found.setdefault(parameter.name, (hints.get(parameter.name, Any), default))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


def _check_hint(kind: Any) -> Any:
    """The hint, if a setting can have that type."""
    try:
        TypeAdapter(kind)
    except PydanticUserError:
        return Any
    return kind


def _copy_sample(prompt: Prompt) -> LegacySample:
    """One rollout's own: such classes write into `metadata`, and a prompt serves its whole group and every epoch."""
    assert isinstance(prompt, SourcePrompt)  # all prompts of an adapter are
    return copy.deepcopy(prompt.sample)


def _convert_reward(result: Any) -> Reward:
    if not isinstance(result, RewardResult):
        raise GraderError(f"compute_reward returned {type(result).__name__}, not a RewardResult")
    return Reward(
        result.total_reward,
        {name: value for name, value in result.sample_metrics.items() if value is not None},
        golden_answers=tuple(str(answer) for answer in result.golden_answers.values() if answer is not None),
        tags=tuple(f"{name}={value}" for name, value in result.sample_tags.items()),
        info={"turns": result.info_turns} if result.info_turns else {},
    )
