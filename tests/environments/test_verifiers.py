"""The player of verifiers' environments, with a stand-in for that package: real processes, a real address, real tokens.

The real package is played in the slow lane (tests/run/test_verifiers_runs.py): it can't be installed beside all else.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from telescope.environments.adapters.verifiers import PlayerProcess, Verifiers, list_tasks
from telescope.environments.base import Reward
from telescope.environments.chat import ChatError, TokenChat
from telescope.environments.failures import ContextFull, GraderError, InfrastructureError
from telescope.environments.proxy.sessions import Proxy
from telescope.environments.template import ChatTemplate
from tests.environments.proxy.conftest import Policy

FAKE = str(Path(__file__).with_name("verifiers_fake"))


def environment(*tasks: dict[str, Any], **env: Any) -> Verifiers:
    return Verifiers(env={"taskset": {"tasks": [*tasks]}, **env}, path=(FAKE,))


@contextlib.asynccontextmanager
async def at_work(verifiers: Verifiers) -> AsyncIterator[Verifiers]:
    try:
        await verifiers.set_up()
        yield verifiers
    finally:
        await verifiers.tear_down()


class Table:
    """Rollouts of an environment's prompts, each with a chat of its own."""

    def __init__(self, verifiers: Verifiers, tokenizer: Any) -> None:
        self._verifiers, self._tokenizer = verifiers, tokenizer

    def chat(self, policy: Policy | None = None, room: int = 300) -> TokenChat:
        return TokenChat(ChatTemplate(self._tokenizer, [1]), policy or Policy(self._tokenizer), room, max_tokens=20)

    async def play(self, index: int, chat: TokenChat | None = None) -> Reward:
        return await self._verifiers.play(self._verifiers.prompts("train")[index], chat or self.chat())


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


async def test_an_episode_is_trained_as_one_dialogue_with_its_rewards(tiny_tokenizer: Any):
    verifiers = environment({"says": ["a-g", "later"], "system_prompt": "find it", "prompt": "a-g"})
    assert verifiers.prompts("train")[0].turns == (
        {"role": "system", "content": "find it"},
        {"role": "user", "content": "a-g"},
    )
    async with at_work(verifiers):
        table = Table(verifiers, tiny_tokenizer)
        chat = table.chat()
        reward = await table.play(0, chat)
    assert (reward.total, dict(reward.metrics)) == (1.0, {"right": 1.0, "agent_turns": 2.0, "agent_requests": 2.0})
    (branch,) = chat.recording().branches
    said = "<|user|>a-g<|assistant|>ok<eos><|user|>later<|assistant|>ok<eos>"
    assert tiny_tokenizer.decode(branch.ids.tolist()) == said
    assert branch.mask.sum() == 6


async def test_rollouts_side_by_side_each_get_what_their_own_policy_said(tiny_tokenizer: Any):
    verifiers = environment({}, {"says": ["b", "c"]})
    async with at_work(verifiers):
        table = Table(verifiers, tiny_tokenizer)
        policies = [Policy(tiny_tokenizer, lambda prompt, say=say: say) for say in ("ok", "no") * 8]
        rewards = await asyncio.gather(*(table.play(at % 3 % 2, table.chat(policy)) for at, policy in enumerate(policies)))
    assert [reward.total for reward in rewards] == [1.0, 0.0] * 8


async def test_a_failure_has_the_owner_that_it_has_in_verifiers(tiny_tokenizer: Any):
    owners = {
        "scores badly": (GraderError, "KeyError: 'board'"),
        "judged badly": (GraderError, r"EnvError: Env\.finalize"),
        "no value": (GraderError, "no value came of right"),
        "no reward": (GraderError, "the task has no reward"),
        "scoring_timeout": (GraderError, "ended with scoring_timeout"),
        "setup_timeout": (InfrastructureError, "ended with setup_timeout"),
        "twice": (InfrastructureError, "played 2 times in one episode"),
        "frozen": (InfrastructureError, "the seat agent is not to be trained"),
    }
    verifiers = environment(*({"does": does} for does in owners), {"does": "agent_timeout"})
    async with at_work(verifiers):
        table = Table(verifiers, tiny_tokenizer)
        for index, (kind, said) in enumerate(owners.values()):
            with pytest.raises(kind, match=said):
                await table.play(index)
        assert (await table.play(len(owners))).tags == ("agent_timeout",)


async def test_a_policy_that_cannot_answer_fails_the_rollout_and_one_that_is_too_long_is_scored(tiny_tokenizer: Any):
    verifiers = environment({}, {"says": ["a" * 200, "b" * 200]})
    async with at_work(verifiers):
        table = Table(verifiers, tiny_tokenizer)
        with pytest.raises(ChatError, match="the server is gone"):
            await table.play(0, table.chat(Policy(tiny_tokenizer, broken=True)))
        with pytest.raises(ContextFull):
            await table.play(1)
        assert (await table.play(0)).total == 1.0


