"""Finds where a mutant belongs in the product, and writes it there. Runs nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.table import Mutant
from tests.product import definitions, product_files


class NoLongerApplies(Exception):
    """The product has changed so that a mutant has no place in it, or several; the sentence says which."""


@dataclass(frozen=True)
class Place:
    """Characters `start` to `end` of a file are a mutant's `old`."""

    file: Path
    start: int
    end: int


def find(root: Path, mutant: Mutant) -> Place:
    """Where in the checkout `root` the mutant belongs. Raises `NoLongerApplies`."""
    pattern = re.compile(r"\s+".join(map(re.escape, mutant.old.split())))
    files, places = list[str](), set[Place]()
    for file in product_files(root):
        text = file.read_text(encoding="utf-8")
        if mutant.where.rpartition(".")[2] not in text:
            continue
        for start, end in spans(text, mutant.where):
            files.append(str(file.relative_to(root)))
            places |= {Place(file, *found.span()) for found in pattern.finditer(text, start, end)}
    if not files:
        raise NoLongerApplies(f"no product file defines {mutant.where}: name the function that does this now")
    where = f"{mutant.where} ({', '.join(files)})"
    if not places:
        raise NoLongerApplies(f"{where} does not hold {mutant.old!r}: write down what stands there now")
    if len(places) > 1:
        raise NoLongerApplies(f"{where} holds {mutant.old!r} {len(places)} times: choose a longer text or name")
    return places.pop()


def planted(text: str, place: Place, mutant: Mutant) -> str:
    """The file's text with the mutant in it. Raises `NoLongerApplies` where that is not Python, or the same program."""
    changed = text[: place.start] + mutant.new + text[place.end :]
    try:
        same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text))
    except SyntaxError as error:
        raise NoLongerApplies(f"{place.file.name} is not Python with {mutant.new!r} for {mutant.old!r}: {error}") from error
    if same:
        raise NoLongerApplies(f"{place.file.name} is the same program with {mutant.new!r} for {mutant.old!r}")
    return changed


def spans(text: str, where: str) -> Iterator[tuple[int, int]]:
    """Characters (start, end) of each function or class whose dotted name within its file ends with `where`."""
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    for name, node in definitions(ast.parse(text)):
        if f".{name}".endswith(f".{where}"):
            yield starts[node.lineno - 1], starts[node.end_lineno or node.lineno]
