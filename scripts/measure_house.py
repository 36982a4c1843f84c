"""Measures how a checkout is built: lines, files, names, imports, pages; with --trace also the files one rollout goes through.

    python scripts/measure_house.py [--names] [--trace] [CHECKOUT ...]

Without a checkout, its own; of several, a column each. Reads files and names no module of the product, so that it measures
other commits too. `--names` also lists what was counted. `_rollout_trace.py` says what --trace counts. What a script can't
judge is counted by hand: the dicts that hold one rollout in flight, and the channels between processes.
"""

from __future__ import annotations

import argparse
import ast
import calendar
import io
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import _rollout_trace

PRODUCT = _rollout_trace.PRODUCT
LONG_FILE, SHORT_FILE = 450, 40
LONG_PAGE = 200
FOLDERS = 6
"""So many of the largest are shown."""
IS_NO = re.compile(r"\b(?:is|are|was) no (?!longer)")
DATE = re.compile(rf"\b20\d\d-\d\d(?:-\d\d)?\b|\b(?:{'|'.join(calendar.month_name[1:])}) 20\d\d\b")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
KINDS = ("messages", "events")
"""Modules of these names define what is said on the wire and what the core hears."""
CONTRACTS = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = Mapping[str, Collection[str]]


@dataclass(frozen=True)
class Fact:
    """A row of the table; `names` are what was counted, where that helps."""

    what: str
    value: str
    names: Sequence[str] = ()


# ---- one file


@dataclass(frozen=True)
class Source:
    """A Python file of the product. `path`: from the checkout's top."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def stem(self) -> str:
        return Path(self.path).stem

    @cached_property
    def functions(self) -> list[tuple[int, str]]:
        """(lines, name) of each function and method."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, Function))
        return [((node.end_lineno or node.lineno) - node.lineno + 1, node.name) for node in found]

    @cached_property
    def classes(self) -> list[str]:
        """Their names without a leading underscore."""
        return [node.name.lstrip("_") for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]


def code_lines(text: str) -> int:
    """Lines with code on them: neither blank, nor comment alone, nor part of a string that stands by itself (a docstring).
    `code_lines('x = 1\\n\\n# why\\n')` is 1."""
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def sources(root: Path) -> list[Source]:
    """Each file once: symbolic links are not followed."""
    found = []
    for name in (name for name in PRODUCT if not (root / name).is_symlink()):
        for folder, _, files in os.walk(root / name):
            found += [Path(folder, file) for file in files if file.endswith(".py")]
    return [Source(str(file.relative_to(root)), file.read_text(encoding="utf-8")) for file in sorted(found)]


# ---- sizes and names


def sizes(found: Sequence[Source]) -> Iterator[Fact]:
    yield Fact("product lines", f"{sum(source.lines for source in found):,}")
    yield Fact("  code, without blanks, comments, docstrings", f"{sum(code_lines(source.text) for source in found):,}")
    yield Fact("product files", f"{len(found)}")
    yield Fact("  median lines", f"{statistics.median(source.lines for source in found):g}")
    short = [f"{source.path} {source.lines}" for source in found if source.lines < SHORT_FILE]
    yield Fact(f"  under {SHORT_FILE} lines", f"{len(short)}", short)
    long = [f"{source.path} {source.lines}" for source in found if source.lines > LONG_FILE]
    yield Fact(f"  over {LONG_FILE} lines", f"{len(long)}", long)
    folders = Counter(str(Path(source.path).parent) for source in found).most_common(FOLDERS)
    flat = ", ".join(f"{name.rpartition('/')[2]} {count}" for name, count in folders)
    yield Fact("files flat in one folder, the largest", flat)
    functions = sorted((lines, f"{source.path}:{name}") for source in found for lines, name in source.functions)
    middle = statistics.median(lines for lines, _ in functions)
    longest, name = functions[-1]
    yield Fact("functions", f"{len(functions):,}, median {middle:g} lines, longest {longest}", [name])


def names(found: Sequence[Source]) -> Iterator[Fact]:
    defined = Counter(name for source in found for name in source.classes)
    yield _repeated("class names defined more than once", defined)
    messages, events = ({name for source in found if source.stem == stem for name in source.classes} for stem in KINDS)
    both = sorted(messages & events)
    yield Fact("names of a wire message and a core event", f"{len(both)}", both)
    stems = (source.stem for source in found if not source.stem.startswith("__"))
    yield _repeated("module names that occur twice or more", Counter(stems))


def _repeated(what: str, counts: Mapping[str, int]) -> Fact:
    repeated = sorted((-count, name) for name, count in counts.items() if count > 1)
    return Fact(what, f"{len(repeated)}", [f"{name} {-count}" for count, name in repeated])


# ---- imports


@dataclass
class Imports:
    """Who imports whom, by path: as the module is imported, inside functions, and for type checkers alone."""

    first: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    late: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    typing: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def imports(root: Path, found: Sequence[Source]) -> Imports:
    """Of the product's own files. A file has as many dotted names as symbolic links in its package give it."""
    known = {}
    for folder, _, files in os.walk(root / PRODUCT[0], followlinks=True):
        for file in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = file.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            known[name] = str(file.resolve().relative_to(root.resolve()))
    asked = Imports()
    for source in found:
        for node, kind in _import_nodes(source.tree, asked.first, asked):
            kind[source.path] |= {known[name] for name in imported(node) if name in known} - {source.path}
    return asked


