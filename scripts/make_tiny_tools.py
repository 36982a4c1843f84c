"""Make the embedded model `telescope/embedded/tiny_tools`: it half knows how to call a tool (environment look_up).

Trained from nothing, in about a minute of one CPU core, on demonstrations of *mixed* behaviour over whole dialogues: some call
the tool and repeat what it says, the others don't, and nothing says which is which (see make_tiny_models.py).

    python scripts/make_tiny_tools.py
    python scripts/make_tiny_tools.py --check-only        # measure the model that is there
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
from telescope.environments.look_up import LookUp

TASK = LookUp()
FOLDER, SEED, STEPS, ANSWER_TOKENS, CHECKED = "tiny_tools", 0, 500, 26, 512
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
Policy = Callable[[list[str]], list[str]]
"""From rendered dialogues to the next answers."""


def demonstrate(draws: Draws) -> list[tuple[str, str]]:
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


def batch(recipe: tiny.Recipe, tokenizer: PreTrainedTokenizerFast, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids [B, T] and labels [B, T] (-100 on messages and padding) of one training step."""
    draws = Draws("base", recipe.folder, recipe.seed, step)
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(tiny.BATCH):
        ids: list[int] = []
        labels: list[int] = []
        for message, answer in demonstrate(draws):
            asked = tokenizer.encode(f"{message}<|assistant|>", add_special_tokens=False)
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


def card(figures: dict[str, dict[str, float]], parameters: int) -> str:
    columns = list(next(iter(figures.values())))
    lines = [
        f"# {FOLDER}: a base model that half knows how to call a tool, made to be trained further",
        "",
        f"A Qwen3-shaped model of {parameters:,} parameters (fp32), with one token a character. Made by",
        f"`scripts/make_tiny_tools.py` in this repository: seed {SEED}, {STEPS} steps of {tiny.BATCH} dialogues.",
        "",
        "## What the base was shown",
        f"Questions such as `{TASK.prompts('train')[0].turns[0]['content']}`, whose answer is drawn anew for each prompt.",
        f"A dialogue {SHOWN}.",
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
