"""`guess_letter` played by a program of its own: how an agent that speaks to an OpenAI-compatible address is trained.

The program is agent.py beside this file: it knows nothing of Telescope, asks the policy over HTTP, and writes down what it was
told. Refuses to play itself: what is sampled, and what of it is trained, is agent_environment.py's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from telescope.environments.agent_environment import AgentEnvironment, ProgramOutcome
from telescope.environments.base import Prompt, Reward
from telescope.environments.tasks.guess_letter import GuessLetter

PROGRAM = Path(__file__).with_name("agent.py")


class LetterAgent(AgentEnvironment):
    """Reward 1 where the program's last guess was the letter, else 0."""

    game: GuessLetter = GuessLetter()
    """What is played; these are `guess_letter`'s own settings."""
    sdk: bool = False
    """Let the program ask through OpenAI's SDK (`pip install openai`). Without it the standard library does, which starts in a
    tenth of the time: a program is started for every rollout."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self.game.prompts(split)

    def argv(self, prompt: Prompt) -> Sequence[str]:
        return [sys.executable, "-I", str(PROGRAM), "--sdk"] if self.sdk else [sys.executable, "-I", "-S", str(PROGRAM)]

    def stdin(self, prompt: Prompt) -> str:
        """The opening question, the letter and the number of guesses: this program is the other player too."""
        return json.dumps({"ask": prompt.turns[-1]["content"], "letter": prompt.answer, "guesses": self.game.max_turns})

    async def score(self, prompt: Prompt, outcome: ProgramOutcome) -> Reward:
        """Of the program's last line, e.g. `["b", "f", "d"]`; nothing was found where it failed."""
        lines = outcome.stdout.splitlines() if outcome.exit_code == 0 else []
        guesses = json.loads(lines[-1]) if lines else []
        found = bool(guesses) and guesses[-1] == prompt.answer
        return Reward(float(found), {"exact": float(found), "guesses": float(len(guesses))})
