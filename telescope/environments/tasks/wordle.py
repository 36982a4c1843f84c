"""Wordle: find a word of five letters in six guesses; each guess is answered letter by letter. Several turns.

`crane` for the secret `react` is answered `c:yellow r:yellow a:green n:grey e:yellow`. A letter is coloured as often as the
secret has it, greens first. The word list is a small one of common words, the one of the package reasoning-gym, or your own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from telescope.environments.answer_parsers import AnswerTags, ThinkTags, Whole
from telescope.environments.base import LazyPrompts, Prompt, Reward, Turn
from telescope.environments.hashed_random import HashedRandom
from telescope.environments.multi_turn import MultiTurn

Colour = Literal["green", "yellow", "grey"]
LENGTH = 5
COMMON = """
about above abuse actor acute admit adopt adult after again agent agree ahead alarm album alert alike alive allow alone
along alter among anger angle angry apart apple apply arena argue arise array aside asset audio avoid award aware badly
baker basic basis beach begin being below bench birth black blame blind block blood board boost booth bound brain brand
bread break breed brief bring broad broke brown build built buyer cable carry catch cause chain chair chart chase cheap
check chest chief child chose civil claim class clean clear click clock close coach coast could count court cover craft
crash cream crime cross crowd crown curve cycle daily dance dealt death debut delay depth doing doubt dozen draft drama
drawn dream dress drink drive drove dying eager early earth eight elite empty enemy enjoy enter entry equal error event
every exact exist extra faith false fault fiber field fifth fifty fight final first fixed flash fleet floor fluid focus
force forth forty forum found frame fraud fresh front fruit fully funny giant given glass globe going grace grade grand
grant grass great green gross group grown guard guess guest guide happy heart heavy hence horse hotel house human ideal
image index inner input issue joint judge known label large laser later laugh layer learn lease least leave legal level
light limit local logic loose lower lucky lunch major maker march match maybe mayor meant media metal might minor minus
mixed model money month moral motor mount mouse mouth movie music needs never night noise north noted novel nurse occur
ocean offer often order ought paint panel paper party peace phase phone photo piece pilot pitch place plain plane plant
plate point pound power press price pride prime print prior prize proof prove queen quick quiet quite radio raise range
rapid ratio reach ready refer right rival river rough round route royal rural scale scene scope score sense serve seven
shall shape share sharp sheet shelf shell shift shirt shock shoot short shown sight since sixth sixty sized skill sleep
slide small smart smile smoke solid solve sorry sound south space spare speak speed spend split spoke sport staff stage
stake stand start state steam steel stick still stock stone stood store storm story strip stuck study stuff style sugar
suite super sweet table taken taste teach teeth thank theft their theme there these thick thing think third those three
threw throw tight times tired title today topic total touch tough tower track trade train treat trend trial tried truck
truly trust truth twice under undue union unity until upper upset urban usage usual valid value video virus visit vital
voice waste watch water wheel where which while white whole whose woman world worry worse worst worth would wound write
wrong wrote yield young youth
"""
_WORD = re.compile(r"[a-z]{5}")


@dataclass
class WordleGame:
    secret: str
    guesses: list[str] = field(default_factory=list)
    """The valid ones."""
    refused: int = 0
    """Answers that were not a guess at all."""
    most_green: int = 0

    @property
    def found(self) -> bool:
        return bool(self.guesses) and self.guesses[-1] == self.secret


class Wordle(MultiTurn):
    """Reward 1 for the word (less `turn_cost` for each guess after the first), else `partial_credit` times its green letters.

    An answer that is not a word of five letters costs a turn and is told so.
    """

    in_threads: ClassVar[bool] = False
    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"found": (0, 1), "valid_guesses": (0, 1), "green": (0, 1)}

    max_turns: int = Field(default=6, ge=1, le=100)
    """Guesses that are allowed."""
    words: Literal["common", "reasoning_gym"] = "common"
    """Where secrets come from: some 500 common words, or the 9,925 in small letters of the installed package reasoning-gym."""
    words_file: str | None = None
    """A text file of your own instead; its words of five letters count."""
    only_known_guesses: bool = False
    """Refuse guesses that are not in the list."""
    partial_credit: float = Field(default=0.2, ge=0, lt=1)
    """Share of the reward for the best guess's green letters where the word is not found."""
    turn_cost: float = Field(default=0.0, ge=0, lt=1)
    """Taken off for each guess after the first, never below `partial_credit`."""
    answer_tag: str | None = Field(default="guess", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Read the guess from the last <tag>...</tag> of an answer; null: the answer is the guess."""
    instruction: str = (
        "Find a secret word of five letters; you have {turns} guesses. After each one you are told for every letter whether it "
        "is green (right place), yellow (elsewhere in the word) or grey (not in it). Give each guess as <guess>crane</guess>."
    )
    """The user's first message; {turns} is filled in."""
    num_train: int = Field(default=10_000, ge=1)
    """Games of the train split; secrets repeat."""
    num_eval: int = Field(default=256, ge=1)
    """Games of the eval split."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the words that are secrets of the eval split alone."""
    seed: int = 0
    """Names the draws of words."""

    @model_validator(mode="after")
    def _there_are_words(self) -> Wordle:
        if len(self.word_list) < 2:
            raise ValueError(f"words_file={self.words_file!r} must hold at least two words of five letters")
        return self

    def prompts(self, split: str) -> Sequence[Prompt]:
        secrets = self._secrets[split]
        size = {"train": self.num_train, "eval": self.num_eval}[split]
        return LazyPrompts(size, lambda index: self._prompt(HashedRandom("wordle", self.seed, split, index).choice(secrets)))

    def initial_state(self, prompt: Prompt) -> WordleGame:
        return WordleGame(prompt.answer)

    def reply(self, state: WordleGame, answer: str) -> Sequence[Turn]:
        guess = self.find_guess(answer)
        if guess is None:
            state.refused += 1
            return ({"role": "user", "content": "That was not a guess: one word of five letters is asked for."},)
        if self.only_known_guesses and guess not in self._known:
            state.refused += 1
            return ({"role": "user", "content": f"{guess} is not in the word list."},)
        state.guesses.append(guess)
        shown = colour_guess(state.secret, guess)
        state.most_green = max(state.most_green, shown.count("green"))
        return ({"role": "user", "content": " ".join(f"{a}:{colour}" for a, colour in zip(guess, shown, strict=True))},)

    def is_done(self, state: WordleGame) -> bool:
        return state.found

    def reward(self, prompt: Prompt, state: WordleGame) -> Reward:
        turns = len(state.guesses) + state.refused
        lost = self.partial_credit * state.most_green / LENGTH
        won = max(1.0 - self.turn_cost * (turns - 1), self.partial_credit)
        metrics = {
            "found": float(state.found),
            "guesses": float(len(state.guesses)),
            "valid_guesses": len(state.guesses) / max(1, turns),
            "green": state.most_green / LENGTH,
        }
        return Reward(won if state.found else lost, metrics, info={"guesses": list(state.guesses)})

    def right_answer(self, prompt: Prompt) -> str:
        return (Whole() if self.answer_tag is None else AnswerTags(self.answer_tag)).wrap(prompt.answer)

    def find_guess(self, answer: str) -> str | None:
        """The guess of an answer in small letters; None where there is none."""
        parser = Whole() if self.answer_tag is None else AnswerTags(self.answer_tag)
        given = (ThinkTags(parser).parse(answer) or "").strip().lower()
        return given if _WORD.fullmatch(given) else None

    @cached_property
    def word_list(self) -> tuple[str, ...]:
        """In the order of the alphabet."""
        text = COMMON
        if self.words_file is not None:
            text = _read(Path(self.words_file).expanduser(), "words_file")
        elif self.words == "reasoning_gym":
            text = _read(_read_packaged(), "words")
        return tuple(sorted({word for word in text.lower().split() if _WORD.fullmatch(word)}))

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.word_list)

    @cached_property
    def _secrets(self) -> dict[str, Sequence[str]]:
        """Disjoint, so that the eval split tells of words never met."""
        shuffled = HashedRandom("wordle words", self.seed).shuffled(self.word_list)
        kept_back = min(max(1, round(self.held_out * len(shuffled))), len(shuffled) - 1)
        return {"eval": shuffled[:kept_back], "train": shuffled[kept_back:]}

    def _prompt(self, secret: str) -> Prompt:
        content = self.instruction.replace("{turns}", str(self.max_turns))
        return Prompt(({"role": "user", "content": content},), answer=secret)


def colour_guess(secret: str, guess: str) -> tuple[Colour, ...]:
    """One colour a letter of the guess, e.g. `colours("react", "crane")` is yellow, yellow, green, grey, yellow."""
    left = Counter(a for a, b in zip(secret, guess, strict=True) if a != b)
    shown: list[Colour] = []
    for a, b in zip(secret, guess, strict=True):
        if a == b:
            shown.append("green")
        elif left[b] > 0:
            left[b] -= 1
            shown.append("yellow")
        else:
            shown.append("grey")
    return tuple(shown)


def _read_packaged() -> Path:
    """The word list of reasoning-gym, found without importing the package."""
    try:
        return Path(str(distribution("reasoning-gym").locate_file("reasoning_gym/data/words3to10.txt")))
    except PackageNotFoundError as error:
        raise ValueError("words=reasoning_gym needs the package: pip install reasoning-gym, or give words_file") from error


def _read(file: Path, setting: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}: {file} can't be read: {error}") from error
