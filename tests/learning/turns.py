"""A training run over dialogues in one process: the product's environment, chat, batches and trainer; only the server is
replaced. All dialogues of a step are played side by side, and the server answers whatever waits as one batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec import UNSET

from telescope.algorithms.base import Algorithm
from telescope.backends.base import Backend, Job, TrainShard, World
from telescope.backends.fsdp import FSDP
from telescope.config.sections import ModelSettings, TrainerSettings
from telescope.environments.base import Environment, Prompt, Reward
from telescope.environments.chat import Recording, Sampled, TokenChat
from telescope.environments.template import ChatTemplate
from telescope.maths import turn_credit
from telescope.maths.minibatches import denominators
from telescope.records import TrainItem
from tests.learning.loop import EOS, LAG, PAD, Server, Spoil


class Batched:
    """The `Sampler` of all dialogues. It answers once every dialogue that is not over waits."""

    def __init__(self, server: Server, dialogues: int, max_tokens: int) -> None:
        self._server, self._open, self._max_tokens = server, dialogues, max_tokens
        self._waiting: list[tuple[np.ndarray, asyncio.Future[Sampled]]] = []

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, answer))
        self._look()
        return await answer

    def one_is_over(self) -> None:
        self._open -= 1
        self._look()

    def _look(self) -> None:
        if self._waiting and len(self._waiting) == self._open:
            waiting, self._waiting = self._waiting, []
            for (_, answer), sampled in zip(waiting, self._answers([ids.tolist() for ids, _ in waiting]), strict=True):
                answer.set_result(sampled)

    def _answers(self, prompts: list[list[int]]) -> list[Sampled]:
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        tokens, logprobs = self._server.decode(ids, seen, self._max_tokens)
        return [self._sampled(*row) for row in zip(tokens.tolist(), logprobs.tolist(), strict=True)]

    def _sampled(self, tokens: list[int], logprobs: list[float]) -> Sampled:
        length = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        return Sampled(
            np.array(tokens[:length], np.int32),
            np.array(logprobs[:length], np.float32),
            np.full(length, self._server.version, np.int32),
            "stop" if EOS in tokens else "length",
        )


async def play_all(
    environment: Environment, prompts: Sequence[Prompt], server: Server, max_tokens: int
) -> list[tuple[Reward, Recording]]:
    template = ChatTemplate(server.tokenizer, [EOS])
    sampler = Batched(server, len(prompts), max_tokens)

    async def one(prompt: Prompt) -> tuple[Reward, Recording]:
        chat = TokenChat(template, sampler, 200, max_tokens=max_tokens)
        try:
            reward = await environment.play(prompt, chat)
        finally:
            sampler.one_is_over()
        return reward, chat.recording()

    return list(await asyncio.gather(*map(one, prompts)))


def learn_turns(
    environment: Environment,
    model: str,
    algorithm: Algorithm,
    *,
    seed: int,
    spoil: Spoil | None = None,
    steps: int,
    prompts: int,
    group_size: int,
    max_tokens: int,
    learning_rate: float,
    server: Server | None = None,
) -> list[float]:
    """Mean reward of each step, on what the server sampled. A `server` that is handed in has the last weights afterwards."""
    server = server or Server(seed, model)
    job = Job(
        algorithm=algorithm,
        model=ModelSettings(name=model),
        trainer=TrainerSettings(learning_rate=learning_rate, betas=(0.9, 0.95), seq_len=2048),
        number_of_steps=steps,
        temperature=1.0,
        max_tokens=max_tokens,
        seed=seed,
        world=World(rank=0, size=1, device="cpu"),
    )
    backend: Backend = FSDP(mixed_precision_dtype=None, gradient_checkpointing=False).build(job)
    curve, random, split = [], np.random.default_rng(seed), environment.prompts("train")
    published: deque[tuple[int, Any]] = deque(maxlen=LAG + 1)
    groups = np.repeat(np.arange(prompts), group_size)
    try:
        for step in range(1, steps + 1):
            if len(published) == LAG + 1:
                server.load(*published[0])
            drawn = [split[int(index)] for index in random.integers(0, len(split), prompts) for _ in range(group_size)]
            played = asyncio.run(play_all(environment, drawn, server, max_tokens))
            rewards = np.array([reward.total for reward, _ in played])
            curve.append(float(rewards.mean()))
            recordings = [recording for _, recording in played]
            returns = find_returns(algorithm, played)
            counts = np.array([len(numbers) for numbers in returns])
            places = turn_credit.number_turns(groups, counts)
            flat = np.concatenate(returns)
            advantages = np.split(algorithm.advantages(flat, places, group_size=group_size), np.cumsum(counts)[:-1])
            if spoil is not None:  # whole rollouts alone are spoiled
                spoiled = spoil(np.concatenate(advantages).reshape(prompts, group_size), random)
                advantages = [np.array([value]) for value in spoiled.reshape(-1)]
            differs = {int(place) for place in np.unique(places) if np.ptp(flat[places == place]) > 0}
            of_rollout = np.split(places, np.cumsum(counts)[:-1])
            taught = {int(group) for group, own in zip(groups, of_rollout, strict=True) if differs & set(own.tolist())}
            kept = [row for row in range(len(rewards)) if int(groups[row]) in taught]
            backend.train_step(_shard(step, kept, recordings, groups, advantages))
            published.append((step, dict(backend.weights())))
        server.load(*published[-1])
    finally:
        backend.close()
    return curve


def find_returns(algorithm: Algorithm, played: Sequence[tuple[Reward, Recording]]) -> list[np.ndarray]:
    """Of each rollout what is compared: its reward, or a return a turn."""
    found = []
    for reward, recording in played:
        rewards = turn_credit.shape_rewards(reward.turns, recording.turns, reward.total)
        returns = algorithm.turn_returns(rewards)
        found.append(np.array([reward.total] if returns is None else returns, np.float64))
    return found


def _shard(
    step: int, kept: list[int], played: list[Recording], groups: np.ndarray, advantages: Sequence[np.ndarray]
) -> TrainShard:
    """The whole step on one rank: every branch of every kept rollout."""
    items, branches = [], []
    for sequence, row in enumerate(kept):
        own = advantages[row]
        for branch, turns in zip(played[row].branches, played[row].branch_turns, strict=True):
            items.append(
                TrainItem(
                    rollout_id=row,
                    group_id=int(groups[row]),
                    sequence=sequence,
                    length=len(branch.ids),
                    advantage=float(own.mean()),
                    sequence_tokens=played[row].completion_tokens,
                    temperature=1.0,
                    turns=UNSET if len(own) == 1 else tuple((tokens, float(own[turn])) for turn, tokens in turns),
                )
            )
            branches.append(branch)
    return TrainShard(
        step=step,
        items=tuple(items),
        ids=np.concatenate([branch.ids for branch in branches]),
        mask=np.concatenate([branch.mask for branch in branches]),
        logprobs=np.concatenate([branch.logprobs for branch in branches]),
        versions=np.concatenate([branch.versions for branch in branches]),
        denominators=(denominators([played[row].completion_tokens for row in kept], [int(groups[row]) for row in kept]),),
    )
