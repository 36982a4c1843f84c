r"""The option that an answer settles on: `\boxed{C}`, "**Answer:** C", "(B)", "so I choose option D".

A letter that begins a word, an article or a pronoun is none, and several letters name no option. Refuses to know which one
is right.
"""

from __future__ import annotations

import re
from functools import lru_cache

from telescope.environments.answer_parsers import AnswerTags, Boxed, ThinkTags

LETTERS = "ABCD"
_TAIL = 2000  # characters at the end of an answer in which a letter is looked for
_SHORT = 80  # characters of an answer that is an option and no more
_MARKUP = re.compile(
    r"[*_`\"“”>$]|\\\$|\\(?:text|mathrm)?(?:bf|it|rm|sf)?(?=\{)|\\(?:mathbf|boldsymbol|bm|mathsf)(?=\{)|[{}]|\\[()\[\]]"
)
_NOUN = r"(?:option|choice|answer|alternative|letter|statement)"
_LINK = r"(?:is|are|would be|must be|should be|will be|to be|['’]s|:|=|-|–|—)"
_SOFTENER = r"(?:therefore|thus|clearly|then|definitely|simply|indeed|most likely|probably|hence|obviously|given by)"
_WRONG = "not|wrong|false|incorrect|out|excluded|eliminated|impossible|a distractor|no|too"
_NOT = re.compile(r"(?:\bnot|\bnever|n['’]t|\bthan|\bneither|\bnor|\beliminat\w+|\bexclud\w+)\W*$", re.IGNORECASE)


def find_letter(answer: str, letters: str = LETTERS) -> str | None:
    """The letter that an answer settles on, or None: of the last box, else the last <answer>, else the one that it calls its
    answer, else the one that stands alone on a line or that it chooses at last. Behind a box or tags without any letter of an
    option, e.g. with a formula, what follows counts."""
    said = ThinkTags().parse(answer)
    for parser in (Boxed(), AnswerTags()):
        found = ThinkTags(parser).parse(answer)
        if found is not None:
            option = _read_option(found, letters)
            if not found or option is not None or _patterns(letters).any.search(_MARKUP.sub("", found)):
                return option
            said = said.rpartition(found)[2] if said is not None else None
    return None if said is None else _find_said(_MARKUP.sub("", said[-_TAIL:]), letters)


def _read_option(text: str, letters: str) -> str | None:
    """The letter that a short text is or begins with: `C`, `(c)`, `Option C`, `C) 81 years`."""
    return _choose(_patterns(letters).alone.match(_raise_first(" ".join(_MARKUP.sub("", text).split()), letters)), letters)


def _raise_first(text: str, letters: str) -> str:
    """A short text that begins with `b)` or `b.`, with the capital letter; as it is where it names another option behind that,
    or speaks of it: `a) is wrong, so C`."""
    patterns = _patterns(letters)
    raised = len(text) <= _SHORT and patterns.small.match(text) and not patterns.other.search(text, 2)
    return text[0].upper() + text[1:] if raised else text


def _find_said(text: str, letters: str) -> str | None:
    patterns = _patterns(letters)
    for pattern in (patterns.labelled, patterns.praised):
        chosen = [
            each
            for each in pattern.finditer(text)
            if not _NOT.search(text[max(0, each.start("letter") - 24) : each.start("letter")])
        ]
        if chosen:
            return _choose(chosen[-1], letters)
    text = text.strip()
    if (letter := _choose(patterns.alone.match(text), letters)) is not None:
        return letter
    lines = [match for line in text.splitlines() if (match := patterns.alone.fullmatch(line.strip())) is not None]
    if lines:
        return _choose(lines[-1], letters)
    cued = [each for each in patterns.cued.finditer(text) if not _NOT.search(text[: each.start("letter")][-24:])]
    return _choose(cued[-1] if cued else patterns.alone.match(_raise_first(text, letters)), letters)


