"""One rollout from its order to its answer: RolloutDone with token arrays, or RolloutFailed with a cause.

Owns the line between a score and a failure: whatever goes wrong (the environment raises, time runs out, a reward is not a
finite number, the server fails) is a RolloutFailed, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from numbers import Real

import numpy as np

from telescope.environments.base import Prompt, Reward
from telescope.environments.chat import Recording, Sampled, TokenChat
from telescope.environments.draws import Draws
from telescope.maths.support import WHOLE, Support
from telescope.records import RolloutOrder, Sampling
from telescope.wire.messages import RolloutDone, RolloutFailed
from telescope.wire.process import Interrupted
from telescope.workers.load import Loaded, describe
from telescope.workers.prefetch import Openings
from telescope.workers.texts import MAX_CAUSE_CHARACTERS, fit

Arrays = tuple[np.ndarray, ...]
Ask = Callable[[RolloutOrder, int, np.ndarray, Sampling], Awaitable[Sampled]]
"""Ask a server to answer turn t of an order: (order, turn, prompt ids, sampling)."""


MAX_NAME_CHARACTERS = 200
REWARD_LIMIT = 1e6
"""Larger totals are mistakes, and their squares and differences would overflow the advantages."""


class BadReward(RuntimeError):
    """What the environment returned is no usable reward."""


@dataclass(frozen=True)
class Limits:
    temperature: float
    max_tokens: int
    max_prompt_tokens: int
    timeout_s: float
    free_lane: bool = False
    """Say when a rollout's generation is over, before its reward."""
    support: Support = WHOLE
    stop: tuple[str, ...] = ()


class Turns:
    """The `Sampler` of one rollout: same order, next turn, its own seed."""

    def __init__(self, order: RolloutOrder, limits: Limits, ask: Ask) -> None:
        self._order = order
        self._limits = limits
        self._ask = ask
        self.waiting = 0
        """Questions without an answer."""

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        limits = self._limits
        seed, kept = turn_seed(self._order.seed, turn), limits.support
        most = limits.max_tokens if max_tokens is None else min(max_tokens, limits.max_tokens)
        sampling = Sampling(limits.temperature, most, seed, kept.top_k, kept.top_p, kept.min_p, limits.stop)
        self.waiting += 1
        sampled = await self._ask(self._order, turn, ids, sampling)
        self.waiting -= 1  # not in a `finally`: where time ran out, it is asked for afterwards
        return sampled


def turn_seed(seed: int, turn: int) -> int:
    """The order's seed for its first answer; later answers draw on, so that two turns don't share their noise."""
    return seed if turn == 0 else Draws("turn", seed, turn).below(2**31)


async def play(
    order: RolloutOrder,
    loaded: Loaded,
    openings: Openings,
    limits: Limits,
    ask: Ask,
    generated: Callable[[RolloutOrder], None] = lambda order: None,
) -> tuple[RolloutDone | RolloutFailed, Arrays]:
    """Play the order; `generated` hears when it asks for no more tokens.

    Raises nothing but cancellation: every failure becomes a RolloutFailed."""
    started_ns = time.time_ns()
    turns = Turns(order, limits, ask)
    chat = TokenChat(openings.template, turns, limits.max_prompt_tokens, lambda: generated(order), max_tokens=limits.max_tokens)
    try:
        async with asyncio.timeout(limits.timeout_s) as clock:
            prompt = await openings.prompt(loaded, order.prompt)
            reward = check_reward(await loaded.environment.play(prompt, chat))
        recording = chat.recording()
    except (asyncio.CancelledError, Interrupted):
        raise
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too; it is counted by its cause
        cause = _timed_out(turns, limits) if clock.expired() else _cause(loaded.label, error, chat)
        return failed(order, cause), ()
    return _done(order, prompt, reward, recording, started_ns), _arrays(recording)


def failed(order: RolloutOrder, cause: str) -> RolloutFailed:
    return RolloutFailed(order.rollout_id, order.attempt, fit(cause, MAX_CAUSE_CHARACTERS))


def check_reward(reward: Reward) -> Reward:
    """Raises `BadReward` unless the total and every metric is a finite number, the total within `REWARD_LIMIT`."""
    if not isinstance(reward, Reward):
        raise BadReward(f"play returned {type(reward).__name__}, not a Reward")
    for name, value in (("total", reward.total), *reward.metrics.items()):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise BadReward(f"the reward's {name} is {value!r}, not a finite number")
    if abs(reward.total) > REWARD_LIMIT:
        raise BadReward(f"the reward's total is {reward.total!r}, beyond ±{REWARD_LIMIT:.0e}: scale the environment's rewards")
    return reward


def _timed_out(turns: Turns, limits: Limits) -> str:
    where = "waiting for the policy's answer" if turns.waiting else "in the environment's own code"
    return f"rollout.timeout_s={limits.timeout_s:g} ran out {where}"


def _cause(label: str, error: BaseException, chat: TokenChat) -> str:
    if chat.failure is not None:  # the turn's failure comes first, whatever the environment made of it
        return f"environments.{label}: {chat.failure}" if str(chat.failure) else describe(chat.failure)
    return f"environments.{label}: {describe(error)}"


def _done(order: RolloutOrder, prompt: Prompt, reward: Reward, recording: Recording, started_ns: int) -> RolloutDone:
    return RolloutDone(
        rollout_id=order.rollout_id,
        attempt=order.attempt,
        reward=float(reward.total),
        metrics={fit(name, MAX_NAME_CHARACTERS): float(value) for name, value in reward.metrics.items()},
        branch_lengths=tuple(len(branch.ids) for branch in recording.branches),
        prompt_tokens=recording.prompt_tokens,
        completion_tokens=recording.completion_tokens,
        turns=recording.turns,
        finish_reason=recording.finish_reason,
        prompt_text=fit(recording.prompt_text),
        completion_text=fit(recording.completion_text),
        golden_answer=fit(reward.golden_answer or prompt.answer),
        started_ns=started_ns,
        generated_ns=recording.generated_ns,
        scored_ns=time.time_ns(),
    )


def _arrays(recording: Recording) -> Arrays:
    """ids, mask, logprobs, versions: all branches one after another."""
    branches = recording.branches
    if len(branches) == 1:
        only = branches[0]
        return only.ids, only.mask, only.logprobs, only.versions
    return (
        np.concatenate([branch.ids for branch in branches]),
        np.concatenate([branch.mask for branch in branches]),
        np.concatenate([branch.logprobs for branch in branches]),
        np.concatenate([branch.versions for branch in branches]),
    )
