"""Scores code by running it against tests in a sandbox: which passed, and why the others did not.

Two kinds of test. A `StdinTest` runs the program on an input and compares what it prints, outside the sandbox: nothing that
the program does can make a wrong output right. An `AssertTest` runs Python code (`assert add(1, 2) == 3`) in the program's own
process; it counts as passed only when the harness reaches its end and says so with a word that is new each time. That meets
`sys.exit(0)`, printed claims, replaced built-ins and a look through the frames. It can't meet what changes the test itself from
within (an object that equals everything, a trace function that jumps over lines) or reads the process's memory: prefer the
first kind.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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


@dataclass(frozen=True)
class StdinTest:
    """`StdinTest("3 4\\n", "7\\n")`: what the program reads, and what it must print."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class AssertTest:
    """`AssertTest("assert add(3, 4) == 7")`: Python code that runs where the
    answer's names are, and raises unless they are right."""

    code: str


Test = StdinTest | AssertTest


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


def read_tests(value: Any, entry_point: str = "") -> tuple[Test, ...]:
    """Tests in any of the forms that data sets have them in; JSON text is read first.

    `"def check(candidate): ..."` with an entry point (HumanEval); a text or a list of texts of assertions (MBPP);
    `{"inputs": [...], "outputs": [...]}` (APPS, TACO); a list of `{"input": ..., "output": ...}` (LiveCodeBench, Codeforces).
    Raises `ValueError` for anything else, and where there is no test.
    """
    if isinstance(value, str) and value.lstrip()[:1] in {"[", "{"}:
        value = json.loads(value)
    if isinstance(value, str):
        tests: list[Test] = [AssertTest(f"{value}\ncheck({entry_point})\n" if entry_point else value)]
    elif isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        tests = [StdinTest(_text(given), _text(out)) for given, out in zip(value["inputs"], value["outputs"], strict=True)]
    elif isinstance(value, Sequence) and all(isinstance(one, str) for one in value):
        tests = [AssertTest(one) for one in value]
    elif isinstance(value, Sequence) and all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in value):
        tests = [StdinTest(_text(one["input"]), _text(one["output"])) for one in value]
    else:
        raise ValueError(f"tests of the form {type(value).__name__} are not known: {str(value)[:80]}")
    if not tests or any(isinstance(test, AssertTest) and not test.code.strip() for test in tests):
        raise ValueError("there is no test, or an empty one: everything would pass")
    return tuple(tests)


async def judge(
    sandbox: Sandbox,
    code: str,
    tests: Sequence[Test],
    *,
    test_s: float = 10.0,
    total_s: float = 60.0,
    stop_at_failure: bool = False,
    site_packages: bool = False,
) -> Verdict:
    """Run every test in a process of its own. Raises `SandboxError`, never because of the code.

    `site_packages` shows the interpreter's installed packages to the code (start-up costs more). Raises `ValueError` without
    tests.
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
        result, outcome = await _run(sandbox, python, code, test, min(test_s, left))
        results.append(result)
        if result is not Result.PASSED:
            complaint = complaint or outcome.complaint
            if stop_at_failure or result is Result.DIED:
                break
    results += [Result.NOT_RUN] * (len(tests) - len(results))
    return Verdict(tuple(results), complaint)


async def _run(sandbox: Sandbox, python: list[str], code: str, test: Test, limit_s: float) -> tuple[Result, Outcome]:
    if isinstance(test, StdinTest):
        # Written anew would be safer still, but a program that rewrites itself between tests only changes what it answers.
        outcome = await sandbox.exec([*python, "main.py"], stdin=test.stdin.encode(), timeout_s=limit_s)
        right = _lines(outcome.text) == _lines(test.expected)
        otherwise = Result.WRONG if outcome.exit_code == 0 else Result.ERROR
        return _result(outcome, right and outcome.exit_code == 0, otherwise), outcome
    word = secrets.token_hex(16)
    given = json.dumps({"code": code, "test": test.code, "word": word}).encode()
    outcome = await sandbox.exec([*python, "-c", HARNESS], stdin=given, timeout_s=limit_s)
    wrong = Result.WRONG if outcome.complaint.startswith("AssertionError") else Result.ERROR
    return _result(outcome, outcome.ok and outcome.stdout.endswith(word.encode()), wrong), outcome


def _result(outcome: Outcome, passed: bool, otherwise: Result) -> Result:
    if outcome.ending is not Ending.EXITED:
        return Result(outcome.ending.value)
    return Result.PASSED if passed else otherwise


def _lines(text: str) -> list[str]:
    """Trailing spaces and empty last lines don't count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return str(value)
