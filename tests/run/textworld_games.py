"""Real games of textworld, for a Python that has it (test_textworld_runs.py makes one): played, and trained on by a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from telescope.environments.adapters.textworld import Textworld
from telescope.environments.graders.pool import GraderPool, open_graders
from tests.environments.tools.talk import Talk
from tests.run.conftest import Start

SOLUTION = ["go east", "take type K keycard", "unlock type K chest with type K keycard"]
"""Of the game of two rooms and four things that is made from seed 3."""


@pytest.fixture
async def graders() -> AsyncIterator[GraderPool]:
    async with open_graders(1) as opened:
        yield opened


def told(*commands: str) -> Talk:
    return Talk([f"<command>{command}</command>" if command else "what now?" for command in commands])


@pytest.mark.timeout(600)
async def test_a_game_is_told_played_and_scored(graders: GraderPool, tmp_path: Path):
    world = Textworld(rooms=2, objects=4, games_dir=str(tmp_path / "games"), max_turns=6)
    prompt = world.prompts("train")[3]
    # Two rollouts of a group make and play the same game at once.
    won, lost = told(SOLUTION[0], "", "dance", *SOLUTION[1:]), told(*["look"] * 6)
    rewards = await asyncio.gather(world.play(prompt, won), world.play(prompt, lost))
    assert [reward.total for reward in rewards] == [1.0, 0.0]
    assert dict(rewards[0].metrics) == {"won": 1.0, "score": 1.0, "commands": 5.0, "known_commands": 0.6}
    assert (rewards[1].tags, rewards[1].metrics["known_commands"]) == (("out_of_turns",), 1.0)
    opening = str(won.said[0][0]["content"])
    assert opening.startswith(world.instruction)
    assert "First step, attempt to go east." in opening
    assert "You are in a basement." in opening
    assert opening.endswith("You may: drop teaspoon, examine teaspoon, go east, inventory, look.")
    assert "$" not in opening  # no banner
    replies = [str(turns[0]["content"]) for turns in won.said[1:]]
    assert replies[0].startswith("-= Bedroom =-")
    assert replies[1] == "That was not a command."
    assert replies[2].startswith("That's not a verb I recognise.")
    assert replies[3].startswith("You pick up the type K keycard from the ground.")
    assert len(list((tmp_path / "games").glob("*.z8"))) == 1
    # Another process, another folder: the same game.
    other = Textworld(rooms=2, objects=4, games_dir=str(tmp_path / "others"), admissible=False)
    async with open_graders(1):
        state = await other.initial_state(prompt)
    assert opening.startswith(str(other.opening(prompt, state)[0]["content"]))


@pytest.mark.timeout(900)
def test_a_run_trains_two_steps_on_games(start: Start, tmp_path: Path):
    settings = [
        f"environments.textworld.kwargs.{each}" for each in (f"games_dir={tmp_path / 'games'}", "rooms=2", "max_turns=2")
    ]
    run = start(
        *("experiment=fake", "env=[textworld]", "number_of_steps=2", *settings, "rollout.group_size=2"),
        *("inference.max_model_len=4096", "trainer.seq_len=8192", "orchestrator.prompts_batch_size_for_trainer=2"),
        *("orchestrator.discard_group_zero_advantage=false", "orchestrator.max_concurrent_prompts_per_server=2"),
    )
    assert run.wait(600) == 0, run.said()[-4000:]
    assert run.summary()["steps"] == 2
    assert run.summary()["rollouts"]["failed"] == 0
    assert all(0 <= row["reward"] <= 1 for row in run.rows("rollouts"))
    assert run.left_after(60) == []
