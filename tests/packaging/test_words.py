"""One word a thing, one thing a word: class names are unique, and names of the product use the field's standard words."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.product import ROOT, definitions, product_files

SAY = {
    "ground": "run_dir_watch",
    "standing": "node_identity",
    "terms": "timeouts",
    "patience": "limits or timeouts",
    "talk": "node_protocol",
    "revival": "restart",
    "lives": "incarnation",
    "door": "direct_endpoint",
    "ticket": "grant",
    "death": "engine_health",
    "mortal": "engine_health",
    "fates": "group_lifecycle",
    "shelf": "rollout_store",
    "complaints": "protocol_violations",
    "draws": "prompt_sampler",
    "ahead": "prefetch",
    "written": "validate",
    "hidden": "redact",
    "patient": "retry",
    "recent": "lru",
    "off_loop": "threads",
    "passed_on": "env_allowlist",
    "household": "child_processes",
    "obstacles": "preflight",
    "meet": "rendezvous",
    "lead": "head",
    "join": "node",
    "verdict": "a plain verb",
    "farewell": "a plain verb",
    "absolve": "a plain verb",
    "bell": "notify",
    "desks": "coordinators",
    "naps": "sleep",
    "perform": "executor",
    "roster": "peers",
    "again": "resume",
}
"""What no module, class or function is called, and what to say instead."""
IN_NO_PART = {"household", "revival", "farewell", "absolve", "mortal", "fates", "shelf", "roster", "ticket", "door", "bell"}
"""Nor does one of these stand within a name, in the singular or the plural."""
ELSEWHERE_FINE = {"join"}
"""Of modules alone: a method that joins something is called so everywhere."""


@dataclass(frozen=True)
class Name:
    kind: str
    """module, class or function"""
    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind} {self.name}"

    @property
    def words(self) -> tuple[str, ...]:
        """`HTTPDoor` and `_http_door` are http, door."""
        parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", self.name)
        return tuple(part.lower() for part in parts)


def names_in(root: Path) -> Iterator[Name]:
    packages = set[Path]()
    for file in product_files(root):
        path = str(file.relative_to(root))
        if not file.stem.startswith("__"):
            yield Name("module", file.stem, path, 1)
        if file.parent not in packages:
            packages.add(file.parent)
            yield Name("module", file.parent.name, str(file.parent.relative_to(root)), 1)
        for name, node in definitions(ast.parse(file.read_text(encoding="utf-8"))):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            yield Name(kind, name.rpartition(".")[2], path, node.lineno)


def instead(name: Name) -> str:
    """What to say instead; empty where the name is fine."""
    whole = "_".join(name.words)
    if whole in SAY and (name.kind == "module" or whole not in ELSEWHERE_FINE):
        return SAY[whole]
    stems = {word.removesuffix("s") for word in name.words}
    return next((SAY[word] for word in sorted(IN_NO_PART) if word.removesuffix("s") in stems), "")


@cache
def product_names() -> tuple[Name, ...]:
    return tuple(names_in(ROOT))


def classes() -> dict[str, list[Name]]:
    """By name, without a leading underscore."""
    found = defaultdict(list)
    for name in product_names():
        if name.kind == "class":
            found[name.name.lstrip("_")].append(name)
    return found


def test_a_class_name_is_defined_once():
    twice = [name for names in classes().values() if len(names) > 1 for name in names]
    twice.sort(key=lambda name: (name.name.lstrip("_"), name.file))
    assert not twice, "\n".join(["name each of these for what it is, so that no other class has its name:", *map(str, twice)])


def test_no_name_is_a_wire_message_and_a_core_event():
    messages, events = (
        {name.name: name for name in product_names() if name.kind == "class" and Path(name.file).stem == stem}
        for stem in ("messages", "events")
    )
    assert messages, "no module of the product is called messages: name the one that has the wire's"
    assert events, "no module of the product is called events: name the one that has the core's"
    both = [f"{messages[name]} is also {events[name]}" for name in sorted(messages.keys() & events)]
    assert not both, "\n".join(["name the event for what has happened and the message for what is said:", *both])


def test_names_use_standard_words():
    private = [f"{name}: say {instead(name)}" for name in product_names() if instead(name)]
    assert not private, "\n".join(["words of our own: say these, or what else is meant, in plain words", *private])


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("module", "door", "direct_endpoint"),
        ("class", "_OffLoop", "threads"),
        ("function", "passed_on", "env_allowlist"),
        ("class", "DoorPort", "direct_endpoint"),
        ("function", "_send_tickets", "grant"),
        ("class", "HTTPBell", "notify"),
        ("module", "join", "node"),
        ("function", "join", ""),
        ("function", "draws_left", ""),
        ("class", "Doorman", ""),
        ("function", "indoor", ""),
    ],
)
def test_a_word_is_told_from_a_part_of_another(kind: str, name: str, said: str):
    assert instead(Name(kind, name, "telescope/any.py", 1)) == said


def test_names_are_found_with_their_file_and_line(tmp_path: Path):
    (tmp_path / "telescope" / "fates").mkdir(parents=True)
    (tmp_path / "telescope" / "fates" / "__init__.py").touch()
    (tmp_path / "telescope" / "fates" / "shelf.py").write_text(
        "class _Part:\n    async def ring(self):\n        def bell(): ...\n"
    )
    assert [str(name) for name in names_in(tmp_path)] == [
        "telescope/fates:1: module fates",
        "telescope/fates/shelf.py:1: module shelf",
        "telescope/fates/shelf.py:1: class _Part",
        "telescope/fates/shelf.py:2: function ring",
        "telescope/fates/shelf.py:3: function bell",
    ]
