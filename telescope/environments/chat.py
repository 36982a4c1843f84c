"""A dialogue recorded token by token: what the server saw and sampled, never what a text would tokenise to afterwards.

    opening turns ─template─▶ prompt ids ─▶ sampled ids ─▶ separators + new turns as ids ─▶ sampled ids ─▶ ...
                              mask 0         mask 1          mask 0                           mask 1

The next turn's prompt is the exact ids so far plus what the template writes behind them. Where the template rewrites what
was there (it strips thinking, trims an answer), the exact ids are no beginning of its render; then a new branch starts from a
full render, in which the old answers are prompt. So each sampled token is trained exactly once, in the context it was
sampled in.

Refuses sockets and clocks beyond time stamps: a `Sampler` is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from telescope.environments.base import Turn
from telescope.environments.failures import ContextFull, InfrastructureError
from telescope.environments.template import ChatTemplate
from telescope.records import FinishReason, Trajectory

_ABOVE_ZERO = 1e-3  # rounding of a log-softmax in low precision; anything more is no log-prob


class ChatError(InfrastructureError):
    """The dialogue cannot go on for a reason outside the environment: an infrastructure failure, never a reward."""


class PromptTooLong(ChatError):
    """The opening prompt leaves no room for an answer of `rollout.max_tokens` (a later one: `ContextFull`)."""


class BrokenCompletion(ChatError):
    """A completion whose arrays cannot be trained on."""


class GenerationAborted(ChatError):
    """The server stopped in the middle of the answer."""


@dataclass(frozen=True)
class Sampled:
    """One answer of the policy; arrays have the length of the answer, its end-of-sequence token included if sampled."""

    ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, after temperature
    versions: np.ndarray  # [T] int32
    finish_reason: FinishReason


class Sampler(Protocol):
    async def sample(self, ids: np.ndarray, turn: int) -> Sampled:
        """Answer the prompt `ids` [T] int32; `turn` counts the answers of this rollout from 0."""
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
    finish_reason: FinishReason
    """Of the last answer."""
    prompt_text: str
    completion_text: str
    """All that came after the opening prompt; end-of-sequence tokens are left out of a dialogue's last answer."""
    generated_ns: int
    """When the last answer was there (time.time_ns)."""


@dataclass
class _Branch:
    """Runs of tokens in order; a run is either all prompt or all sampled."""

    text: str
    runs: list[tuple[np.ndarray, Sampled | None]] = field(default_factory=list)

    @property
    def was_answered(self) -> bool:
        return any(sampled is not None for _, sampled in self.runs)

    def append_prompt(self, ids: np.ndarray) -> None:
        self.runs.append((ids, None))

    def append_sampled(self, sampled: Sampled) -> None:
        self.runs.append((sampled.ids, sampled))

    def ids(self) -> np.ndarray:
        ids: np.ndarray = np.concatenate([ids for ids, _ in self.runs])
        return ids.astype(np.int32, copy=False)

    def trajectory(self) -> Trajectory:
        """All up to the last sampled token: a prompt that was never answered teaches nothing."""
        while self.runs[-1][1] is None:
            self.runs.pop()
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
        return Trajectory(ids, mask, logprobs, versions)


