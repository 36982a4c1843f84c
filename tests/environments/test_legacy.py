"""Classes of the older API, as their users wrote them but for the import lines, through the adapter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from pydantic import ValidationError

from telescope.config import plugins
from telescope.config.plugins import ENVIRONMENTS, PluginError
from telescope.environments import legacy
from telescope.environments.failures import GraderError
from telescope.environments.template import ChatTemplate
from tests.environments.playing import played

ADDING = '''
    from __future__ import annotations
    from telescope.environments.legacy import RewardResult, Rubric, Sample, SingleTurnEnvironment

    class AddingEnvironment(SingleTurnEnvironment):
        """Add two numbers."""

        def __init__(self, largest: int = 9, style: str = "plain", **kwargs):
            super().__init__(system_prompt="add", instruction_prompt="only the sum", **kwargs)
            self.largest = largest
            self.style = style
            self.rubric = Rubric()
            self.rubric.add_reward(self._sum, range_min=0, range_max=1)
            self.rubric.add_reward(self._short, weight=0.5, name="short", golden_answer="few digits")
            self.rubric.add_metric(self._length)

        @property
        def metrics_ranges(self):
            open_ends = {"short": {"min": 0, "max": None}, "_length": {"min": 0}}
            return {**self.rubric.metrics_ranges, **open_ends}

        def load_dataset(self, num_samples: int = -1, shuffle: bool = False, seed: int = 42, **kwargs):
            return [
                Sample(prompt=f"{a}+{b}", answer=str(a + b), metadata={"a": a}) for a in range(2) for b in range(self.largest)
            ]

        @staticmethod
        def _sum(completion: str, sample: Sample) -> tuple[float, str]:
            return float(completion == sample.answer), sample.answer

        async def _short(self, completion: str) -> float:
            return float(len(completion) < 3)

        def _length(self, completion):
            return len(completion)

        async def compute_reward(self, completion: str, sample: Sample, eos_token: str = ""):
            return await self.rubric.score(completion=completion, sample=sample, extra_sample_tags={"a": sample.metadata["a"]})
'''
COUNTING = """
    from telescope.environments.legacy import RewardResult, Sample, SingleTurnEnvironment

    class Counting(SingleTurnEnvironment):
        def load_dataset(self, num_samples=-1, **kwargs):
            return [Sample(prompt="1+2", answer="3", metadata={"seen": []})]

        def compute_reward(self, completion, sample, eos_token=""):
            sample.metadata["seen"].append(completion)
            return RewardResult(float(len(sample.metadata["seen"])))
"""
GAME = """
    from telescope.environments.legacy import MultiTurnEnvironment, RewardResult, Sample

    class HigherLower(MultiTurnEnvironment):
        def __init__(self, max_turns: int = 4, seed: int = 0, **kwargs):
            super().__init__(max_turns=max_turns, **kwargs)

        def load_dataset(self, num_samples=-1, **kwargs):
            return [Sample(prompt=[{"role": "user", "content": "0-9?"}], answer=7)]

        def create_initial_state(self, sample):
            state = super().create_initial_state(sample)
            state.custom["guesses"] = []
            return state

        async def env_response(self, messages, state):
            guess = int(messages[-1]["content"])
            state.custom["guesses"].append(guess)
            if guess == state.sample.answer:
                return []
            return [{"role": "user", "content": "more" if guess < state.sample.answer else "less"}]

        def compute_reward(self, state, eos_token=""):
            won = state.trajectory[-1].completion[0]["content"] == "7"
            return RewardResult(
                total_reward=float(won), sample_metrics={"turns": state.num_turns}, golden_answers={"game": "7"},
                info_turns=[{"guess": guess} for guess in state.custom["guesses"]],
            )
