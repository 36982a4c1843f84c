"""What a task is: prompts by index and a way to play one. User code; no sockets, no tokens, no weights in here.

A file of this folder with one `Environment` subclass is an environment of that file's name; its settings are its fields.
An exception is never a reward of 0: out of `prompts` or `play` it is a failure of the infrastructure, out of a reward function
one of the grader (failures.py); only a `PolicyError` is a score. docs/environments.md shows how to write one.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, overload, runtime_checkable

from telescope.environments.failures import GraderError, grading
from telescope.environments.threads import TimeLimit, run_function
from telescope.environments.validate import find_turns_mistake, must_override
from telescope.settings import Settings

Turn = Mapping[str, Any]  # {"role": "user", "content": "rev hhfje"}, as OpenAI writes messages
ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}


@dataclass(frozen=True)
class Prompt:
    """One task instance: the opening turns and what the environment needs to score the answer.

    Read only: the same object serves every rollout of its group and every epoch. What a rollout changes belongs in its own
    state, copied deeply where it comes from `turns` or `facts`.
    """

    turns: tuple[Turn, ...]
    answer: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `TypeError` in the line that made it: a mistake found later would be a failure of each of its rollouts."""
        mistake = find_turns_mistake(self.turns)
        if mistake:
            raise TypeError(f"Prompt: {mistake}")
        if not isinstance(self.answer, str):
            raise TypeError(f"Prompt: answer={self.answer!r} must be text; what else the score needs goes into facts")
        if not isinstance(self.facts, Mapping):
            raise TypeError(f"Prompt: facts={self.facts!r} must be a mapping such as a dict")


class LazyPrompts(Sequence[Prompt]):
    """`size` prompts, each made when asked for: a split of a million costs nothing until it is drawn from."""

    def __init__(self, size: int, make: Callable[[int], Prompt]) -> None:
        self._size = size
        self._make = make

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self._make(at) for at in range(*index.indices(self._size))]
        at = index + self._size if index < 0 else index
        if not 0 <= at < self._size:
            raise IndexError(f"prompt {index} of a split of {self._size}")
        return self._make(at)


@dataclass(frozen=True)
class Reward:
    """The score of one rollout. `metrics` are numbers to be charted, e.g. `{"exact": 1.0}`."""

    total: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    golden_answers: tuple[str, ...] = ()
    """Shown beside the answer; empty: the prompt's own."""
    tags: tuple[str, ...] = ()
    """Words by which rollouts are found and counted, e.g. `("overlong",)`; each step charts the share that has one."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What a reader of the rollout may want to know; kept as JSON in its row (cut off where it is long), never charted."""
    turns: tuple[float, ...] = ()
    """Rewards by turn, one for each answer of the policy in the order in which they came, that add up to `total`; for
    algorithms that credit turns (`algorithm.credit=turn`). Empty: all of it is earned at the end."""


