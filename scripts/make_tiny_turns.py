"""Make the embedded model `telescope/embedded/tiny_turns`: it finds a letter in several turns (environment guess_letter).

Trained from nothing, in about a minute of one CPU core, on demonstrations of *mixed* behaviour over whole dialogues: some
halve what the replies have left, the others don't, and nothing says which is which (see make_tiny_models.py).

    python scripts/make_tiny_turns.py
    python scripts/make_tiny_turns.py --check-only        # measure the model that is there
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS)]

import make_tiny_models as tiny
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from telescope.environments.draws import Draws
from telescope.environments.guess_letter import ALPHABET, GuessLetter, Search

TASK = GuessLetter()
FOLDER, SEED, STEPS, ANSWER_TOKENS, CHECKED = "tiny_turns", 0, 500, 3, 512
HABITS = ("halve",) * 20 + ("walk",) * 35 + ("contrary",) * 25 + ("repeat",) * 20
SHOWN = (
    "halves what the replies have left (20%, the wanted one), walks from the first letter on (35%), halves the side that the "
    "replies have ruled out (25%), says one letter again and again (20%)"
)
RECIPE = tiny.Recipe(
    folder=FOLDER, seed=SEED, hidden=64, mlp=192, steps=STEPS, max_new_tokens=ANSWER_TOKENS,
    task=tiny.TASK_REVERSE, demonstrate=tiny.demonstrate_reverse, shown=SHOWN,
)  # fmt: skip
Policy = Callable[[list[str]], list[str]]
"""From rendered dialogues to the next answers."""


def demonstrate(draws: Draws) -> list[tuple[str, str]]:
    """One dialogue of one habit, as (message, answer) pairs."""
    prompt, habit = TASK.prompt(draws), draws.choice(HABITS)
    state = TASK.initial_state(prompt)
    first, low, high = state.low, state.low, state.high
    stubborn = draws.between(low, high)
    said, message = [], str(prompt.turns[0]["content"])
    while not TASK.is_done(state) and len(said) < TASK.max_turns:
        guess = {"walk": first + len(said), "repeat": stubborn}.get(habit, (low + high) // 2)
        said.append((message, ALPHABET[guess]))
        (reply,) = TASK.reply(state, ALPHABET[guess])
        message = str(reply["content"])
        if (message == "later") == (habit == "halve"):
            low = min(guess + 1, high)
        else:
            high = max(guess - 1, low)
    return said


def batch(recipe: tiny.Recipe, tokenizer: PreTrainedTokenizerFast, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids [B, T] and labels [B, T] (-100 on messages and padding) of one training step."""
    draws = Draws("base", recipe.folder, recipe.seed, step)
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(tiny.BATCH):
        ids: list[int] = []
        labels: list[int] = []
        for message, answer in demonstrate(draws):
            asked = tokenizer.encode(f"<|user|>{message}<|assistant|>", add_special_tokens=False)
            told = [*tokenizer.encode(answer, add_special_tokens=False), tiny.EOS]
            ids += asked + told
            labels += [-100] * len(asked) + told
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    padded = [[*ids, *[tiny.PAD] * (width - len(ids))] for ids, _ in rows]
    wanted = [[*labels, *[-100] * (width - len(labels))] for _, labels in rows]
    return torch.tensor(padded), torch.tensor(wanted)


def policy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, sample: bool) -> Policy:
    @torch.no_grad()
    def answers(dialogues: list[str]) -> list[str]:
        encoded = tokenizer(dialogues, return_tensors="pt", padding=True, add_special_tokens=False)
        chosen = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=ANSWER_TOKENS,
            do_sample=sample,
            **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
        )
        new = chosen[:, encoded["input_ids"].shape[1] :]
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in new]

    return answers


def play(answers: Policy, split: str = "train") -> dict[str, float]:
    """Mean reward and metrics over `CHECKED` prompts, all played side by side."""
    torch.manual_seed(1)
    prompts = list(TASK.prompts(split)[:CHECKED])
    states: list[Search] = [TASK.initial_state(prompt) for prompt in prompts]
    texts = [f"<|user|>{prompt.turns[0]['content']}<|assistant|>" for prompt in prompts]
    for _ in range(TASK.max_turns):
        open_ = [at for at, state in enumerate(states) if not TASK.is_done(state)]
        for at, answer in zip(open_, answers([texts[at] for at in open_]), strict=True):
            (reply,) = TASK.reply(states[at], answer)
            texts[at] += f"{answer}<eos><|user|>{reply['content']}<|assistant|>"
    totals: dict[str, float] = {}
    for prompt, state in zip(prompts, states, strict=True):
        reward = TASK.reward(prompt, state)
        for name, value in {"reward": reward.total, **reward.metrics}.items():
            totals[name] = totals.get(name, 0.0) + value
    return {name: round(value / len(prompts), 3) for name, value in totals.items()}


def card(figures: dict[str, dict[str, float]], parameters: int) -> str:
    columns = list(next(iter(figures.values())))
    lines = [
        f"# {FOLDER}: a base model of several turns, made to be trained further",
        "",
        f"A Qwen3-shaped model of {parameters:,} parameters (fp32), with one token a character. Made by",
        f"`scripts/make_tiny_turns.py` in this repository: seed {SEED}, {STEPS} steps of {tiny.BATCH} dialogues.",
        "",
        "## What the base was shown",
        "Searches for a letter among seven: `a-g`, answered with a letter, then `later` or `earlier`, three guesses in all. A",
        f"dialogue {SHOWN}.",
        "Nothing marks the wanted habit as such. Reinforcement learning selects it from the reward of whole dialogues alone.",
        "",
        f"## The base, measured on {CHECKED} prompts with transformers' own sampling",
        f"| | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
        *(f"| {name} | " + " | ".join(f"{row[column]:.3f}" for column in columns) + " |" for name, row in figures.items()),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SCRIPTS.parent / "telescope" / "embedded")
    parser.add_argument("--check-only", action="store_true", help="measure the model that is there; train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.use_deterministic_algorithms(True)
    folder, tokenizer, before = arguments.out / FOLDER, tiny.make_tokenizer(), time.process_time()
    if arguments.check_only:
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    else:
        model = tiny.train(RECIPE, tokenizer, batch)
        tiny.save(RECIPE, model, tokenizer, folder)
    figures = {
        "sampled at temperature 1": play(policy(model, tokenizer, sample=True)),
        "greedy": play(policy(model, tokenizer, sample=False)),
    }
    print(f"{FOLDER}: {time.process_time() - before:.0f} CPU-s", figures)
    if not arguments.check_only:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        (folder / "MODEL_CARD.md").write_text(card(figures, parameters), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