"""
SHOP = '''
    from telescope.environments.legacy import RewardResult, Sample
    from telescope.environments.legacy import ToolEnvironment

    PRICES = {"pear": 3}

    def price(fruit: str) -> int:
        """Price of a fruit.

        Args:
            fruit: its name
        """
        return PRICES[fruit]

    class ShopEnvironment(ToolEnvironment):
        def __init__(self, **kwargs):
            super().__init__(tools=[price], max_turns=5, system_prompt="a shop", **kwargs)

        def load_dataset(self, num_samples=-1, **kwargs):
            return [Sample(prompt="pear?", answer="3")]

        async def compute_reward(self, state, eos_token=""):
            answer = state.trajectory[-1].completion[-1]["content"]
            return RewardResult(float(answer == state.sample.answer), self.get_tool_metrics(state))
'''


def task(folder: Path, name: str, code: str) -> Any:
    """The environment class of a folder a task, found as a user's own is."""
    home = folder / "environments" / name
    home.mkdir(parents=True)
    (home / "task.py").write_text(dedent(code))
    (home / "__init__.py").write_text("from .task import *\n")
    return plugins.load(ENVIRONMENTS, name, (str(folder),))


async def test_a_single_turn_class_runs_with_its_arguments_as_settings(tmp_path: Path, tiny: ChatTemplate) -> None:
    kind = task(tmp_path, "adding", ADDING)
    assert set(kind.model_fields) == {"largest", "style", "system_prompt", "instruction_prompt"}
    environment = kind.model_validate_json(json.dumps({"largest": 3}), strict=True)
    assert len(environment.prompts("train")) == 6
    assert [dict(turn) for turn in environment.prompts("train")[5].turns] == [
        {"role": "system", "content": "add"}, {"role": "user", "content": "1+2\n\nonly the sum"},
    ]  # fmt: skip
    reward, _, _ = await played(tiny, environment, "3", index=5)
    assert reward.total == 1.5
    assert dict(reward.metrics) == {"_sum": 1.0, "short": 1.0, "_length": 1.0}
    assert (reward.golden_answers, reward.tags) == (("3", "few digits"), ("a=1",))
    assert environment.metrics_ranges == {"_sum": (0.0, 1.0)}


def test_a_typo_in_an_argument_is_refused(tmp_path: Path) -> None:
    kind = task(tmp_path, "adding", ADDING)
    with pytest.raises(ValidationError, match=r"larges\s+Extra inputs"):
        kind(larges=3)
    with pytest.raises(ValidationError, match="valid integer"):
        kind(largest="3")


async def test_a_multi_turn_class_plays_until_it_answers_nothing(tmp_path: Path, tiny: ChatTemplate) -> None:
    environment = task(tmp_path, "game", GAME)()
    reward, answers, recording = await played(tiny, environment, "5", "9", "7")
    assert (reward.total, dict(reward.metrics), reward.golden_answers) == (1.0, {"turns": 3}, ("7",))
    assert reward.info == {"turns": [{"guess": 5}, {"guess": 9}, {"guess": 7}]}
    assert [prompt.rpartition("<|user|>")[2] for prompt in answers.prompts] == [
        "0-9?<|assistant|>",
        "more<|assistant|>",
        "less<|assistant|>",
    ]
    assert recording.turns == 3


async def test_turns_that_run_out_are_scored(tmp_path: Path, tiny: ChatTemplate) -> None:
    environment = task(tmp_path, "game", GAME)(max_turns=2)
    reward, answers, _ = await played(tiny, environment, "5", "6")
    assert (reward.total, len(answers.prompts)) == (0.0, 2)


async def test_what_the_old_class_raises_is_no_zero(tmp_path: Path, tiny: ChatTemplate) -> None:
    broken = ADDING.replace("return float(completion == sample.answer), sample.answer", 'raise KeyError("gold")')
    with pytest.raises(GraderError, match="reward function _sum: KeyError: 'gold'"):
        await played(tiny, task(tmp_path, "broken", broken)(), "3")
    bare = GAME.replace("return RewardResult(", "return dict(")
    with pytest.raises(GraderError, match="compute_reward returned dict, not a RewardResult"):
        await played(tiny, task(tmp_path, "bare", bare)(), "7")


