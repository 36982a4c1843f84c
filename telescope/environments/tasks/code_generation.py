"""Write a program that passes tests. Any data set with a question and tests; the tests run in a sandbox (docs/sandboxes.md)."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from telescope.environments.answer_parsers import CodeBlock
from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.graders.code import (
    AssertTest,
    CallTest,
    CodeResult,
    Test,
    check_program,
    extract_code,
    prepend,
    read_tests,
    run_tests,
)
from telescope.environments.questions.dataset import DatasetSource, Instruction, NoRows, Row, hold_out
from telescope.environments.questions.rows import find_place, write_text
from telescope.environments.sandboxes.base import SandboxError
from telescope.environments.sandboxes.pool import Pool, SandboxSettings

log = logging.getLogger(__name__)

_COMPLAINT_CHARACTERS = 500


class CodeGeneration(SingleTurn):
    """Reward 1 where all tests pass, or the share of tests that do. The defaults are those of MBPP."""

    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {
        "all_passed": (0.0, 1.0),
        "tests_passed": (0.0, 1.0),
        "has_code": (0.0, 1.0),
    }

    dataset: str = "google-research-datasets/mbpp"
    """Hugging Face id of the data set."""
    subsets: tuple[str, ...] = ("full",)
    """Its configurations, one after another; empty: its only one."""
    revision: str | None = None
    """Commit or tag of the data set on the hub; null: the newest."""
    data_dir: str | None = None
    """A local copy, a folder or a file; nothing is fetched then."""
    train_split: str = "train"
    """The data set's split that is trained on."""
    eval_split: str | None = "test"
    """The data set's split that is held out; null: `held_out` rows of the train split."""
    held_out: int = Field(default=128, ge=1)
    """Rows held out where there is no split for it; which ones `seed` decides."""
    seed: int = 0
    """Names the draw of the rows held out."""
    question_field: str = "text"
    """Column of the question; a dotted path reaches into it, through JSON text as well (`info.question`)."""
    tests_field: str = "test_list"
    """Column of the tests, or a dotted path to them. docs/sandboxes.md shows the forms they may have."""
    setup_field: str | None = "test_setup_code"
    """Column of code that goes before each assertion, e.g. imports; null: none."""
    entry_point_field: str | None = None
    """Column of the function's name, for tests that define `check(candidate)`; null: the tests call it themselves."""
    prefix_field: str | None = None
    """Column of code that goes before the answer's, e.g. HumanEval's `prompt` with its imports; null: none."""
    prelude: str = ""
    """Code that goes before every answer, e.g. imports that the questions take for granted."""
    solution_field: str | None = "code"
    """Column of a right program, shown beside the policy's answer; null: none."""
    instruction: Instruction = "{question}\n\nWrite Python code that solves this. Put it into one ```python block."
    """The user's message; {question} is filled in."""
    shown_tests: int = Field(default=1, ge=0)
    """Tests shown below the question: without one, the name of the wanted function is often unknown."""
    max_tests: int = Field(default=16, ge=1)
    """Of more tests than this only the first are run."""
    unreadable: Literal["refuse", "leave_out"] = "refuse"
    """What becomes of rows without tests that can be read: none is taken (the worker ends with the first of them), or they are
    left out and counted in the worker's log."""
    number_tolerance: float = Field(default=0.0, ge=0, le=0.1)
    """How far a printed number that is not an integer may be from the wanted one, absolutely or as a share of it; then words
    are compared, and white space does not count. 0: the text must be the same."""
    score: Literal["all", "share"] = "all"
    """`all`: 1 where every test passes, else 0, and the first failure ends the run; `share`: the share of tests that pass."""
    test_s: float = Field(default=5.0, gt=0, le=600)
    """Seconds that one test may take; not more than `sandbox.limits.time_s`."""
    total_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds that all tests of an answer may take; those not begun by then have failed."""
    site_packages: bool = False
    """Whether programs may import what is installed for the sandbox's Python; it then takes longer to start."""
    sandbox: SandboxSettings = SandboxSettings()
    """Where programs run."""

    _pool: Pool | None = PrivateAttr(default=None)

    async def set_up(self) -> None:
        self._pool = await Pool.open(self.sandbox)

    async def tear_down(self) -> None:
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    def check_data(self) -> None:
        self._source.check(self.train_split, self.eval_split)

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self._splits[split]

    def right_answer(self, prompt: Prompt) -> str:
        return CodeBlock(("python",)).wrap(prompt.answer) if prompt.answer.strip() else ""

    async def reward(self, prompt: Prompt, answer: str) -> Reward:
        tests = self._read_tests(prompt.facts["tests"], prompt.facts["setup"], prompt.facts["entry_point"], check=False)
        code = extract_code(answer, next((test.function for test in tests if isinstance(test, CallTest)), ""))
        if not code.strip():
            return Reward(0.0, self._measure(0.0, 0.0, 0.0), tags=("no_code",))
        if self._pool is None:
            raise SandboxError("the environment was not set up: its sandboxes are not there")
        async with self._pool.sandbox() as guest:
            verdict = await run_tests(
                guest,
                prepend(self.prelude, prompt.facts["prefix"] + code),
                tests,
                test_s=self.test_s,
                total_s=self.total_s,
                stop_at_failure=self.score == "all",
                site_packages=self.site_packages,
                tolerance=self.number_tolerance,
            )
        metrics = self._measure(float(verdict.all_passed), verdict.passed, 1.0)
        tags = tuple(sorted({result.value for result in verdict.results} - {CodeResult.PASSED.value, CodeResult.NOT_RUN.value}))
        info = {
            "tests": [result.value for result in verdict.results],
            "complaint": verdict.complaint[:_COMPLAINT_CHARACTERS],
            "sandbox": guest.use.row(),
        }
        total = float(verdict.all_passed) if self.score == "all" else verdict.passed
        return Reward(total, {**metrics, **guest.use.metrics()}, tags=tags, info=info)

    def _measure(self, all_passed: float, tests_passed: float, has_code: float) -> dict[str, float]:
        """Where the first failure ends the run, the share that passed would only say where in the list that test stands."""
        share = {"tests_passed": tests_passed} if self.score == "share" else {}
        return {"all_passed": all_passed, **share, "has_code": has_code}

    @property
    def _source(self) -> DatasetSource:
        return DatasetSource(self.dataset, self.subsets, self.revision, self.data_dir)

    @cached_property
    def _splits(self) -> dict[str, list[Prompt]]:
        source = self._source
        paths = (self.question_field, self.tests_field, self.setup_field, self.entry_point_field, self.prefix_field)
        columns = [path for path in (*paths, self.solution_field) if path is not None]
        train = source.rows(self.train_split, columns)
        if self.eval_split is not None:
            held = train if self.eval_split == self.train_split else source.rows(self.eval_split, columns)
            return {"train": self._make_prompts(train), "eval": self._make_prompts(held)}
        # The key is one for all tasks of this kind, and stays: another would hold out other rows of a run that goes on.
        rest, held_out = hold_out(self._make_prompts(train), self.held_out, "code_generation", self.seed, "held out")
        return {"train": rest, "eval": held_out}

    def _make_prompts(self, rows: Sequence[Row]) -> list[Prompt]:
        made, left_out = [], []
        for at, row in enumerate(rows):
            try:
                made.append(self._prompt(row))
            except (ValueError, TypeError, LookupError) as error:
                shown = ", ".join(f"{name}={str(value)[:40]!r}" for name, value in row.items())
                left_out.append(
                    f"row {at} of {self.dataset} ({find_place(row)}: {shown}) is none that can be tested: {error!r}"
                )
                if self.unreadable == "refuse":
                    raise NoRows(f"{left_out[0]}; unreadable=leave_out leaves such rows out") from error
        if left_out:
            log.warning("%d of %d rows are left out, the first: %s", len(left_out), len(rows), left_out[0])
        return made

    def _prompt(self, row: Row) -> Prompt:
        tests = json.dumps(_get_path(row, self.tests_field))
        setup, entry_point = _get_text(row, self.setup_field), _get_text(row, self.entry_point_field)
        prefix, solution = _get_text(row, self.prefix_field), _get_text(row, self.solution_field)
        check_program(setup, f"setup_field={self.setup_field}")
        if solution.strip():
            check_program(prepend(self.prelude, prefix + solution), f"solution_field={self.solution_field}")
        read = self._read_tests(tests, setup, entry_point)
        question = _get_text(row, self.question_field) + "".join(_show_test(test) for test in read[: self.shown_tests])
        return Prompt(
            turns=({"role": "user", "content": self.instruction.replace("{question}", question)},),
            answer=solution,
            facts={"tests": tests, "setup": setup, "entry_point": entry_point, "prefix": prefix},
        )

    def _read_tests(self, tests: str, setup: str, entry_point: str, *, check: bool = True) -> tuple[Test, ...]:
        """The first `max_tests`, each assertion behind the set-up code."""
        first = read_tests(json.loads(tests), entry_point, check=check)[: self.max_tests]
        return tuple(AssertTest(f"{setup}\n{test.code}") if setup and isinstance(test, AssertTest) else test for test in first)


def _get_path(row: Row, path: str) -> Any:
    """The value in the column of that very name, else at a dotted path; JSON text on the way is read."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, str):
            value = json.loads(value)
        value = value[part]
    return value


def _get_text(row: Row, path: str | None) -> str:
    return "" if path is None else write_text(_get_path(row, path))


def _show_test(test: Test) -> str:
    if isinstance(test, AssertTest):
        return f"\n\nYour code must pass:\n{test.code.strip()}"
    if isinstance(test, CallTest):
        arguments = ", ".join(map(repr, ast.literal_eval(test.arguments)))
        return f"\n\nExample:\n{test.function}({arguments}) returns {test.expected} (as JSON)"
    return f"\n\nExample input:\n{test.stdin}\nExample output:\n{test.expected}"
