"""What a user's file may lack or hold in another shape is said in a sentence that names it, before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from telescope.compose.load import load_points, places_for
from telescope.environments.agent_environment import AgentEnvironment
from telescope.environments.base import Environment, Prompt, Reward, SingleTurn, Turn
from telescope.environments.multi_turn import MultiTurn
from telescope.environments.template import ChatTemplate
from telescope.environments.tool_environment import ToolEnvironment
from telescope.environments.validate import find_class_mistake, find_ranges_mistake, find_turns_mistake
from tests.environments.playing import played
from tests.workers.test_loading import broken

ASKED = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("turns", "answer", "sentence"),
    [
        ("question", "", "'question' is not a list of messages"),
        (ASKED, "", "is not a list of messages"),
        (("question",), "", "'question' is not a message like"),
        (({"content": "x"},), "", "is not a message like"),
        (({"role": "user", "text": "x"},), "", "has no content"),
        (({"role": "user", "content": None},), "", "has no content"),
        (({"role": "assistant"},), "", "has no content"),
        ((ASKED,), 5, "answer=5 must be text"),
    ],
)
def test_a_prompt_that_is_none_is_refused_where_it_is_made(turns: Any, answer: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=r"^Prompt: ") as raised:
        Prompt(turns, answer)
    assert sentence in str(raised.value)


def test_messages_as_openai_writes_them_are_taken() -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    assert find_turns_mistake([ASKED, called, parts, {"role": "assistant", "content": None}]) == ""
    assert Prompt([ASKED]).answer == ""  # type: ignore[arg-type]


def test_what_a_class_lacks_depends_on_its_shape() -> None:
    class Bare(Environment):
        pass

    class Asks(SingleTurn):
        def prompts(self, split: str) -> list[Prompt]:
            return []

    class Own(SingleTurn):
        """A `play` of its own needs no reward function."""

        def prompts(self, split: str) -> list[Prompt]:
            return []

        async def play(self, prompt: Prompt, chat: Any) -> Reward:
            return Reward(0)

    class Talks(MultiTurn):
        pass

    class Calls(ToolEnvironment):
        pass

    class Runs(AgentEnvironment):
        pass

    class Complete(ToolEnvironment):
        def prompts(self, split: str) -> list[Prompt]:
            return []

        def reward(self, prompt: Prompt, state: Any) -> Reward:
            return Reward(0)

    class Former(Complete):
        def answered(self, state: Any, text: str) -> list[Turn]:
            return []

    class Both(Former):
        def reply_to_text(self, state: Any, text: str) -> list[Turn]:
            return self.answered(state, text)

    kinds = (Bare, Asks, Own, Talks, Calls, Runs, Complete, Former, Both)
    said = [find_class_mistake(kind).partition(" (")[0] for kind in kinds]
    assert said == [
        "Bare defines no play and no prompts",
        "Asks defines no reward",
        "",
        "Talks defines no initial_state and no is_done and no prompts and no reply and no reward",
        "Calls defines no prompts and no reward",
        "Runs defines no argv and no prompts",
        "",
        "Former.answered is never called: name it reply_to_text",
        "",
    ]


def test_the_ends_of_a_metric_are_two_numbers() -> None:
    assert find_ranges_mistake({"exact": (0.0, 1.0), "count": [0, float("inf")]}) == ""
    for ends in ({"min": 0, "max": 1}, (0.0,), (1.0, 0.0), ("0", "1"), 1.0):
        assert "exact has" in find_ranges_mistake({"exact": ends})


def test_a_worker_says_which_part_of_the_file_is_wrong(tmp_path: Path) -> None:
    head = "class A(SingleTurn):\n    def reward(self, prompt, answer): return Reward(1)\n"
    give = head + "    def prompts(self, split): return "
    assert "prompts('train') holds 'x', which is not a Prompt" in broken(tmp_path, "texts", give + "['x']\n")
    assert "prompts('train') gave <generator" in broken(tmp_path, "lazy", give + "(Prompt(()) for _ in range(3))\n")
    assert "A.prompts must be a plain `def`" in broken(
        tmp_path, "waits", head + "    async def prompts(self, split): return []\n"
    )
    assert "A defines no prompts" in broken(tmp_path, "empty", head)
    assert "A defines no reward" in broken(
        tmp_path,
        "misspelt",
        "class A(SingleTurn):\n    def prompts(self, split): return [Prompt(())]\n    def rewrd(self): pass\n",
    )
    assert broken(tmp_path, "number", give + "[Prompt((), answer=5)]\n").endswith("number.py line 4)")
    untyped = broken(tmp_path, "untyped", "class A(SingleTurn):\n    words = ('a',)\n")
    assert "`words = ('a',)`: write a setting with its type" in untyped
    assert "write a setting with its type" in broken(
        tmp_path,
        "overridden",
        "from telescope.environments.multi_turn import MultiTurn\nclass A(MultiTurn):\n    max_turns = 3\n",
    )


def test_an_init_that_sets_attributes_is_told_where_settings_belong(tmp_path: Path) -> None:
    home = tmp_path / "plugins" / "environments"
    home.mkdir(parents=True)
    (home / "own_init.py").write_text(
        "from telescope.environments.base import SingleTurn\n"
        "class Mine(SingleTurn):\n    def __init__(self):\n        self.x = 1\n"
    )
    (point,) = load_points(["env=[own_init]"], places_for(str(tmp_path)), {})
    assert [problem.sentence for problem in point.problems] == [
        "environments.own_init.kwargs: Mine sets x: settings are fields of the class, with a type, and what set_up makes is a "
        "private field (docs/environments.md)"
    ]


class Plain(Environment):
    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt((ASKED,))]


async def test_turns_that_are_no_messages_fail_with_words(tiny: ChatTemplate) -> None:
    class Starless(Plain):
        async def play(self, prompt: Prompt, chat: Any) -> Reward:
            await chat.say(prompt.turns)
            return Reward(1)

    with pytest.raises(
        TypeError, match=r"^\(\{'role'.* is not a message like .*; several are given one by one, say\(\*turns\)"
    ):
        await played(tiny, Starless(), "a")

    class OneMessage(MultiTurn):
        def prompts(self, split: str) -> list[Prompt]:
            return [Prompt((ASKED,))]

        def initial_state(self, prompt: Prompt) -> None: ...

        def reply(self, state: Any, answer: str) -> Any:
            return ASKED

        def is_done(self, state: Any) -> bool:
            return False

        def reward(self, prompt: Prompt, state: Any) -> Reward:
            return Reward(1)

    with pytest.raises(TypeError, match=r"OneMessage\.reply: \{'role'.* is not a list of messages"):
        await played(tiny, OneMessage(), "a", "b")
