"""The glossary is true: what it names in code is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.product import PRODUCT, ROOT, definitions, product_files

NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def names_of_the_product() -> set[str]:
    """Modules, packages, classes, functions, and the fields of classes, which settings are."""
    found = set[str]()
    for file in product_files():
        found |= {file.stem, file.parent.name}
        for name, node in definitions(ast.parse(file.read_text(encoding="utf-8"))):
            found.add(name.rpartition(".")[2])
            if isinstance(node, ast.ClassDef):
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                found |= {target.id for target in fields if isinstance(target, ast.Name)}
    return found


def named(text: str) -> list[tuple[str, str]]:
    """(term, code in backticks) of each row of the glossary's tables; a term may be code itself."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [(row[0].strip(), code) for row in rows for cell in row for code in re.findall(r"`([^`]+)`", cell)]


def missing(text: str, known: set[str], root: Path = ROOT) -> list[str]:
    """A sentence for each piece of code that is neither a file of the product nor a name in it."""
    found = []
    for term, code in named(text):
        if "/" in code:
            there = any((root / top / code).exists() for top in (*PRODUCT, "."))
        else:
            there = bool(NAME.fullmatch(code)) and set(code.split(".")) <= known
        if not there:
            found.append(f"{term}: `{code}` is not a module, class, function or setting of the product")
    return found


def test_what_the_glossary_names_in_code_is_there():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert len(named(text)) >= 3
    assert not missing(text, names_of_the_product()), "\n".join(
        ["in docs/glossary.md:", *missing(text, names_of_the_product())]
    )


def test_a_name_that_has_gone_is_noticed(tmp_path: Path):
    (tmp_path / "telescope" / "flow").mkdir(parents=True)
    text = "\n".join(
        [
            "| word | meaning |",
            "|---|---|",
            "| group | `group_size` rollouts, see `flow/` and `flow/gone.py` |",
            "| `Slot` | one of `rollout.group_size`, `rollout.gone`, `not a name` |",
            "Text beside the table names `anything`.",
        ]
    )
    sentences = missing(text, {"group_size", "rollout", "Slot"}, tmp_path)
    assert [re.findall(r"(.*): `(.*)`", sentence)[0] for sentence in sentences] == [
        ("group", "flow/gone.py"),
        ("`Slot`", "rollout.gone"),
        ("`Slot`", "not a name"),
    ]
