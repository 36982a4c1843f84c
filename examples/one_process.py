"""Reinforcement learning of a language model in one process: sample, score, compare, weigh, update.

    python examples/one_process.py --steps 20

What a run of Telescope does with servers, workers, an orchestrator and trainer ranks, one after another and in plain sight: the
model, the task, the advantages and the loss are the same; queues, packing, stale samples and weight updates are left out. Read
`train` first. It learns Countdown (`use 3 5 8 make 10` -> `5+8-3`) on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from telescope.algorithms.base import Algorithm, PackedRow
from telescope.algorithms.grpo import GRPO
from telescope.config.models import model_folder
from telescope.environments.base import Prompt
from telescope.environments.tasks.countdown import Countdown
from telescope.records import Denominators


@dataclass(frozen=True)
class Recipe:
    """The quickstart's, but for the number of steps."""

    steps: int = 20
    prompts: int = 32
    """Prompts a step; each is answered `group_size` times."""
    group_size: int = 8
    max_tokens: int = 24
    temperature: float = 1.0
    learning_rate: float = 1.5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Rollouts:
    """B answers of at most L sampled tokens. The tokens of an answer stand behind its prompt, which is padded on the left."""

    ids: Tensor  # [B, P + L] int64, prompt and answer
    attention: Tensor  # [B, P + L] int64, 0 where the prompt is padded
    sampled: Tensor  # [B, L] bool, True where the policy sampled the token: up to its end token, which counts
    texts: list[str]


def train(recipe: Recipe, algorithm: Algorithm) -> list[float]:
    """The mean reward of each step, in order."""
    torch.manual_seed(recipe.seed)
    folder = model_folder("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    task = Countdown()
    questions, order = task.prompts("train"), np.random.default_rng(recipe.seed)
    means = []
    for step in range(1, recipe.steps + 1):
        chosen = [questions[int(index)] for index in order.choice(len(questions), recipe.prompts, replace=False)]
        prompts = [prompt for prompt in chosen for _ in range(recipe.group_size)]  # a group is a prompt's answers
        rollouts = sample(model, tokenizer, prompts, recipe)
        rewards = np.array([task.reward(prompt, text).total for prompt, text in zip(prompts, rollouts.texts, strict=True)])
        groups = np.repeat(np.arange(recipe.prompts), recipe.group_size)
        advantages = algorithm.advantages(rewards, groups, group_size=recipe.group_size)
        loss = update(model, optimizer, rollouts, advantages, algorithm, recipe)
        means.append(float(rewards.mean()))
        question, answer = prompts[0].turns[-1]["content"], rollouts.texts[0]
        print(f"step {step}: reward {means[-1]:.3f}, loss {loss:+.4f}, e.g. {question} -> {answer}")
    return means


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], recipe: Recipe) -> Rollouts:
    """One answer to each prompt, drawn token by token from the policy."""
    texts = [tokenizer.apply_chat_template(list(p.turns), tokenize=False, add_generation_prompt=True) for p in prompts]
    asked = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    ids = model.generate(
        **asked,
        do_sample=True,
        temperature=recipe.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=recipe.max_tokens,
        pad_token_id=tokenizer.pad_token_id,
    )
    answers = ids[:, asked["input_ids"].shape[1] :]
    ended = (answers == tokenizer.eos_token_id).int()
    sampled = ended.cumsum(dim=1) - ended == 0  # no end token stands before it
    texts = [tokenizer.decode(answer[own], skip_special_tokens=True) for answer, own in zip(answers, sampled, strict=True)]
    attention = torch.cat([asked["attention_mask"], sampled.long()], dim=1)
    return Rollouts(ids, attention, sampled, texts)


def logprobs(model: PreTrainedModel, rollouts: Rollouts, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each sampled token and entropy of the distribution that it came from, both [B, L]; anything elsewhere."""
    length = rollouts.sampled.shape[1]
    positions = (rollouts.attention.cumsum(dim=1) - 1).clamp(min=0)
    output = model(input_ids=rollouts.ids, attention_mask=rollouts.attention, position_ids=positions, use_cache=False)
    before = output.logits[:, -length - 1 : -1] / temperature  # what is predicted at a place is the next token
    everything = before.float().log_softmax(dim=-1)
    taken = everything.gather(-1, rollouts.ids[:, -length:, None]).squeeze(-1)
    entropy = -(everything.exp() * everything).sum(dim=-1)
    return taken, entropy.detach()


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    advantages: np.ndarray,
    algorithm: Algorithm,
    recipe: Recipe,
) -> float:
    """One step of the optimiser on all rollouts. Gives the loss."""
    current, entropy = logprobs(model, rollouts, recipe.temperature)
    count, length = rollouts.sampled.shape
    tokens = rollouts.sampled.sum(dim=1)
    whose = torch.arange(count).repeat_interleave(length)
    row = PackedRow(  # all answers, one behind another
        current=current.flatten(),
        old=None,
        rollout=current.detach().flatten(),  # no update lies between sampling and training here
        mask=rollouts.sampled.flatten(),
        advantages=torch.as_tensor(advantages, dtype=torch.float32)[whose],
        segments=whose,
        sequence_tokens=tokens.float(),
        entropy=entropy.flatten(),
    )
    counts = Denominators(tokens=int(tokens.sum()), sequences=count, groups=recipe.prompts)
    loss = algorithm.loss(row, counts, max_tokens=recipe.max_tokens).loss
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
    optimizer.step()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    given = parser.parse_args()
    train(Recipe(steps=given.steps, seed=given.seed), GRPO())


if __name__ == "__main__":
    main()
