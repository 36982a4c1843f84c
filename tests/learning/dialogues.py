"""Training runs of whole dialogues in one process: the product's environments, chat, algorithms and trainer; only the server is
replaced, by transformers' model. Rollouts play side by side, and whatever they ask at the same time is sampled as one batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from telescope.algorithms.base import Algorithm
from telescope.backends.base import Job, World
from telescope.backends.fsdp import FSDP
from telescope.config.parts import ModelSettings, TrainerSettings
from telescope.environments.base import Environment, Prompt, Reward
from telescope.environments.chat import Sampled, TokenChat
from telescope.environments.template import ChatTemplate
from telescope.records import Trajectory
from tests.learning.loop import EOS, LAG, PAD, Server, Spoil, shard

MAX_PROMPT_TOKENS = 200


@dataclass
class Asked:
    ids: np.ndarray
    answer: asyncio.Future[Sampled]


@dataclass
class Table:
    """Rollouts that play side by side: once each of them waits for an answer, or is over, all that was asked is sampled."""

    server: Server
    max_tokens: int
    playing: int = 0
    asked: list[Asked] = field(default_factory=list)

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None = None) -> Sampled:
        waiting = Asked(ids, asyncio.get_running_loop().create_future())
        self.asked.append(waiting)
        self._sample_when_all_wait()
        return await waiting.answer

    def leave(self) -> None:
        self.playing -= 1
        self._sample_when_all_wait()

    def _sample_when_all_wait(self) -> None:
        if not self.asked or len(self.asked) < self.playing:
            return
        asked, self.asked = self.asked, []
        for one, sampled in zip(asked, self._decoded([each.ids.tolist() for each in asked]), strict=True):
            one.answer.set_result(sampled)

    @torch.no_grad()
    def _decoded(self, prompts: list[list[int]]) -> list[Sampled]:
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions, cache = (seen.cumsum(1) - 1).clamp(min=0), None
        ended = torch.zeros(len(prompts), 1, dtype=torch.bool)
        tokens, logprobs = [], []
        while len(tokens) < self.max_tokens and not bool(ended.all()):
            out = self.server.model(
                input_ids=ids, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True
            )
            distribution = out.logits[:, -1].log_softmax(-1)
            ids = distribution.exp().multinomial(1, generator=self.server.random)
            tokens.append(ids)
            logprobs.append(distribution.gather(1, ids))
            ended |= ids == EOS
            cache, positions = out.past_key_values, positions[:, -1:] + 1
            seen = torch.cat([seen, torch.ones_like(ids)], 1)
        rows = zip(torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        return [self._sampled(*row) for row in rows]

    def _sampled(self, tokens: list[int], logprobs: list[float]) -> Sampled:
        length = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        return Sampled(
            ids=np.array(tokens[:length], np.int32),
            logprobs=np.array(logprobs[:length], np.float32),
            versions=np.full(length, self.server.version, np.int32),
            finish_reason="stop" if EOS in tokens else "length",
        )


async def play_all(
    environment: Environment, prompts: Sequence[Prompt], server: Server, max_tokens: int
) -> tuple[list[Reward], list[Trajectory]]:
    """One rollout a prompt, with its reward and its one branch."""
    template = ChatTemplate(server.tokenizer, [EOS])
    table = Table(server, max_tokens, playing=len(prompts))

    async def one(prompt: Prompt) -> tuple[Reward, Trajectory]:
        chat = TokenChat(template, table, MAX_PROMPT_TOKENS)
        try:
            reward = await environment.play(prompt, chat)
        finally:
            table.leave()
        (branch,) = chat.recording().branches
        return reward, branch

    played = await asyncio.gather(*map(one, prompts))
    return [reward for reward, _ in played], [branch for _, branch in played]


def learn_dialogues(
    environment: Environment,
    algorithm: Algorithm,
    *,
    model: str,
    max_tokens: int,
    steps: int = 24,
    prompts: int = 32,
    group_size: int = 8,
    learning_rate: float = 1.5e-4,
    seed: int = 0,
    spoil: Spoil | None = None,
) -> tuple[list[float], Server]:
    """Mean reward of each step, and the server with the weights of the end. `spoil` breaks the advantages: a control."""
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
    backend = FSDP(mixed_precision_dtype=None, gradient_checkpointing=False).build(job)
    server, random, curve = Server(seed, model), np.random.default_rng(seed), []
    published: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=LAG + 1)
    known = environment.prompts("train")
    groups = np.repeat(np.arange(prompts), group_size)
    try:
        for step in range(1, steps + 1):
            if len(published) == LAG + 1:
                server.load(*published[0])
            drawn = [known[int(index)] for index in random.integers(0, len(known), prompts) for _ in range(group_size)]
            scored, trajectories = asyncio.run(play_all(environment, drawn, server, max_tokens))
            rewards = np.array([reward.total for reward in scored])
            curve.append(float(rewards.mean()))
            advantages = algorithm.advantages(rewards, groups, group_size=group_size)
            if spoil is not None:
                advantages = spoil(advantages.reshape(prompts, group_size), random).reshape(-1)
            kept = [row for row in range(len(rewards)) if len(set(rewards[groups == groups[row]])) > 1]
            backend.train_step(shard(step, kept, trajectories, groups, advantages))
            published.append((step, dict(backend.weights())))
        server.load(*published[-1])
    finally:
        backend.close()
    return curve, server
