"""What the scripts of embedded models with dialogues share: batches, a policy, the card, the command."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import make_tiny_models as tiny
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from telescope.environments.hashed_random import HashedRandom

CHECKED = 512
"""Prompts on which a model is measured."""
NOTHING_MARKED = (
    "Nothing marks the wanted habit as such. Reinforcement learning selects it from the reward of whole dialogues alone."
)
EMBEDDED = Path(__file__).resolve().parent.parent / "telescope" / "embedded"
Dialogue = Sequence[tuple[str, str]]
"""(rendered message, answer) pairs."""
Policy = Callable[[list[str]], list[str]]
"""From rendered dialogues to the next answers."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Maker:
    """One model: how it is shown dialogues, how it is measured, and what its card says of both."""

    recipe: tiny.Recipe
    demonstrate: Callable[[HashedRandom], Dialogue]
    play: Callable[[Policy], Figures]
    title: str
    shown: Sequence[str]
    """Lines of the card."""

    def batch(self, recipe: tiny.Recipe, tokenizer: PreTrainedTokenizerFast, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Padded ids [B, T] and labels [B, T] (-100 on messages and padding) of one training step."""
        draws = HashedRandom("base", recipe.folder, recipe.seed, step)
        rows: list[tuple[list[int], list[int]]] = []
        for _ in range(tiny.BATCH):
            ids: list[int] = []
            labels: list[int] = []
            for message, answer in self.demonstrate(draws):
                asked = tokenizer.encode(f"{message}<|assistant|>", add_special_tokens=False)
                told = [*tokenizer.encode(answer, add_special_tokens=False), tiny.EOS]
                ids += asked + told
                labels += [-100] * len(asked) + told
            rows.append((ids, labels))
        width = max(len(ids) for ids, _ in rows)
        padded = [[*ids, *[tiny.PAD] * (width - len(ids))] for ids, _ in rows]
        wanted = [[*labels, *[-100] * (width - len(labels))] for _, labels in rows]
        return torch.tensor(padded), torch.tensor(wanted)

    def policy(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, sample: bool) -> Policy:
        @torch.no_grad()
        def answers(dialogues: list[str]) -> list[str]:
            encoded = tokenizer(dialogues, return_tensors="pt", padding=True, add_special_tokens=False)
            chosen = model.generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                max_new_tokens=self.recipe.max_new_tokens,
                do_sample=sample,
                **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
            )
            new = chosen[:, encoded["input_ids"].shape[1] :]
            return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in new]

        return answers

    def card(self, script: str, figures: dict[str, Figures], parameters: int) -> str:
        recipe, columns = self.recipe, list(next(iter(figures.values())))
        lines = [
            f"# {recipe.folder}: {self.title}, made to be trained further",
            "",
            f"A Qwen3-shaped model of {parameters:,} parameters (fp32), with one token a character. Made by",
            f"`scripts/{script}` in this repository: seed {recipe.seed}, {recipe.steps} steps of {tiny.BATCH} dialogues.",
            "",
            "## What the base was shown",
            *self.shown,
            NOTHING_MARKED,
            "",
            f"## The base, measured on {CHECKED} prompts with transformers' own sampling",
            f"| | {' | '.join(columns)} |",
            "|---|" + "---|" * len(columns),
            *(f"| {name} | " + " | ".join(f"{row[column]:.3f}" for column in columns) + " |" for name, row in figures.items()),
            "",
        ]
        return "\n".join(lines)

    def main(self, script: str, description: str | None) -> int:
        """Train, save, measure and write the card; or only measure."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--out", type=Path, default=EMBEDDED)
        parser.add_argument("--check-only", action="store_true", help="measure the model that is there; train nothing")
        arguments = parser.parse_args()
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.use_deterministic_algorithms(True)
        folder, tokenizer, before = arguments.out / self.recipe.folder, tiny.make_tokenizer(), time.process_time()
        if arguments.check_only:
            model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        else:
            model = tiny.train(self.recipe, tokenizer, self.batch)
            tiny.save(self.recipe, model, tokenizer, folder)
        figures = {
            "sampled at temperature 1": self.play(self.policy(model, tokenizer, sample=True)),
            "greedy": self.play(self.policy(model, tokenizer, sample=False)),
        }
        print(f"{self.recipe.folder}: {time.process_time() - before:.0f} CPU-s", figures)
        if not arguments.check_only:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            (folder / "MODEL_CARD.md").write_text(self.card(script, figures, parameters), encoding="utf-8")
        return 0