class Dialogue(Protocol):
    """One line of messages with the policy. Records ids, masks, log-probs and versions of every token behind the
    environment's back."""

    async def say(self, *turns: Turn, tools: Sequence[ToolSchema] = (), max_tokens: int | None = None) -> str:
        """Append turns, let the policy answer, and return its text (the end-of-sequence token not included).

        `tools` are put to the chat template, now and for the rest of the dialogue. `max_tokens` lowers the limit of this
        answer, which is `rollout.max_tokens` or the environment's own. A first turn of the role "assistant" directly after an
        answer adds no message: it says how that answer reads as one (with `tool_calls`), for templates that refuse a tool's
        result behind anything else.
        Raises `ContextFull` where a later prompt leaves no room for an answer; the dialogue is then as it was.
        """
        ...

    def restart(self, *turns: Turn) -> None:
        """Forget the messages so far (all that was sampled is still trained): the next `say` begins with these turns."""
        ...

    @property
    def truncated(self) -> bool:
        """Whether the last answer was cut off at the token limit, or there was no room for another one (`ContextFull`)."""
        ...

    @property
    def last_prompt_tokens(self) -> int:
        """Tokens of the prompt that was answered last."""
        ...

    @property
    def last_answer_tokens(self) -> int:
        """Tokens of the last answer."""
        ...

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be added to the dialogue before a prompt leaves no room for an answer."""
        ...


class Chat(Dialogue, Protocol):
    """What a rollout talks through: one dialogue, and on demand further ones beside it."""

    def dialogue(self) -> Dialogue:
        """Another line of messages in the same rollout, for agents within it: several may `say` at once, and one reward counts
        for all."""
        ...

    def close(self) -> None:
        """No more will be asked: another rollout may generate while this one is scored. For rewards that take a while; `say`
        fails afterwards."""
        ...


@runtime_checkable
class KnowsTemplate(Protocol):
    """What can say what the chat template is able to write: the template itself, and most chats. Of a chat that can't, a tool
    role is expected and no listing."""

    @property
    def shows_tools(self) -> bool: ...
    @property
    def has_tool_role(self) -> bool: ...
    @property
    def tokenizer(self) -> Any: ...


class Environment(Settings):
    """Base of all environments. Subclasses give `prompts` and `play`, or derive from SingleTurn or MultiTurn.

    One instance serves hundreds of rollouts at once: what belongs to a rollout lives in `play`, not on the instance.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "eval")
    """The splits that `prompts` knows; "train" must be among them."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Packages it needs beyond Telescope's, as pip takes them (`"textarena>=0.7,<0.8"`); where one is missing or of another
    version, the refusal gives the install line."""
    reward_min: ClassVar[float | None] = None
    """Lower end of its rewards, where the run's entry gives none."""
    reward_max: ClassVar[float | None] = None
    """Upper end of its rewards, likewise."""
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Both ends of metrics, e.g. `{"exact": (0.0, 1.0)}`; `python -m telescope env check` says where one lies outside."""
    no_eval_with: ClassVar[Mapping[str, Any]] = {}
    """Settings and the value of each with which the eval split is empty, e.g. `{"held_out": 0}`: an eval of it is then refused
    before a run starts."""
    checked_apart: ClassVar[bool] = False
    """Whether `check_data` may take long or runs code of the user's. The start of a run then asks it in a process of its own,
    and within limits; so it asks all environments that do not come with Telescope."""
    reward_limit_s: ClassVar[float | None] = None
    """Seconds that one call of a reward function may take, from its beginning; None: `rollout.timeout_s` alone counts."""

    async def set_up(self) -> None:
        """Once in each worker process, before its first rollout: open a pool, load an index. Raising ends the worker."""

    async def tear_down(self) -> None:
        """Once when the worker ends, whatever ended it. It has 10 seconds."""

    def check_data(self) -> None:
        """Raise what `prompts` would raise for want of a file, a package or a setting: asked before a run starts anything, so
        quickly, and without a network. Override it where `prompts` takes long or downloads."""
        for split in self.splits:
            if not self.prompts(split) and split == "train":
                raise ValueError("it has no prompts in its train split")

    @must_override
    def prompts(self, split: str) -> Sequence[Prompt]:
        """All prompts of a split, in a fixed order: the same settings give the same prompts anywhere, in any process.

        A sequence may make its prompts lazily (`LazyPrompts`).
        """
        raise NotImplementedError(f"{type(self).__name__} defines no prompts")

    def right_answer(self, prompt: Prompt) -> str:
        """The right answer in the form in which the policy has to say it, such as `<answer>42</answer>`; "" where none can be
        said. `telescope env check` plays it."""
        return prompt.answer

    def first_request(self, prompt: Prompt, template: KnowsTemplate) -> tuple[Sequence[Turn], Sequence[ToolSchema]]:
        """What the first `say` of a rollout puts to the chat template, as far as that is known without playing: turns and
        tools. Prompts are measured by it."""
        return prompt.turns, ()

    @must_override
    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        """One rollout. Runs on the event loop: slow synchronous work belongs in `threads.run_function`."""
        raise NotImplementedError

    async def run_reward(self, function: Callable[..., Any], *arguments: Any, in_thread: bool = True) -> Reward:
        """The Reward that a reward function gives (`def` in a thread, `async def` on the event loop).

        Whatever it raises, a `GraderError` comes out, as for anything but a Reward or a call of more than `reward_limit_s`.
        """
        try:
            with grading():
                result = await run_function(function, *arguments, limit_s=self.reward_limit_s, in_thread=in_thread)
        except TimeLimit as error:
            raise GraderError(str(error)) from error
        if not isinstance(result, Reward):
            said = f"{getattr(function, '__qualname__', function)} returned {type(result).__name__}, not a Reward"
            raise GraderError(said)
        return result


class SingleTurn(Environment):
    """One question, one answer, one reward function (`def` in a thread, `async def` on the event loop)."""

    reward_in_thread: ClassVar[bool] = True
    """False for a reward of microseconds that cannot hang: handing it to a thread would cost more than it takes."""

    @must_override
    def reward(self, prompt: Prompt, answer: str) -> Reward | Awaitable[Reward]:
        raise NotImplementedError

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        answer = await chat.say(*prompt.turns)
        if self.reward_in_thread or inspect.iscoroutinefunction(self.reward):
            chat.close()
        return await self.run_reward(self.reward, prompt, answer, in_thread=self.reward_in_thread)
