"""A table of answers and verdicts, by rule and written before any grader was read: each grader is held to it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from telescope.environments.answer_parsers import Answer, ThinkTags
from telescope.environments.graders.code import extract_code
from telescope.environments.graders.letters import find_letter
from telescope.environments.graders.maths import compare_exactly, compare_symbolically, extract_answer

HERE = Path(__file__).parent
ROWS: dict[str, list[dict[str, Any]]] = defaultdict(list)
for line in (HERE / "triples.jsonl").read_text(encoding="utf-8").splitlines():
    row = json.loads(line)
    ROWS[row["family"]].append(row)
DISAGREEMENTS: dict[str, str] = json.loads((HERE / "disagreements.json").read_text(encoding="utf-8"))


def is_right(row: dict[str, Any]) -> bool:
    """The verdict of the grader of this row's kind on the whole text."""
    answer = Answer(row["answer"], "think") if row.get("prompt_opens_thought") else row["answer"]
    kind, gold = row.get("inner", row["grader"]), row["gold"]
    if kind in ("math", "number"):
        given = extract_answer(answer, row.get("form", "any"))
        known = False if given is None else compare_exactly(gold, given)
        return compare_symbolically(gold, given or "") if known is None else known
    if kind == "choice":
        return find_letter(answer, "ABCDEFGHIJ") == gold
    if kind == "code":
        return extract_code(answer).rstrip("\n") == (gold or "").rstrip("\n")
    said = ThinkTags().parse(answer)
    return said is not None and said == gold.strip()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", sorted(ROWS))
def test_the_graders_agree_with_the_table_but_where_it_is_said(family: str) -> None:
    differing = {row["id"] for row in ROWS[family] if is_right(row) != row["right"]}
    assert differing == DISAGREEMENTS.keys() & {row["id"] for row in ROWS[family]}


def test_the_table_has_its_size_and_each_disagreement_a_reason() -> None:
    rows = {row["id"]: row for family in ROWS.values() for row in family}
    assert (len(rows), len(ROWS)) == (1960, 38)
    assert DISAGREEMENTS.keys() <= rows.keys()
    assert sum(not rows[each]["choice"] for each in DISAGREEMENTS) == 2
    assert all(len(reason) > 20 for reason in DISAGREEMENTS.values())