def _import_nodes(
    node: ast.AST, kind: dict[str, set[str]], asked: Imports
) -> Iterator[tuple[ast.Import | ast.ImportFrom, dict[str, set[str]]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, kind
        elif isinstance(child, Function | ast.Lambda):
            yield from _import_nodes(child, asked.late, asked)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _import_nodes(child, asked.typing, asked)
        else:
            yield from _import_nodes(child, kind, asked)


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Every dotted name that the statement may mean: `from a import b` is `a` where `b` is not a module, else `a.b` too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module is not None:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def knots(graph: Graph) -> list[list[str]]:
    """The strongly connected parts of more than one member, largest first: each is made of cycles. Tarjan's algorithm."""
    order, low, path, found = dict[str, int](), dict[str, int](), list[str](), list[list[str]]()

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in path:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            part = path[path.index(node) :]
            del path[path.index(node) :]
            found.append(part)

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return sorted((sorted(part) for part in found if len(part) > 1), key=len, reverse=True)


def graph(root: Path, found: Sequence[Source]) -> Iterator[Fact]:
    asked = imports(root, found)
    kinds = (asked.first, asked.late, asked.typing)
    edges = [sum(map(len, kind.values())) for kind in kinds]
    yield Fact("imports of one product file by another", f"{edges[0]:,}, in functions {edges[1]}, for types alone {edges[2]}")
    merged = [
        {source.path: set[str]().union(*(kind[source.path] for kind in kinds[: upto + 1])) for source in found}
        for upto in range(len(kinds))
    ]
    for what, one in zip(("import cycles", "  with those in functions", "  with those for types"), merged, strict=True):
        parts = knots(one)
        value = f"among {', '.join(str(len(part)) for part in parts)} files" if parts else "none"
        yield Fact(what, value, [*map(" ".join, parts)])
    yield contracts(root)


def contracts(root: Path) -> Fact:
    """What import-linter says of the checkout's own contracts (arrows up among them)."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", CONTRACTS], cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    said = re.search(r"Contracts: (.*)", answer.stdout)
    broken = [line for line in answer.stdout.splitlines() if line.endswith("BROKEN")]
    return Fact("import contracts", said[1].rstrip(".") if said else f"not judged: {answer.stderr.strip()[-200:]}", broken)


# ---- pages


def pages(root: Path, found: Sequence[Source]) -> Iterator[Fact]:
    """User pages: the README and docs/, without the lab pages in folders below it."""
    files = (root / "README.md", *sorted((root / "docs").glob("*.md")))
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    yield Fact("user pages", f"{len(texts)}")
    long = [f"{name} {text.count(chr(10))}" for name, text in texts.items() if text.count("\n") > LONG_PAGE]
    yield Fact(f"  over {LONG_PAGE} lines", f"{len(long)}", long)
    lines = [(len(line), name) for name, text in texts.items() for line in text.splitlines() if not line.startswith("|")]
    yield Fact("  longest line outside tables, characters", f"{max(lines)[0]}", [max(lines)[1]])
    words = [(len(part.split()), name) for name, text in texts.items() for part in paragraphs(text)]
    yield Fact("  longest paragraph, words", f"{max(words)[0]}", [max(words)[1]])
    dates = {name: len(DATE.findall(text)) for name, text in texts.items()}
    yield Fact("  dates", f"{sum(dates.values())}", [f"{name} {count}" for name, count in dates.items() if count])
    code = sum(len(IS_NO.findall(source.text)) for source in found)
    yield Fact("“is no …”", f"{sum(len(IS_NO.findall(text)) for text in texts.values())} in user pages, {code} in code")


def paragraphs(text: str) -> Iterator[str]:
    """Running text: neither tables, nor headings, nor what stands in a fence. A list's entries are paragraphs of their own."""
    part, fenced = list[str](), False
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        begins = bool(re.match(r"\s*(?:[-*]|\d+\.) ", line))
        ends = fence or fenced or not line.strip() or line.startswith(("|", "#"))
        if (begins or ends) and part:
            yield " ".join(part)
            part = []
        if not ends:
            part.append(line)
        fenced ^= fence


# ---- all of it


def facts(root: Path, *, traced: bool) -> list[Fact]:
    found = sources(root)
    if not found:
        raise SystemExit(f"{root} has none of the folders {', '.join(PRODUCT)}: name the top of a checkout")
    measured = [*sizes(found), *names(found), *graph(root, found), *pages(root, found)]
    if traced:
        rollout = _rollout_trace.trace(root)
        measured.append(Fact("files of one rollout, prompt to gradient", f"{len(rollout.files)}", rollout.files))
        measured.append(Fact("  types that carry it", f"{len(rollout.types)}", rollout.types))
    return measured


def table(columns: Mapping[str, Sequence[Fact]], *, listed: bool) -> str:
    """A line a fact, a column a checkout."""
    values = {name: {fact.what: fact.value for fact in column} for name, column in columns.items()}
    rows = [("", *columns)] + [(what, *(column.get(what, "") for column in values.values())) for what in _whats(columns)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if listed:
        lines += [line for name, column in columns.items() for fact in column for line in _listing(name, fact)]
    return "\n".join(lines)


def _whats(columns: Mapping[str, Sequence[Fact]]) -> Iterable[str]:
    return dict.fromkeys(fact.what for column in columns.values() for fact in column)


def _listing(checkout: str, fact: Fact) -> list[str]:
    return ["", f"{checkout}: {fact.what.strip()}", *(f"    {name}" for name in fact.names)] if fact.names else []


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], metavar="CHECKOUT")
    parser.add_argument("--names", action="store_true", help="list what was counted")
    parser.add_argument("--trace", action="store_true", help="also run one rollout and count the files that it goes through")
    asked = parser.parse_args(arguments)
    columns = {str(root): facts(root.resolve(), traced=asked.trace) for root in asked.checkouts}
    print(table(columns, listed=asked.names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
