"""What a docstring says about a function and its parameters: Google, numpy and reST style.

Owns the reading of prose; refuses types (they come from the type hints, see schema.py). A docstring of no known style is all
description. One pass over the lines.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

_GOOGLE_PARAMETERS = frozenset({"args:", "arguments:", "parameters:", "params:", "keyword args:", "keyword arguments:"})
_GOOGLE_OTHERS = frozenset(
    {"returns:", "return:", "yields:", "raises:", "example:", "examples:", "note:", "notes:", "warning:", "see also:"}
)
_NUMPY_PARAMETERS = frozenset({"parameters", "other parameters"})
_NUMPY_RULE = re.compile(r"-{3,}")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+) *(?:\([^()]*(?:\([^()]*\)[^()]*)*\))? *: *(.*)")
_NUMPY_ENTRY = re.compile(r"(\w+(?: *, *\w+)*) *(?::.*)?")
_REST_ENTRY = re.compile(r":(?:param|parameter|arg|argument|key|keyword)(?: +[^:]*?)?[ ]+\*{0,2}(\w+) *: *(.*)")
_REST_FIELD = re.compile(r":(?:\w+)(?: [^:]*)?:")


@dataclass
class Described:
    """`Described("Add two numbers.", {"a": "The first."})`; runs of white space are single spaces in parameters."""

    summary: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(docstring: str | None) -> Described:
    """The description (all prose before the first section) and the text of each parameter."""
    found = DocstringReader(inspect.cleandoc(docstring).splitlines() if docstring else [])
    found.read()
    parameters = {name: " ".join(" ".join(lines).split()) for name, lines in found.parameters.items()}
    return Described("\n".join(found.summary).strip(), {name: text for name, text in parameters.items() if text})


class DocstringReader:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self.summary: list[str] = []
        self.parameters: dict[str, list[str]] = {}

    def read(self) -> None:
        at, section = 0, "summary"
        names: list[str] = []
        indent = 0
        while at < len(self._lines):
            line = self._lines[at]
            started, used = self._find_section(at)
            if started:
                section, names, indent, at = started, [], 0, at + used
                continue
            if line.startswith(":") and _REST_FIELD.match(line):
                section, names = "rest", []
                if entry := _REST_ENTRY.match(line):
                    names = self._enter([entry[1]], entry[2])
            elif section == "summary":
                self.summary.append(line)
            elif section in ("google", "numpy") and line.strip():
                names, indent = self._read_entry(section, line, names, indent)
            else:
                self._continue_entry(names, line)
            at += 1

    def _find_section(self, at: int) -> tuple[str, int]:
        """The section that begins at this line and the lines of its heading; ("", 0) if none does."""
        line = self._lines[at].rstrip()
        if line.startswith(" "):
            return "", 0
        if line.lower() in _GOOGLE_PARAMETERS:
            return "google", 1
        if line.lower() in _GOOGLE_OTHERS:
            return "other", 1
        if at + 1 < len(self._lines) and line and _NUMPY_RULE.fullmatch(self._lines[at + 1].strip()):
            return ("numpy" if line.lower() in _NUMPY_PARAMETERS else "other"), 2
        return "", 0

    def _read_entry(self, section: str, line: str, names: list[str], indent: int) -> tuple[list[str], int]:
        """A line of a parameter section: a new parameter at the entries' own indentation, else more of the last one."""
        depth = len(line) - len(line.lstrip())
        if section == "google" and depth == 0:  # prose behind the section
            return [], indent
        first = not names
        if first:
            indent = depth
        if depth <= indent:
            pattern = _GOOGLE_ENTRY if section == "google" else _NUMPY_ENTRY
            entry = pattern.fullmatch(line.strip())
            if entry is not None:
                several = [name.strip() for name in entry[1].split(",")]
                return self._enter(several, entry[2] if section == "google" else ""), indent
        self._continue_entry(names, line)
        return names, indent

    def _enter(self, names: list[str], text: str) -> list[str]:
        for name in names:
            self.parameters[name] = [text]
        return names

    def _continue_entry(self, names: list[str], line: str) -> None:
        for name in names:
            self.parameters[name].append(line.strip())
