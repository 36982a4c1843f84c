"""How a chat template wants the policy's earlier answers: where their thought goes, and which marks it writes by itself.

    sampled text   <think>\\nfive and eight\\n</think>\\n\\n13      what the policy wrote behind the header
    message        {"content": "13", "reasoning_content": "five and eight"}

A template that takes the thought as a field of its own writes the marks around it. Given the sampled text as `content` it would
write them twice, or the thought behind an empty one. So a template is asked once, by rendering a few made-up answers; then
an answer is taken apart by the marks which the template itself wrote. Refuses to render: it is handed a function that does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from telescope.environments.answer_parsers import Answer, find_opening
from telescope.environments.base import Turn

FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Where templates look for a thought, in the order in which they are tried."""
PARTS = "content parts"
"""Not a field: the content is a list of a thinking and a text part (Mistral's reasoning models)."""

Render = Callable[..., str | None]
"""The text of turns, `header` saying whether the next answer's header is wanted; None where the template refuses them."""

_THOUGHT, _TEXT, _TOOL = "probe4172", "probe8365", "probe2946"
_USER: Turn = {"role": "user", "content": "q"}
_CALL = {"id": "c00000000", "type": "function", "function": {"name": _TOOL, "arguments": {}}}
_RESULT: Turn = {"role": "tool", "name": _TOOL, "tool_call_id": "c00000000", "content": "r"}
_MARK = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]")
_CONTROL = re.compile(r"<\|[^<>|\s]{1,64}\|>")
_LAST_MARK = re.compile(rf"(?:{_MARK.pattern})\s*$")
_WORDS = re.compile(r"[^\W\d_]+")
_SIDES = frozenset(("start", "begin", "open", "end", "stop", "close", "of", "prefix", "suffix"))


