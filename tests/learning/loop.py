"""A whole training run in one process: the product's algorithms, batching, packing and trainer; only the server is replaced,
by transformers' model drawing tokens itself. Samples come from weights some versions old, as in the asynchronous system.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope.algorithms.base import Algorithm
from telescope.backends.base import Backend, Job, TrainShard, World
from telescope.backends.fsdp import FSDP
from telescope.config.models import model_source
from telescope.config.sections import ModelSettings, TrainerSettings
from telescope.environments.tasks.reverse_letters import ReverseLetters
from telescope.maths.minibatches import denominators
from telescope.records import TrainItem, Trajectory

MODEL = "tiny_reverse"
STEPS, PROMPTS, GROUP_SIZE, MAX_TOKENS, LAG = 24, 32, 8, 10, 2
PAD, EOS = 0, 1

Spoil = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # advantages [groups, G] to advantages, for controls


@dataclass
class Curve:
    """What a run showed, step by step. `exact` is measured on what the server sampled."""

    exact: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def end(self) -> float:
        """Share of exact answers over steps 17 to 24."""
        return float(np.mean(self.exact[16:24]))

    def gain(self) -> float:
        return self.end() - float(np.mean(self.exact[:3]))

    def largest(self, name: str) -> float:
        return max(metrics[name] for metrics in self.metrics)


class Server:
    """Samples completions, and knows which version of the weights it holds."""

    def __init__(self, seed: int, model: str = MODEL) -> None:
        source = model_source(model)
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        self.version = 0
        self.random = torch.Generator().manual_seed(seed)

    def load(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.version = version

    @torch.no_grad()
    def sample(self, texts: list[list[dict[str, str]]]) -> list[Trajectory]:
        """One completion a prompt at temperature 1, with the log-prob of each sampled token."""
        prompts = [self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False) for turns in texts]
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        tokens, logprobs = self.decode(ids, seen, MAX_TOKENS)
        return [
            self._trajectory(prompt, *row) for prompt, *row in zip(prompts, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    @torch.no_grad()
    def decode(self, ids: torch.Tensor, seen: torch.Tensor, max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probs [rows, max_tokens] behind left-padded prompts `ids` [rows, T]; `seen` is 0 on the padding."""
        tokens, logprobs = [], []
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        cache = None
        for _ in range(max_tokens):
            out = self.model(input_ids=ids, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True)
            distribution = out.logits[:, -1].log_softmax(-1)
            ids = distribution.exp().multinomial(1, generator=self.random)
            tokens.append(ids)
            logprobs.append(distribution.gather(1, ids))
            cache, positions = out.past_key_values, positions[:, -1:] + 1
            seen = torch.cat([seen, torch.ones_like(ids)], 1)
        return torch.cat(tokens, 1), torch.cat(logprobs, 1)

    def _trajectory(self, prompt: list[int], tokens: list[int], logprobs: list[float]) -> Trajectory:
        length = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        return Trajectory(
            ids=np.array([*prompt, *tokens[:length]], np.int32),
            mask=np.array([0] * len(prompt) + [1] * length, np.uint8),
            logprobs=np.array([np.nan] * len(prompt) + logprobs[:length], np.float32),
            versions=np.array([-1] * len(prompt) + [self.version] * length, np.int32),
        )

    def answer(self, trajectory: Trajectory) -> str:
        text: str = self.tokenizer.decode(trajectory.ids[trajectory.mask == 1], skip_special_tokens=True)
        return text


def learn(algorithm: Algorithm, *, seed: int = 0, spoil: Spoil | None = None, sync: bool = True) -> Curve:
    """Train for `STEPS` steps. `spoil` breaks the advantages and `sync=False` the weight updates: negative controls."""
    trainer = TrainerSettings(learning_rate=1.5e-4, betas=(0.9, 0.95), seq_len=2048)
    job = Job(
        algorithm=algorithm,
        model=ModelSettings(name=MODEL),
        trainer=trainer,
        number_of_steps=STEPS,
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        seed=seed,
        world=World(rank=0, size=1, device="cpu"),
    )
    backend = FSDP(mixed_precision_dtype=None, gradient_checkpointing=False).build(job)
    try:
        return _steps(backend, algorithm, seed, spoil, sync)
    finally:
        backend.close()


def _steps(backend: Backend, algorithm: Algorithm, seed: int, spoil: Spoil | None, sync: bool) -> Curve:
    server, curve, random = Server(seed), Curve(), np.random.default_rng(seed)
    prompts = ReverseLetters().prompts("train")
    published: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=LAG + 1)
    for step in range(1, STEPS + 1):
        if sync and len(published) == LAG + 1:
            server.load(*published[0])
        drawn = [prompts[int(index)] for index in random.integers(0, len(prompts), PROMPTS) for _ in range(GROUP_SIZE)]
        trajectories = server.sample([[dict(turn) for turn in prompt.turns] for prompt in drawn])
        answers = [server.answer(trajectory) for trajectory in trajectories]
        rewards = np.array([ReverseLetters().reward(*pair).total for pair in zip(drawn, answers, strict=True)])
        curve.exact.append(float(rewards.mean()))
        groups = np.repeat(np.arange(PROMPTS), GROUP_SIZE)
        advantages = algorithm.advantages(rewards, groups, group_size=GROUP_SIZE)
        if spoil is not None:
            advantages = spoil(advantages.reshape(PROMPTS, GROUP_SIZE), random).reshape(-1)
        kept = [row for row in range(len(rewards)) if len(set(rewards[groups == groups[row]])) > 1]
        curve.metrics.append(backend.train_step(shard(step, kept, trajectories, groups, advantages)).metrics)
        published.append((step, dict(backend.weights())))
    return curve


def shard(step: int, kept: list[int], trajectories: list[Trajectory], groups: np.ndarray, advantages: np.ndarray) -> TrainShard:
    """The whole step on one rank."""
    chosen = [trajectories[row] for row in kept]
    items = tuple(
        TrainItem(
            rollout_id=row,
            group_id=int(groups[row]),
            sequence=sequence,
            length=len(trajectory.ids),
            advantage=float(advantages[row]),
            sequence_tokens=trajectory.trained_tokens,
            temperature=1.0,
        )
        for sequence, (row, trajectory) in enumerate(zip(kept, chosen, strict=True))
    )
    return TrainShard(
        step=step,
        items=items,
        ids=np.concatenate([each.ids for each in chosen]),
        mask=np.concatenate([each.mask for each in chosen]),
        logprobs=np.concatenate([each.logprobs for each in chosen]),
        versions=np.concatenate([each.versions for each in chosen]),
        denominators=(denominators([item.sequence_tokens for item in items], [item.group_id for item in items]),),
    )
