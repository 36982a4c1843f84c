"""GPQA-Diamond: 198 multiple-choice questions of biology, physics and chemistry that experts find hard (CC BY 4.0).

A benchmark: what was trained on it measures nothing on it. Its authors ask that its questions not be put in plain text
anywhere, and the hub asks for consent before it gives them (HF_TOKEN).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from pydantic import Field, field_validator

from telescope.environments.answer_parsers import Boxed
from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.graders.letters import LETTERS as LETTERS
from telescope.environments.graders.letters import find_letter as find_letter
from telescope.environments.hashed_random import HashedRandom
from telescope.environments.questions.dataset import DatasetSource, Row, get_text
from telescope.environments.questions.rows import NoRows, find_place

COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


class GpqaDiamond(SingleTurn):
    """Reward 1 for the letter of the right option, else 0. The options of a question stand in an order drawn by `seed`."""

    reward_in_thread: ClassVar[bool] = False
    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"exact": (0, 1), "has_answer": (0, 1)}

    dataset: str = "Idavidrein/gpqa"
    """Hugging Face id of the data set."""
    subset: str = "gpqa_diamond"
    """Its configuration; gpqa_main and gpqa_extended hold more questions."""
    revision: str | None = None
    """Commit or tag of the data set; null: its newest."""
    data_dir: str | None = None
    """A local copy instead: the folder as the hub has it, or its CSV file."""
    instruction: str = (
        "{question}\n\n{options}\n\nThink step by step, then give the letter of the right option within \\boxed{}."
    )
    """The user's message; {question} and {options} are filled in."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Only the first so many questions; null: all."""
    seed: int = 0
    """Names the draw of the order of options."""

    @field_validator("instruction")
    @classmethod
    def _instruction_asks(cls, instruction: str) -> str:
        for part in ("{question}", "{options}"):
            if part not in instruction:
                raise ValueError(f"instruction={instruction!r} must contain {part}")
        return instruction

    def check_data(self) -> None:
        self._source.check("train")

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The same for both splits, because there are no other questions."""
        return self._prompts

    def right_answer(self, prompt: Prompt) -> str:
        return Boxed().wrap(prompt.answer)

    def reward(self, prompt: Prompt, answer: str) -> Reward:
        letter = find_letter(answer)
        exact = letter == prompt.answer
        metrics = {"exact": float(exact), "has_answer": float(letter is not None)}
        return Reward(float(exact), metrics, golden_answers=(prompt.answer,), info={"parsed_answer": letter})

    @cached_property
    def _prompts(self) -> tuple[Prompt, ...]:
        rows = self._source.rows("train", COLUMNS)
        return tuple(self._prompt(row, index) for index, row in enumerate(rows[: self.num_prompts]))

    @property
    def _source(self) -> DatasetSource:
        return DatasetSource(self.dataset, (self.subset,), self.revision, self.data_dir)

    def _prompt(self, row: Row, index: int) -> Prompt:
        texts = {column: get_text(row, column).strip() for column in COLUMNS}
        if missing := [column for column, text in texts.items() if not text]:
            raise NoRows(f"{find_place(row)}: column {missing[0]!r} is empty: mend the row or take it out")
        question, *options = texts.values()
        order = HashedRandom("gpqa", self.seed, index).shuffled(range(4))
        shown = "\n".join(f"{letter}) {options[at]}" for letter, at in zip(LETTERS, order, strict=True))
        content = self.instruction.replace("{options}", shown).replace("{question}", question)
        return Prompt(turns=({"role": "user", "content": content},), answer=LETTERS[order.index(0)])
