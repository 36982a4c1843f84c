"""Any program is an agent: it runs beside its rollout, is killed at its limit with all it started, and then scored."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from telescope.environments.agent_environment import ProgramOutcome, _blame_the_wait, run_program
from telescope.environments.base import Prompt
from telescope.environments.chat import ChatError, TokenChat
from telescope.environments.failures import InfrastructureError
from telescope.environments.tasks.agent_program import AgentProgram
from telescope.environments.template import ChatTemplate
from telescope.runlog import temporary
from tests.environments.proxy.conftest import SHOWING, Policy

AGENT = Path(__file__).parent / "agent.py"


@pytest.fixture
def policy(tiny_tokenizer: Any) -> Policy:
    return Policy(tiny_tokenizer, lambda prompt: prompt.split("<|user|>")[-1].removesuffix("<|assistant|>")[::-1])


def chat_of(policy: Policy) -> TokenChat:
    return TokenChat(ChatTemplate(policy.tokenizer, [1], chat_template=SHOWING), policy, 300, max_tokens=200)


def program(tmp_path: Path, *command: str, **settings: Any) -> AgentProgram:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"task": "ab cd", "answer": "cd ab"}) + "\n\n" + json.dumps({"task": "x"}) + "\n")
    return AgentProgram(command=command, tasks=str(file), **settings)


async def play(environment: AgentProgram, chat: TokenChat) -> Any:
    await environment.set_up()
    try:
        return await environment.play(environment.prompts("train")[0], chat)
    finally:
        await environment.tear_down()


async def test_a_program_with_the_sdk_is_trained_on_all_it_asked(tmp_path: Path, policy: Policy) -> None:
    chat = chat_of(policy)
    reward = await play(program(tmp_path, sys.executable, str(AGENT), time_limit_s=100.0), chat)
    assert (reward.total, reward.tags) == (1.0, ())
    assert reward.metrics == {"agent_requests": 4.0, "exact": 1.0}
    texts = [policy.tokenizer.decode(branch.ids.tolist()) for branch in chat.recording().branches]
    assert sorted(texts) == [
        "<|user|>ab cd<|assistant|>dc ba<eos><|user|>ba dc<|assistant|>cd ab<eos>",
        "<|user|>ab<|assistant|>ba<eos>",
        "<|user|>cd<|assistant|>dc<eos>",
    ]
    assert sum(int(branch.mask.sum()) for branch in chat.recording().branches) == 18


async def test_a_program_that_fails_scores_nothing_and_is_shown(tmp_path: Path, policy: Policy) -> None:
    code = "import sys; print('cd ab'); sys.exit('no luck')"
    reward = await play(program(tmp_path, sys.executable, "-S", "-c", code), chat_of(policy))
    assert (reward.total, reward.tags) == (0.0, ("agent_failed",))
    assert (reward.info["exit_code"], reward.info["stderr"]) == (1, "no luck\n")


async def test_a_program_that_asked_nothing_is_no_rollout(tmp_path: Path, policy: Policy) -> None:
    chat = chat_of(policy)
    assert (await play(program(tmp_path, sys.executable, "-S", "-c", "print('cd ab')"), chat)).total == 1.0
    with pytest.raises(ChatError, match="without asking the policy"):
        chat.recording()


async def test_a_program_that_is_not_there_says_so(tmp_path: Path, policy: Policy) -> None:
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        await play(program(tmp_path, "no_such_program"), chat_of(policy))


async def test_at_its_limit_it_is_killed_with_all_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([{sys.executable!r}, '-S', '-c', 'import time; time.sleep(1000)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(str(child.pid) + '.')\n"
        "time.sleep(1000)\n"
    )
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_program([sys.executable, "-S", "-c", code], variables={}, stdin="", limit_s=300, give_up=stop)
    )
    pids = tmp_path / "pids"
    async with asyncio.timeout(60):
        while not (pids.exists() and pids.read_text().endswith(".")):
            await asyncio.sleep(0.05)
    child = psutil.Process(int(pids.read_text()[:-1]))
    stop.set()
    outcome = await asyncio.wait_for(running, 60)
    assert outcome.timed_out
    await asyncio.to_thread(psutil.wait_procs, [child], 60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_programs_run_in_a_folder_that_is_swept_where_their_worker_was_killed(tmp_path: Path, policy: Policy) -> None:
    reward = await play(program(tmp_path, sys.executable, "-S", "-c", "import os; print(os.getcwd())"), chat_of(policy))
    folder = Path(reward.info["stdout"].strip())
    assert folder.parent.name.startswith(temporary.PREFIX)
    assert not folder.parent.exists()


async def test_a_time_limit_ends_a_program(tmp_path: Path, policy: Policy) -> None:
    code = "import time; print('cd ab', flush=True); time.sleep(1000)"
    reward = await play(program(tmp_path, sys.executable, "-S", "-c", code, time_limit_s=0.5), chat_of(policy))
    assert (reward.total, reward.tags) == (0.0, ("agent_timeout",))


async def test_time_in_which_the_policy_owes_an_answer_does_not_count(tmp_path: Path) -> None:
    """The program may go only after its wait has been asked for five times: four ends of its limit were none."""
    go, started, asked = tmp_path / "go", time.monotonic(), itertools.count(1)

    def waited_s() -> float:
        if next(asked) == 5:
            go.touch()
        return time.monotonic() - started + 1.0

    code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
    never = asyncio.Event()
    argv = [sys.executable, "-S", "-c", code]
    outcome = await run_program(argv, variables={}, stdin="", limit_s=0.1, give_up=never, waited_s=waited_s)
    assert outcome.exit_code == 0
    assert next(asked) > 5


async def test_a_program_that_fails_while_the_policy_owes_it_an_answer_is_not_scored(tmp_path: Path, policy: Policy) -> None:
    policy.held = {"a<|assistant|>": asyncio.Event()}
    there = tmp_path / "there"
    code = (
        "import os, socket, sys, time\n"
        "host, _, path = os.environ['OPENAI_BASE_URL'].removeprefix('http://').partition('/')\n"
        'body = \'{"messages": [{"role": "user", "content": "a"}]}\'\n'
        "s = socket.create_connection(host.split(':'))\n"
        "head = f'POST /{path}/chat/completions HTTP/1.1\\r\\nhost: a\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n'\n"
        "s.sendall((head + body).encode())\n"
        f"while not os.path.exists({str(there)!r}): time.sleep(0.02)\n"
        "sys.exit('it took too long')\n"
    )
    playing = asyncio.create_task(play(program(tmp_path, sys.executable, "-S", "-c", code), chat_of(policy)))
    await asyncio.wait_for(policy.asked.wait(), 60)
    there.touch()
    with pytest.raises(InfrastructureError, match=r"exit code 1, and had given up a request .* ends: it took too long$"):
        await asyncio.wait_for(playing, 60)


def test_a_program_is_scored_unless_it_failed_and_had_given_up_a_request() -> None:
    for code, given_up in ((0, True), (0, False), (1, False), (None, False)):
        _blame_the_wait(ProgramOutcome(code, "", ""), given_up)
    with pytest.raises(InfrastructureError, match="was killed at time_limit_s, and had given up a request"):
        _blame_the_wait(ProgramOutcome(None, "", ""), True)


async def test_a_server_that_fails_ends_the_program_and_the_rollout(tmp_path: Path, policy: Policy) -> None:
    policy.broken = True
    code = (
        "import os, time, urllib.request as u\n"
        'body = b\'{"messages": [{"role": "user", "content": "a"}]}\'\n'
        "try: u.urlopen(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body)\n"
        "except OSError: pass\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(ChatError, match="the server is gone"):
        await play(program(tmp_path, sys.executable, "-S", "-c", code), chat_of(policy))


async def test_a_flood_of_output_is_kept_to_its_beginning_and_secrets_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    code = "import os, sys; print(os.environ.get('WANDB_API_KEY'), os.environ['MINE']); sys.stdout.write('x' * 5_000_000)"
    never = asyncio.Event()
    outcome = await run_program(
        [sys.executable, "-S", "-c", code], variables={"MINE": "here"}, stdin="y" * 1_000_000, limit_s=60, give_up=never
    )
    assert (outcome.exit_code, len(outcome.stdout)) == (0, 1024 * 1024)
    assert outcome.stdout.startswith("None here\n")


def test_tasks_are_lines_and_broken_ones_are_named(tmp_path: Path) -> None:
    found = program(tmp_path, "x").prompts("train")
    assert [(prompt.turns[0]["content"], prompt.answer) for prompt in found] == [("ab cd", "cd ab"), ("x", "")]
    assert found[0] == Prompt(({"role": "user", "content": "ab cd"},), "cd ab", {"task": "ab cd", "answer": "cd ab"})
    assert program(tmp_path, "x").prompts("eval") == []  # they would be those that are trained on
    (tmp_path / "tasks.jsonl").write_text('{"task": "x"}\nnonsense\n')
    with pytest.raises(ValueError, match=r"tasks.jsonl line 2 is no"):
        AgentProgram(command=("x",), tasks=str(tmp_path / "tasks.jsonl")).prompts("train")
    (tmp_path / "tasks.jsonl").write_bytes(b"\xff")
    for place, said in (("tasks.jsonl", "can't decode byte"), ("none.jsonl", "No such file"), (".", "Is a directory")):
        with pytest.raises(ValueError, match=f"the tasks in .* can't be read: .*{said}.*: name a file of JSON lines"):
            AgentProgram(command=("x",), tasks=str(tmp_path / place)).prompts("train")
    with pytest.raises(ValueError, match="give command="):
        AgentProgram().prompts("train")
    assert "PATH" in os.environ
