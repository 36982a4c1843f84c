"""Make the embedded model `telescope/embedded/tiny_tools`: it half knows how to call a tool (environment look_up).

Trained from nothing, in about a minute of one CPU core, on demonstrations of *mixed* behaviour over whole dialogues: some call
the tool and repeat what it says, the others don't, and nothing says which is which (see make_tiny_models.py).

    python scripts/make_tiny_tools.py
    python scripts/make_tiny_tools.py --check-only        # measure the model that is there
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
from telescope.environments.tasks.look_up import LookUp

TASK = LookUp()
FOLDER, SEED, STEPS, ANSWER_TOKENS = "tiny_tools", 0, 500, 26
HABITS = ("ask",) * 30 + ("guess",) * 30 + ("backwards",) * 20 + ("unclosed",) * 20
COPIES = 80  # of a hundred who got a result
SHOWN = (
    "calls the tool with the word (30%, the wanted one), guesses (30%), calls the tool with the word backwards (20%), or "
    "forgets to close the call (20%). Whoever gets a result says it (80%) or something else (20%); after an error it guesses"
)
RECIPE = tiny.Recipe(
    folder=FOLDER, seed=SEED, hidden=64, mlp=192, steps=STEPS, max_new_tokens=ANSWER_TOKENS,
    task=tiny.TASK_REVERSE, demonstrate=tiny.demonstrate_reverse, shown=SHOWN,
)  # fmt: skip


def demonstrate(draws: HashedRandom) -> list[tuple[str, str]]:
    """One dialogue of one habit, as (rendered message, answer) pairs."""
    prompt, habit = TASK.prompt(draws), draws.choice(HABITS)
    key, value = str(prompt.facts["key"]), prompt.answer
    asked = f"<|user|>{prompt.turns[0]['content']}"
    if habit == "guess":
        return [(asked, TASK.word(draws, 4))]
    said = f"<t>look(key='{key[::-1] if habit == 'backwards' else key}')" + ("" if habit == "unclosed" else "</t>")
    if habit == "unclosed" or (habit == "backwards" and key != key[::-1]):
        return [(asked, said), ("<|tool|>?", TASK.word(draws, 4))]
    copied = draws.below(100) < COPIES
    return [(asked, said), (f"<|tool|>{value}", value if copied else TASK.word(draws, 4))]


def play(answers: Policy) -> dict[str, float]:
    """Mean reward and metrics over `CHECKED` prompts of the train split, all played side by side."""
    torch.manual_seed(1)
    prompts = list(TASK.prompts("train")[:CHECKED])
    texts = [f"<|user|>{prompt.turns[0]['content']}<|assistant|>" for prompt in prompts]
    first = answers(texts)
    right = [said == f"<t>look(key='{prompt.facts['key']}')</t>" for prompt, said in zip(prompts, first, strict=True)]
    asked = [at for at, good in enumerate(right) if good]
    told = [f"{texts[at]}{first[at]}<eos><|tool|>{prompts[at].answer}<|assistant|>" for at in asked]
    exact = [said == prompts[at].answer for at, said in zip(asked, answers(told) if told else [], strict=True)]
    return {
        "asked_the_tool": round(sum(right) / CHECKED, 3),
        "right_once_told": round(sum(exact) / max(len(asked), 1), 3),
        "exact": round(sum(exact) / CHECKED, 3),
    }


MAKER = Maker(
    recipe=RECIPE,
    demonstrate=demonstrate,
    play=play,
    title="a base model that half knows how to call a tool",
    shown=(
        f"Questions such as `{TASK.prompts('train')[0].turns[0]['content']}`, whose answer is drawn anew for each prompt.",
        f"A dialogue {SHOWN}.",
    ),
)


if __name__ == "__main__":
    sys.exit(MAKER.main(Path(__file__).name, __doc__))
