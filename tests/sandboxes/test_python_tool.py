"""Questions with a Python tool: programs run in real sandboxes, what they print is read, and what goes wrong has its owner."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from telescope.environments.base import Prompt, Reward
from telescope.environments.questions.maths import MathsQuestions
from telescope.environments.sandboxes.base import Limits, SandboxError
from telescope.environments.sandboxes.pool import SandboxSettings
from telescope.environments.tools.python_tool import PythonTool, strip_markdown
from tests.environments.tools.talk import Talk

QUESTION = Prompt(({"role": "user", "content": "What is 6 times 7?"},), answer="42")
SMALL = SandboxSettings(ready=1, most=2, limits=Limits(time_s=60.0, output_kb=4))


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


@asynccontextmanager
async def questions(tmp_path: Path, **settings: Any) -> AsyncIterator[MathsQuestions]:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"problem": "What is 6 times 7?", "answer": "42"}\n{"problem": "And 2 + 2?", "answer": "4"}\n')
    task = MathsQuestions(dataset="none", data_dir=str(file), held_out=1, answer_form="boxed", **settings)
    await task.set_up()
    try:
        yield task
    finally:
        await task.tear_down()


async def played(task: MathsQuestions, answers: Sequence[str]) -> tuple[Reward, Talk]:
    talk = Talk(answers)
    (prompt,) = (each for split in ("train", "eval") for each in task.prompts(split) if each.answer == "42")
    return await task.play(prompt, talk), talk  # type: ignore[arg-type]


async def test_a_program_is_run_read_and_counted_and_the_answer_behind_it_is_scored(tmp_path: Path) -> None:
    async with questions(tmp_path, tools=("python",), with_tools=PythonTool(sandbox=SMALL, python_limit_s=60.0)) as task:
        reward, talk = await played(task, [call("print(6 * 7)"), "It is \\boxed{42}."])
    assert talk.results(1) == ["42\n"]
    assert [tool["function"]["name"] for tool in talk.tools] == ["python"]
    assert list(talk.tools[0]["function"]["parameters"]["properties"]) == ["code"]
    assert (reward.total, reward.golden_answers) == (1.0, ("42",))
    counted = {name: reward.metrics[name] for name in ("exact", "python_calls", "tool_success_count", "sandbox_commands")}
    assert counted == {"exact": 1.0, "python_calls": 1.0, "tool_success_count": 1.0, "sandbox_commands": 1.0}
    assert [use["commands"] for use in reward.info["sandbox"]] == [{"exited": 1}]


async def test_what_a_program_does_wrong_is_told_to_the_policy_and_nothing_of_it_is_left_for_the_next(tmp_path: Path) -> None:
    programs = {
        "print(1)\nprint(1 / 0)": "ZeroDivisionError: division by zero Before that it printed: 1\n",
        "open('kept', 'w').write('x')": "(the program printed nothing)",
        "print(open('kept').read())": "FileNotFoundError: [Errno 2] No such file or directory: 'kept'",
        "```python\nprint('plain')\n```": "plain\n",
        "print('x' * 100_000)": "Error: the program printed too much and was ended. It began with: xxx",
        "import socket; socket.create_connection(('127.0.0.1', 1))": "Error: ",
    }
    tool = PythonTool(
        sandbox=SMALL, python_limit_s=60.0, max_turns=20, tool_timeout_s=0.001
    )  # its own limit holds, not this one
    async with questions(tmp_path, tools=("python",), with_tools=tool) as task:
        reward, talk = await played(task, [*map(call, programs), "\\boxed{41}"])
    for at, said in enumerate(programs.values(), 1):
        assert said in talk.results(at)[0]
    assert (reward.total, reward.metrics["tool_error_count"], reward.metrics["tool_success_count"]) == (0.0, 4.0, 2.0)


async def test_an_endless_program_is_ended_and_its_policy_told(tmp_path: Path) -> None:
    tool = PythonTool(sandbox=SMALL, python_limit_s=0.5)
    async with questions(tmp_path, tools=("python",), with_tools=tool) as task:
        reward, talk = await played(task, [call("while True: pass"), "\\boxed{42}"])
    assert talk.results(1) == ["Error: the program took longer than 0.5 s and was ended"]
    assert (reward.total, reward.metrics["tool_error_count"]) == (1.0, 1.0)


async def test_without_tools_it_is_one_question_and_one_answer_and_needs_no_sandbox(tmp_path: Path) -> None:
    nowhere = PythonTool(sandbox=SandboxSettings(provider="bubblewrap", python="/no/such/python"))
    async with questions(tmp_path, with_tools=nowhere) as task:
        reward, talk = await played(task, ["\\boxed{42}"])
    assert (reward.total, len(talk.said), talk.tools) == (1.0, 1, [])
    assert set(reward.metrics) == {"exact", "has_answer", "boxed"}


async def test_a_sandbox_that_fails_is_no_error_of_the_policy(tmp_path: Path) -> None:
    tool = PythonTool(sandbox=SMALL).with_score(MathsQuestions(dataset="none").reward)
    with pytest.raises(SandboxError, match="was not set up"):
        await tool.play(QUESTION, Talk([call("print(1)")]))  # type: ignore[arg-type]


def test_a_program_may_not_have_more_time_than_a_command() -> None:
    with pytest.raises(ValidationError, match=r"python_limit_s=20 must not be above sandbox.limits.time_s=10"):
        PythonTool(python_limit_s=20.0)


@pytest.mark.parametrize(
    ("written", "run"),
    [("print(1)", "print(1)"), ("```python\nprint(1)\n```", "print(1)"), ("```\na\nb\n```\n", "a\nb"), ("```py\na", "a")],
)
def test_markdown_around_a_program_is_taken_off(written: str, run: str) -> None:
    assert strip_markdown(written) == run
