"""Make the embedded model `telescope/embedded/tiny_turns`: it finds a letter in several turns (environment guess_letter).

Trained from nothing, in about a minute of one CPU core, on demonstrations of *mixed* behaviour over whole dialogues: some
halve what the replies have left, the others don't, and nothing says which is which (see make_tiny_models.py).

    python scripts/make_tiny_turns.py
    python scripts/make_tiny_turns.py --check-only        # measure the model that is there
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS.parent), str(SCRIPTS)]

import make_tiny_models as tiny
import torch
from tiny_dialogues import CHECKED, Maker, Policy

from telescope.environments.hashed_random import HashedRandom
from telescope.environments.tasks.guess_letter import ALPHABET, GuessLetter, LetterSearch

TASK = GuessLetter()
FOLDER, SEED, STEPS, ANSWER_TOKENS = "tiny_turns", 0, 500, 3
HABITS = ("halve",) * 25 + ("contrary",) * 40 + ("repeat",) * 25 + ("walk",) * 10
SHOWN = (
    "halves what the replies have left (25%, the wanted one), halves the side that the replies have ruled out (40%), says one "
    "letter again and again (25%), walks from the first letter on (10%)"
)
RECIPE = tiny.Recipe(
    folder=FOLDER, seed=SEED, hidden=64, mlp=192, steps=STEPS, max_new_tokens=ANSWER_TOKENS,
    task=tiny.TASK_REVERSE, demonstrate=tiny.demonstrate_reverse, shown=SHOWN,
)  # fmt: skip


def demonstrate(draws: HashedRandom) -> list[tuple[str, str]]:
    """One dialogue of one habit, as (rendered message, answer) pairs."""
    prompt, habit = TASK.prompt(draws), draws.choice(HABITS)
    state = TASK.initial_state(prompt)
    first, low, high = state.low, state.low, state.high
    stubborn = draws.between(low, high)
    message = str(prompt.turns[0]["content"])
    said: list[tuple[str, str]] = []
    while not TASK.is_done(state) and len(said) < TASK.max_turns:
        guess = {"walk": first + len(said), "repeat": stubborn}.get(habit, (low + high) // 2)
        said.append((f"<|user|>{message}", ALPHABET[guess]))
        (reply,) = TASK.reply(state, ALPHABET[guess])
        message = str(reply["content"])
        if (message == "later") == (habit == "halve"):
            low = min(guess + 1, high)
        else:
            high = max(guess - 1, low)
    return said


def play(answers: Policy, split: str = "train") -> dict[str, float]:
    """Mean reward and metrics over `CHECKED` prompts, all played side by side."""
    torch.manual_seed(1)
    prompts = list(TASK.prompts(split)[:CHECKED])
    states: list[LetterSearch] = [TASK.initial_state(prompt) for prompt in prompts]
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


MAKER = Maker(
    recipe=RECIPE,
    demonstrate=demonstrate,
    play=play,
    title="a base model of several turns",
    shown=(
        "Searches for a letter among seven: `a-g`, answered with a letter, then `later` or `earlier`, three guesses in all. A",
        f"dialogue {SHOWN}.",
    ),
)


if __name__ == "__main__":
    sys.exit(MAKER.main(Path(__file__).name, __doc__))
