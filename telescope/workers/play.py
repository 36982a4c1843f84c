"""One rollout from its order to its answer: RolloutResult with token arrays, or RolloutError with a cause.

Owns the line between a score and a failure: whatever goes wrong (the environment raises, time runs out, a reward is not a
finite number, the server fails) is a RolloutError of its kind, never a reward of 0; what the policy does wrong is a score.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from telescope.config.evals import Eval
from telescope.config.run import RunConfig
from telescope.environments.base import Environment, Prompt, Reward
from telescope.environments.chat import PromptTooLong, Recording, Sampled, TokenChat
from telescope.environments.failures import GraderError, PolicyError
from telescope.environments.hashed_random import HashedRandom
from telescope.environments.tools.redact import declare_secrets
from telescope.environments.validate import describe_not_awaitable
from telescope.maths import routing
from telescope.maths.support import WHOLE, Support
from telescope.records import FailureKind, RolloutOrder, Sampling
from telescope.wire.messages import RolloutError, RolloutResult
from telescope.wire.process import Interrupted
from telescope.workers.loading import LoadedEnvironment, describe
from telescope.workers.prompt_cache import PromptCache
from telescope.workers.report import check_reward, make_error, make_result, score_policy_error
from telescope.workers.text_chat import ChatCompletions, TextChat

Arrays = tuple[np.ndarray, ...]
Ask = Callable[[RolloutOrder, int, np.ndarray, Sampling], Awaitable[Sampled]]
"""Ask a server to answer turn t of an order: (order, turn, prompt ids, sampling)."""


@dataclass(frozen=True)
class PlayLimits:
    temperature: float
    max_tokens: int
    max_prompt_tokens: int
    timeout_s: float
    free_lane: bool = False
    """Say when a rollout's generation is over, before its reward."""
    support: Support = WHOLE
    stop: tuple[str, ...] = ()
    evals: Mapping[str, Eval] = field(default_factory=dict)
    """By name: what answers of an eval have otherwise."""

    @classmethod
    def from_config(cls, config: RunConfig) -> PlayLimits:
        """Those of the run. An environment may have some of its own (`of`)."""
        return cls(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            max_prompt_tokens=config.inference.max_model_len - config.rollout.max_tokens,
            timeout_s=config.rollout.timeout_s,
            free_lane=config.orchestrator.free_lane_after_generation,
            support=config.rollout.support,
            stop=config.rollout.stop,
            evals={one.name: one for one in config.active_evals},
        )

    def of(self, loaded: LoadedEnvironment, eval_name: str = "") -> PlayLimits:
        """With what the environment's entry sets itself, and before that the eval. What its answers may not have is left to
        its prompts."""
        own = self.evals.get(eval_name)
        temperature = self.temperature if loaded.temperature is None else loaded.temperature
        max_tokens = self.max_tokens if loaded.max_tokens is None else loaded.max_tokens
        if own is not None:
            temperature = temperature if own.temperature is None else own.temperature
            max_tokens = max_tokens if own.max_tokens is None else own.max_tokens
        longest = self.max_prompt_tokens + self.max_tokens - max_tokens
        support = self.support if own is None or own.top_p is None else replace(self.support, top_p=own.top_p)
        return replace(self, temperature=temperature, max_tokens=max_tokens, max_prompt_tokens=longest, support=support)


PlayedChat = TokenChat | TextChat


def _open_chat(
    turns: TurnSampler, prompts: PromptCache, limits: PlayLimits, closed: Callable[[], None], remote: ChatCompletions | None
) -> PlayedChat:
    if remote is not None:
        return TextChat(remote, turns.make_sampling, closed, limits.timeout_s)
    assert prompts.template is not None, "without a remote server prompts become tokens here"
    return TokenChat(prompts.template, turns, limits.max_prompt_tokens, closed, max_tokens=limits.max_tokens)


class TurnSampler:
    """The `Sampler` of one rollout: same order, next turn, its own seed."""

    def __init__(self, order: RolloutOrder, limits: PlayLimits, ask: Ask) -> None:
        self._order = order
        self._limits = limits
        self._ask = ask
        self.waiting = 0
        """Questions without an answer."""

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        self.waiting += 1
        sampled = await self._ask(self._order, turn, ids, self.make_sampling(turn, max_tokens))
        self.waiting -= 1  # not in a `finally`: where time ran out, it is asked for afterwards
        return replace(sampled, routed=None) if self._order.eval else sampled  # nobody trains on an eval's

    def make_sampling(self, turn: int, max_tokens: int | None) -> Sampling:
        """How turn `turn` is sampled; `max_tokens` as in `sample`."""
        limits = self._limits
        seed, kept = make_turn_seed(self._order.seed, turn), limits.support
        most = limits.max_tokens if max_tokens is None else min(max_tokens, limits.max_tokens)
        return Sampling(limits.temperature, most, seed, kept.top_k, kept.top_p, kept.min_p, limits.stop)


