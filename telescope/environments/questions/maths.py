r"""One shape for all data sets of mathematical questions with a final answer: load, ask, compare.

Each data set is a file of its own beside this folder that says where it lies and what its columns are called. The answer is
read out of the policy's text (graders/maths.py) and compared by math-verify in a grader process; most need no algebra and are
decided at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from telescope.environments.answer_parsers import Boxed
from telescope.environments.base import Chat, KnowsTemplate, Prompt, Reward, SingleTurn, ToolSchema, Turn
from telescope.environments.graders.extraction import AnswerForm, extract_answer, extract_golden
from telescope.environments.graders.maths_grader import MATH_VERIFY, TOO_HEAVY, MathsGrader
from telescope.environments.graders.pool import GraderOverrun
from telescope.environments.graders.quantities import PercentReading
from telescope.environments.questions.dataset import DatasetSource, Instruction, Row, get_text, hold_out, make_prompts
from telescope.environments.tools.python_tool import PythonTool


class MathsQuestions(SingleTurn):
    """Reward 1 for the right final answer, else 0; `format_reward` sets a part aside for a boxed answer, right or wrong."""

    requires: ClassVar[tuple[str, ...]] = (MATH_VERIFY,)
    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"exact": (0, 1), "has_answer": (0, 1), "boxed": (0, 1)}

    dataset: str
    """Hugging Face id of the data set."""
    subsets: tuple[str, ...] = ()
    """Its configurations, one after another; empty: its only one."""
    revision: str | None = None
    """Commit or tag of the data set; null: its newest."""
    data_dir: str | None = None
    """A local copy instead: the folder as the hub has it, a folder written by save_to_disk, or one Parquet, JSON lines or CSV
    file."""
    question_field: str = "problem"
    """Column of the question; a dotted path reaches into it, and of a list of messages the last one counts."""
    answer_field: str = "answer"
    """Column of the answer; of a worked solution the boxed part counts, or what stands behind ####."""
    train_split: str = "train"
    """The data set's split that is trained on."""
    eval_split: str | None = None
    """The data set's split that is held out; null: `held_out` questions of the train split."""
    held_out: int = Field(default=256, ge=1)
    """Questions kept from training for evaluation where there is no eval_split; drawn by `seed`."""
    num_train: int | None = Field(default=None, ge=1)
    """Only the first so many questions of the train split; null: all."""
    num_eval: int | None = Field(default=None, ge=1)
    """Only the first so many questions of the eval split; null: all."""
    instruction: Instruction = "{question}\n\nThink step by step, then give the final answer within \\boxed{}."
    """The user's message; {question} is filled in."""
    system_prompt: str | None = None
    """A system message before it."""
    answer_form: AnswerForm = "boxed"
    """boxed: only a \\boxed{} answer counts; any: also #### 18, <answer> tags, "the answer is 18", or the last number."""
    percent: PercentReading = "either"
    """What 10% is: either, 10 or 0.1 as the right answer has it; hundredths, 0.1 alone; units, 10 alone."""
    number_tolerance: float = Field(default=0.0, ge=0, le=0.1)
    """How far a number that is not whole may be off, as a share of the right one; 0: a rounded number is not the exact one."""
    format_reward: float = Field(default=0.0, ge=0, lt=1)
    """Share of the reward that a boxed answer gets, right or wrong; the rest is for being right."""
    grading_limit_s: float = Field(default=5.0, gt=0, le=600)
    """Seconds of processor time that comparing one answer may take; ordinary ones take 2 to 100 ms. Beyond it an answer is
    wrong and has the tag too_heavy."""
    seed: int = 0
    """Names the draw of the questions held out."""
    tools: tuple[Literal["python"], ...] = ()
    """`[python]`: the policy may run programs before it answers (docs/tools.md); empty: one question, one answer."""
    with_tools: PythonTool = PythonTool()
    """The dialogue then: turns, call format, the sandbox of the programs and their limits."""

    async def set_up(self) -> None:
        if self.tools:
            await self._dialogue.set_up()

    async def tear_down(self) -> None:
        if self.tools:
            await self._dialogue.tear_down()

    async def play(self, prompt: Prompt, chat: Chat) -> Reward:
        return await (self._dialogue.play(prompt, chat) if self.tools else super().play(prompt, chat))

    def right_answer(self, prompt: Prompt) -> str:
        return Boxed().wrap(prompt.answer)  # which every `answer_form` reads

    def first_request(self, prompt: Prompt, template: KnowsTemplate) -> tuple[Sequence[Turn], Sequence[ToolSchema]]:
        return self._dialogue.first_request(prompt, template) if self.tools else super().first_request(prompt, template)

    @cached_property
    def _dialogue(self) -> PythonTool:
        return self.with_tools.with_score(self.reward)

    def check_data(self) -> None:
        self._source.check(self.train_split, self.eval_split)

    def prompts(self, split: str) -> Sequence[Prompt]:
        prompts = self._train_and_eval[split]
        limit = {"train": self.num_train, "eval": self.num_eval}[split]
        return prompts if limit is None else prompts[:limit]

    async def reward(self, prompt: Prompt, answer: str) -> Reward:
        given = extract_answer(answer, self.answer_form)
        exact, tags = False, tuple[str, ...]()
        if given is not None:
            try:
                exact = await self._grader.is_right(prompt.answer, given)
            except GraderOverrun:  # the expected answer is easy, so this one is to blame
                tags = (TOO_HEAVY,)
        boxed = extract_answer(answer, "boxed") is not None
        total = (1 - self.format_reward) * exact + self.format_reward * boxed
        metrics = {"exact": float(exact), "has_answer": float(given is not None), "boxed": float(boxed)}
        return Reward(total, metrics, golden_answers=(prompt.answer,), tags=tags, info={"parsed_answer": given})

    @property
    def _source(self) -> DatasetSource:
        return DatasetSource(self.dataset, self.subsets, self.revision, self.data_dir)

    @cached_property
    def _grader(self) -> MathsGrader:
        return MathsGrader(self.percent, self.number_tolerance, self.grading_limit_s)

    @cached_property
    def _train_and_eval(self) -> dict[str, tuple[Prompt, ...]]:
        train = self._load_prompts(self.train_split)
        if self.eval_split is not None:
            same = self.eval_split == self.train_split
            return {"train": train, "eval": train if same else self._load_prompts(self.eval_split)}
        rest, held_out = hold_out(train, self.held_out, "held out", self.seed)
        return {"train": tuple(rest), "eval": tuple(held_out)}

    def _load_prompts(self, split: str) -> tuple[Prompt, ...]:
        rows = self._source.rows(split, [self.question_field, self.answer_field])
        return make_prompts(self.dataset, split, rows, self._prompt)

    def _prompt(self, row: Row) -> Prompt | None:
        answer = extract_golden(get_text(row, self.answer_field))
        asked = get_text(row, self.question_field).strip()
        if not asked or not answer:
            return None
        question = self.instruction.replace("{question}", asked)
        system: tuple[Turn, ...] = ({"role": "system", "content": self.system_prompt},) if self.system_prompt else ()
        return Prompt(turns=(*system, {"role": "user", "content": question}), answer=answer)
