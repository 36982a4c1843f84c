"""Parsers: what they find, that they find what they wrote, and that no answer keeps them busy."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.environments.answer_parsers import (
    Answer,
    AnswerTags,
    Boxed,
    CodeBlock,
    ThinkTags,
    Whole,
    XMLFields,
    strip_thought,
)

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
PLAIN = TEXTS.filter(lambda text: not set(text) & set("<>`\\{}\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"))


@pytest.mark.parametrize(
    ("parser", "text", "found"),
    [
        (Boxed(), r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (Boxed(), r"\boxed{1} no, \boxed{2}", "2"),
        (Boxed(), r"\boxed{a \} b}", r"a \} b"),
        (Boxed(), r"\boxed{1} then \boxed{2", "1"),
        (Boxed(), r"x \\\boxed{5}", "5"),
        (Boxed(), r"\boxed {7}", "7"),
        (Boxed(), r"no box, {only} braces}", None),
        (AnswerTags(), "a <answer> 4 </answer> b", "4"),
        (AnswerTags(), "<answer>1</answer><answer>2</answer>", "2"),
        (AnswerTags(), "<answer>1</answer> then <answer>2", "1"),
        (AnswerTags(), "</answer>1<answer>", None),
        (AnswerTags("final"), "<final>x</final>", "x"),
        (ThinkTags(), "<think>2+2</think> 4", "4"),
        (ThinkTags(), "just 4", "just 4"),
        (ThinkTags(), "<think>never ends", None),
        (ThinkTags(opened=True), "2+2</think>4", "4"),
        (ThinkTags(opened=True), "never ends", None),
        (ThinkTags(Boxed()), r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (ThinkTags(Boxed()), r"<think>\boxed{1}</think>no", None),
        (CodeBlock(), "```python\nprint(1)\n```", "print(1)"),
        (CodeBlock(), "```\na\n```\nand\n```c\nb\n```", "b"),
        (CodeBlock(("python",)), "```python\na\n```\nand\n```bash\nls\n```", "a"),
        (CodeBlock(("python",)), "```\na\n```", "a"),
        (CodeBlock(), "````\n```\nx\n```\n````", "```\nx\n```"),
        (CodeBlock(), "```python\nnever closed", None),
        (CodeBlock(), "```\n```", ""),
        (XMLFields(("reasoning", "answer")), "<reasoning>r</reasoning>\n<answer>a</answer>", "a"),
        (Whole(), "  ", None),
    ],
)
def test_what_counts_of_an_answer(parser: Any, text: str, found: str | None) -> None:
    assert parser.parse(text) == found


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<mm:think>", "</mm:think>"),
     ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought\n", "<channel|>"), ("<|think|>", "<|end|>"),
     ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")],
)  # fmt: skip
def test_a_thought_in_any_model_s_marks_holds_no_answer(opening: str, closing: str) -> None:
    boxed = ThinkTags(Boxed())
    for text in (f"{opening}\\boxed{{5}}", Answer("\\boxed{5}", "", opening)):
        assert (boxed.parse(text), ThinkTags().parse(text), strip_thought(text)) == (None, None, "")
    for text in (f"{opening}\\boxed{{5}}{closing}\\boxed{{6}}", Answer(f"\\boxed{{5}}{closing}\\boxed{{6}}", "", opening)):
        assert (boxed.parse(text), strip_thought(text)) == ("6", "\\boxed{6}")


def test_a_thought_that_only_prompts_open_is_left_too() -> None:
    opened = Answer("\\boxed{5}</reasoning>\\boxed{6}", "reasoning", "<reasoning>\n")
    assert (ThinkTags(Boxed()).parse(opened), strip_thought(opened)) == ("6", "\\boxed{6}")
    assert ThinkTags(Boxed()).parse(Answer("\\boxed{5}", "reasoning", "<reasoning>\n")) is None
    assert ThinkTags(Boxed()).parse("<reasoning>so</reasoning>\\boxed{6}") == "6"
    assert strip_thought("<reasoning>so</reasoning>6") == "<reasoning>so</reasoning>6"


@pytest.mark.parametrize(
    ("parser", "text", "right"),
    [
        (Boxed(), r"\boxed{1}", 1.0),
        (Boxed(), r"\boxed{1}\boxed{2}", 0.0),
        (Boxed(), r"\boxed{ }", 0.0),
        (AnswerTags(), "x <answer>1</answer>", 1.0),
        (AnswerTags(), "<answer>1</answer></answer>", 0.0),
        (AnswerTags(), "</answer>1<answer>", 0.0),
        (ThinkTags(), "<think>a</think>b", 1.0),
        (ThinkTags(), "<think></think>b", 0.0),
        (ThinkTags(), "a <think>a</think>b", 0.0),
        (ThinkTags(), "<think>a</think>b</think>", 0.0),
        (ThinkTags(), "<think>a</think>  ", 0.0),
        (ThinkTags(AnswerTags()), "<think>a</think><answer>b</answer>", 1.0),
        (ThinkTags(AnswerTags()), "<think>a</think>b", 0.0),
        (ThinkTags(opened=True), "a</think>b", 1.0),
        (CodeBlock(), "x\n```\n1\n```", 1.0),
        (CodeBlock(), "```\n1\n```\n```\n2\n```", 0.0),
        (XMLFields(("a", "b")), "<a>1</a><b>2</b>", 1.0),
        (XMLFields(("a", "b")), "<b>1</b><a>2</a>", 0.0),
        (XMLFields(("a", "b")), "<a>1<b>2</b></a>", 0.0),
        (XMLFields(("a", "b")), "<a></a><b>2</b>", 0.0),
        (XMLFields(("a", "b")), "<a>1</c><b>2</b>", 0.0),
    ],
)
def test_the_asked_form_is_one_and_no_more(parser: Any, text: str, right: float) -> None:
    assert parser.well_formed(text) == right


@given(PLAIN, PLAIN)
def test_a_parser_finds_what_it_wrote_whatever_stands_around_it(inside: str, around: str) -> None:
    for parser in (Boxed(), AnswerTags(), ThinkTags()):
        assert (parser.parse(around + parser.wrap(inside)) or "") == inside.strip()
    fields = XMLFields(("first", "second"))
    assert fields.fields(around + fields.wrap(first=around, second=inside)) == {
        "first": around.strip(),
        "second": inside.strip(),
    }
    assert CodeBlock(("python",)).parse(f"{around}\n{CodeBlock(('python',)).wrap(inside)}\n{around}") == inside


@given(TEXTS, st.integers(0, 6))
def test_nested_braces_of_any_depth_stay_together(text: str, depth: int) -> None:
    body = "".join(c for c in text if c not in "\\{}")
    for _ in range(depth):
        body = f"{{{body}}}"
    assert Boxed().parse(Boxed().wrap(body)) == body.strip()


PARSERS = (Boxed(), AnswerTags(), ThinkTags(AnswerTags()), CodeBlock(("python",)), XMLFields(("a", "b", "answer")))


@given(st.text(st.sampled_from(list("<>/answerthinkb`\\{}o xd\n")), max_size=80))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for parser in PARSERS:
        found = parser.parse(text)
        assert found is None or found in text
        assert parser.well_formed(text) in (0.0, 1.0)


MEGABYTE = 1_000_000
HOSTILE = [
    r"\boxed{", r"\boxed", "{", "}", "\\", r"\boxed ", "<answer>", "</answer>", "<answer></answer>", "<think>", "</think>",
    "```", "`", "```\n", "```python\n", "```x\n````\n", " ", "\n", "<a>", "</b>", "<", "a",
]  # fmt: skip


def test_a_megabyte_of_anything_takes_linear_time() -> None:
    """Twice the text takes about twice the CPU time; a quadratic pass would take a thousand times this test's seconds."""
    started = time.process_time()
    for piece in HOSTILE:
        text = piece * (MEGABYTE // len(piece))
        for parser in PARSERS:
            parser.parse(text)
            parser.well_formed(text)
    # some 220 passes over a megabyte: a few seconds of CPU. One quadratic pass alone would be hours.
    assert time.process_time() - started < 100


@pytest.mark.parametrize("make", [lambda: AnswerTags("a b"), lambda: ThinkTags(tag=""), lambda: XMLFields(("a", "a"))])
def test_what_is_no_tag_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="must be one or more different names of tags"):
        make()
