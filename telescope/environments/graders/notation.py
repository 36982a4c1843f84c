r"""Notation that changes no answer: what is spelled in several ways gets one, and lists and brackets come apart.

White space is kept where it parts two numbers or words (`2 1/2`, `1 2 3`) or stands behind a comma (`32, 349` is a list,
`32,349` a number). Linear in the text. Refuses to compute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_SIGNS = str.maketrans(
    {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}  # full width
    | {
        "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ",
        "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∅": "\\emptyset ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "±": "\\pm ",
        "⁄": "/",
        "√": "\\sqrt ", "\u00a0": " ", "\u2009": "\\,", "\u202f": "\\,", "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3",
        "⅔": " 2/3", "⅕": " 1/5", "⅛": " 1/8", "，": ", ", "（": "(", "）": ")", "％": "%", "θ": "\\theta ", "º": "°",
    }
)  # fmt: skip
_DOLLAR = "\ue000"  # a dollar that is money and no delimiter
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?"), ""),
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), ","),
    (re.compile(r"(?<![\d.])(\d{1,3}(?:\\,\d{3})+)(?!\d)"), lambda match: match[1].replace("\\,", "")),
    (re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\\\\$"), " "),
    (re.compile(r"\\(?:varnothing|empty)(?![a-zA-Z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\(?:geq|geqslant)(?![a-zA-Z])"), r"\\ge "),
    (re.compile(r"\\(?:leq|leqslant)(?![a-zA-Z])"), r"\\le "),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne "),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\?\^\s*\{?\s*\\circ\s*\}?|\\(?:degree|textdegree)(?![a-zA-Z])"), "°"),
    (re.compile(r"\\(?:textdollar|dollar|\$)(?![a-zA-Z])"), _DOLLAR),
    (re.compile(r"\\(?:textsterling|pounds)(?![a-zA-Z])"), "£"),
    (re.compile(r"\\(?:texteuro|euro)(?![a-zA-Z])(?:\{\})?"), "€"),
    (re.compile(r"\\colon(?![a-zA-Z])"), ":"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\log_\{?e\}?(?![a-zA-Z])"), r"\\ln "),
    (re.compile(r"\\(?:text)?color\s*\{[a-zA-Z]{1,20}\}"), ""),
    (
        re.compile(r"\\(?:operatorname\*?|mathrm|text)\s*\{(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan)\}"),
        r"\\\1 ",
    ),
)
_PLAIN_NAME = re.compile(r"(?<![a-zA-Z])(?:pi|oo|exp|abs|sin|cos|tan|cot|sec|csc|ln|log|arc(?:sin|cos|tan))(?![a-zA-Z])")
_PLAIN = (
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![\\\w])oo(?!\w)"), r"\\infty "),
    # In words and units ("log", "5 sec", "m/sec^2") they name no function: an argument must follow.
    (re.compile(r"(?<![\\a-zA-Z])(sec|csc)(?=\s?(?:\^\{?-?\d\}?)?\s?[(\\])"), r"\\\1 "),
    (
        re.compile(
            r"(?<![\\a-zA-Z])((?:arc)?(?:sin|cos|tan)|cot|ln|log)"
            r"(?=\s?(?:[\^_]\{?-?\w{1,4}\}?)?\s?(?:[(\\|\d]|[a-zA-Z](?![a-zA-Z])))"
        ),
        r"\\\1 ",
    ),
)
_CALLED = re.compile(r"(?:\\|(?<![\\a-zA-Z]))(exp|abs|sqrt)\s?(?=\()")
_WRAPPED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname|emph|bm|boldsymbol)\s*\{([^{}]*)\}"
)
_MONEY = re.compile(r"^\s*-?\$(?=\d[^$]*$)")
_DELIMITERS = re.compile(r"\$|(?<!\\)\\[()\[\]]|`")
_SPACE = re.compile(r"(?<![\w%.°'’,)}])\s+|\s+(?![\w('°\\])")
_PARTS_NOTHING = re.compile(r"(?<![\d,]) |(?<!,) (?!\d)")
_LETTER = re.compile(r"[(\[{]([a-zA-Z])[)\]}]")
_GREATER = re.compile(r">|\\ge(?![a-zA-Z])|\\gt(?![a-zA-Z])")
_LESS = re.compile(r"<|\\le(?![a-zA-Z])|\\lt(?![a-zA-Z])|=(?<!>=)|\\ne(?![a-zA-Z])")
_BETWEEN = re.compile(
    r"(?:([^<>=,a-zA-Z\\]{1,40}|[^<>=,]{0,40}\\[^<>=,]{1,40}?)(<=|<|\\le ?))?([a-zA-Z])(?: ?(<=|<|\\le ?)([^<>=,]{1,40}))?"
)
_MEMBER = re.compile(r"([a-zA-Z]) ?\\in(?![a-zA-Z]) ?([(\[].{1,200}[)\]])")
_OPENING, _CLOSING = "([{", ")]}"
MAX_ITEMS = 32
_LONGEST_WITH_CALLS = 1000  # characters: each call looks for its bracket


@dataclass(frozen=True)
class Items:
    """What commas part: `opening` and `closing` are the brackets around them, "" for a bare list."""

    opening: str
    closing: str
    items: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        return self.opening not in ("", "\\{")


@lru_cache(maxsize=4096)  # the samples of a group share the right answer, and often the given one
def tidy(text: str) -> str:
    r"""The text in one spelling: without dollar signs, \left and \right, \text around words, and spaces that part nothing;
    \dfrac is \frac; a last full stop, and brackets around one letter don't count."""
    text = _MONEY.sub(lambda match: match[0].replace("$", _DOLLAR), text.rstrip()) if "$" in text else text.rstrip()
    text = _RAISED_RUN.sub(lambda run: f"^{{{run[0].translate(_RAISED)}}}", text).translate(_SIGNS)
    if any(sign in text for sign in "\\~{*"):
        if (len(text) - len(text.rstrip("\\"))) % 2:
            text = text[:-1]
        for spelling, one in _SPELLINGS:
            text = spelling.sub(one, text)
        for _ in range(3):
            text, changed = _WRAPPED.subn(r" \1 ", text)
            if not changed:
                break
        text = _DELIMITERS.sub("", text)
    else:
        text = text.replace("$", "").replace("`", "")
    text = _write_plain_names(text)
    text = text.replace(_DOLLAR, "$")
    text = _SPACE.sub("", " ".join(text.strip(" \t\r\n*").split())).rstrip(".;:").strip(" ,")
    if text.startswith("{") and find_close(text, 0) == len(text) - 1:
        text = text[1:-1]
    match = _LETTER.fullmatch(text)
    return match[1] if match else text


