"""Questions of your own: a JSON, CSV or Parquet file, or a data set of the hub, scored without a line of Python.

    path ─rows─▶ messages and right answers ─hash of the messages─▶ train, eval
    answer ─answer_form─▶ what counts of it ─scoring─▶ reward 0 to 1

Owns the settings and what is scored by which of them. Rows are read by telescope/environments/questions, which also finds what
counts of an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, PrivateAttr, field_validator, model_validator

from telescope.config.plugins import lacking, load_function, split_function
from telescope.environments.answer_parsers import AnswerParser
from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.failures import GraderError
from telescope.environments.graders.extraction import extract_golden
from telescope.environments.graders.maths import Conventions, compare_exactly
from telescope.environments.graders.maths_grader import MATH_VERIFY, TOO_HEAVY, MathsGrader
from telescope.environments.graders.pool import GraderOverrun, grade
from telescope.environments.graders.quantities import PercentReading
from telescope.environments.identity import identify_question
from telescope.environments.judge import Judge, JudgeSettings
from telescope.environments.questions.answers import (
    AnswerPlace,
    Scoring,
    find_pattern_mistake,
    is_number,
    is_same_number,
    is_same_text,
    make_parser,
    make_pattern,
    search_pattern,
    wrap_answer,
)
from telescope.environments.questions.chats import read_answers, read_turns
from telescope.environments.questions.dataset import (
    SUFFIXES,
    DatasetSource,
    Instruction,
    Row,
    get_text,
    get_value,
    hold_out,
    make_prompts,
)
from telescope.environments.questions.rows import NoRows, find_place, show
from telescope.environments.rubric import Rubric

_log = logging.getLogger(__name__)

FUNCTION = "score"
"""The name of a function that is given as a file alone."""
MOST_HELD_OUT = 256
AGREES = (
    "Does the answer say the same as the right answer? Other words and another form are fine; something else, or both of two "
    "answers, is not."
)
ONLY_FOR: Mapping[str, tuple[Scoring, ...]] = {
    "ignore_case": ("exact", "regex"),
    "percent": ("number", "math"),
    "number_tolerance": ("number", "math"),
    "pattern": ("regex",),
    "function": ("function",),
    "judge": ("judge",),
    "judge_question": ("judge",),
    "judge_points": ("judge",),
}
"""Settings that only some scorings look at."""


class Questions(SingleTurn):
    """Reward 1 for a right answer, else 0; what a function or a judge says, where one scores."""

    checked_apart: ClassVar[bool] = True
    no_eval_with: ClassVar[Mapping[str, Any]] = {"held_out": 0}
    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"has_answer": (0, 1)}

    path: str = ""
    """A JSON lines, JSON, CSV or Parquet file, a folder with such files, or the id of a data set on the Hugging Face hub."""
    eval_path: str | None = None
    """Another one for the eval split; null: see `eval_split`."""
    subsets: tuple[str, ...] = ()
    """Configurations of a data set with several, one after another; empty: its only one."""
    revision: str | None = None
    """Commit or tag of a data set on the hub; null: its newest."""
    train_split: str = "train"
    """The split that is trained on, of a folder whose files name splits or of a data set on the hub."""
    eval_split: str | None = None
    """The split that is held out; null: `held_out` questions of those that are trained on."""
    question_field: str = "question"
    """Column of the question: a text, or a list of messages. A dotted path reaches into a column."""
    answer_field: str | None = "answer"
    """Column of the right answer, or of a list of answers that are right; the question's, where a list of messages ends with
    it; null: there is none."""
    system_field: str | None = None
    """Column of a system message; where it is empty, `system_prompt` counts."""
    facts_fields: tuple[str, ...] = ()
    """Further columns, which a function gets in `facts`."""
    instruction: Instruction = "{question}"
    """The user's message; {question} is filled in."""
    system_prompt: str | None = None
    """A system message before it; null: none."""
    held_out: int | None = Field(default=None, ge=0)
    """Questions kept from training for evaluation, by a hash of each; null: a tenth, 256 at most; 0: none."""
    num_train: int | None = Field(default=None, ge=1)
    """Only the first so many questions of the train split; null: all."""
    num_eval: int | None = Field(default=None, ge=1)
    """Only the first so many questions of the eval split; null: all."""
    seed: int = 0
    """Names the draw of the questions held out."""
    scoring: Scoring = "exact"
    """exact: the same text; number: the same number; math: the same formula (math-verify); regex: `pattern` is found; function:
    one of yours; judge: another model."""
    answer_form: AnswerPlace | None = None
    """What counts of the answer, behind any thought. whole: all; boxed: \\boxed{}; tag: <answer> tags; any: also behind ####,
    "the answer is 18", or the last number. null: any for number and math, else whole."""
    ignore_case: bool = False
    """Whether capitals do not matter to exact and regex."""
    percent: PercentReading = "either"
    """What 10% is: either, 10 or 0.1 as the right answer has it; hundredths, 0.1 alone; units, 10 alone."""
    number_tolerance: float = Field(default=0.0, ge=0, le=0.1)
    """How far a number that is not whole may be off, as a share of the right one; 0: a rounded number is not the exact one."""
    pattern: str | None = None
    """Regular expression that a right answer holds; {answer} in it is the row's right answer. null: the row's is the
    pattern."""
    function: str | None = None
    """Python function that scores: `score.py`, or `score.py:name` for one that is not called score."""
    judge: JudgeSettings | None = None
    """The model that judges, e.g. `{base_url: …, model: …}`."""
    judge_question: str | None = None
    """What the judge is asked; null: whether the answer says the same as the right one."""
    judge_points: int | None = Field(default=None, ge=1, le=100)
    """The judge gives 0 to so many points, of which the reward is the share; null: it says yes or no."""
    grading_limit_s: float = Field(default=5.0, gt=0, le=600)
    """Seconds of processor time that math and regex may take for one answer. Beyond it the answer is wrong and has the tag
    too_heavy."""

    _judge: Judge | None = PrivateAttr(default=None)

    @field_validator("path", "eval_path")
    @classmethod
    def _find_from_anywhere(cls, path: str | None) -> str | None:
        """What lies here, or can't be on the hub, from the root on: every process then finds it."""
        if not path:
            return path
        place = Path(path).expanduser()
        local = path.startswith((".", "~")) or path.endswith(SUFFIXES) or place.exists()
        return str(place.absolute()) if local else path

    @field_validator("function")
    @classmethod
    def _find_function_from_anywhere(cls, function: str | None) -> str | None:
        return ":".join(map(str, split_function(function, FUNCTION))) if function else function

    @model_validator(mode="after")
    def _settings_fit(self) -> Questions:
        for name, scorings in ONLY_FOR.items():
            if self.scoring not in scorings and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no use with scoring={self.scoring}: it is for {' and '.join(scorings)}")
        for name in ("function", "judge"):
            if self.scoring == name and getattr(self, name) is None:
                raise ValueError(f"scoring={name} needs {name}")
        if self.needs_answer and self.answer_field is None:
            alone = {"regex": " without {answer} in a pattern", "judge": " without judge_question"}.get(self.scoring, "")
            raise ValueError(f"scoring={self.scoring}{alone} compares with right answers: answer_field names their column")
        if self.pattern and (mistake := find_pattern_mistake(self.pattern.replace("{answer}", "x"))):
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {mistake}")
        if "right_answers" in self.facts_fields:
            raise ValueError(
                "facts_fields=[right_answers] is the name by which facts have the right answers: call the column so"
            )
        if self.held_out is not None and (other := "eval_path" if self.eval_path else "eval_split" if self.eval_split else ""):
            raise ValueError(f"held_out={self.held_out} has no use with {other}, which says what is held out: leave one out")
        return self

    @property
    def needs_answer(self) -> bool:
        """Whether a row without a right answer could not be scored."""
        if self.scoring == "regex":
            return not self.pattern or "{answer}" in self.pattern
        return self.scoring in ("exact", "number", "math") or (self.scoring == "judge" and self.judge_question is None)

    @property
    def place(self) -> AnswerPlace:
        """`answer_form`, with its default."""
        return self.answer_form or ("any" if self.scoring in ("number", "math") else "whole")

    async def set_up(self) -> None:
        if self.judge is not None:
            self._judge = Judge(self.judge)

    async def tear_down(self) -> None:
        if self._judge is not None:
            await self._judge.close()

    def check_data(self) -> None:
        """All rows, of data sets that lie here."""
        self._check_scoring()
        sources = [self._source(self.path, "path"), *([self._source(self.eval_path, "eval_path")] if self.eval_path else [])]
        for source in sources:
            source.check()
        if all(source.data_dir is not None for source in sources):
            _ = self._train_and_eval

    def prompts(self, split: str) -> Sequence[Prompt]:
        self._check_scoring()
        limit = {"train": self.num_train, "eval": self.num_eval}[split]
        return self._train_and_eval[split][:limit]

    def right_answer(self, prompt: Prompt) -> str:
        if not prompt.answer or (self.scoring == "regex" and not self.pattern):
            return ""
        return wrap_answer(prompt.answer, self.place)

    async def reward(self, prompt: Prompt, answer: str) -> Reward:
        given = self._parser.parse(answer) or None
        has_answer = {"has_answer": float(given is not None)}
        golden = tuple(prompt.facts["right_answers"])
        if self.scoring == "function":
            scored = await self._rubric.reward(prompt=prompt, completion=answer)
            return Reward(scored.total, {**scored.metrics, **has_answer}, golden_answers=scored.golden_answers or golden)
        value, tags = 0.0, tuple[str, ...]()
        if given is not None:
            try:
                value = await self._ask_judge(prompt, given) if self.scoring == "judge" else await self._compare(golden, given)
            except GraderOverrun:  # the right answers are easy, so this one is to blame
                tags = (TOO_HEAVY,)
        name = "judged" if self.scoring == "judge" else "exact"
        return Reward(value, {name: value, **has_answer}, golden_answers=golden, tags=tags, info={"parsed_answer": given})

    async def _compare(self, golden: Sequence[str], given: str) -> float:
        """1 where the answer is one of the right ones. Raises `GraderOverrun` where it is none of those that could be asked."""
        conventions = Conventions(self.percent, self.number_tolerance)
        if self.scoring == "math":
            if any(compare_exactly(one, given, conventions) for one in golden):
                return 1.0
            return await _find_any(self._maths.is_right(one, given) for one in golden)
        if self.scoring == "regex":
            patterns = dict.fromkeys(make_pattern(self.pattern or "", one) for one in golden or ("",))
            return await _find_any(
                grade(search_pattern, pattern, given, self.ignore_case, limit_s=self.grading_limit_s) for pattern in patterns
            )
        if self.scoring == "number":
            return float(any(is_same_number(one, given, conventions) for one in golden))
        return float(any(is_same_text(one, given, self.ignore_case) for one in golden))

    async def _ask_judge(self, prompt: Prompt, given: str) -> float:
        """Raises `GraderError`."""
        if self._judge is None:
            raise GraderError("the environment was not set up: its judge is not there")
        right = prompt.facts["right_answers"]
        texts = {
            "task": str(next(turn["content"] for turn in reversed(prompt.turns) if turn["role"] == "user")),
            **({"right_answer": "\nor: ".join(right)} if right else {}),
            "answer": given,
        }
        question = self.judge_question or AGREES
        if self.judge_points is None:
            return float(await self._judge.yes_or_no(question, **texts))
        return await self._judge.rate(question, 0, self.judge_points, **texts) / self.judge_points

    @cached_property
    def _parser(self) -> AnswerParser:
        return make_parser(self.place)

    @cached_property
    def _maths(self) -> MathsGrader:
        return MathsGrader(self.percent, self.number_tolerance, self.grading_limit_s)

    @cached_property
    def _rubric(self) -> Rubric:
        return Rubric(parser=self._parser).add(load_function(self.function or "", FUNCTION), name=FUNCTION)

    def _check_scoring(self) -> None:
        """Raise what is absent for it."""
        if not self.path:
            raise ValueError("path is empty: name your file, a folder, or a data set of the Hugging Face hub")
        if self.scoring == "function":
            _ = self._rubric
        if self.scoring == "math" and lacking((MATH_VERIFY,), "scoring=math"):
            raise ValueError(f"scoring=math needs what is not installed: python -m pip install '{MATH_VERIFY}'")

    def _source(self, path: str, setting: str) -> DatasetSource:
        if Path(path).is_absolute():
            return DatasetSource(path, self.subsets, None, path, setting)
        return DatasetSource(path, self.subsets, self.revision, None, setting)

    @cached_property
    def _train_and_eval(self) -> dict[str, tuple[Prompt, ...]]:
        """By split; no question is in both."""
        self._refuse_unread()
        one_file = Path(self.path).is_file()
        whole = self._load(self._source(self.path, "path"), None if one_file else self.train_split)
        if self.eval_path is not None:
            source = self._source(self.eval_path, "eval_path")
            held_out = self._load(source, None if Path(self.eval_path).is_file() else self.eval_split or "test")
        elif self.eval_split is not None and one_file:
            raise ValueError(
                f"eval_split={self.eval_split} has no use: path={self.path!r} is one file; set eval_path or held_out"
            )
        elif self.eval_split is not None:
            held_out = self._load(self._source(self.path, "path"), self.eval_split)
        else:
            count = max(1, min(MOST_HELD_OUT, len(whole) // 10)) if self.held_out is None else self.held_out
            try:
                train, drawn = hold_out(whole, count, "held out", self.seed, identity=identify_question)
            except NoRows as error:
                if self.held_out is not None:
                    raise
                different = len(set(map(identify_question, whole)))
                raise NoRows(
                    f"{self.path} has {different} different questions, too few to hold some out for evals and train on the "
                    "rest: give more, or set held_out=0 or eval_path"
                ) from error
            return {"train": tuple(train), "eval": tuple(drawn)}
        return {"train": self._leave_out(whole, held_out), "eval": held_out}

    def _refuse_unread(self) -> None:
        """Raise for a setting that chooses among what these files have none of."""
        paths = [path for path in (self.path, self.eval_path) if path]
        files, local = all(Path(path).is_file() for path in paths), all(Path(path).is_absolute() for path in paths)
        unread = {
            "train_split": (Path(self.path).is_file(), f"path={self.path!r} is one file"),
            "subsets": (files, f"{' and '.join(map(repr, paths))}: one file has none"),
            "revision": (local, f"{' and '.join(map(repr, paths))}: what lies here has none"),
        }
        for name, (useless, why) in unread.items():
            value = getattr(self, name)
            if useless and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value} has no use: {why}; leave it out")
        if self.eval_split is not None and self.eval_path is not None and Path(self.eval_path).is_file():
            raise ValueError(f"eval_split={self.eval_split} has no use: eval_path={self.eval_path!r} is one file; leave it out")

    def _leave_out(self, whole: Sequence[Prompt], held_out: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """The questions to train on without those that are held out. Raises `NoRows` where none is left."""
        names = {identify_question(prompt) for prompt in held_out}
        rest = tuple(prompt for prompt in whole if identify_question(prompt) not in names)
        if not rest:
            raise NoRows(
                f"all {len(whole)} questions of the train split are in the eval split too: name another eval_path or eval_split"
            )
        if len(rest) < len(whole):
            _log.warning(
                "%s: %d of %d questions of the train split are in the eval split too, and are not trained on",
                self.path,
                len(whole) - len(rest),
                len(whole),
            )
        return rest

    def _load(self, source: DatasetSource, split: str | None) -> tuple[Prompt, ...]:
        wanted = [name for name in (self.question_field, self.answer_field) if name]
        others = [*([self.system_field] if self.system_field else []), *self.facts_fields]
        try:
            rows = source.rows(split, [*wanted, *others], wanted)
        except NoRows as error:
            if (
                self.answer_field
                and not self.needs_answer
                and f"has no column {self.answer_field.partition('.')[0]!r}" in str(error)
            ):
                raise NoRows(f"{error}; or set answer_field=null where there are no right answers") from error
            raise
        prompts = make_prompts(source.dataset, split, rows, self._prompt)
        if not prompts:
            raise NoRows(
                f"{source.data_dir or source.dataset} has no row with a question{' and an answer' * self.needs_answer}"
            )
        return prompts

    def _prompt(self, row: Row) -> Prompt | None:
        system = (get_text(row, self.system_field).strip() if self.system_field else "") or self.system_prompt or ""
        with_answer = self.answer_field == self.question_field
        turns = read_turns(row, self.question_field, self.instruction, system, with_answer=with_answer)
        answers = read_answers(row, self.answer_field) if turns and self.answer_field else ()
        if not turns or (self.needs_answer and not answers):
            return None
        if self.scoring in ("number", "math"):
            answers = tuple(map(extract_golden, answers))
        self._check_answers(row, answers)
        facts = {name: get_value(row, name) for name in self.facts_fields}
        return Prompt(turns, answers[0] if answers else "", {**facts, "right_answers": answers})

    def _check_answers(self, row: Row, answers: Sequence[str]) -> None:
        """Raises `NoRows` for a right answer that no answer could equal."""
        for one in answers:
            at = f"{find_place(row)}: column {self.answer_field!r} holds {show(one)}, which is not"
            if self.scoring == "number" and not is_number(one):
                raise NoRows(f"{at} a number: mend the row, or set scoring to exact or math")
            if self.scoring == "regex" and (mistake := find_pattern_mistake(make_pattern(self.pattern or "", one))):
                raise NoRows(f"{at} a regular expression ({mistake}): mend the row, or set pattern={{answer}}")


async def _find_any(verdicts: Iterable[Awaitable[bool]]) -> float:
    """1 where one of them is true, asked one after another. Raises the first `GraderOverrun` where none is."""
    overrun: GraderOverrun | None = None
    for verdict in verdicts:
        try:
            if await verdict:
                return 1.0
        except GraderOverrun as error:
            overrun = overrun or error
    if overrun is not None:
        raise overrun
    return 0.0
