"""docs/protocol.md is normative: it has every message with its fields, its ways, what is kept and what answers it."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from telescope.wire import messages
from telescope.wire.messages import Body

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
ROLES = {"W": "worker", "S": "server", "T": "trainer"}
KINDS = {kind.__name__: kind for kind in typing.get_args(Body)}


def table() -> dict[str, tuple[str, str, str, str]]:
    """Of each message: its ways, how it is kept, what answers it, its fields."""
    section = PAGE.read_text(encoding="utf-8").partition("## 4. Messages")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| ")]
    return {
        name: (way, kept, answered, fields) for name, way, kept, answered, fields in (map(str.strip, row) for row in rows[1:])
    }


def ways(text: str) -> set[tuple[str, str]]:
    """(role, `up` or `down`), as seen from the hub."""
    found = set()
    for way in ("WST→H, H→WST" if text == "both" else text).split(", "):
        start, end = way.split("→")
        found |= {(ROLES[role], "down") for role in end} if start == "H" else {(ROLES[role], "up") for role in start}
    return found


def expected_ways(kind: messages.Kind) -> set[tuple[str, str]]:
    up = {role for role in ROLES.values() if kind in messages.FROM_PEER[role] | messages.SESSION_OF_PEER}
    down = {role for role in ROLES.values() if kind in messages.FROM_HUB[role] | messages.SESSION_OF_HUB}
    return {*((role, "up") for role in up), *((role, "down") for role in down)}


def test_the_page_has_every_message_and_no_other() -> None:
    assert set(table()) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_message_is_on_the_page_as_it_is_sent(name: str) -> None:
    kind = KINDS[name]
    way, kept, answered, fields = table()[name]
    assert [field for field in kind.__struct_fields__ if not re.search(rf"\b{field}\b", fields)] == []
    assert ways(way) == expected_ways(kind)
    keeps = "answer" if kind in messages.ANSWERED_BY else "safe" if kind in messages.SAFE_BY_APPLICATION else "ack"
    assert kept == (keeps if kind in messages.KEPT else "–")
    by = {each.__name__ for each in messages.ANSWERED_BY.get(kind, ())}
    if kind not in messages.SESSION_OF_PEER | messages.SESSION_OF_HUB:
        assert {each for each in answered.split(", ") if each} - {"Ack"} == by
