r"""The part of an answer that counts: behind a thought, in a \boxed{}, between tags, in a code block, in XML fields.

Each parser reads a text (`parse`, None where there is nothing of the kind), says whether it has the asked form (`well_formed`,
1.0 or 0.0: a reward function for a rubric), and writes one (`wrap`). Answers are hostile: every parser passes over the text a
fixed number of times, whatever it holds. Refuses to judge what it finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_.-]*$")
_LATEX = re.compile(r"\\{1,3}(?:boxed|fbox)(?:[ \t\n]{0,8}\{|[ \t]{0,8}([-+]?[0-9][0-9.,/]*|[A-Z](?!\w)))|\\.|[{}]", re.DOTALL)
_OPENED = re.compile(r"<(think|thinking|reasoning|thought)>\s*$")
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|think|>", "<|end|>"),
)
"""With what models open and close a thought; gpt-oss thinks in a channel (`say_channels`)."""
_ONLY_BY_PROMPT = tuple((f"<{tag}>", f"</{tag}>") for tag in ("thinking", "reasoning", "thought"))
_CHANNEL = "<|channel|>"
_CHANNELS = re.compile(r"(?:<\|start\|>\w{0,64})?\s{0,8}(?:to=[^\s<]{1,256}\s{0,8})?<\|channel\|>")
HARMONY_TO = re.compile(r"to=(?:functions\.)?([\w.-]{1,256})")
_HARMONY_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_FENCE = re.compile(r"^([ ]{0,3})(`{3,64}|~{3,64})([^`\n]{0,200})$", re.MULTILINE)
_LANGUAGE = re.compile(r"[ \t]*(?:\{[ ]*\.?)?([A-Za-z][\w+#-]*)")


class Answer(str):
    """What the policy said, and the tag of the thought that its prompt had opened before it, "" for none.

    A template may write `<think>` itself: the text alone doesn't show whether it ever leaves that thought. `opening` is what
    the prompt ends in, such as `<think>` and a line break, or another model's mark.
    """

    __slots__ = ("opened_by", "opening")
    opened_by: str
    opening: str

    def __new__(cls, text: str, opened_by: str = "", opening: str = "") -> Answer:
        answer = super().__new__(cls, text)
        answer.opened_by = opened_by
        answer.opening = opening or (f"<{opened_by}>" if opened_by else "")
        return answer


class AnswerParser(Protocol):
    def parse(self, completion: str) -> str | None:
        """What counts of the answer, without white space around it."""
        ...

    def well_formed(self, completion: str) -> float:
        """1.0 where the answer has exactly the asked form, else 0.0."""
        ...


def find_opened(prompt: str) -> str:
    """The tag of the thought that a prompt ends in, such as `think`; "" for none."""
    match = _OPENED.search(prompt[-64:])
    return match[1] if match else ""


def find_opening(prompt: str) -> str:
    """The end of a prompt that opens a thought, such as `<think>` and the white space behind it; "" for none."""
    match = _OPENED.search(prompt[-64:])
    return match[0] if match else ""


def strip_thought(answer: str, *, channels: bool = True) -> str:
    """The answer behind its thought: `<think>…</think>` at its start, or all up to `</think>` where the prompt opened it; and
    so with the marks of other models. Of channels, what is said and the calls; as they stand without `channels`.

    A thought that never ends is all thought: "".
    """
    said = _leave_thought(answer, THOUGHTS)
    if said is not None and channels and _CHANNELS.match(said.lstrip()):
        said = say_channels(said)
    return said or ""


def _leave_thought(answer: str, marks: Sequence[tuple[str, str]]) -> str | None:
    """Behind a thought in one of these marks that the answer or its prompt opened; None for one that never ends."""
    opened_by = answer.opening.strip() if isinstance(answer, Answer) else ""
    if opened_by.startswith(_CHANNEL):
        return opened_by + answer
    start = answer.lstrip()
    for opening, closing in (*marks, *_ONLY_BY_PROMPT):
        opened = opened_by == opening or (start.startswith(opening) and (opening, closing) not in _ONLY_BY_PROMPT)
        if not opened and opening != "<think>":
            continue
        end = answer.find(closing)
        if end >= 0 and (opened or opening not in answer[:end]):
            return answer[end + len(closing) :]
        if opened:
            return None
    return answer


def say_channels(text: str) -> str | None:
    """What the messages of gpt-oss say, analysis left out and calls as they were written; None for analysis alone."""
    said: list[str] = []
    for message, head, body in split_channels(text):
        if HARMONY_TO.search(head):
            said.append(message)
        elif body is not None and not is_analysis(head):
            said.append(body)
    return "".join(said) if said else None


def split_channels(text: str) -> Iterator[tuple[str, str, str | None]]:
    """(message, its head, its body) of a text of channels; a body of None never began."""
    for message in text.split("<|start|>"):
        head, begun, body = message.partition("<|message|>")
        yield message, head, _HARMONY_END.split(body, maxsplit=1)[0] if begun else None


def is_analysis(head: str) -> bool:
    """Whether the head of a message names the channel of thoughts."""
    channel = _HARMONY_CHANNEL.search(head)
    return channel is not None and channel[1] == "analysis"


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
        """From behind the last closing tag; None where a thought was begun, by the answer or by its prompt, and never ended.
        As `<think>`, so the marks of other models."""
        opened = self.opened or (
            isinstance(completion, Answer)
            and (completion.opened_by == self.tag or completion.opening.strip() == f"<{self.tag}>")
        )
        said: str | None = completion
        if self.tag == "think":
            said = _leave_thought(completion, THOUGHTS[1:])
            said = say_channels(said) if said is not None and _CHANNELS.match(said.lstrip()) else said
        if said is None:
            return None
        _, closed, rest = said.rpartition(f"</{self.tag}>")
        if (not closed and opened) or f"<{self.tag}>" in rest:
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
    r"""The last `\boxed{…}` whose braces are balanced, e.g. `\frac{1}{2}` of `so \boxed{\frac{1}{2}}`; an empty one
    counts where there is no other. `\fbox{7}`, `\boxed 7` and a doubled backslash are boxes too."""

    def parse(self, completion: str) -> str | None:
        boxes = sorted(_find_boxes(completion), reverse=True)
        return next(filter(None, (completion[slice(*box)].strip() for box in boxes)), "") if boxes else None

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
    """The last fenced block of Markdown; of the given languages, if any are named and a block says one of them. What stands
    behind a block's language (`python title="a.py"`) doesn't count."""

    languages: tuple[str, ...] = ()

    def parse(self, completion: str) -> str | None:
        blocks = self.find_all(completion)
        return blocks[-1] if blocks else None

    def well_formed(self, completion: str) -> float:
        """Exactly one block, and something in it."""
        blocks = self.find_all(completion)
        return float(len(blocks) == 1 and bool(blocks[0].strip()))

    def wrap(self, text: str) -> str:
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
        return f"{fence}{self.languages[0] if self.languages else ''}\n{text}\n{fence}"

    def find_all(self, completion: str) -> list[str]:
        """Blocks that are closed, their white space kept; those without a language where no block has one of `languages`."""
        found: list[tuple[bool, str]] = []
        opened = None
        for fence in _FENCE.finditer(completion):
            if opened is None:
                opened = fence
            elif fence[2][0] == opened[2][0] and len(fence[2]) >= len(opened[2]) and not fence[3].strip():
                language = _LANGUAGE.match(opened[3])
                if language is None or not self.languages or language[1].lower() in self.languages:
                    inside = completion[opened.end() + 1 : max(fence.start() - 1, opened.end() + 1)]
                    found.append((language is not None, _take_indent(inside, len(opened[1]))))
                opened = None
        named = [inside for has_language, inside in found if has_language] if self.languages else []
        return named or [inside for _, inside in found]


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


def _take_indent(text: str, width: int) -> str:
    """Without up to `width` spaces before each line, as far as the fence itself stands from the margin."""
    return re.sub(rf"^ {{1,{width}}}", "", text, flags=re.MULTILINE) if width else text


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
        elif "box" in mark[0] and mark[1] is None:
            open_braces.append(mark.end())
        elif mark[1] is not None:
            boxes.append((mark.start(1), mark.start(1) + len(mark[1].rstrip(".,"))))
    return boxes


def _check_names(names: Sequence[str]) -> None:
    if not names or len(set(names)) != len(names) or not all(_NAME.match(name) for name in names):
        raise ValueError(f"{list(names)} must be one or more different names of tags, e.g. answer")