async def test_a_player_that_dies_fails_its_rollouts_and_the_next_one_starts_another(tiny_tokenizer: Any):
    verifiers = environment({"does": "dies"}, {})
    async with at_work(verifiers):
        table = Table(verifiers, tiny_tokenizer)
        for _ in range(2):
            with pytest.raises(InfrastructureError, match=r"has ended.*; its last words: .*out of luck"):
                await table.play(0)
            assert (await table.play(1)).total == 1.0


async def test_a_rollout_that_is_given_up_is_given_up_in_verifiers_too(tiny_tokenizer: Any, notes: Path):
    verifiers = environment({"does": "waits", "notes": str(notes)}, {})
    async with at_work(verifiers):
        table = Table(verifiers, tiny_tokenizer)
        rollout = asyncio.create_task(table.play(0))
        async with asyncio.timeout(60):
            await written(notes, "began\n")
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)
            await written(notes, "began\ncancelled\n")
        assert (await table.play(1)).total == 1.0


async def written(notes: Path, text: str) -> None:
    """Another process writes it."""
    while not notes.exists() or notes.read_text() != text:
        await asyncio.sleep(0.01)


async def test_what_the_policy_samples_for_a_rollout_that_is_given_up_is_broken_off(tiny_tokenizer: Any):
    verifiers = environment({})
    async with at_work(verifiers):
        table = Table(verifiers, tiny_tokenizer)
        policy = Policy(tiny_tokenizer, held={"go<|assistant|>": asyncio.Event()})
        rollout = asyncio.create_task(table.play(0, table.chat(policy)))
        async with asyncio.timeout(60):
            await policy.asked.wait()
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)
            await policy.cancelled.wait()
        assert (await table.play(0)).total == 1.0


async def test_a_rollout_of_a_player_that_reads_no_more_is_given_up_at_once():
    verifiers = environment({})
    async with at_work(verifiers):
        player = verifiers._player
        assert player is not None
        assert player._process is not None
        player._process.send_signal(signal.SIGSTOP)
        rollout = asyncio.create_task(player.play({"task": {}, "base_url": "x" * 4_000_000, "model": "any"}))
        while not player._waiting:
            await asyncio.sleep(0)
        rollout.cancel()
        try:
            async with asyncio.timeout(60):
                (ended,) = await asyncio.gather(rollout, return_exceptions=True)
        finally:
            player._process.send_signal(signal.SIGCONT)
        assert isinstance(ended, asyncio.CancelledError)


ENDS_WITH_ITS_INPUT = """
import json, os, subprocess, sys
sys.stdin.readline()
{before}
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    number = json.loads(line)["number"]
    {each}
"""


def player_of(folder: Path, each: str, before: str = "", hung_s: float = 60.0) -> PlayerProcess:
    """One whose program is another one: what may go wrong before and for each line that it is told."""
    program, python = folder / "program.py", folder / "python"
    program.write_text(ENDS_WITH_ITS_INPUT.format(before=before, each=each))
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{program}'\n")
    python.chmod(0o755)
    return PlayerProcess(str(python), {}, (), 100, hung_s)


async def test_a_player_that_hangs_is_killed_once_it_does_not_say_that_it_has_given_up(tmp_path: Path):
    player = player_of(tmp_path, "import signal; os.kill(os.getpid(), signal.SIGSTOP)", hung_s=0.1)
    await player.start()
    rollouts = [asyncio.create_task(player.play({})) for _ in range(2)]
    while len(player._waiting) < 2:
        await asyncio.sleep(0)
    rollouts[0].cancel()
    async with asyncio.timeout(100):
        first, second = await asyncio.gather(*rollouts, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, InfrastructureError)
    assert "last words: (it was killed: it did not give up a rollout within 0.1 s, so it hangs)" in str(second)
    await player.close()


async def test_a_player_that_says_that_it_has_given_up_lives_on(tiny_tokenizer: Any):
    verifiers = environment({"says": ["held"]}, {})
    async with at_work(verifiers):
        table, player = Table(verifiers, tiny_tokenizer), verifiers._player
        assert player is not None
        policy = Policy(tiny_tokenizer, held={"held<|assistant|>": asyncio.Event()})
        rollout = asyncio.create_task(table.play(0, table.chat(policy)))
        async with asyncio.timeout(100):
            await policy.asked.wait()
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)
            while player._given_up:
                await asyncio.sleep(0.01)
        process = player._process
        assert (await table.play(1)).total == 1.0
        assert player._process is process


