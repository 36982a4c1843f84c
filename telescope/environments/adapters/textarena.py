"""Games of the package textarena for one player (MIT): 2048, Mastermind, Minesweeper, Sokoban, Tower of Hanoi and others.

    seed, moves so far ─▶ the game played from its beginning in a grader process ─▶ what it says, whether it is over, its reward

A game is a function of its seed and the moves: nothing of it is kept between two turns, so that any process can go on with it,
and the one global `random` that textarena draws from is nobody else's. Most games take some milliseconds to play again. Refuses
games for several players.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from telescope.config.words import did_you_mean
from telescope.environments.answer_parsers import ThinkTags, Whole
from telescope.environments.base import LazyPrompts, Prompt, Reward, Turn
from telescope.environments.failures import GraderError
from telescope.environments.graders.pool import grade
from telescope.environments.multi_turn import MultiTurn

PLAYER = 0


@dataclass
class ReplayedGame:
    """`view` is what `replay` gave last."""

    seed: int
    view: Mapping[str, Any]
    moves: list[str] = field(default_factory=list)


class Textarena(MultiTurn):
    """The reward is the game's own: 1 for a win in most, a share of the way where it counts that, 0 where it has not ended."""

    requires: ClassVar[tuple[str, ...]] = ("textarena>=0.7.4,<0.8",)
    in_threads: ClassVar[bool] = False
    metrics_ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"finished": (0, 1), "won": (0, 1), "invalid_move": (0, 1)}

    game: str = "GuessTheNumber-v0-raw"
    """Which game, as textarena names it: `Mastermind-v0-raw`, `2048-v0-easy-raw`. Those ending with -raw tell what happened
    last and no more: the dialogue holds the rest."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The game's own settings, where they should differ from those of its name, e.g. {max_turns: 5}."""
    max_turns: int = Field(default=30, ge=1, le=10_000)
    """Moves that are allowed, invalid ones included; the game itself may end sooner."""
    num_train: int = Field(default=10_000, ge=1)
    """Games of the train split."""
    num_eval: int = Field(default=256, ge=1)
    """Games of the eval split, made from other seeds."""
    seed: int = Field(default=0, ge=0)
    """Game i is made from seed + i, those of the eval split from behind the last one of the train split."""
    replay_limit_s: float = Field(default=20.0, gt=0)
    """Seconds of processor time to play a game as far as it has come."""
    instruction: str = ""
    """What stands before the game's own opening, e.g. how to think; empty: nothing."""

    async def set_up(self) -> None:
        """Begin one game: a name that textarena does not know, or a game for several, is refused now."""
        try:
            await self._replay(self.seed, ())
        except GraderError as error:
            raise ValueError(f"game={self.game!r} with options={self.options} can't be played: {error}") from error

    def prompts(self, split: str) -> Sequence[Prompt]:
        size = {"train": self.num_train, "eval": self.num_eval}[split]
        start = self.seed if split == "train" else self.seed + self.num_train
        return LazyPrompts(size, self._make_prompts_from(start))

    async def initial_state(self, prompt: Prompt) -> ReplayedGame:
        seed = int(prompt.facts["seed"])
        return ReplayedGame(seed, await self._replay(seed, ()))

    def opening(self, prompt: Prompt, state: ReplayedGame) -> Sequence[Turn]:
        said = [self.instruction, str(state.view["said"])]
        return ({"role": "user", "content": "\n\n".join(filter(None, said))},)

    async def reply(self, state: ReplayedGame, answer: str) -> Sequence[Turn]:
        state.moves.append(ThinkTags(Whole()).parse(answer) or "")
        state.view = await self._replay(state.seed, state.moves)
        return ({"role": "user", "content": str(state.view["said"]) or "Your move."},)

    def is_done(self, state: ReplayedGame) -> bool:
        return bool(state.view["done"])

    def reward(self, prompt: Prompt, state: ReplayedGame) -> Reward:
        total, done = float(state.view["reward"]), self.is_done(state)
        metrics = {
            "finished": float(done),
            "won": float(done and total >= 1),
            "moves": float(len(state.moves)),
            "invalid_move": float(state.view["invalid"]),
        }
        return Reward(total, metrics, info={"seed": state.seed, "reason": state.view["reason"]})

    def _make_prompts_from(self, start: int) -> Any:
        # The opening is the game's own, and made with the game: what stands here is what is known without it.
        return lambda index: Prompt(
            ({"role": "user", "content": self.instruction or self.game},), facts={"seed": start + index}
        )

    async def _replay(self, seed: int, moves: Sequence[str]) -> Mapping[str, Any]:
        view: Mapping[str, Any] = await grade(replay, self.game, self._options, seed, list(moves), limit_s=self.replay_limit_s)
        return view

    @cached_property
    def _options(self) -> str:
        return json.dumps(self.options, sort_keys=True)


def replay(game: str, options: str, seed: int, moves: Sequence[str]) -> dict[str, Any]:
    """The game after these moves. For a grader process: it seeds the global `random` that the games draw from."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if game not in ENV_REGISTRY:
        raise ValueError(f"textarena has no such game.{did_you_mean(game, ENV_REGISTRY)}")
    random.seed(f"textarena:{seed}")
    env = textarena.make(game, **json.loads(options))
    env.reset(num_players=1, seed=seed)
    done, seen = False, env.get_observation()[1]
    for move in moves:
        done, _ = env.step(move)
        seen = [] if done else env.get_observation()[1]
        if done:
            break
    told = env.state.game_info.get(PLAYER, {}) if done else {}
    return {
        "said": read_messages(seen),
        "done": done,
        "reward": float((env.state.rewards or {}).get(PLAYER, 0.0)) if done else 0.0,
        "reason": str(told.get("reason", "")),
        "invalid": bool(told.get("invalid_move", False)),
    }


def read_messages(seen: Any) -> str:
    """What a game says to its player, without the player's own words: of the -raw games a list of (who, text, kind)."""
    if isinstance(seen, str):
        return seen.strip()
    return "\n".join(text.strip() for _, text, kind in seen if kind.name != "PLAYER_ACTION")
