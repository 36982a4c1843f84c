"""Environments written for the other design of this API: a dataset of samples, `compute_reward`, `env_response`.

Change the import lines of such a file to this module, and it is an environment like any other: its `__init__` arguments become
settings, and a thin adapter (`adapted`) plays it. docs/environments.md has the table of what became what. Refuses one thing
that was usual there: a reward function that raises is a failure of the grader, and no 0.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import PydanticUserError, TypeAdapter, create_model

from telescope.environments.base import Environment, Prompt, Reward, SingleTurn, Turn
from telescope.environments.failures import GraderError
from telescope.environments.multi_turn import MultiTurn
from telescope.environments.off_loop import called
from telescope.environments.rubric import Rubric as _Rubric

ChatMessage = dict[str, Any]
Messages = list[ChatMessage]
ENDLESS = 10_000
"""Turns of an environment whose `max_turns` is 0 or less: it ends by itself."""
NO_REPLY = "empty_env_response"


@dataclass
class Sample:
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
class RolloutState:
    sample: Sample
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

    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[Sample]:
        """All samples, the same ones in the same order in every process."""
        raise NotImplementedError(f"{type(self).__name__} defines no load_dataset")

    def compute_reward(self, *arguments: Any, **by_name: Any) -> Any:
        """The `RewardResult` of one rollout; subclasses say of what."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute_reward")

    def opening(self, sample: Sample) -> Messages:
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

    def create_initial_state(self, sample: Sample) -> RolloutState:
        return RolloutState(sample)

    def env_response(self, messages: Messages, state: RolloutState) -> Any:
        """The messages that follow the last answer; none ends the dialogue."""
        raise NotImplementedError(f"{type(self).__name__} defines no env_response")

    def is_done(self, state: RolloutState) -> Any:
        """Whether it is over, or (whether, why). Asked after each answer, and again after each `env_response`."""
        return 0 < self.max_turns <= state.num_turns, "max_turns_reached"


class Rubric(_Rubric):
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
    ) -> Rubric:
        """`invert` (smaller is better) is known and means nothing here."""
        ends = None if range_min is None or range_max is None else (float(range_min), float(range_max))
        called_as = name or func.__name__
        self.add(func, weight, name=called_as, ends=ends)
        if golden_answer is not None:
            self._golden[called_as] = golden_answer
        return self

    def add_metric(self, func: Callable[..., Any], **options: Any) -> Rubric:
        return self.add_reward(func, 0.0, **options)

    @property
    def metrics_ranges(self) -> dict[str, dict[str, float]]:
        return {name: {"min": low, "max": high} for name, (low, high) in self.ranges.items()}

    async def score(
        self,
        *,
        completion: str | None = None,
        sample: Sample | None = None,
        state: RolloutState | None = None,
        eos_token: str = "",
        extra_sample_metrics: Mapping[str, float] | None = None,
        extra_golden_answers: Mapping[str, str | None] | None = None,
        extra_info_turns: Sequence[dict[str, Any]] | None = None,
        extra_sample_tags: Mapping[str, str] | None = None,
    ) -> RewardResult:
        """Raises `GraderError` where a function raises or gives no number."""
        given = {"completion": completion, "sample": sample, "state": state, "eos_token": eos_token}
        outcomes = await self._called(given)
        golden: dict[str, str | None] = {name: answer or self._golden.get(name) for name, (_, answer) in outcomes.items()}
        return RewardResult(
            total_reward=sum(self._parts[name].weight * value for name, (value, _) in outcomes.items()),
            sample_metrics={name: value for name, (value, _) in outcomes.items()} | dict(extra_sample_metrics or {}),
            golden_answers={**{name: answer for name, answer in golden.items() if answer}, **(extra_golden_answers or {})},
            info_turns=list(extra_info_turns or ()),
            sample_tags=dict(extra_sample_tags or {}),
        )


# ---- the adapter -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourcePrompt(Prompt):
    sample: Sample = field(default_factory=lambda: Sample(""))


