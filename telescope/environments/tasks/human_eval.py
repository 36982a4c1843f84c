"""HumanEval: 164 Python functions to complete from their signature and description, scored by tests (MIT).

A benchmark: what was trained on it measures nothing on it. Chen et al., Evaluating Large Language Models Trained on Code,
arXiv:2107.03374.
"""

from __future__ import annotations

from pydantic import Field

from telescope.environments.questions.dataset import Instruction
from telescope.environments.tasks.code_generation import CodeGeneration


class HumanEval(CodeGeneration):
    """Reward 1 where all tests pass. The whole function counts as an answer, and so does its body alone. Both splits are the
    same 164, because there are no others."""

    dataset: str = "openai/openai_humaneval"
    """Hugging Face id of the data set."""
    subsets: tuple[str, ...] = ()
    """Its configurations, one after another; empty: its only one."""
    train_split: str = "test"
    """The data set's split that is trained on."""
    eval_split: str | None = "test"
    """The data set's split that is held out; null: `held_out` rows of the train split."""
    question_field: str = "prompt"
    """Column of the question; a dotted path reaches into it, through JSON text as well (`info.question`)."""
    tests_field: str = "test"
    """Column of the tests, or a dotted path to them. docs/sandboxes.md shows the forms they may have."""
    setup_field: str | None = None
    """Column of code that goes before each assertion, e.g. imports; null: none."""
    entry_point_field: str | None = "entry_point"
    """Column of the function's name, for tests that define `check(candidate)`; null: the tests call it themselves."""
    prefix_field: str | None = "prompt"
    """Column of code that goes before the answer's, e.g. HumanEval's `prompt` with its imports; null: none."""
    solution_field: str | None = "canonical_solution"
    """Column of a right program, shown beside the policy's answer; null: none."""
    instruction: Instruction = (
        "Complete this Python function:\n\n```python\n{question}```\n\nPut the whole function into one ```python block."
    )
    """The user's message; {question} is filled in."""
    shown_tests: int = Field(default=0, ge=0)
    """Tests shown below the question: without one, the name of the wanted function is often unknown."""
    test_s: float = Field(default=10.0, gt=0, le=600)
    """Seconds that one test may take; not more than `sandbox.limits.time_s`."""
