"""Text adventures made by the package textworld (MIT): rooms, doors, keys and chests, and a quest that is known to be solvable.

    seed, commands so far ─▶ the game played from its beginning in a grader process ─▶ what it says, its score, what may be done

A game is made from its seed, compiled once into `games_dir` (about a second), and played again up to the present for each
command (a fifth of a second, and milliseconds a command): nothing of it is kept between two turns, and any process can go on.
The package is not among `requires`: where a run is only composed or submitted, it need not be there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from telescope.environments.answer_parsers import AnswerTags, ThinkTags, Whole
from telescope.environments.base import LazyPrompts, Prompt, Reward, Turn
from telescope.environments.graders.pool import grade
from telescope.environments.multi_turn import MultiTurn

REQUIREMENT = "textworld>=1.7,<1.8"
MAX_COMMAND = 200
COMPILING_S = 600.0
"""On the clock for a game to be made and compiled on a busy machine; the compiler is a process of its own."""
_MAKING = "making-"
_STATUS = re.compile(r"\n+>[^\n]*\Z")


@dataclass
class Adventure:
    """`view` is what `replay` gave last. `commands` are those that were put to the game."""

    seed: int
    view: Mapping[str, Any]
    commands: list[str] = field(default_factory=list)
    refused: int = 0
    """Answers without a command."""


class Textworld(MultiTurn):
    """The reward is the share of the game's points that were scored: 1 for the quest done, often nothing between."""

    in_threads: ClassVar[bool] = False
    reward_min: ClassVar[float | None] = 0.0
    reward_max: ClassVar[float | None] = 1.0
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"won": (0, 1), "known_commands": (0, 1), "score": (0, 1)}

    rooms: int = Field(default=3, ge=1, le=50)
    """Rooms of a game."""
    objects: int = Field(default=5, ge=1, le=100)
    """Things in it."""
    quest_length: int = Field(default=3, ge=1, le=30)
    """Commands that its quest takes at least."""
    theme: Literal["house", "basic"] = "house"
    """How its texts are written."""
    admissible: bool = True
    """Tell after each command what may be done next."""
    max_turns: int = Field(default=15, ge=1, le=10_000)
    """Answers that are allowed."""
    num_train: int = Field(default=1000, ge=1)
    """Games of the train split."""
    num_eval: int = Field(default=64, ge=1)
    """Games of the eval split, made from other seeds."""
    seed: int = Field(default=0, ge=0)
    """Game i is made from seed + i, those of the eval split from behind the last one of the train split."""
    games_dir: str = ""
    """Folder that keeps compiled games, 0.5 MB each; empty: one in the folder for temporary files, by the user's number."""
    answer_tag: str | None = Field(default="command", pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Read the command from the last <tag>...</tag> of an answer; null: the answer is the command."""
    replay_limit_s: float = Field(default=30.0, gt=0)
    """Seconds of processor time to make a game, or to play it as far as it has come (the compiler's own not counted)."""
    instruction: str = (
        "You play a text adventure, one command at a time: look, inventory, go east, take key from table, unlock chest with "
        "key, open chest. Give each command as <command>look</command>."
    )
    """What stands before the game's own opening."""

    async def set_up(self) -> None:
        await super().set_up()
        sweep(Path(self._games))  # another user's is refused now

    def prompts(self, split: str) -> Sequence[Prompt]:
        if importlib.util.find_spec("textworld") is None:
            raise ValueError(f"env=textworld needs a package that is not installed: pip install '{REQUIREMENT}'")
        size = {"train": self.num_train, "eval": self.num_eval}[split]
        start = self.seed if split == "train" else self.seed + self.num_train
        # The opening is the game's own, and made with the game: what stands here is what is known without it.
        return LazyPrompts(size, lambda index: Prompt(_make_user_turn(self.instruction), facts={"seed": start + index}))

    async def initial_state(self, prompt: Prompt) -> Adventure:
        seed = int(prompt.facts["seed"])
        await grade(compile_game, self._options(seed), self._games, limit_s=self.replay_limit_s, clock_limit_s=COMPILING_S)
        return Adventure(seed, await self._replay(seed, ()))

    def opening(self, prompt: Prompt, state: Adventure) -> Sequence[Turn]:
        return _make_user_turn("\n\n".join(filter(None, (self.instruction, self._describe(state.view)))))

    async def reply(self, state: Adventure, answer: str) -> Sequence[Turn]:
        command = self.find_command(answer)
        if command is None:
            state.refused += 1
            return _make_user_turn("That was not a command.")
        state.commands.append(command)
        state.view = await self._replay(state.seed, state.commands)
        return _make_user_turn(self._describe(state.view))

    def is_done(self, state: Adventure) -> bool:
        return bool(state.view["done"])

    def reward(self, prompt: Prompt, state: Adventure) -> Reward:
        share = state.view["score"] / max(1, state.view["max_score"])
        answers = len(state.commands) + state.refused
        metrics = {
            "won": float(state.view["won"]),
            "score": float(share),
            "commands": float(answers),
            "known_commands": state.view["known"] / max(1, answers),
        }
        return Reward(float(share), metrics, info={"seed": state.seed, "commands": list(state.commands)})

    def find_command(self, answer: str) -> str | None:
        """The command in small letters on one line; None where there is none."""
        parser = Whole() if self.answer_tag is None else AnswerTags(self.answer_tag)
        given = " ".join((ThinkTags(parser).parse(answer) or "").lower().split())
        return given if 0 < len(given) <= MAX_COMMAND else None

    def _describe(self, view: Mapping[str, Any]) -> str:
        may = f"You may: {', '.join(view['admissible'])}." if self.admissible and view["admissible"] else ""
        return "\n\n".join(filter(None, (str(view["said"]), may)))

    def _options(self, seed: int) -> dict[str, Any]:
        return {
            "seed": seed,
            "rooms": self.rooms,
            "objects": self.objects,
            "quest_length": self.quest_length,
            "theme": self.theme,
        }

    @property
    def _games(self) -> str:
        if self.games_dir:
            return str(Path(self.games_dir).expanduser().resolve())
        return str(make_own_folder(Path(tempfile.gettempdir(), f"telescope-textworld-{os.getuid()}")))

    async def _replay(self, seed: int, commands: Sequence[str]) -> Mapping[str, Any]:
        view: Mapping[str, Any] = await grade(
            replay, self._options(seed), self._games, list(commands), limit_s=self.replay_limit_s
        )
        return view


def _make_user_turn(text: str) -> tuple[Turn]:
    return ({"role": "user", "content": text},)


def make_own_folder(folder: Path) -> Path:
    """The folder, made. Raises `ValueError` where it is another user's: anybody may put one at this place, and its games would
    be loaded."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f"{folder} is not a folder that this user alone may write to: remove it, or name another games_dir")
    return folder


def sweep(folder: Path) -> None:
    """Remove what games were made in by processes that were killed."""
    for aside in folder.glob(f"{_MAKING}*"):
        with contextlib.suppress(OSError):  # another worker was faster
            if time.time() - aside.stat().st_mtime > 2 * COMPILING_S:
                shutil.rmtree(aside, ignore_errors=True)


def locate_game(options: Mapping[str, Any], folder: str) -> Path:
    """Where a game lies: its name holds all that it is made from."""
    made = "rooms{rooms}-objects{objects}-quest{quest_length}-{theme}-seed{seed}".format_map(options)
    return Path(folder) / f"textworld-1.7-{made}.z8"


def compile_game(options: Mapping[str, Any], folder: str) -> str:
    """Make and compile a game that is not there yet, beside its place and then moved there. For a grader process."""
    import textworld

    game = locate_game(options, folder)
    if game.exists():
        return str(game)
    game.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = textworld.GameOptions()
    wanted.seeds = options["seed"]
    wanted.nb_rooms, wanted.nb_objects, wanted.quest_length = options["rooms"], options["objects"], options["quest_length"]
    wanted.grammar.theme = options["theme"]
    with tempfile.TemporaryDirectory(prefix=_MAKING, dir=game.parent) as aside:
        wanted.path = os.path.join(aside, game.name)
        textworld.make(wanted)
        for made in sorted(Path(aside).glob(f"{game.stem}.*"), key=lambda part: part.suffix == ".z8"):  # the game itself last
            made.replace(game.with_name(made.name))
    return str(game)


def replay(options: Mapping[str, Any], folder: str, commands: Sequence[str]) -> dict[str, Any]:
    """The game after these commands. For a grader process."""
    import textworld

    asked = textworld.EnvInfos(
        admissible_commands=True, score=True, max_score=True, won=True, objective=True, description=True, feedback=True
    )
    env = textworld.start(str(locate_game(options, folder)), request_infos=asked)
    try:
        state, known, done = env.reset(), 0, False
        said = f"{state.objective}\n\n{state.description}"
        for command in commands:
            known += command in {may.lower() for may in state.admissible_commands}
            state, _, done = env.step(command)
            said = _STATUS.sub("", state.feedback.rstrip())
            if done:
                break
        return {
            "said": re.sub(r"\n{3,}", "\n\n", said).strip(),
            "admissible": [] if done else list(state.admissible_commands),
            "score": int(state.score or 0),
            "max_score": int(state.max_score or 0),
            "won": bool(state.won),
            "known": known,
            "done": bool(done),
        }
    finally:
        env.close()
