"""A model's chat template and tokenizer behind three questions: the text of a dialogue, its tokens, the text of tokens.

Owns rendering and what is remembered of it. Refuses to import transformers: it is handed a tokenizer (workers/tokenizer.py
loads one), so that environments and their tests need none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from telescope.environments.answer_form import AnswerForm, find_answer_form
from telescope.environments.answer_parsers import find_opening
from telescope.environments.base import ToolSchema, Turn
from telescope.environments.lru import LruCache

Ids = np.ndarray  # [T] int32


_SURROGATES = re.compile("[\ud800-\udfff]")
_PROBE = "probe7391"
SHOWN_OF_AN_END = 40
_ASKED: Turn = {"role": "user", "content": "q"}


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class TemplateError(RuntimeError):
    """The template cannot render these turns; the message says what it said."""


@dataclass(frozen=True)
class Rendered:
    text: str
    ids: Ids


class ChatTemplate:
    """Renders dialogues. `eos_ids` are the tokens that end an answer, the tokenizer's own first."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        *,
        chat_template: str | None = None,
        enable_thinking: bool = False,
        remembered: int = 4096,
    ) -> None:
        if not eos_ids:
            raise ValueError("the tokenizer names no end-of-sequence token: an answer could never end")
        self.tokenizer = tokenizer
        self._options: dict[str, Any] = {"enable_thinking": enable_thinking}
        if chat_template is not None:
            self._options["chat_template"] = chat_template
        self.end_texts = {token: self.decode([token]) for token in eos_ids}
        """What each end-of-sequence token looks like in a text."""
        self._anchor = self.end_texts[eos_ids[0]]
        self._anchor_ids = self._encode(self._anchor)
        self._remembered: LruCache[str, Rendered] = LruCache(remembered)
        self.form: AnswerForm = find_answer_form(self._try, list(self.end_texts.values()))
        """How the template wants earlier answers: found out here, by some tens of dialogues, and not beside a rollout."""

    def opening(self, turns: Sequence[Turn], tools: Sequence[ToolSchema] = ()) -> Rendered:
        """`render` of a dialogue's first prompt. Remembered, because all samples of a group ask for the same one."""
        spelled = self.spell(turns)
        return self._remembered.get(_make_key(spelled, tools), lambda: self._render(spelled, tools))

    def render(self, turns: Sequence[Turn], tools: Sequence[ToolSchema] = ()) -> Rendered:
        """Text and tokens of the dialogue with the header of the policy's next answer at its end. Answers in it, of examples
        say, are spelled as the template wants them."""
        return self._render(self.spell(turns), tools)

    def spell(self, turns: Sequence[Turn]) -> list[Turn]:
        """Messages as the template wants them: `text` takes them so."""
        return [self.form.spell(turn) for turn in turns]

    def _render(self, spelled: Sequence[Turn], tools: Sequence[ToolSchema]) -> Rendered:
        text = self.text(spelled, tools)
        return Rendered(text, self.encode(text))

    def remember(self, turns: Sequence[Turn], rendered: Rendered) -> None:
        """Take over what `render` made of opening turns in another thread. Call it where `opening` is called."""
        self._remembered.get(_make_key(self.spell(turns), ()), lambda: rendered)

    def lengths(self, dialogues: Sequence[Sequence[Turn]], enough: int = sys.maxsize, characters: int = 1) -> list[int]:
        """Tokens of each dialogue as `render` makes them; many at once, in the tokenizer's own threads where it has some. Of
        one whose first `characters * enough` make more than `enough` tokens that number is given, and the rest not read."""
        texts = [self.text(self.spell(turns)) for turns in dialogues]
        cut = characters * enough
        found = self._count([text[:cut] for text in texts])
        again = [place for place, text in enumerate(texts) if len(text) > cut and found[place] <= enough]
        for place, length in zip(again, self._count([texts[place] for place in again]), strict=True):
            found[place] = length
        return found

    def _count(self, texts: Sequence[str]) -> list[int]:
        batch: Any = self.tokenizer
        if not callable(batch):
            return [len(self._encode(text)) for text in texts]
        return [len(ids) for ids in batch(list(texts), add_special_tokens=False)["input_ids"]] if texts else []

    def text(self, turns: Sequence[Turn], tools: Sequence[ToolSchema] = (), *, header: bool = True) -> str:
        """The dialogue as the template writes these very messages, with the header of the policy's next answer unless `header`
        is False. `tools` go to the template as its own `tools`, in OpenAI's form."""
        return self._write(turns, tools, add_generation_prompt=header)

    def _write(self, turns: Sequence[Turn], tools: Sequence[ToolSchema] = (), **more: Any) -> str:
        given = {"tools": [dict(tool) for tool in tools]} if tools else {}
        options = {"tokenize": False, "add_generation_prompt": True, **self._options, **given, **more}
        try:
            text = self.tokenizer.apply_chat_template([dict(turn) for turn in turns], **options)
        except (ValueError, TypeError, KeyError, LookupError) as error:
            raise TemplateError(f"the tokenizer can't render the dialogue: {error} (model.chat_template gives one)") from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "jinja2":  # templates refuse by raising; we do not import jinja2
                raise
            raise TemplateError(f"the chat template refuses the dialogue of {_list_roles(turns)}: {error}") from error
        # Tokenizers take no half of a surrogate pair, and what an environment says may hold one (the name of a file, say).
        return _SURROGATES.sub("\ufffd", str(text))

    @property
    def is_deaf(self) -> bool:
        """Whether the template writes a dialogue, and nothing of what the user says in it."""
        try:
            return _PROBE not in self.text([{"role": "user", "content": _PROBE}])
        except TemplateError:  # it wants another dialogue: said where an environment's own prompts are rendered
            return False

    def find_oddities(self) -> list[str]:
        """What of the template makes training other than one thinks, in sentences; empty mostly."""
        looks = (self._find_strange_end, self._find_ignored_header, self._find_clock)
        return [sentence for look in looks if (sentence := look())]

    def _find_strange_end(self) -> str:
        try:
            text = self._write([_ASKED, {"role": "assistant", "content": _PROBE}], add_generation_prompt=False)
        except TemplateError:
            return ""
        _, said, end = text.rpartition(_PROBE)
        if not said or end.lstrip().startswith(tuple(self.end_texts.values())):
            return ""
        known = " or ".join(map(repr, self.end_texts.values()))
        return (
            f"the chat template writes {end[:SHOWN_OF_AN_END]!r} behind an answer, and answers end with {known} alone: the end "
            "that the policy reads in earlier turns would end none of its own; add the token to eos_token_id in "
            "generation_config.json, or give another model.chat_template"
        )

    def _find_ignored_header(self) -> str:
        try:
            same = self._write([_ASKED]) == self._write([_ASKED], add_generation_prompt=False)
        except TemplateError:
            return ""
        return (
            "the chat template writes the same with and without add_generation_prompt: no header tells the policy that the "
            "answer is its own; mend it, or give another model.chat_template"
            if same
            else ""
        )

    def _find_clock(self) -> str:
        """By a clock of our own, which takes the place of the one that transformers gives to templates."""
        try:
            shown = _PROBE in self._write([_ASKED], strftime_now=lambda form: _PROBE)
        except TemplateError:
            return ""
        return (
            "the chat template writes the date (strftime_now): prompts then differ from day to day, and between hosts around "
            "midnight; give model.chat_template without it"
            if shown
            else ""
        )

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template writes the tools that it is given."""
        tool = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
        return self._writes([_ASKED], [{"type": "function", "function": tool}])

    @cached_property
    def has_tool_role(self) -> bool:
        """Whether the template writes turns of the role "tool", be it only behind an answer with `tool_calls`."""
        result = {"role": "tool", "name": "f", "tool_call_id": "c00000000", "content": _PROBE}
        call = {"id": "c00000000", "type": "function", "function": {"name": "f", "arguments": {}}}
        answers: tuple[Turn, ...] = (
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        )
        return any(self._writes([_ASKED, answer, result], ()) for answer in answers)

    def _writes(self, turns: Sequence[Turn], tools: Sequence[ToolSchema]) -> bool:
        try:
            return _PROBE in self.text(turns, tools)
        except TemplateError:
            return False

    def _try(self, turns: Sequence[Turn], *, header: bool) -> str | None:
        try:
            return self.text(turns, header=header)
        except TemplateError:
            return None

    def find_opening(self, prompt: str) -> str:
        """The end of a prompt that opens a thought, in any of the known tags or in this template's own mark; "" for none."""
        own = self.form.opening.strip()
        if own and prompt[-128:].rstrip().endswith(own):
            return prompt[prompt.rindex(own) :]
        return find_opening(prompt)

    def encode(self, text: str) -> Ids:
        """Tokens of a whole prompt."""
        return _freeze(self._encode(text))

    def continuation(self, text: str) -> Ids:
        """Tokens of a text that follows other tokens.

        Encoded behind an end-of-sequence token that is then dropped: tokenizers that mark the start of a text with a space
        would otherwise put one here.
        """
        ids = self._encode(self._anchor + text)
        at = len(self._anchor_ids)
        return _freeze(ids[at:] if ids[:at] == self._anchor_ids else self._encode(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, special ones shown: an answer that holds one must not look as if it did not."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _make_key(turns: Sequence[Turn], tools: Sequence[ToolSchema]) -> str:
    return json.dumps([list(map(dict, turns)), list(map(dict, tools))], default=repr)


def _freeze(ids: list[int]) -> Ids:
    array = np.array(ids, np.int32)
    array.setflags(write=False)  # shared between the samples of a group
    return array


def _list_roles(turns: Sequence[Turn]) -> str:
    return ", ".join(str(turn.get("role", "no role")) for turn in turns)