async def test_what_a_rollout_writes_into_its_sample_no_other_one_sees(tmp_path: Path, tiny: ChatTemplate) -> None:
    single = task(tmp_path, "counting", COUNTING)()
    (prompt,) = single.prompts("train")
    for _ in range(3):
        reward = await single.reward(prompt, "3")
        assert (reward.total, prompt.facts) == (1.0, {"seen": []})
    game = task(tmp_path, "game", GAME)()
    (opening,) = game.prompts("train")
    one, two = [await game.initial_state(opening) for _ in range(2)]
    one.sample.metadata["seen"] = 1
    one.messages[0]["content"] = "changed"
    assert (two.sample.metadata, two.messages[0]["content"], opening.facts) == ({}, "0-9?", {})


async def test_a_tool_class_calls_its_tools_and_counts_them(tmp_path: Path, tiny: ChatTemplate) -> None:
    environment = task(tmp_path, "shop", SHOP)()
    call = '<tool_call>{"name": "price", "arguments": {"fruit": "%s"}}</tool_call>'
    reward, answers, _ = await played(
        tiny, environment, call % "pear", call % "plum", "<tool_call>{", "3", max_prompt_tokens=9000
    )
    assert reward.total == 1.0
    assert dict(reward.metrics) == {
        "total_tool_calls": 3.0, "tool_success_count": 1.0, "tool_error_count": 2.0, "tool_success_rate": pytest.approx(1 / 3),
        "unique_tools_used": 1.0, "price_calls": 2.0,
    }  # fmt: skip
    assert '"name": "price"' in answers.prompts[0]
    assert "[price] 3" in answers.prompts[1]
    assert "[price] Error: KeyError: 'plum'" in answers.prompts[2]
    assert len(answers.prompts) == 4


async def test_a_tool_that_hangs_is_given_up_and_the_policy_told(tmp_path: Path, tiny: ChatTemplate) -> None:
    """Its thread is lost; here it ends with the test."""
    waits = SHOP.replace("return PRICES[fruit]", "return released.wait() and 3").replace(
        "PRICES = {", "import threading\n    released = threading.Event()\n    PRICES = {"
    )
    kind = task(tmp_path, "waits", waits)
    released = sys.modules[kind.source_class.__module__].released
    try:
        call = '<tool_call>{"name": "price", "arguments": {"fruit": "pear"}}</tool_call>'
        reward, answers, _ = await played(tiny, kind(tool_timeout_s=0.01), call, "3", max_prompt_tokens=9000)
    finally:
        released.set()
    assert (reward.total, reward.metrics["tool_error_count"]) == (1.0, 1.0)
    assert "[price] Error: it took longer than 0.01 s" in answers.prompts[1]


def test_required_packages_that_are_missing_give_the_install_line(tmp_path: Path) -> None:
    stated = f'REQUIRED_PACKAGES = ["no-such-package>=2", "numpy"]\n{dedent(GAME)}'
    home = tmp_path / "environments"
    home.mkdir()
    (home / "needy.py").write_text(stated)
    with pytest.raises(PluginError, match=r"needs what is not installed: python -m pip install 'no-such-package>=2'"):
        plugins.load(ENVIRONMENTS, "needy", (str(tmp_path),))
    assert "telescope.environments.legacy" in sys.modules


def test_the_shapes_themselves_are_no_environments() -> None:
    found = plugins.find(ENVIRONMENTS)
    assert not {"compat", "compat_tools", "multi_turn", "rubric", "failures"} & set(found)


def test_a_name_may_be_a_property_or_an_attribute_of_the_class() -> None:
    class ByProperty(legacy.SingleTurnEnvironment):
        @property
        def name(self) -> str:
            return "caps"

    class ByAttribute(legacy.SingleTurnEnvironment):
        def __init__(self) -> None:
            super().__init__()
            self.name = "own"

    class Unnamed(legacy.MultiTurnEnvironment):
        pass

    assert (ByProperty().name, ByAttribute().name, Unnamed().name) == ("caps", "own", "Unnamed")


def test_what_a_class_of_the_other_design_lacks_is_said() -> None:
    for call, name in (
        (legacy.SingleTurnEnvironment().load_dataset, "load_dataset"),
        (legacy.MultiTurnEnvironment().compute_reward, "compute_reward"),
    ):
        with pytest.raises(NotImplementedError, match=f"Environment defines no {name}"):
            call()