async def test_what_a_player_prints_without_end_holds_nothing_up_and_is_not_kept(tmp_path: Path):
    flood = "[os.write(2, b'y' * 2**20) for _ in range(8)]; print(json.dumps({'number': number, 'reward': 1}), flush=True)"
    player = player_of(tmp_path, flood)
    await player.start()
    async with asyncio.timeout(100):
        assert await player.play({}) == {"number": 1, "reward": 1}
    await player.close()
    assert max(map(len, player._said)) <= 1000


@pytest.mark.parametrize("noise", ["hello from a .pth file", "[1]"])
async def test_a_player_that_says_what_is_no_answer_is_ended_and_quoted(noise: str, tmp_path: Path):
    player = player_of(tmp_path, f"print({noise!r}, flush=True)")
    await player.start()
    async with asyncio.timeout(100):
        with pytest.raises(InfrastructureError, match=r"has ended.*said what is not an answer: .*; see what prints to stdout"):
            await player.play({})
    await player.close()
    early = player_of(tmp_path, "", before=f"print({noise!r}, flush=True)")
    with pytest.raises(ValueError, match=r"said what is not an answer: .*see what prints to stdout as that Python starts"):
        await early.start()
    await early.close()


def test_the_listing_of_tasks_waits_for_nothing_that_it_has_started_and_ends_it(tmp_path: Path):
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    script = f"{child}\nopen({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))"
    python = player_of(tmp_path, "", before=script)._python
    assert list_tasks(python, {}, {}, 500) == {"ready": True}
    left = int((tmp_path / "child").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(left).status() != psutil.STATUS_ZOMBIE:  # and gone where somebody collects it
            time.sleep(0.01)


async def test_the_player_ends_with_the_environment(tiny_tokenizer: Any):
    verifiers = environment({})
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with at_work(verifiers):
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        assert len(started) == 1
    assert not [child for child in started if child.is_running()]


def test_both_splits_are_listed_and_chosen_from_as_verifiers_chooses():
    tasks = [{"prompt": str(number)} for number in range(5)]
    held_out = {"tasks": [{"prompt": "x"}, {"prompt": "y"}]}
    verifiers = Verifiers(env={"taskset": {"tasks": tasks}}, path=(FAKE,), select={"limit": 3}, eval_taskset=held_out)
    texts = {split: [prompt.turns[-1]["content"] for prompt in verifiers.prompts(split)] for split in ("train", "eval")}
    assert texts == {"train": ["0", "1", "2"], "eval": ["x", "y"]}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"seats": {"a": {}, "b": {}}}, r"2 seats of Env ask the policy \(a, b\): exactly one may"),
        ({"seats": {"a": {"client": {}}}}, r"0 seats of Env ask the policy \(none\)"),
        ({"retries": 2}, r"env\.retries must be left away"),
        ({"taskset": {"endless": True}}, r"has no end: say how many with select=\{limit: 1000\}"),
        ({"taskset": {"id": "unknown"}}, "taskset 'unknown' not found"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(env: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Verifiers(env=env, path=(FAKE,)).prompts("train")


def test_a_python_without_verifiers_is_told_what_to_install(tmp_path: Path):
    (tmp_path / "verifiers.py").write_text("raise ModuleNotFoundError(\"No module named 'verifiers'\", name='verifiers')")
    with pytest.raises(ValueError, match=r"verifiers is not installed for .*: .* -m pip install 'verifiers>=0\.4,<0\.5'"):
        Verifiers(path=(str(tmp_path),)).prompts("train")
    with pytest.raises(ValueError, match="python=/nowhere/python can't be started"):
        Verifiers(python="/nowhere/python").prompts("train")
    with pytest.raises(ValueError, match=r"env\.taskset='my-tasks' must be a section of settings, e\.g\. {taskset"):
        Verifiers(env={"taskset": "my-tasks"})
    with pytest.raises(ValueError, match="must not name another id"):
        Verifiers(eval_taskset={"id": "other"})


async def test_one_address_serves_all_rollouts_by_the_model_s_name(tiny_tokenizer: Any):
    proxy, table = Proxy(), Table(environment(), tiny_tokenizer)
    await proxy.start()
    policies = [Policy(tiny_tokenizer, lambda prompt, say=say: say) for say in ("ab", "cd")]
    (url, first, session), (other_url, second, _) = (proxy.open_by_model(table.chat(policy)) for policy in policies)
    assert url == other_url
    async with openai.AsyncOpenAI(base_url=url, api_key="any", timeout=100, max_retries=0) as client:
        ask = client.chat.completions.create
        said = [(await ask(model=model, messages=[{"role": "user", "content": "a"}])) for model in (first, second)]
        assert [answer.choices[0].message.content for answer in said] == ["ab", "cd"]
        await proxy.shut(session)
        for model in (first, "gpt-4"):
            with pytest.raises(openai.NotFoundError, match="there is no rollout of the model"):
                await ask(model=model, messages=[{"role": "user", "content": "a"}])
    await proxy.close()