def _write_plain_names(text: str) -> str:
    r"""Constants and functions as a calculator writes them, in LaTeX: `pi/2` is `\pi /2`, `exp(2)` is `e^{2}`."""
    if _PLAIN_NAME.search(text):
        for plain, written in _PLAIN:
            text = plain.sub(written, text)
    if "(" not in text or len(text) > _LONGEST_WITH_CALLS:
        return text
    for called in reversed(list(_CALLED.finditer(text))):
        close = find_close(text, called.end())
        if close > 0:
            opening, closing = {"exp": ("e^{", "}"), "abs": ("|", "|"), "sqrt": ("\\sqrt{", "}")}[called[1]]
            if text[: called.start()].rstrip()[-1:] in ("^", "_"):
                opening, closing = "{" + opening, closing + "}"
            text = f"{text[: called.start()]}{opening}{text[called.end() + 1 : close]}{closing}{text[close + 1 :]}"
    return text


def turn_round(tidied: str) -> str:
    """A chain of "greater than" as one of "less than": `4>x>-1` is `-1<x<4`."""
    if not _GREATER.search(tidied) or _LESS.search(tidied):
        return tidied
    parts = re.split(r"(>=|>|\\ge(?![a-zA-Z])|\\gt(?![a-zA-Z]))", tidied)
    turned = {">": "<", "\\gt": "<"}
    return "".join(turned.get(part, "\\le ") if at % 2 else part.strip() for at, part in reversed(list(enumerate(parts))))


def find_interval(tidied: str) -> Items | None:
    """The interval that an inequality of one variable names, as `[1,2)` for `1\\le x<2`; None for anything else."""
    named = _read_inequality(tidied)
    return named[1] if named is not None else None


