"""A dialogue recorded token by token: what the server saw and sampled, never what a text would tokenise to afterwards.

    opening turns ─template─▶ prompt ids ─▶ sampled ids ─▶ separators + new turns as ids ─▶ sampled ids ─▶ ...
                              mask 0         mask 1          mask 0                           mask 1

The next turn's prompt is the exact ids so far plus what the template writes behind them. Where the template rewrites what
was there (it strips thinking, trims an answer), the exact ids are not the beginning of its render; then a new branch starts
from a full render, in which the old answers are prompt. The same happens where the environment cuts its context short
(`restart`) or talks in several dialogues. So each sampled token is trained exactly once, in the context it was sampled in.

Refuses sockets and clocks beyond time stamps: a `Sampler` is handed in.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from telescope.environments.answer_parsers import Answer, find_opened
from telescope.environments.base import ToolSchema, Turn
from telescope.environments.failures import ContextFull, InfrastructureError
from telescope.environments.template import ChatTemplate, TemplateError, Tokenizer
from telescope.environments.validate import find_message_mistake
from telescope.maths import routing
from telescope.records import FinishReason, Trajectory

_ABOVE_ZERO = 1e-3  # rounding of a log-softmax in low precision; anything more is not a log-prob


class ChatError(InfrastructureError):
    """The dialogue cannot go on for a reason outside the environment: an infrastructure failure, never a reward."""


class PromptTooLong(ChatError):
    """The opening prompt leaves no room for an answer of `max_tokens` (a later one: `ContextFull`)."""


class BrokenCompletion(ChatError):
    """A completion whose arrays cannot be trained on."""


class GenerationAborted(ChatError):
    """The server stopped in the middle of the answer."""


@dataclass(frozen=True)
class Sampled:
    """One answer of the policy; arrays but `routed` have the length of the answer, its end-of-sequence token included if
    sampled."""

    ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, after temperature
    versions: np.ndarray  # [T] int32
    finish_reason: FinishReason
    routed: np.ndarray | None = None  # [P + T, L, K] uint8 or int16: experts of prompt and answer, where the server records


class Sampler(Protocol):
    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        """Answer the prompt `ids` [T] int32; `turn` counts the questions of this rollout from 0. `max_tokens` lowers
        the rollout's own limit for this answer; None leaves it."""
        ...


@dataclass(frozen=True)
class Recording:
    """A finished dialogue, ready to be trained on."""

    branches: tuple[Trajectory, ...]
    prompt_tokens: int
    """Tokens of the opening prompt."""
    completion_tokens: int
    """Tokens the policy sampled, over all turns and branches."""
    turns: int
    """Answers of the policy."""
    reasons: tuple[str, ...]
    """Why each branch begins, in a sentence; "" for the first."""
    finish_reason: FinishReason
    """Of the main dialogue's last answer, or "length" where it had no room for another one. Where the main dialogue asked
    nothing, of the dialogue that answered last."""
    prompt_text: str
    completion_text: str
    """All that came after the opening prompt; end-of-sequence tokens are left out of a dialogue's last answer."""
    generated_ns: int
    """When the last answer was there (time.time_ns)."""
    branch_turns: tuple[tuple[tuple[int, int], ...], ...]
    """Of each branch its answers in order: (which of the rollout's answers, counted from 0 as they came; sampled tokens)."""


@dataclass
class _Branch:
    """Runs of tokens in order; a run is either all prompt or all sampled. The first is the branch's opening prompt."""

    text: str
    runs: list[tuple[np.ndarray, Sampled | None]] = field(default_factory=list)
    reason: str = ""
    """Why it begins."""
    turns: list[tuple[int, int]] = field(default_factory=list)
    """Its answers: which of the rollout's, and sampled tokens."""
    routed: np.ndarray | None = None  # [T, L, K] up to the end of its last answer; None: not recorded

    def ids(self) -> np.ndarray:
        ids: np.ndarray = np.concatenate([ids for ids, _ in self.runs])
        return ids.astype(np.int32, copy=False)

    def trajectory(self) -> Trajectory:
        ids = self.ids()
        mask = np.zeros(len(ids), np.uint8)
        logprobs = np.full(len(ids), np.nan, np.float32)
        versions = np.full(len(ids), -1, np.int32)
        at = 0
        for run, sampled in self.runs:
            if sampled is not None:
                mask[at : at + len(run)] = 1
                logprobs[at : at + len(run)] = sampled.logprobs
                versions[at : at + len(run)] = sampled.versions
            at += len(run)
        return Trajectory(ids, mask, logprobs, versions, self.routed)


