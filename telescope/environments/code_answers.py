"""Scores code by running it against tests (code_tests.py) in a sandbox: which passed, and why the others did not.

What a program prints on an input and what a function returns are compared outside the sandbox: nothing that the program does
can make a wrong one right. An `AssertTest` runs in the program's own process; it counts as passed only when the harness reaches
its end and says so with a word that is new each time. That meets `sys.exit(0)`, printed claims, replaced built-ins and a look
through the frames. It can't meet what changes the test itself from within (an object that equals everything, a trace function
that jumps over lines) or reads the process's memory: prefer the other kinds.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from telescope.environments.code_tests import CallTest, StdinTest, Test, printed_alike, returned_alike
from telescope.environments.parsers import CodeBlock
from telescope.environments.sandboxes.base import Ending, FileRefused, Outcome, Sandbox

_FENCE = "```"

HARNESS = """\
import json, os, sys
given = json.loads(sys.stdin.buffer.read())
space = {"__name__": "solution"}
os.write(1, (
    given.pop("word").encode(),
    list(map(
        exec,
        (compile(given.pop("code"), "solution.py", "exec"), compile(given.pop("test"), "test.py", "exec")),
        (space, space),
    )),
)[0])
os._exit(0)
"""
"""One expression on purpose. When the answer begins, all that is still to happen (`os.write`, the word, `exec`, the compiled
test) has been looked up and lies on the interpreter's own stack: no name leads there, neither a module's nor a frame's, so
there is nothing to replace and nothing to read. `os._exit` drops what was printed and not flushed: the word comes last.
"""


CALLING = """\
import ast, json, os, sys
given = json.loads(sys.stdin.buffer.read())
space = {"__name__": "solution"}
exec(compile(given["code"], "solution.py", "exec"), space)
name = given["name"]
function = getattr(space["Solution"](), name, None) if "Solution" in space else None
function = function or space.get(name)
if function is None:
    raise NameError(f"name {name!r} is not defined")
value = json.dumps(function(*ast.literal_eval(given["arguments"])), default=list)
left = memoryview((given["word"] + value).encode())
while left:
    left = left[os.write(1, left):]
os._exit(0)
"""
"""Calls a function and tells its value. What is wanted is not in here: a program that says the word itself has only said its
answer in another way.
"""


class Result(StrEnum):
    PASSED = "passed"
    WRONG = "wrong"
    """Another output, or a failed assertion."""
    ERROR = "error"
    """It raised, or ended early."""
    TIMED_OUT = "timed_out"
    FLOODED = "flooded"
    DIED = "died"
    NOT_RUN = "not_run"
    """An earlier test took the sandbox down or used up the time, or nothing more depended on it."""


@dataclass(frozen=True)
class Verdict:
    results: tuple[Result, ...]
    complaint: str = ""
    """The last line of standard error of the first test that failed."""

    @property
    def passed(self) -> float:
        """The share of tests that passed."""
        return sum(result is Result.PASSED for result in self.results) / len(self.results)

    @property
    def all_passed(self) -> bool:
        return all(result is Result.PASSED for result in self.results)


def code_of(answer: str) -> str:
    """The last closed Python block behind any thought; an answer without a fence as a whole; `""` where neither is there.

    Leading spaces stay: a bare function body is an answer where a prefix comes before it.
    """
    _, closed, said = answer.rpartition("</think>")
    if not closed and "<think>" in answer:
        return ""
    block = CodeBlock(("python", "py", "python3")).parse(said)
    return block + "\n" if block is not None else "" if _FENCE in said else said


def behind(prelude: str, code: str) -> str:
    """The code with a prelude, e.g. of imports, before it. What it imports from `__future__` must come first, and does."""
    if not prelude:
        return code
    lines = code.splitlines(keepends=True)
    first = [line for line in lines if line.startswith("from __future__ import ")]
    rest = [line for line in lines if not line.startswith("from __future__ import ")]
    return "".join([*(line.rstrip("\n") + "\n" for line in first), prelude.rstrip("\n") + "\n", *rest])


async def judge(
    sandbox: Sandbox,
    code: str,
    tests: Sequence[Test],
    *,
    test_s: float = 10.0,
    total_s: float = 60.0,
    stop_at_failure: bool = False,
    site_packages: bool = False,
    tolerance: float = 0.0,
) -> Verdict:
    """Run every test in a process of its own. Raises `SandboxError`, never because of the code.

    `site_packages` shows the interpreter's installed packages to the code (start-up costs more). `tolerance` is how far printed
    numbers may be off (`printed_alike`). Raises `ValueError` without tests.
    """
    if not tests:
        raise ValueError("there is no test: everything would pass")
    python = ["python3", "-I"] if site_packages else ["python3", "-I", "-S"]
    deadline = time.monotonic() + total_s
    results: list[Result] = []
    complaint = ""
    if any(isinstance(test, StdinTest) for test in tests):
        try:
            await sandbox.upload("main.py", code.encode("utf-8", "replace"))
        except FileRefused as error:  # an earlier program has taken the sandbox down, or filled it
            return Verdict((Result.DIED, *[Result.NOT_RUN] * (len(tests) - 1)), str(error))
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        result, outcome = await _run(sandbox, python, code, test, min(test_s, left), tolerance)
        results.append(result)
        if result is not Result.PASSED:
            complaint = complaint or outcome.complaint
            if stop_at_failure or result is Result.DIED:
                break
    results += [Result.NOT_RUN] * (len(tests) - len(results))
    return Verdict(tuple(results), complaint)


async def _run(
    sandbox: Sandbox, python: list[str], code: str, test: Test, limit_s: float, tolerance: float
) -> tuple[Result, Outcome]:
    if isinstance(test, StdinTest):
        # Written anew would be safer still, but a program that rewrites itself between tests only changes what it answers.
        outcome = await sandbox.exec([*python, "main.py"], stdin=test.stdin.encode(), timeout_s=limit_s)
        right = printed_alike(outcome.text, test.expected, tolerance)
        otherwise = Result.WRONG if outcome.exit_code == 0 else Result.ERROR
        return _result(outcome, right and outcome.exit_code == 0, otherwise), outcome
    word = secrets.token_hex(16)
    if isinstance(test, CallTest):
        call = {"code": code, "name": test.function, "arguments": test.arguments, "word": word}
        outcome = await sandbox.exec([*python, "-c", CALLING], stdin=json.dumps(call).encode(), timeout_s=limit_s)
        _, told, value = outcome.text.rpartition(word)
        otherwise = Result.WRONG if outcome.ok and told else Result.ERROR
        return _result(outcome, outcome.ok and bool(told) and returned_alike(value, test.expected), otherwise), outcome
    given = json.dumps({"code": code, "test": test.code, "word": word}).encode()
    outcome = await sandbox.exec([*python, "-c", HARNESS], stdin=given, timeout_s=limit_s)
    wrong = Result.WRONG if outcome.complaint.startswith("AssertionError") else Result.ERROR
    return _result(outcome, outcome.ok and outcome.stdout.endswith(word.encode()), wrong), outcome


def _result(outcome: Outcome, passed: bool, otherwise: Result) -> Result:
    if outcome.ending is not Ending.EXITED:
        return Result(outcome.ending.value)
    return Result.PASSED if passed else otherwise