def make_turn_seed(seed: int, turn: int) -> int:
    """The order's seed for its first answer; later answers draw on, so that two turns don't share their noise."""
    return seed if turn == 0 else HashedRandom("turn", seed, turn).below(2**31)


async def play(
    order: RolloutOrder,
    loaded: LoadedEnvironment,
    prompts: PromptCache,
    limits: PlayLimits,
    ask: Ask,
    generated: Callable[[RolloutOrder], None] = lambda order: None,
    remote: ChatCompletions | None = None,
) -> tuple[RolloutResult | RolloutError, Arrays]:
    """Play the order within `limits`, or the environment's own; `generated` hears when it asks for no more tokens. `remote`: a
    server of somebody else's, which is asked in text.

    Raises nothing but cancellation: every failure becomes a RolloutError."""
    started_ns, limits = time.time_ns(), limits.of(loaded, order.eval)
    turns = TurnSampler(order, limits, ask)
    chat = _open_chat(turns, prompts, limits, lambda: generated(order), remote)
    try:
        async with asyncio.timeout(limits.timeout_s) as clock:
            prompt = await prompts.get_prompt(loaded, order.prompt)
            with declare_secrets(loaded.secrets):
                reward = await _score(loaded.environment, prompt, chat)
        recording = chat.recording()
        result = make_result(order, prompt, reward, recording, started_ns, limits.temperature, loaded.secrets)
        return result, _join_branches(recording)
    except (asyncio.CancelledError, Interrupted):
        raise
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too; it is counted by its cause
        if clock.expired():
            return make_error(order, _describe_timeout(turns, chat, limits)), ()
        return make_error(order, _find_cause(loaded.place, error, chat), _find_kind(error, chat), loaded.secrets), ()


async def _score(environment: Environment, prompt: Prompt, chat: PlayedChat) -> Reward:
    """The environment's score, or the one that the policy's own fault earns. A child that its code has forked, and that comes
    back out of it, ends here: it is not the worker, though it has its sockets and its files."""
    worker = os.getpid()
    try:
        playing = environment.play(prompt, chat)
        if not inspect.isawaitable(playing):
            raise TypeError(describe_not_awaitable(f"{type(environment).__name__}.play", playing))
        return check_reward(await playing)
    except PolicyError as error:
        return check_reward(score_policy_error(error))
    finally:
        if os.getpid() != worker:
            os._exit(0)


def _describe_timeout(turns: TurnSampler, chat: PlayedChat, limits: PlayLimits) -> str:
    asking = turns.waiting or isinstance(chat.failure, asyncio.CancelledError)
    where = "waiting for the policy's answer" if asking else "in the environment's own code"
    return f"rollout.timeout_s={limits.timeout_s:g} ran out {where}"


def _find_cause(place: str, error: BaseException, chat: PlayedChat) -> str:
    if chat.failure is not None:  # the turn's failure comes first, whatever the environment made of it
        return f"{place}: {chat.failure}" if str(chat.failure) else describe(chat.failure)
    told = error.__cause__ if isinstance(error, GraderError) and error.__cause__ is not None else error
    return f"{place}: {describe(told)}"


def _find_kind(error: BaseException, chat: PlayedChat) -> FailureKind:
    if chat.failure is None and isinstance(error, PromptTooLong):
        return "prompt"
    return "grader" if chat.failure is None and isinstance(error, GraderError) else "infrastructure"


def _join_branches(recording: Recording) -> Arrays:
    """ids, mask, logprobs, versions, and routing where it was recorded: all branches one after another."""
    branches = recording.branches
    if not branches:
        return tuple(np.empty(0, kind) for kind in (np.int32, np.uint8, np.float32, np.int32))
    if len(branches) == 1:
        only = branches[0]
        return only.arrays
    routed = routing.joined([branch.routed for branch in branches], [len(branch.ids) for branch in branches])
    return (
        np.concatenate([branch.ids for branch in branches]),
        np.concatenate([branch.mask for branch in branches]),
        np.concatenate([branch.logprobs for branch in branches]),
        np.concatenate([branch.versions for branch in branches]),
        *(() if routed is None else (routed,)),
    )