@dataclass(frozen=True)
class AnswerForm:
    """What was found out about one template."""

    field: str = ""
    """Where the thought goes: a message's key, `PARTS`, or "" where the template knows thoughts in the content alone."""
    opening: str = ""
    """What the template writes before a thought, with what the header may have opened."""
    closing: str = ""
    """What it writes between a thought and the text behind it."""
    before_text: str = ""
    """What it writes between the header and a text without a thought, e.g. the name of a channel."""
    ending: str = ""
    """What it writes between a text and the end token."""
    keeps_unclosed: bool = False
    """Whether a thought that was cut off stays as it is when it is given as content."""
    keeps_closed: bool = False
    """Whether a text with the closing mark alone stays as it is when it is given as content."""
    refuses_both: bool = False
    """Whether an answer with calls may have a thought or a text, not both."""
    inline: bool = True
    """Without a field: whether a thought in the content stays where the policy wrote it, or is taken off."""
    inline_with_calls: bool = True
    """The same of an answer whose calls are spelled out."""

    def spell(self, turn: Turn) -> Turn:
        """A message of the policy, whose content is the text as it was sampled, as the template wants it."""
        content = turn.get("content")
        if turn.get("role") != "assistant" or not isinstance(content, str) or any(field in turn for field in FIELDS):
            return turn
        if "tool_calls" in turn:  # written by somebody who took the answer apart already
            return turn
        opened = content.opening if isinstance(content, Answer) else ""
        if not self.field:
            whole = opened + content
            return {**turn, "content": self._cut_text(whole if self.inline else whole.removeprefix(_take_thought(whole)))}
        thought, closed, text = self._split(content, opened)
        if thought is None:
            return {**turn, "content": self._cut_text(text)}
        if not closed and self.keeps_unclosed:
            return {**turn, "content": self.opening + thought}
        return {**turn, **self.write(thought, self._cut_text(text))}

    def restate(self, turn: Turn, spelled: Turn) -> Turn:
        """`turn`, an answer with its calls spelled out, with the thought of the same answer as it stands in the history."""
        if any(field in turn for field in FIELDS) or not isinstance(text := turn.get("content") or "", str):
            return turn
        if not self.field:
            own = spelled.get("content")
            return {**turn, "content": _take_thought(own) + text} if isinstance(own, str) and self.inline_with_calls else turn
        if self.field == PARTS:
            own = spelled.get("content")
            thought = own[0]["thinking"] if isinstance(own, list) else ""
        else:
            thought = spelled.get(self.field, "")
        if not thought:
            return turn
        if self.refuses_both and text:
            thought, text = f"{thought}\n{text}", ""
        return {**turn, **self.write(thought, text)}

    def write(self, thought: str, text: str) -> dict[str, Any]:
        """The parts of a message that hold a thought and a text."""
        if self.field == PARTS:
            parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}]
            return {"content": parts if text else parts[:1]}
        return {"content": text, self.field: thought}

    def _cut_text(self, text: str) -> str:
        """The text without what the template writes around it. Where that marks texts as such, marks in a text would begin
        something else: of a call that nobody could read, say, the words stay."""
        text = text.removeprefix(self.before_text).removesuffix(self.ending)
        return _CONTROL.sub("", text) if _CONTROL.search(self.before_text) else text

    def _split(self, text: str, opened: str) -> tuple[str | None, bool, str]:
        """(thought or None, whether it was closed, the rest). White space goes where the marks stand otherwise than the
        template writes them."""
        opening, mark = self.opening.strip(), _MARK.search(self.closing)
        before, closing = (self.closing[: mark.start()], mark[0]) if mark else ("", self.closing)
        body = None
        if opened.strip():
            body = text.removeprefix(self.opening[len(opened) :] if self.opening.startswith(opened) else "")
        elif text.startswith(self.opening) and opening:
            body = text[len(self.opening) :]
        elif opening and text.lstrip().startswith(opening):
            body = text.lstrip()[len(opening) :].lstrip("\n")
        at = (text if body is None else body).find(closing) if closing else -1
        if body is None:
            mentioned = bool(opening) and (self.keeps_closed or opening in text[:at])
            if at < 0 or "/" not in closing or mentioned:
                return None, False, text
            body = text  # closed and never opened
        if at < 0:
            return body, False, ""
        start = at - len(before)
        if start >= 0 and body.startswith(self.closing, start):
            return body[:start], True, body[start + len(self.closing) :]
        thought, rest = body[:at].strip(), body[at + len(closing) :]
        behind = self.closing[len(before) + len(closing) :].strip()
        rest = rest.lstrip("\n")
        common = len(list(itertools.takewhile(bool, map(str.__eq__, behind, rest))))
        if common < len(behind):  # as far as whole marks agree: a call goes to a channel of its own
            common = behind.rfind(">", 0, common) + 1
        return thought, True, rest[common:].lstrip("\n") if common else rest


def _take_thought(text: str) -> str:
    """All up to the mark that closes a thought in a text, "" without one."""
    for mark in ("</think>", "[/THINK]"):
        before, closed, behind = text.partition(mark)
        if closed:
            return before + closed + behind[: len(behind) - len(behind.lstrip("\n"))]
    return ""


def find_answer_form(render: Render, end_texts: Sequence[str]) -> AnswerForm:
    """Ask a template. `render` renders turns, with or without the next header; `end_texts` are what ends an answer."""
    header = render([_USER], header=True)
    plain = render([_USER, {"role": "assistant", "content": _TEXT}], header=False)
    if header is None or plain is None or _TEXT not in plain:
        return AnswerForm()
    start, _, tail = plain.partition(_TEXT)
    ends = [at for end in end_texts if end and (at := tail.find(end)) >= 0]
    ending = tail[: min(ends)] if ends else ""
    before_text = start[len(header) :] if start.startswith(header) else ""
    for field in (*FIELDS, PARTS):
        form = AnswerForm(field, before_text=before_text, ending=ending)
        if seen := list(_show_thought(render, form)):
            return _ask_for_field(render, form, header, *max(seen, key=lambda each: _TEXT in each[1]))
    return _ask_for_inline(render, AnswerForm(before_text=before_text, ending=ending), header)