@dataclass(frozen=True)
class _Question:
    """What is about to be asked. Nothing of the dialogue has changed yet: a question that fails leaves it as it was."""

    branch: _Branch  # new and without runs, or the one that goes on
    added: np.ndarray  # [T] what goes behind the branch's runs
    text: str  # of the whole prompt
    told: str  # for the transcript

    def ids(self) -> np.ndarray:
        return np.concatenate([self.branch.ids(), self.added]) if self.branch.runs else self.added


class DialogueRecord:
    """What all dialogues of a rollout write to, whether its tokens are known or not: one count of answers, one first failure,
    one lane to generate in."""

    def __init__(self, closed: Callable[[], None]) -> None:
        self.opening_text = ""
        self.asked = self.answers = self.asking = 0
        self.generated_ns = 0
        self.failure: BaseException | None = None
        self.closed = False
        self._tell_closed = closed

    def close(self) -> None:
        """Give the lane away; a second call does nothing."""
        if self.asking:
            raise RuntimeError("close was called while the policy was still answering")
        if not self.closed:
            self.closed = True
            self._tell_closed()

    def refuse_closed(self, asked: str) -> None:
        """Raises `RuntimeError` where `asked`, the name of a method, comes too late."""
        if self.closed:
            raise RuntimeError(f"{asked} was called after close: the lane to generate in has been given away")


class _ChatRecord(DialogueRecord):
    """With one list of branches."""

    def __init__(
        self,
        template: ChatTemplate,
        sampler: Sampler,
        max_prompt_tokens: int,
        max_tokens: int | None,
        closed: Callable[[], None],
    ) -> None:
        super().__init__(closed)
        self.template = template
        self.sampler = sampler
        self.max_prompt_tokens = max_prompt_tokens
        self.max_tokens = max_tokens
        self.branches: list[_Branch] = []
        self.answered_last: TokenDialogue | None = None

    async def sample(self, prompt: np.ndarray, max_tokens: int | None) -> Sampled:
        """Raises `PromptTooLong` or `ContextFull`, after which a dialogue may go on with less, and what the sampler raises."""
        turn, room = self.asked, self.measure_room(max_tokens)
        if len(prompt) > room:
            raise (ContextFull if self.answers else PromptTooLong)(
                f"the prompt of turn {turn} has {len(prompt)} tokens, more than the {room} that "
                "inference.max_model_len - rollout.max_tokens (or the environment's own max_tokens) leaves: raise "
                "max_model_len, lower max_tokens or shorten prompts"
            )
        self.asked += 1
        sampled = await self.sampler.sample(prompt, turn, max_tokens)
        _check_sampled(sampled, len(prompt))
        self.answers += 1
        self.generated_ns = time.time_ns()
        return sampled

    def measure_room(self, max_tokens: int | None) -> int:
        """The longest prompt that leaves room for an answer."""
        spared = self.max_tokens - max_tokens if max_tokens is not None and self.max_tokens is not None else 0
        return self.max_prompt_tokens + max(spared, 0)