def match_intervals(one: str, other: str) -> tuple[Items, Items] | None:
    r"""Both as intervals, where one is an inequality and the other says `\in` of the same letter; else None."""
    for first, second in ((one, other), (other, one)):
        inside, bounded = _read_membership(first), _read_inequality(second)
        if inside is not None and bounded is not None and inside[0] == bounded[0]:
            return (inside[1], bounded[1]) if first is one else (bounded[1], inside[1])
    return None


def _read_inequality(tidied: str) -> tuple[str, Items] | None:
    """The letter and its interval."""
    match = _BETWEEN.fullmatch(turn_round(tidied))
    if match is None or (match[1] is None and match[5] is None):  # a letter alone bounds nothing
        return None
    low, below, letter, above, high = match.groups()
    opening, closing = ("[" if below and below != "<" else "("), ("]" if above and above != "<" else ")")
    return letter, Items(opening, closing, ((low or "-\\infty").strip(), (high or "\\infty").strip()))


def _read_membership(tidied: str) -> tuple[str, Items] | None:
    r"""`x \in [1,2)`: the letter and its interval."""
    match = _MEMBER.fullmatch(tidied)
    items = split_items(match[2]) if match is not None else None
    if match is None or items is None or items.opening not in ("(", "[") or len(items.items) != 2:
        return None
    return match[1], items


def squeeze(tidied: str) -> str:
    """In small letters, and without white space but for what parts two numbers or stands behind a comma: `X y` is `xy`, `1 2`
    is not `12`."""
    return _PARTS_NOTHING.sub("", tidied).casefold()


def find_close(text: str, at: int) -> int:
    """Where the bracket opened at `at` is closed, whatever kinds both are; -1: nowhere."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] in _OPENING) - (text[place] in _CLOSING)
        if depth == 0:
            return place
    return -1


def split_items(tidied: str) -> Items:
    """The parts of a list, a set, a tuple or an interval; a text that is none of them is a bare list of one."""
    opening, inside, closing = _take_brackets(tidied)
    parts = _split(inside, bare=not opening)
    if opening in ("", "\\{", "{"):
        parts = tuple(each for part in parts for each in _write_both_signs(part))
    if len(parts) > MAX_ITEMS or (opening in ("{", "\\{") and parts == ("\\emptyset",)):
        return Items("", "", (tidied,))
    if len(parts) == 1 and opening in ("(", "[") and closing == ")]"["([".index(opening)]:
        return Items("", "", parts)
    return Items(opening, closing, parts)


def _take_brackets(text: str) -> tuple[str, str, str]:
    for opening, closings in (
        ("\\{", ("\\}",)),
        ("\\langle ", ("\\rangle",)),
        ("(", (")", "]")),
        ("[", (")", "]")),
        ("{", ("}",)),
    ):
        for closing in closings:
            long_enough = len(text) > len(opening) + len(closing)
            if long_enough and text.startswith(opening) and text.endswith(closing):
                if opening != "\\langle " and find_close(text, len(opening) - 1) != len(text) - 1:
                    continue
                kind = {"{": ("\\{", "\\}"), "\\langle ": ("(", ")")}.get(opening, (opening, closing))
                return kind[0], text[len(opening) : len(text) - len(closing)], kind[1]
    return "", text, ""


def _write_both_signs(part: str) -> tuple[str, ...]:
    if "\\pm" not in part and "\\mp" not in part:
        return (part,)
    pieces = _PLUS_MINUS.split(part)  # text, "p" or "m", text, …
    written = (
        "".join(signs.get(piece, piece) if at % 2 else piece for at, piece in enumerate(pieces)) for signs in _BOTH_SIGNS
    )
    return tuple(text.removeprefix("+") for text in written)


_BOTH_SIGNS: tuple[dict[str, str], ...] = ({"p": "+", "m": "-"}, {"p": "-", "m": "+"})
_PLUS_MINUS = re.compile(r"\\(p|m)[pm](?![a-zA-Z]) ?")
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_WORDS_BETWEEN = re.compile(r",? (?:and|or) ", re.IGNORECASE)


def _split(text: str, bare: bool) -> tuple[str, ...]:
    if "," not in text and ";" not in text and not (bare and _WORDS_BETWEEN.search(text)) and "\\text" not in text:
        return (text,)
    if bare or ", " in text:
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if bare:
        text = _WORDS_BETWEEN.sub(", ", text)
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if sign in ",;" and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    parts = [part.strip() for part in parts]
    return tuple(parts) if all(parts) else (text,)
