r"""The part of an answer that counts: behind a thought, in a \boxed{}, between tags, in a code block, in XML fields.

Each parser reads a text (`parse`, None where there is nothing of the kind), says whether it has the asked form (`well_formed`,
1.0 or 0.0: a reward function for a rubric), and writes one (`wrap`). Answers are hostile: every parser passes over the text a
fixed number of times, whatever it holds. Refuses to judge what it finds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_.-]*$")
_LATEX = re.compile(r"\\boxed[ \t\n]{0,8}\{|\\.|[{}]", re.DOTALL)
_FENCE = re.compile(r"^[ ]{0,3}(`{3,64})([^`\n]{0,100})$", re.MULTILINE)


class AnswerParser(Protocol):
    def parse(self, completion: str) -> str | None:
        """What counts of the answer, without white space around it."""
        ...

    def well_formed(self, completion: str) -> float:
        """1.0 where the answer has exactly the asked form, else 0.0."""
        ...


@dataclass(frozen=True)
class Whole:
    """The whole answer counts."""

    def parse(self, completion: str) -> str | None:
        return completion.strip() or None

    def well_formed(self, completion: str) -> float:
        return float(bool(completion.strip()))

    def wrap(self, text: str) -> str:
        return text


@dataclass(frozen=True)
class ThinkTags:
    """`<think>…</think>` and then an answer, which `inner` reads."""

    inner: AnswerParser = Whole()
    tag: str = "think"
    opened: bool = False
    """The chat template writes the opening tag itself, so that answers begin within the thought."""

    def __post_init__(self) -> None:
        _check_names((self.tag,))

    def parse(self, completion: str) -> str | None:
        """From behind the last closing tag; None where a thought was begun and never ended."""
        _, closed, rest = completion.rpartition(f"</{self.tag}>")
        if not closed and (self.opened or f"<{self.tag}>" in completion):
            return None
        return self.inner.parse(rest)

    def well_formed(self, completion: str) -> float:
        """One thought, at the beginning, and then an answer of the inner form."""
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"
        openings = 0 if self.opened else 1
        if completion.count(closing) != 1 or completion.count(opening) != openings:
            return 0.0
        if not self.opened and not completion.lstrip().startswith(opening):
            return 0.0
        thought, _, rest = completion.partition(closing)
        return self.inner.well_formed(rest) if opening not in rest and thought.strip() != opening else 0.0

    def wrap(self, text: str, thought: str = "") -> str:
        return f"{'' if self.opened else f'<{self.tag}>'}{thought}</{self.tag}>{text}"


@dataclass(frozen=True)
class Boxed:
    r"""The last `\boxed{…}` whose braces are balanced, e.g. `\frac{1}{2}` of `so \boxed{\frac{1}{2}}`."""

    def parse(self, completion: str) -> str | None:
        boxes = _find_boxes(completion)
        return completion[slice(*max(boxes))].strip() if boxes else None

    def well_formed(self, completion: str) -> float:
        """Exactly one box, and something in it."""
        boxes = _find_boxes(completion)
        return float(len(boxes) == 1 and bool(completion[slice(*boxes[0])].strip()))

    def wrap(self, text: str) -> str:
        return f"\\boxed{{{text}}}"


@dataclass(frozen=True)
class AnswerTags:
    """What stands between the last `<answer>` and `</answer>` that belong together."""

    tag: str = "answer"

    def __post_init__(self) -> None:
        _check_names((self.tag,))

    def parse(self, completion: str) -> str | None:
        inside = _find_between(completion, f"<{self.tag}>", f"</{self.tag}>")
        return None if inside is None else inside.strip()

    def well_formed(self, completion: str) -> float:
        """One pair of tags with something between them."""
        counts = completion.count(f"<{self.tag}>"), completion.count(f"</{self.tag}>")
        return float(counts == (1, 1) and bool(self.parse(completion)))

    def wrap(self, text: str) -> str:
        return f"<{self.tag}>{text}</{self.tag}>"


@dataclass(frozen=True)
class CodeBlock:
    """The last fenced block of Markdown, of the given languages if any are named (a block without a language is of any)."""

    languages: tuple[str, ...] = ()

    def parse(self, completion: str) -> str | None:
        blocks = self._blocks(completion)
        return blocks[-1] if blocks else None

    def well_formed(self, completion: str) -> float:
        """Exactly one block, and something in it."""
        blocks = self._blocks(completion)
        return float(len(blocks) == 1 and bool(blocks[0].strip()))

    def wrap(self, text: str) -> str:
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
        return f"{fence}{self.languages[0] if self.languages else ''}\n{text}\n{fence}"

    def _blocks(self, completion: str) -> list[str]:
        """Blocks that are closed, their white space kept."""
        found, opened = [], None
        for fence in _FENCE.finditer(completion):
            if opened is None:
                opened = fence
            elif len(fence[1]) >= len(opened[1]) and not fence[2].strip():
                language = opened[2].strip().lower()
                if not (self.languages and language) or language in self.languages:
                    found.append(completion[opened.end() + 1 : max(fence.start() - 1, opened.end() + 1)])
                opened = None
        return found


@dataclass(frozen=True)
class XMLFields:
    """`<reasoning>…</reasoning><answer>…</answer>`: each named field once, in this order. `parse` gives the last one."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_names(self.names)

    def fields(self, completion: str) -> Mapping[str, str]:
        """Those that are there, without white space around them; of one that is there twice, the last."""
        read = {name: _find_between(completion, f"<{name}>", f"</{name}>") for name in self.names}
        return {name: text.strip() for name, text in read.items() if text is not None}

    def parse(self, completion: str) -> str | None:
        return self.fields(completion).get(self.names[-1])

    def well_formed(self, completion: str) -> float:
        at = 0
        for name in self.names:
            opening, closing = f"<{name}>", f"</{name}>"
            if (completion.count(opening), completion.count(closing)) != (1, 1):
                return 0.0
            start, end = completion.find(opening, at), completion.find(closing, at)
            if start < 0 or end < start + len(opening) or not completion[start + len(opening) : end].strip():
                return 0.0
            at = end + len(closing)
        return 1.0

    def wrap(self, **fields: str) -> str:
        return "\n".join(f"<{name}>\n{fields[name]}\n</{name}>" for name in self.names)


def _find_between(text: str, opening: str, closing: str) -> str | None:
    """Between the last closing mark that has an opening one before it, and that."""
    before, closed, _ = text.rpartition(closing)
    _, opened, inside = before.rpartition(opening)
    return inside if closed and opened else None


def _find_boxes(text: str) -> list[tuple[int, int]]:
    r"""(start, end) of what stands in each balanced `\boxed{}`, nested ones too."""
    boxes: list[tuple[int, int]] = []
    open_braces: list[int] = []  # where the inside of a box begins, -1 for another brace
    for mark in _LATEX.finditer(text):
        if mark[0] == "{":
            open_braces.append(-1)
        elif mark[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                boxes.append((start, mark.start()))
        elif mark[0].startswith("\\boxed"):
            open_braces.append(mark.end())
    return boxes


def _check_names(names: Sequence[str]) -> None:
    if not names or len(set(names)) != len(names) or not all(_NAME.match(name) for name in names):
        raise ValueError(f"{list(names)} must be one or more different names of tags, e.g. answer")
