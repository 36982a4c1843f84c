"""The shipped tool-calling model is what its script makes and what its card says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3ForCausalLM

from telescope.environments.tasks.look_up import LookUp
from telescope.environments.template import ChatTemplate
from tests.environments.conftest import EMBEDDED
from tests.environments.playing import played
from tests.environments.tools.talk import Talk
from tests.product import load_script

ROOT = Path(__file__).parents[2]
FOLDER = EMBEDDED / "tiny_tools"


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script(ROOT / "scripts" / "make_tiny_tools.py")


def test_size_and_tokenizer() -> None:
    model = Qwen3ForCausalLM.from_pretrained(FOLDER)
    assert model.num_parameters() == 131_520
    assert (FOLDER / "model.safetensors").stat().st_size < 540_000
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((FOLDER / file).read_text()) == json.loads((EMBEDDED / "tiny_reverse" / file).read_text())


def test_the_base_half_knows_its_task_and_at_its_best_knows_it(script: Any) -> None:
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(FOLDER).eval(), AutoTokenizer.from_pretrained(FOLDER)
    script.CHECKED = 192
    assert 0.15 < script.play(script.MAKER.policy(model, tokenizer, sample=True))["exact"] < 0.40
    assert script.play(script.MAKER.policy(model, tokenizer, sample=False))["exact"] > 0.9


def test_a_call_that_succeeds_earns_its_credit_and_a_wrong_end_gives_it_back() -> None:
    game = LookUp(call_credit=0.5)
    assert game.credit_calls(1.0, [True, True]) == (0.5, 0.5)
    assert game.credit_calls(0.0, [True, True]) == (0.5, -0.5)
    assert game.credit_calls(1.0, [False, False]) == (0.0, 1.0)
    assert game.credit_calls(0.0, [False]) == (0.0,)
    assert game.credit_calls(1.0, [True]) == (1.0,)
    assert game.credit_calls(0.0, [True, False, True]) == (0.5, -0.5, 0.0)


async def test_rewards_by_turn_leave_the_total_as_it_is(tiny: ChatTemplate) -> None:
    key, value = (lambda prompt: (prompt.facts["key"], prompt.answer))(LookUp().prompts("train")[0])
    answers = (f"<t>look(key='{key}')</t>", value)
    plain, _, _ = await played(tiny, LookUp(), *answers)
    credited, _, record = await played(tiny, LookUp(call_credit=0.5), *answers)
    assert (plain.total, plain.turns) == (1.0, ())
    assert (credited.total, credited.turns, record.turns) == (1.0, (0.5, 0.5), 2)
    assert credited.metrics == plain.metrics
    wrong, _, _ = await played(tiny, LookUp(call_credit=0.5), answers[0], "a")
    assert (wrong.total, wrong.turns) == (0.0, (0.5, -0.5))


def test_the_card_says_what_was_measured() -> None:
    card = (FOLDER / "MODEL_CARD.md").read_text()
    row = re.search(r"sampled at temperature 1 \| (\S+) \| (\S+) \| (\S+)", card)
    assert row is not None
    assert 0.15 < float(row[3]) < 0.40
    assert "calls the tool with the word (30%, the wanted one)" in card


def test_demonstrations_have_the_stated_shares_and_the_wanted_one_is_right(script: Any) -> None:
    draws = script.HashedRandom("shares")
    shown = [script.demonstrate(draws) for _ in range(2000)]
    called = [each for each in shown if len(each) == 2 and each[1][0] != "<|tool|>?"]
    assert 0.26 < len(called) / 2000 < 0.36  # some words read the same backwards
    assert 0.26 < sum(len(each) == 1 for each in shown) / 2000 < 0.34
    assert 0.75 < sum(each[1][0] == f"<|tool|>{each[1][1]}" for each in called) / len(called) < 0.86


async def test_the_wanted_behaviour_earns_1_and_guessing_nothing() -> None:
    task = LookUp()
    prompt = task.prompts("train")[0]
    key = prompt.facts["key"]
    reward = await task.play(prompt, Talk([f"<t>look(key='{key}')</t>", prompt.answer]))
    assert (reward.total, reward.metrics["look_calls"], reward.metrics["asked_the_tool"]) == (1, 1, 1)
    assert (await task.play(prompt, Talk(["aaaa"]))).total == 0
    backwards = Talk([f"<t>look(key='{key[::-1]}x')</t>", "aaaa"])
    assert (await task.play(prompt, backwards)).metrics["tool_error_count"] == 1
    assert backwards.results(1) == ["?"]
    gone = Talk([f"<t>look(key='{key}')</t>", prompt.answer[::-1]])
    assert (await LookUp(tool_there=False).play(prompt, gone)).total == 0
    assert gone.results(1) == ["?"]