class _Adapter(Environment):
    """What both shapes share: one source object for each environment object, made of its settings."""

    splits: ClassVar[tuple[str, ...]] = ("train",)
    source_class: ClassVar[type[SourceEnvironment]] = SourceEnvironment

    @functools.cached_property
    def source(self) -> Any:
        """Made with the settings that are not the default: of the others the class may give its own to its base."""
        given = {name: (getattr(self, name), default) for name, (_, default) in _parameters(self.source_class).items()}
        return self.source_class(**{name: value for name, (value, default) in given.items() if value != default})

    @property
    def metrics_ranges(self) -> Mapping[str, tuple[float, float]]:  # type: ignore[override]
        ranges: Mapping[str, Mapping[str, float]] = self.source.metrics_ranges
        known = {name: (ends.get("min"), ends.get("max")) for name, ends in ranges.items()}
        return {name: (low, high) for name, (low, high) in known.items() if low is not None and high is not None}

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [self._prompt(sample) for sample in self.source.load_dataset()]

    def _prompt(self, sample: Sample) -> SourcePrompt:
        answer = "" if sample.answer is None else str(sample.answer)
        return SourcePrompt(tuple(self.source.opening(sample)), answer, sample.metadata or {}, sample=sample)

    async def _rewarded(self, *arguments: Any) -> Reward:
        function = self.source.compute_reward
        if "eos_token" in inspect.signature(function).parameters:
            function = functools.partial(function, eos_token="")  # what an answer ends with is never part of it here
        return _reward(await called(function, *arguments))


class _Single(_Adapter, SingleTurn):
    async def reward(self, prompt: Prompt, answer: str) -> Reward:
        return await self._rewarded(answer, _sample(prompt))


class _Several(_Adapter, MultiTurn):
    max_turns: int = 10

    @property
    def turn_limit(self) -> int:
        return self.source.max_turns if self.source.max_turns > 0 else ENDLESS

    async def initial_state(self, prompt: Prompt) -> RolloutState:
        state: RolloutState = await self.called(self.source.create_initial_state, _sample(prompt))
        state.messages = copy.deepcopy([dict(turn) for turn in prompt.turns])
        return state

    async def reply(self, state: RolloutState, answer: str) -> Sequence[Turn]:
        said: ChatMessage = {"role": "assistant", "content": answer}
        state.trajectory.append(TrajectoryStep([dict(message) for message in state.messages], [said]))
        state.messages.append(said)
        await self._ask_whether_done(state)
        if state.stop_reason is not None:
            return ()
        turns: Messages = list(await self.called(self.source.env_response, list(state.messages), state) or ())
        if not turns:
            state.stop_reason = NO_REPLY
            return ()
        state.messages.extend(turns)
        await self._ask_whether_done(state)
        return turns

    def is_done(self, state: RolloutState) -> bool:
        return state.stop_reason is not None

    async def reward(self, prompt: Prompt, state: RolloutState) -> Reward:
        return await self._rewarded(state)

    async def _ask_whether_done(self, state: RolloutState) -> None:
        answer = await self.called(self.source.is_done, state)
        done, reason = answer if isinstance(answer, tuple) else (answer, None)
        if done:
            state.stop_reason = reason or "done"


@functools.cache
def adapted(source: type) -> type[Environment] | None:
    """The environment class that plays a class of the other design; None for any other class and for the shapes themselves."""
    if not issubclass(source, SourceEnvironment) or source.__module__.startswith("telescope.environments.compat"):
        return None
    shape = _Several if issubclass(source, MultiTurnEnvironment) else _Single
    fields: dict[str, Any] = {name: (_hint(kind), default) for name, (kind, default) in _parameters(source).items()}
    made = create_model(source.__name__, __base__=shape, __module__=source.__module__, __doc__=source.__doc__, **fields)
    made.source_class = source
    made.requires = tuple(getattr(sys.modules[source.__module__], "REQUIRED_PACKAGES", ()))
    return made


def _parameters(source: type) -> dict[str, tuple[Any, Any]]:
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


OBJECTS = ("tools", "error_formatter")
"""Arguments that subclasses give in code; no setting could hold them."""


def _hint(kind: Any) -> Any:
    """The hint, if a setting can have that type."""
    try:
        TypeAdapter(kind)
    except PydanticUserError:
        return Any
    return kind


def _sample(prompt: Prompt) -> Sample:
    """One rollout's own: such classes write into `metadata`, and a prompt serves its whole group and every epoch."""
    assert isinstance(prompt, SourcePrompt)  # all prompts of an adapter are
    return copy.deepcopy(prompt.sample)


def _reward(result: Any) -> Reward:
    if not isinstance(result, RewardResult):
        raise GraderError(f"compute_reward returned {type(result).__name__}, not a RewardResult")
    return Reward(
        result.total_reward,
        {name: value for name, value in result.sample_metrics.items() if value is not None},
        golden_answers=tuple(str(answer) for answer in result.golden_answers.values() if answer is not None),
        tags=tuple(f"{name}={value}" for name, value in result.sample_tags.items()),
        info={"turns": result.info_turns} if result.info_turns else {},
    )
