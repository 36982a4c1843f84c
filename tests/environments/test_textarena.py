"""Games of the real textarena: the same game whoever plays it on, its own rewards, and refusals with their reasons."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from telescope.environments.adapters.textarena import Textarena
from telescope.environments.failures import GraderError
from telescope.environments.graders.pool import GraderPool, open_graders
from telescope.environments.template import ChatTemplate
from tests.environments.playing import played
from tests.environments.tools.talk import Talk


@pytest.fixture
async def graders() -> AsyncIterator[GraderPool]:
    """Where a textarena is imported once for all games of a test."""
    async with open_graders(1) as opened:
        yield opened


async def test_a_game_goes_its_way_in_the_dialogue_and_earns_the_game_s_own_reward(graders: GraderPool, tiny: ChatTemplate):
    game = Textarena(options={"min_number": 1, "max_number": 4, "max_turns": 9}, instruction="Be quick.")
    secrets = []
    for index in range(3):  # every seed has a number; four guesses find it
        reward, answers, _ = await played(tiny, game, "[1]", "<think>[9]</think>[2]", "[3]", "[4]", index=index)
        assert (reward.total, reward.metrics["won"], reward.metrics["finished"]) == (1.0, 1.0, 1.0)
        secrets.append(int(reward.metrics["moves"]))
        assert len(answers.prompts) == secrets[-1]
        assert answers.prompts[0].startswith("<|user|>Be quick.\n\nYou are Player 0. You are playing Guess The Number.")
        assert all("[1]" not in prompt.rpartition("<|user|>")[2] for prompt in answers.prompts[1:])
        assert "target number is higher" in answers.prompts[-1] or secrets[-1] == 1
    assert len(set(secrets)) > 1
    # The same seeds in another process, begun anew: the same numbers.
    async with open_graders(1):
        again = [(await game.play(game.prompts("train")[index], Talk(["[1]", "[2]", "[3]", "[4]"]))) for index in range(3)]
    assert [int(reward.metrics["moves"]) for reward in again] == secrets


async def test_a_game_that_does_not_end_earns_0_an_invalid_end_is_counted_and_others_are_refused(
    graders: GraderPool, tiny: ChatTemplate
):
    lake = Textarena(game="FrozenLake-v0-raw", max_turns=2)
    reward, answers, _ = await played(tiny, lake, "[down]", "[up]")
    assert (reward.total, reward.metrics["finished"], reward.tags) == (0.0, 0.0, ("out_of_turns",))
    assert "You moved down" in answers.prompts[1]
    codes = Textarena(game="Mastermind-v0-raw")
    reward, answers, _ = await played(tiny, codes, "[1 2 3 4]", "no code", "none again")
    assert "invalid move" in answers.prompts[2]
    assert (reward.metrics["invalid_move"], reward.metrics["won"]) == (1.0, 0.0)
    assert str(reward.info["reason"]).startswith("Invalid Move")
    # What can't be played is refused before the first rollout.
    for settings, said in (
        ({"game": "Mastermid-v0-raw"}, r"no such game\. Did you mean Mastermind-v0-raw\?"),
        ({"game": "Nim-v0-raw"}, "can't be played: .*player"),
        ({"options": {"colour": "red"}}, "colour"),
    ):
        with pytest.raises(ValueError, match=said):
            await Textarena.model_validate(settings).set_up()
    slow = Textarena(game="Sudoku-v0-hard-raw", replay_limit_s=0.01)
    with pytest.raises(GraderError):
        await slow.initial_state(slow.prompts("train")[0])


def test_seeds_of_the_splits_do_not_meet():
    game = Textarena(num_train=5, num_eval=2, seed=3)
    assert [prompt.facts["seed"] for prompt in game.prompts("train")] == [3, 4, 5, 6, 7]
    assert [prompt.facts["seed"] for prompt in game.prompts("eval")] == [8, 9]