class TokenDialogue:
    """One line of messages and answers. A rollout has one, or several side by side that share its reward."""

    def __init__(self, record: _ChatRecord, *, forgives_cancelling: bool = False) -> None:
        self._record = record
        self._forgives_cancelling = forgives_cancelling
        self._history: list[Turn] = []
        self._restated: dict[int, Turn] = {}
        self._tools: tuple[ToolSchema, ...] = ()
        self._branch: _Branch | None = None
        self._transcript: list[str] = []
        self._end_text = ""  # of the sampled end token; shown only where the dialogue goes on behind it
        self._finish_reason: FinishReason = "abort"
        self._busy = False
        self._last = (0, 0)

    @property
    def last_prompt_tokens(self) -> int:
        """Tokens of the prompt that was answered last."""
        return self._last[0]

    @property
    def last_answer_tokens(self) -> int:
        """Tokens of the last answer, its end-of-sequence token included."""
        return self._last[1]

    @property
    def truncated(self) -> bool:
        """Whether the last answer was cut off at its token limit, or the dialogue had no room for another one."""
        return self._finish_reason == "length"

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template writes the tools that `say` is given."""
        return self._record.template.shows_tools

    @property
    def has_tool_role(self) -> bool:
        """Whether the chat template writes turns of the role "tool"."""
        return self._record.template.has_tool_role

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's, for parsers that need one."""
        return self._record.template.tokenizer

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be added before a prompt leaves no room for an answer of `max_tokens`."""
        used = len(self._branch.ids()) if self._branch is not None else 0
        return self._record.max_prompt_tokens - used

    @property
    def transcript(self) -> str:
        """All that came after the opening prompt."""
        return "".join(self._transcript)

    async def say(self, *turns: Turn, tools: Sequence[ToolSchema] = (), max_tokens: int | None = None) -> str:
        """Append turns, let the policy answer, and return its text without the end-of-sequence token: an `Answer` of
        answer_parsers.py, which knows whether the prompt ended in an opened thought.

        See `Dialogue.say`. Raises `ContextFull` where the dialogue has grown too long, `ChatError` where the opening is too
        long or the completion is unusable, and whatever the sampler raises; the dialogue is then as it was.
        """
        if self._busy:
            raise RuntimeError("say was called while the policy was still answering: a dialogue has one answer at a time")
        self._record.refuse_closed("say")
        if not turns and not self._history:
            raise ValueError("the first say of a dialogue needs at least one turn")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"say was called with max_tokens={max_tokens}: an answer needs room for a token")
        _check_turns(turns)
        self._busy = True
        self._record.asking += 1
        try:
            return await self._say(turns, tuple(tools) or self._tools, max_tokens)
        except (PromptTooLong, ContextFull):  # nothing was asked: restart with less, or score what is there
            self._finish_reason = "length"
            raise
        except asyncio.CancelledError as error:
            if not self._forgives_cancelling:
                self._record.failure = self._record.failure or error
            raise
        except BaseException as error:
            self._record.failure = self._record.failure or error
            raise
        finally:
            self._busy = False
            self._record.asking -= 1

    def takes(self, *turns: Turn) -> bool:
        """Whether the chat template writes the dialogue with these turns behind it, as `say` would. Nothing is changed."""
        history, restated, _ = self._append_turns(turns)
        template = self._record.template
        try:
            if self._branch is None:
                template.text(template.spell(history), self._tools)
            else:
                self._render(self._branch, history, restated, self._tools)
        except TemplateError:
            return False
        return True

    def restart(self, *turns: Turn) -> None:
        """Forget the messages so far; the next `say` begins a new branch with these turns before its own."""
        if self._busy:
            raise RuntimeError("restart was called while the policy was still answering")
        _check_turns(turns)
        if self._branch is not None:
            self._transcript.append("\n[context restarted]\n")
        self._history, self._restated, self._branch, self._end_text = list(turns), {}, None, ""

    async def _say(self, turns: Sequence[Turn], tools: tuple[ToolSchema, ...], max_tokens: int | None) -> str:
        history, restated, turns = self._append_turns(turns)
        question = self._make_question(history, restated, turns, tools)
        try:
            sampled = await self._record.sample(question.ids(), max_tokens)
        except PromptTooLong as error:
            raise PromptTooLong(f"{error} ({self._describe_parts(history, tools)})") from None
        self._history, self._restated, self._tools = history, restated, tools
        return self._commit(question, sampled)

    def _describe_parts(self, history: Sequence[Turn], tools: tuple[ToolSchema, ...]) -> str:
        """What an opening prompt's tokens are: those of its tools, of its system turn, and the rest."""
        template, system = self._record.template, 0
        bare = len(template.render(history).ids)
        spoken = [turn for turn in history if turn.get("role") != "system"]
        with contextlib.suppress(TemplateError):
            system = bare - len(template.render(spoken).ids) if 0 < len(spoken) < len(history) else 0
        names = ", ".join(str(tool.get("function", {}).get("name")) for tool in tools)
        parts = [f"{len(template.opening(history, tools).ids) - bare} are schemas of tools: {names}"] if tools else []
        return ", ".join([*parts, f"{system} are the system turn", f"{bare - system} are the rest"])

    def _append_turns(self, turns: Sequence[Turn]) -> tuple[list[Turn], dict[int, Turn], Sequence[Turn]]:
        """(messages, those that stand restated, the new ones) with `turns` behind the dialogue."""
        restated, form = dict(self._restated), self._record.template.form
        answered = bool(self._history) and self._history[-1].get("role") == "assistant"
        if turns and answered and self._branch is not None and turns[0].get("role") == "assistant":
            restated[len(self._history) - 1] = form.restate(turns[0], form.spell(self._history[-1]))
            turns = turns[1:]
        return [*self._history, *turns], restated, turns

    def _make_question(
        self, history: Sequence[Turn], restated: Mapping[int, Turn], turns: Sequence[Turn], tools: tuple[ToolSchema, ...]
    ) -> _Question:
        template, branch = self._record.template, self._branch
        if branch is None:
            opening = template.opening(history, tools)
            told = "" if not self._record.branches and not self._transcript else _describe_turns(turns)
            why = "" if not self._record.branches else "the context was restarted" if self._transcript else "another dialogue"
            return _Question(_Branch(opening.text, reason=why), opening.ids, opening.text, told)
        text = self._render(branch, history, restated, tools)
        if text.startswith(branch.text):
            added = text[len(branch.text) :]
            return _Question(branch, template.continuation(added), text, self._end_text + added)
        why = "the tools have changed" if tools != self._tools else _explain_difference(branch.text, text)
        return _Question(_Branch(text, reason=why), template.encode(text), text, _describe_turns(turns))

    def _render(
        self, branch: _Branch, history: Sequence[Turn], restated: Mapping[int, Turn], tools: tuple[ToolSchema, ...]
    ) -> str:
        """The dialogue as the template writes it: with the answers' own texts, or as they were restated where the template
        refuses those or the restated ones alone go on from the exact tokens."""
        template = self._record.template
        spelled = template.spell(history)
        if not restated:
            return template.text(spelled, tools)
        other = [restated.get(at, turn) for at, turn in enumerate(spelled)]
        try:
            text = template.text(spelled, tools)
        except TemplateError:
            return template.text(other, tools)
        if text.startswith(branch.text):
            return text
        try:
            return template.text(other, tools)
        except TemplateError:
            return text

    def _commit(self, question: _Question, sampled: Sampled) -> str:
        record, branch = self._record, question.branch
        ids = sampled.ids.tolist()
        ended = sampled.finish_reason == "stop" and ids[-1] in record.template.end_texts
        answer = record.template.decode(ids[:-1] if ended else ids)
        if not branch.runs:
            record.opening_text = record.opening_text or question.text
            record.branches.append(branch)
        length = len(question.ids()) + len(sampled.ids)
        branch.routed = routing.continued(branch.routed, sampled.routed, length)
        branch.runs += [(question.added, None), (sampled.ids, replace(sampled, routed=None))]
        branch.turns.append((record.answers - 1, len(sampled.ids)))  # nothing else has run since it was counted
        # The sampled end token is part of the exact ids: the template has to write the same one for the branch to go on.
        self._end_text = record.template.end_texts[ids[-1]] if ended else ""
        branch.text = question.text + answer + self._end_text
        self._branch = branch
        said = Answer(answer, find_opened(question.text), record.template.find_opening(question.text))
        self._history.append({"role": "assistant", "content": said})
        self._transcript += [question.told, answer]
        self._finish_reason, record.answered_last = sampled.finish_reason, self
        self._last = (sum(len(run) for run, _ in branch.runs[:-1]), len(sampled.ids))
        return said