def _ask_for_field(render: Render, form: AnswerForm, header: str, before: str, behind: str) -> AnswerForm:
    """What else there is to know of a template that writes a thought of its own field, between `before` and `behind`."""
    closing, shown, _ = behind.partition(_TEXT)
    if not shown or _TOOL in closing:
        mark = _MARK.search(behind)
        closing = behind[: mark.end()] if mark else ""
    opening = _find_own_opening(before, header, closing)
    unclosed = render([_USER, {"role": "assistant", "content": opening + _THOUGHT}, _USER], header=True)
    text = f"{_THOUGHT}{closing}{_TEXT}"
    closed = render([_USER, {"role": "assistant", "content": text}, _USER], header=True)
    calls = {"role": "assistant", "tool_calls": [_CALL]}
    both, one = (render([_USER, {**calls, **form.write(_THOUGHT, text)}, _RESULT], header=True) for text in (_TEXT, ""))
    return replace(
        form,
        opening=opening,
        closing=closing,
        before_text="" if _holds(form.before_text, closing) else form.before_text,
        keeps_unclosed=unclosed is not None and unclosed.startswith(before + _THOUGHT),
        keeps_closed=closed is not None and closed.startswith(header + form.before_text + text),
        refuses_both=both is None and one is not None,
    )


def _ask_for_inline(render: Render, form: AnswerForm, header: str) -> AnswerForm:
    """What a template without a field makes of a thought in the content."""
    answer = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_TEXT}"}
    begun = f"{header.removesuffix(find_opening(header))}<think>\n{_THOUGHT}"
    shown = [
        render(turns, header=True) for turns in ([_USER, answer, _USER], [_USER, {**answer, "tool_calls": [_CALL]}, _RESULT])
    ]
    inline, with_calls = (each is None or _THOUGHT not in each or each.startswith(begun) for each in shown)
    before_text = "" if _holds(form.before_text, "</think>") else form.before_text
    return replace(form, before_text=before_text, inline=inline, inline_with_calls=with_calls)


def _holds(text: str, closing: str) -> bool:
    """Whether a text has the end of a thought in it: of an empty one, written before answers without."""
    return bool(closing.strip()) and closing.strip() in text


def _find_own_opening(before: str, header: str, closing: str) -> str:
    """What opens a thought, out of what stands before one and the header of an answer, which may have opened it already."""
    if before.startswith(header) and before[len(header) :].strip():
        return before[len(header) :]
    opened = header[len(before) :] if header.startswith(before) else ""
    if opened.strip() and not _holds(opened, closing):  # a header that opens thoughts as the history does not
        return opened
    last, line = _LAST_MARK.search(before[-128:]), before.rstrip()
    found = last[0] if last else line[line.rfind("\n") + 1 :] + before[len(line) :]
    # What an answer's header ends in may be its role alone, with the thought right behind.
    return "" if header.startswith(line) and not (find_opening(found) or _are_sides(found, closing)) else found


def _are_sides(opening: str, closing: str) -> bool:
    """Whether two marks are named alike, as `[THINK]` and `[/THINK]` are."""
    one, other = (set(_WORDS.findall(text.lower())) - _SIDES for text in (opening, closing))
    return bool(one & other)


def _show_thought(render: Render, form: AnswerForm) -> Iterator[tuple[str, str]]:
    """(what stands before the thought, what behind it) for each dialogue in which the template writes it."""
    tries: list[tuple[Turn, Sequence[Turn], bool]] = []
    for text in (_TEXT, ""):
        answer = {"role": "assistant", **form.write(_THOUGHT, text)}
        called = {**answer, "tool_calls": [_CALL]}
        tries += [(answer, [], False), (answer, [], True), (called, [_RESULT], True), (answer, [_USER], True)]
    for turn, behind, header in tries:
        before, found, after = (render([_USER, turn, *behind], header=header) or "").partition(_THOUGHT)
        shown_as_data = before.endswith(("'thinking': '", '"thinking": "')) and after.startswith(("'", '"'))
        if found and not shown_as_data:  # templates that know no parts write the list itself
            yield before, after
