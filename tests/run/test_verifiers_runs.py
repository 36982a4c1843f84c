"""Environments of the real package verifiers, in a Python of its own: played, checked, and trained on by a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from telescope.cli.env import main as env_command
from telescope.environments.adapters.verifiers import REQUIREMENT, Verifiers
from telescope.environments.base import Reward
from telescope.environments.chat import TokenChat
from telescope.environments.failures import ContextFull, GraderError, InfrastructureError
from telescope.environments.template import ChatTemplate
from tests.environments.conftest import EMBEDDED
from tests.environments.own_venv import installed
from tests.environments.proxy.conftest import Policy
from tests.run.conftest import Start
from tests.run.test_agent_runs import QUIET, SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
GUESSES = {"a-g": "d", "earlier": "b", "later": "c"}
KINDS = ("won", "lost", "bad reward", "no board", "too long", "dies")
TROUBLE = """
import os
import verifiers.v1 as vf
from letters_for_verifiers import LetterData, Letters, LettersConfig, LetterTask, Loop

class Troubled(LetterTask):
    async def setup(self, trace, runtime):
        if self.data.name == "no board":
            raise RuntimeError("no board is free")
        if self.data.name == "dies":
            os._exit(3)

    @vf.reward(weight=0.5)
    async def tidy(self, trace):
        print("words on stdout")
        if self.data.name == "bad reward":
            raise KeyError("board")
        return 1.0

class TroubledLetters(vf.Taskset[Troubled, LettersConfig]):
    def load(self):
        for name in KINDS:
            prompt = "a-g" * 200 if name == "too long" else "a-g"
            yield Troubled(LetterData(prompt=prompt, letter="a" if name == "lost" else "c", name=name), self.config.task)

__all__ = ["TroubledLetters", "Loop"]
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("verifiers") / "venv", REQUIREMENT)


def troubled(python: Path, folder: Path, **seat: Any) -> Verifiers:
    (folder / "troubled_letters.py").write_text(f"KINDS = {KINDS!r}\n{TROUBLE}")
    env = {"taskset": {"id": "troubled-letters"}, "agent": {"runtime": {"type": "subprocess"}, **seat}}
    return Verifiers(env=env, python=str(python), path=(str(folder),))


def answer(prompt: str) -> str:
    return GUESSES.get(prompt.removesuffix("<|assistant|>").rpartition("<|user|>")[2], "d")


async def outcomes_of(verifiers: Verifiers, chats: dict[str, TokenChat]) -> dict[str, Reward | Exception]:
    outcomes: dict[str, Reward | Exception] = {}
    for prompt, name in zip(verifiers.prompts("train"), KINDS, strict=True):
        try:
            outcomes[name] = await verifiers.play(prompt, chats[name])
        except Exception as error:  # noqa: BLE001 looked at by the test
            outcomes[name] = error
    return outcomes


async def test_real_episodes_have_their_rewards_exact_tokens_and_owners_of_failures(python: Path, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED / "tiny")
    chats = {name: TokenChat(ChatTemplate(tokenizer, [1]), Policy(tokenizer, answer), 300, max_tokens=20) for name in KINDS}
    verifiers = troubled(python, tmp_path)
    await verifiers.set_up()
    try:
        outcomes = await outcomes_of(verifiers, chats)
    finally:
        await verifiers.tear_down()
    won, lost = outcomes["won"], outcomes["lost"]
    assert isinstance(won, Reward), outcomes
    assert isinstance(lost, Reward), outcomes
    assert (won.total, lost.total) == (1.5, 0.5)
    assert won.metrics == {"found": 1.0, "tidy": 0.5, "guesses": 3.0, "agent_turns": 3.0, "agent_requests": 3.0}
    (branch,) = chats["won"].recording().branches
    said = "<|user|>a-g<|assistant|>d<eos><|user|>earlier<|assistant|>b<eos><|user|>later<|assistant|>c<eos>"
    assert tokenizer.decode(branch.ids.tolist()) == said
    for name, owner, said in (
        ("bad reward", GraderError, "KeyError: 'board'"),
        ("no board", InfrastructureError, "no board is free"),
        ("too long", ContextFull, "left no room"),
        ("dies", InfrastructureError, "has ended"),
    ):
        assert isinstance(outcomes[name], owner), outcomes
        assert said in str(outcomes[name])


def test_settings_that_verifiers_does_not_know_are_refused_with_its_words(python: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"verifiers refuses the environment: (.|\n)*max_guesses"):
        troubled(python, tmp_path, max_guesses=3).prompts("train")


def test_the_example_is_checked_by_env_check(python: Path, capsys: pytest.CaptureFixture[str]):
    settings = [f"python={python}", "env={taskset:{id:letters-for-verifiers},agent:{runtime:{type:subprocess}}}"]
    code = env_command(["check", "verifiers", "--model", "tiny_turns", "--no-second-process", *settings])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "120 train" in said or "120" in said
    assert "guesses" in said


def test_a_run_trains_on_an_environment_of_verifiers(start: Start, python: Path):
    place = f"environments.verifiers.kwargs.python={python}"
    run = start("experiment=verifiers", "inference=fake", "backend=fake", *QUIET, *SMALL, place)
    assert run.wait(600) == 0, run.said()[-4000:]
    assert run.summary()["steps"] == 2
    assert run.summary()["rollouts"]["failed"] == 0
    rows = {row["rollout_id"]: row for row in run.rows("rollouts") if row["status"] == "scored"}
    trained = run.rows("tokens")
    assert len(trained) == len({(row["rollout_id"], row["branch"]) for row in trained}) > 0
    for row in trained:
        rollout = rows[row["rollout_id"]]
        assert rollout["metrics"]["agent_requests"] == rollout["turns"] == rollout["metrics"]["guesses"]
        assert sum(row["mask"]) == rollout["completion_tokens"] == len(row["logprobs"])
    assert run.left_after(60) == []
