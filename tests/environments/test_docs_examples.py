"""The environments that the pages of docs/ on environments show work as printed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from telescope.environments.base import Environment
from telescope.environments.template import ChatTemplate
from telescope.workers.report import check_reward
from tests.environments.judge_server import judging
from tests.environments.playing import played

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("environments", "multi_turn", "turn_credit", "rewards", "judges")]

NOT_OVERRIDDEN = ("run_reward",)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """All names that the Python blocks of the pages define, each block in a module of its own."""
    names: dict[str, Any] = {}
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        module = types.ModuleType(f"docs_block_{number}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, f"block {number} of docs/", "exec"), module.__dict__)
        names |= module.__dict__
    return names


async def test_tally_is_answered_in_strokes(shown: dict[str, Any], tiny: ChatTemplate) -> None:
    reward, _, _ = await played(tiny, shown["Tally"](numbers=(2,)), "++")
    assert (reward.total, dict(reward.metrics)) == (1.0, {"exact": 1.0, "length": 2.0})
    with pytest.raises(ValueError, match="number"):
        shown["Tally"](number=(2,))


async def test_guess_is_told_larger_and_smaller(shown: dict[str, Any], tiny: ChatTemplate) -> None:
    reward, answers, _ = await played(tiny, shown["Guess"](), "3", "9", "7", index=7)
    assert reward.total == pytest.approx(1 / 3)
    assert [prompt.rpartition("<|user|>")[2] for prompt in answers.prompts[1:]] == [
        "larger<|assistant|>",
        "smaller<|assistant|>",
    ]


async def test_letters_are_rewarded_turn_by_turn(shown: dict[str, Any], tiny: ChatTemplate) -> None:
    reward, _, record = await played(tiny, shown["Letters"](), "b", "c", "c", index=1)
    assert reward.turns == (1 / 3, 0.0, 1 / 3)
    assert record.turns == 3
    assert check_reward(reward).total == pytest.approx(2 / 3)


@pytest.mark.parametrize("answer", ["²", "1" * 5000, "-3", "", "seven"])
def test_guess_takes_what_is_no_number_for_a_wrong_guess(shown: dict[str, Any], answer: str) -> None:
    guess = shown["Guess"]()
    state = guess.initial_state(guess.prompts("train")[7])
    assert guess.reply(state, answer) == [{"role": "user", "content": "larger"}]
    assert state["guesses"] == [-1]


async def test_retry_loses_a_tenth_a_turn(shown: dict[str, Any], tiny: ChatTemplate) -> None:
    reward, _, _ = await played(tiny, shown["Retry"](), "ba", "ab")
    assert reward.total == pytest.approx(0.9)


async def test_praise_is_judged(shown: dict[str, Any], tiny: ChatTemplate) -> None:
    async with judging(["Verdict: yes", "Verdict: 7"]) as server:
        praise = shown["Praise"](judge={"base_url": server.base_url, "model": "wise"})
        await praise.set_up()
        reward, _, _ = await played(tiny, praise, "O sea")
        await praise.tear_down()
    assert (reward.total, dict(reward.metrics)) == (0.7, {"about": 1.0})


async def test_sums_are_worth_one_and_their_form_a_fifth(shown: dict[str, Any], tiny: ChatTemplate) -> None:
    right = "<think>4+4</think><answer>8</answer>"
    reward, _, _ = await played(tiny, shown["Sums"](), right, index=4)
    assert reward.total == pytest.approx(1.2)
    assert set(reward.metrics) == {"exact", "format", "brevity"}
    assert (await played(tiny, shown["Sums"](), "<answer>8</answer>", index=4))[0].total == 1.0


def test_the_first_hour_finds_no_equation_right_until_its_reward_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "first_hour.md").read_text(encoding="utf-8")
    puzzles, task = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "puzzles.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_puzzles.py", str(file)])
    exec(compile(puzzles, "make_puzzles.py", "exec"), {})
    (mended,) = re.findall(r"^    (left, equals, right = .*replace.*)$", page, re.MULTILINE)
    written = re.sub(r"left, equals, right = .*", lambda _: mended, task)
    assert written != task
    for code, right in ((task, 0.0), (written, 1.0)):
        module = types.ModuleType("equation")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, "equation.py", "exec"), module.__dict__)
        equation = module.Equation(file=str(file))
        assert (len(equation.prompts("train")), len(equation.prompts("eval"))) == (500, 100)
        for prompt in equation.prompts("train")[:20]:
            assert equation.reward(prompt, prompt.answer).total == 1.0
            assert equation.reward(prompt, prompt.answer.replace(" ", "")).total == right
            assert equation.reward(prompt, prompt.answer.partition(" =")[0]).total == 0.0


def test_all_that_an_environment_may_override_is_on_its_page() -> None:
    page = (DOCS / "environments.md").read_text(encoding="utf-8")
    hooks = [name for name, value in vars(Environment).items() if callable(value) and not name.startswith(("_", "model_"))]
    assert {"first_request", "right_answer", "check_data", "prompts"} <= set(hooks)
    assert [name for name in hooks if name not in NOT_OVERRIDDEN and f"`{name}(" not in page] == []