class TokenChat:
    """The `Chat` an environment is given; afterwards `recording()` holds what it did.

    `failure` is the first error `say` raised: a rollout that had one must not be trained on, even where the environment
    caught it and returned a reward.
    """

    def __init__(
        self, template: ChatTemplate, sampler: Sampler, max_prompt_tokens: int, closed: Callable[[], None] = lambda: None
    ) -> None:
        self._template = template
        self._sampler = sampler
        self._max_prompt_tokens = max_prompt_tokens
        self._history: list[Turn] = []
        self._branches: list[_Branch] = []
        self._opening_text = ""
        self._opening_tokens = 0
        self._transcript: list[str] = []
        self._end_text = ""  # of the sampled end token; shown only where the dialogue goes on behind it
        self._answers = 0
        self._finish_reason: FinishReason = "abort"
        self._generated_ns = 0
        self._busy = False
        self._closed = False
        self._tell_closed = closed
        self.failure: BaseException | None = None

    @property
    def truncated(self) -> bool:
        """Whether the last answer was cut off at `rollout.max_tokens`."""
        return self._finish_reason == "length"

    async def say(self, *turns: Turn) -> str:
        """Append turns, let the policy answer, and return its text without the end-of-sequence token.

        Raises `ContextFull` where the dialogue has become too long, `ChatError` where the opening is too long or the completion
        is unusable, and whatever the sampler raises.
        """
        if self._busy:
            raise RuntimeError("say was called while the policy was still answering: a dialogue has one answer at a time")
        if self._closed:
            raise RuntimeError("say was called after close: the lane to generate in has been given away")
        if not turns and not self._history:
            raise ValueError("the first say of a dialogue needs at least one turn")
        self._busy = True
        try:
            return await self._say(turns)
        except ContextFull:  # the policy's, and nothing was sampled: what there is stands
            raise
        except BaseException as error:
            self.failure = self.failure or error
            raise
        finally:
            self._busy = False

    def close(self) -> None:
        """See `Chat`; a second call is none."""
        if self._busy:
            raise RuntimeError("close was called while the policy was still answering")
        if not self._closed:
            self._closed = True
            self._tell_closed()

    def recording(self) -> Recording:
        """The dialogue as trajectories. Raises `ChatError` where the policy was never asked or `say` failed."""
        if self.failure is not None:
            raise ChatError(f"a turn of the dialogue failed: {self.failure}") from self.failure
        if self._answers == 0:
            raise ChatError("the environment returned a reward without asking the policy anything")
        branches = tuple(branch.trajectory() for branch in self._branches if branch.was_answered)
        return Recording(
            branches=branches,
            prompt_tokens=self._opening_tokens,
            completion_tokens=sum(branch.trained_tokens for branch in branches),
            turns=self._answers,
            finish_reason=self._finish_reason,
            prompt_text=self._opening_text,
            completion_text="".join(self._transcript),
            generated_ns=self._generated_ns,
        )

    async def _say(self, turns: Sequence[Turn]) -> str:
        self._history.extend(turns)
        branch = self._prompt(turns)
        prompt = branch.ids()
        if len(prompt) > self._max_prompt_tokens:
            raise (ContextFull if self._answers else PromptTooLong)(
                f"the prompt of turn {self._answers} has {len(prompt)} tokens, more than the {self._max_prompt_tokens} that "
                "inference.max_model_len - rollout.max_tokens leaves: raise max_model_len, lower max_tokens or shorten prompts"
            )
        sampled = await self._sampler.sample(prompt, self._answers)
        _check(sampled)
        return self._record(branch, sampled)

    def _prompt(self, turns: Sequence[Turn]) -> _Branch:
        """The branch to answer in, with its prompt complete."""
        if not self._branches:
            opening = self._template.opening(self._history)
            self._opening_text, self._opening_tokens = opening.text, len(opening.ids)
            return self._branch(opening.text, opening.ids)
        text = self._template.text(self._history)
        branch = self._branches[-1]
        if text.startswith(branch.text):
            added = text[len(branch.text) :]
            branch.append_prompt(self._template.continuation(added))
            branch.text = text
            self._transcript.append(self._end_text + added)
            return branch
        self._transcript.extend(f"\n[{turn.get('role', '')}] {turn.get('content', '')}\n" for turn in turns)
        return self._branch(text, self._template.render(self._history).ids)

    def _branch(self, text: str, ids: np.ndarray) -> _Branch:
        branch = _Branch(text)
        branch.append_prompt(ids)
        self._branches.append(branch)
        return branch

    def _record(self, branch: _Branch, sampled: Sampled) -> str:
        ids = sampled.ids.tolist()
        ended = sampled.finish_reason == "stop" and ids[-1] in self._template.end_texts
        answer = self._template.decode(ids[:-1] if ended else ids)
        branch.append_sampled(sampled)
        # The sampled end token is part of the exact ids: the template has to write the same one for the branch to go on.
        self._end_text = self._template.end_texts[ids[-1]] if ended else ""
        branch.text += answer + self._end_text
        self._history.append({"role": "assistant", "content": answer})
        self._transcript.append(answer)
        self._answers += 1
        self._finish_reason = sampled.finish_reason
        self._generated_ns = time.time_ns()
        return answer


def _check(sampled: Sampled) -> None:
    """Raise unless every sampled token has an id, a log-prob and a version."""
    lengths = (len(sampled.ids), len(sampled.logprobs), len(sampled.versions))
    if sampled.finish_reason == "abort":
        raise GenerationAborted(f"the server stopped the answer after {lengths[0]} tokens")
    if len(set(lengths)) != 1:
        raise BrokenCompletion("a completion has {} ids, {} log-probs and {} versions".format(*lengths))
    if lengths[0] == 0:
        raise BrokenCompletion("a completion has no tokens")
    # NaN fails every comparison: a missing log-prob is found here and never becomes 0.
    if not bool(np.all(np.isfinite(sampled.logprobs) & (sampled.logprobs <= _ABOVE_ZERO))):
        at = int(np.argmin(np.isfinite(sampled.logprobs) & (sampled.logprobs <= _ABOVE_ZERO)))
        raise BrokenCompletion(f"token {at} of a completion has log-prob {sampled.logprobs[at]}, which is none")
    if int(sampled.ids.min()) < 0 or int(sampled.versions.min()) < 0:
        raise BrokenCompletion("a completion has a negative token id or weight version")