def _choose(match: re.Match[str] | None, letters: str) -> str | None:
    """The letter of a match, unless another one is named with it."""
    if match is None:
        return None
    patterns, text = _patterns(letters), match.string
    joined = patterns.joined.match(text, match.end("letter")) or patterns.before.search(text[: match.start("letter")][-40:])
    return None if joined is not None else match["letter"].upper()


class _Patterns:
    def __init__(self, letters: str) -> None:
        kinds = f"[{letters}]"
        bare = rf"(?P<letter>{kinds}|(?<=[(\[])(?:{kinds.lower()})(?=[)\]])|{kinds.lower()}(?=[.)]?\s*$))"
        named = rf"(?:(?i:(?:the )?(?:correct |right |best )?{_NOUN})\s*:?\s*)?[(\[]?{bare}[)\]]?(?![\w'’])"
        # "A cat", "I think": a word, where small letters follow it.
        named += r"(?!(?<=[AI]) (?!(?:is|was|and|or|because|since|as|not)\b)[a-z])"
        self.labelled = re.compile(
            rf"(?:####|\b)(?i:(?<=####)|answers?|(?:correct|right|best|my|final) (?:one|{_NOUN}))\s*"
            rf"(?i:{_LINK}\s*)?(?i:{_SOFTENER},?\s+)?{named}",
            re.MULTILINE,
        )
        self.praised = re.compile(
            rf"(?<![\w'’]){named}\)? (?i:is|must be|seems) (?i:the |a )?(?i:right|correct|best|answer|true|only)\b",
            re.MULTILINE,
        )
        self.alone = re.compile(rf"{named}(?=\s*$|[).:,\]]|\s[-–—]|\s?[✓✔]|\n)", re.MULTILINE)
        self.small = re.compile(rf"[{letters.lower()}][.):](?!\S)[^\n]*\Z")
        marked = rf"(?:{kinds}(?![\w'’])|{kinds.lower()}(?=[).:]))"
        self.any = re.compile(rf"(?<![\w'’\\]){marked}")
        self.other = re.compile(
            rf"(?<![\w'’\\]){marked}(?!(?<=[AI]) [a-z])"
            r"|\b(?i:so|therefore|thus|hence|it is|it['’]s|must be|i (?:think|say|choose|pick)|no|not|wrong|false|incorrect"
            r"|eliminat\w+|exclud\w+)\b|(?i:n['’]t\b)|=>|→"
        )
        self.cued = re.compile(
            r"(?<!\w)(?i:choose|chose|pick|select|go with|going with|it['’]?s|it is|is|be|leaves"
            r"|so|therefore|thus|hence|think|say|=>|→)"
            rf"[,:]?\s+{named}(?=\s*$|[).:,;!\]\n]|\s[-–—])",
            re.MULTILINE,
        )
        others = rf"(?:[)\]]?,?\s*(?:and|or)?\s*[(\[]?{kinds}(?![\w'’]))*"
        wrong = rf"(?!{others}\)?\s+(?:is|are|was|were)(?:n['’]t|\s+(?:\w+ly\s+)?(?:{_WRONG}))\b)"
        self.joined = re.compile(
            rf"[)\]]?\s*(?:,|,?\s*but)\s*[(\[]?{kinds}(?![\w'’]){wrong}"
            rf"|[)\]]?\s*,?\s*\(?and(?: maybe| also)?\s*[(\[]?(?i:{kinds})(?![\w'’]){wrong}"
            rf"|[)\]]?\s*,?\s*\(?(?:and/or|or|&|/|\+)(?: maybe| also| possibly| perhaps)?\s*[(\[]?(?i:{kinds})(?![\w'’])"
            rf"|[)\]]?[^\S\n]*[(\[]?{kinds}(?=[)\]:]|\s*$|\s+{kinds}(?![\w'’]))"
            rf"|[)\]]?[.:][^\S\n]*[(\[]?{kinds}(?=\.|\s*$)"
        )
        self.before = re.compile(rf"(?<![\w'’]){kinds}[)\]]?\s*(?:and/or|and|or|&|/|\+)\s*[(\[]?$")


@lru_cache(maxsize=8)
def _patterns(letters: str) -> _Patterns:
    return _Patterns(letters)
