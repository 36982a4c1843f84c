"""Cases from public reports about other graders (docs/internals/reports_on_runs.md): the verdicts here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from telescope.environments.graders.letters import find_letter
from telescope.environments.graders.maths import compare_exactly, compare_symbolically, extract_answer
from telescope.environments.graders.notation import tidy
from telescope.environments.tasks.gpqa_diamond import COLUMNS, GpqaDiamond


def is_right(wanted: str, text: str) -> bool:
    given = extract_answer(text)
    assert given is not None
    known = compare_exactly(wanted, given)
    return compare_symbolically(wanted, given) if known is None else known


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}"),
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        (r"1-\frac{1}{2^{100}}", "1"),
        ("n=2, 3, 4", "n=1, 2, 3"),
        ("D = (0, 1)", "D = (0, 1.5)"),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}"),
        (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}"),
        (r"\pm 2021", "2021"),
        ("12:00", "1:00"),
        (r"1, 2, \ldots, n", r"1, 3, 5, \ldots, 2n-1"),
        ("3*x-1*y+13=0", "3x + 4y + 14=0"),
        (r"\frac{x^2}{4}+\frac{y^2}{3}=1", r"\frac{x^2}{16}+\frac{y^2}{12}=1"),
        ("f(x) = 0", r"\forall x>0, f(x) = 0"),
        ("4", r"4\sqrt(2)"),
    ],
)
def test_answers_that_differ_in_what_is_small_named_or_parsed_away_are_wrong(wanted: str, given: str) -> None:
    assert not is_right(wanted, f"\\boxed{{{given}}}")


def test_marks_around_a_final_answer_are_none_of_it() -> None:
    assert is_right("73", "the number is **73**.\n\n---\n\n✅ Final Answer: **73**")


@pytest.mark.parametrize(
    ("wanted", "given", "wrong"),
    [
        (r"\dfrac{\pi}{2}", "pi/2", "pi/3"),
        (r"-2\pi", "-2*pi", "2*pi"),
        ("e^{16} - 1", "-1 + exp(16)", "-1 + exp(15)"),
        (r"\ln 2", "ln(2)", "ln(3)"),
        (r"\sin 2x", "sin(2x)", "cos(2x)"),
        (r"\log_2 3", "log_2(3)", "log_3(2)"),
        ("|x-1|", "abs(x-1)", "abs(x+1)"),
        (r"4\sqrt{2}", r"4\sqrt(2)", r"4\sqrt(3)"),
        (r"\sqrt{1+\sqrt{2}}", "sqrt(1+sqrt(2))", "sqrt(1+sqrt(3))"),
        (r"(-\infty, 3)", "(-oo, 3)", "(-oo, 4)"),
    ],
)
def test_functions_and_constants_may_be_written_as_a_calculator_writes_them(wanted: str, given: str, wrong: str) -> None:
    assert is_right(wanted, f"\\boxed{{{given}}}")
    assert not is_right(wanted, f"\\boxed{{{wrong}}}")


def test_words_and_units_are_no_functions() -> None:
    assert [tidy(text) for text in ("pizza", "5 sec", "m/sec^2", "log", "tangent", "moon")] == [
        "pizza", "5 sec", "m/sec^2", "log", "tangent", "moon",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["sqrt(" * 10**6, "exp(" * 10**6 + "pi", "pi " * 10**5, "abs(x)" * 10**5])
def test_megabytes_of_plain_functions_are_read_in_linear_time(text: str) -> None:
    assert tidy(text)  # a search for the end of each bracket would take half an hour


@pytest.mark.parametrize(
    ("wanted", "given", "right"),
    [
        (r"m \geq \sqrt{2}", r"m \in [\sqrt{2}, +\infty)", True),
        (r"m \in [\sqrt{2}, +\infty)", r"m \geq \sqrt{2}", True),
        (r"x\in(1,2)", "1<x<2", True),
        (r"x\in[1,2)", "1<x<2", False),
        (r"m \in [\sqrt{2}, +\infty)", r"m > \sqrt{2}", False),
        (r"x \in \{2,3\}", r"2 \le x \le 3", False),
        (r"y \in [2,3]", r"2 \le x \le 3", False),
    ],
)
def test_an_inequality_and_its_interval_are_the_same_whichever_is_wanted(wanted: str, given: str, right: bool) -> None:
    assert is_right(wanted, f"\\boxed{{{given}}}") is right


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        (r"so \boxed{\langle H\rangle \ll \Delta E}. **Answer: D**", "D"),
        (r"\boxed{42\ \text{J}}, which is option C.", "C"),
        (r"Answer: D. At last \boxed{A, B}", None),
        (r"The answer is D, or not: \boxed{none of these}", None),
        (r"Answer: D \boxed{}", None),
        ("The calculated answer is 11.\n\nAnswer seems to be A.\n\nAnswer: A\n", "A"),
        ("Answer seems to be difficult.\n\nB", "B"),
        ("Answer:\n\nAll of them hold, so the answer is C", "C"),
        ("<think>The answer is A.</think>The answer is D.", "D"),
        ("The answer is B because a car moves.", "B"),
        ("I would pick B — a safe choice.", "B"),
        ("d", "D"),
        ("b. 4", "B"),
        (r"\boxed{b) 4 m/s}", "B"),
        ("a car, since it moves", None),
    ],
)
def test_an_option_is_the_letter_that_an_answer_calls_its_answer(answer: str, letter: str | None) -> None:
    assert find_letter(answer) == letter


def test_options_are_shown_as_the_file_has_them_brackets_too(tmp_path: Path) -> None:
    options = ["ln(2) = [ (T_1 - T_2) / (T1*T2)]", "[a]", "(b) {c}", "\\boxed{d}"]
    (tmp_path / "gpqa.jsonl").write_text(json.dumps(dict(zip(COLUMNS, ["Which?", *options], strict=True))) + "\n")
    (prompt,) = GpqaDiamond(data_dir=str(tmp_path / "gpqa.jsonl")).prompts("eval")
    shown = prompt.turns[0]["content"].splitlines()
    assert sorted(line[3:] for line in shown if line[1:3] == ") ") == sorted(options)
    assert f"{prompt.answer}) {options[0]}" in shown