class TokenChat(TokenDialogue):
    """The `Chat` an environment is given; afterwards `recording()` holds what it did.

    `failure` is the first error `say` raised (a prompt that was too long is none): a rollout that had one must not be trained
    on, even where the environment caught it and returned a reward.
    """

    def __init__(
        self,
        template: ChatTemplate,
        sampler: Sampler,
        max_prompt_tokens: int,
        closed: Callable[[], None] = lambda: None,
        *,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(_ChatRecord(template, sampler, max_prompt_tokens, max_tokens, closed))
        self._dialogues: list[TokenDialogue] = [self]

    @property
    def failure(self) -> BaseException | None:
        return self._record.failure

    def dialogue(self) -> TokenDialogue:
        """Another line of messages in this rollout, e.g. of a sub-agent; several may ask at once.

        Its answers are trained with the rollout's reward. A `say` of it that is cancelled leaves no trace.
        """
        self._record.refuse_closed("dialogue")
        other = TokenDialogue(self._record, forgives_cancelling=True)
        self._dialogues.append(other)
        return other

    def close(self) -> None:
        """See `Chat`; a second call is none."""
        self._record.close()

    def recording(self) -> Recording:
        """The rollout as trajectories. Raises `ChatError` where the policy was never asked or `say` failed."""
        record = self._record
        if record.failure is not None:
            raise ChatError(f"a turn of the dialogue failed: {record.failure}") from record.failure
        if record.asking:
            raise ChatError("the environment returned a reward while the policy was still answering")
        if record.answers == 0:
            raise ChatError("the environment returned a reward without asking the policy anything")
        branches = tuple(branch.trajectory() for branch in record.branches)
        never_asked = self._finish_reason == "abort"
        told = record.answered_last if never_asked and record.answered_last is not None else self
        return Recording(
            branches=branches,
            prompt_tokens=len(record.branches[0].runs[0][0]),
            completion_tokens=sum(branch.trained_tokens for branch in branches),
            turns=record.answers,
            reasons=tuple(branch.reason for branch in record.branches),
            finish_reason=told._finish_reason,
            prompt_text=record.opening_text,
            completion_text="".join(dialogue.transcript for dialogue in self._dialogues),
            generated_ns=record.generated_ns,
            branch_turns=tuple(tuple(branch.turns) for branch in record.branches),
        )


def _check_turns(turns: Sequence[Turn]) -> None:
    """Raises `TypeError` for what is not a message."""
    for turn in turns:
        if mistake := find_message_mistake(turn):
            several = "; several are given one by one, say(*turns)" if isinstance(turn, list | tuple) else ""
            raise TypeError(f"{mistake}{several}")


def _describe_turns(turns: Sequence[Turn]) -> str:
    """Messages in a transcript where the template's own text is not to be had."""
    return "".join(f"\n[{turn.get('role', '')}] {turn.get('content', '')}\n" for turn in turns)


def _explain_difference(was: str, now: str) -> str:
    """Where the template writes the past anew."""
    low, high = 0, min(len(was), len(now))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if was[low:middle] == now[low:middle] else (low, middle - 1)
    return (
        f"the template writes the past anew: behind {was[max(0, low - 20) : low]!r} stood {was[low : low + 40]!r}, "
        f"and stands {now[low : low + 40]!r}"
    )


def _check_sampled(sampled: Sampled, prompt_tokens: int) -> None:
    """Raise unless every sampled token has an id, a log-prob and a version."""
    lengths = (len(sampled.ids), len(sampled.logprobs), len(sampled.versions))
    if sampled.finish_reason == "abort":
        raise GenerationAborted(f"the server stopped the answer after {lengths[0]} tokens")
    if len(set(lengths)) != 1:
        raise BrokenCompletion("a completion has {} ids, {} log-probs and {} versions".format(*lengths))
    if lengths[0] == 0:
        raise BrokenCompletion("a completion has no tokens")
    tokens = prompt_tokens + lengths[0]
    if sampled.routed is not None and len(sampled.routed) != tokens:
        raise BrokenCompletion(f"a completion has the routing of {len(sampled.routed)} tokens, and prompt and answer {tokens}")
    # NaN fails every comparison: a missing log-prob is found here and never becomes 0.
    if not bool(np.all(np.isfinite(sampled.logprobs) & (sampled.logprobs <= _ABOVE_ZERO))):
        at = int(np.argmin(np.isfinite(sampled.logprobs) & (sampled.logprobs <= _ABOVE_ZERO)))
        raise BrokenCompletion(f"token {at} of a completion has log-prob {sampled.logprobs[at]}, which is none")
    if int(sampled.ids.min()) < 0 or int(sampled.versions.min()) < 0:
        raise BrokenCompletion("a completion has a negative token id or weight version")
