"""Scores code by running it against tests in a sandbox: which passed, and why the others did not.

Three kinds of tests, in the forms that data sets have them in. A `StdinTest` gives a program an input and wants an output; a
`CallTest` calls a function and wants a value: both are compared outside the sandbox, so that nothing that the program does can
make a wrong one right. An `AssertTest` is Python code that runs in the program's own process; it counts as passed only when the
harness reaches its end and says so with a word that is new each time. That meets `sys.exit(0)`, printed claims, replaced
built-ins and a look through the frames. It can't meet what changes the test itself from within (an object that equals
everything, a trace function that jumps over lines) or reads the process's memory: prefer the other kinds.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from telescope.environments.answer_parsers import CodeBlock, ThinkTags
from telescope.environments.sandboxes.base import Ending, FileRefused, Outcome, Sandbox

FLOAT_TOLERANCE = 1e-6
"""Of floats that a function returns: data sets hold them with fewer digits than Python computes."""
LONGEST_NUMBER = 40
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_LONG_NUMBERS = ("-X", "int_max_str_digits=0")
"""Programs may read and print whole numbers of any length, as the judges did that wrote the tests: Python itself stops at 4,300
digits. Time and output are limited anyway."""
_MOST_DIGITS = 4000  # of a whole number that is read here
_LONG_WHOLE = re.compile(rf"\s*-?[1-9][0-9]{{{_MOST_DIGITS},}}\s*")
_BROKEN = (ValueError, SyntaxError, RecursionError, MemoryError)
_FENCES = ("```", "~~~")
_PYTHON = CodeBlock(("python", "py", "python3", "py3", "ipython", "ipython3"))
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


@dataclass(frozen=True)
class StdinTest:
    """`StdinTest("3 4\\n", "7\\n")`: what the program reads, and what it must print."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """`CallTest("add", "(3, 4)", "7")`: a function (of the class `Solution`, where the program has one), its arguments as a
    Python literal, and the JSON of what it must return."""

    function: str
    arguments: str
    expected: str


@dataclass(frozen=True)
class AssertTest:
    """`AssertTest("assert add(3, 4) == 7")`: Python code that runs where the
    answer's names are, and raises unless they are right."""

    code: str


Test = StdinTest | CallTest | AssertTest


class CodeResult(StrEnum):
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
class CodeVerdict:
    results: tuple[CodeResult, ...]
    complaint: str = ""
    """The last line of standard error of the first test that failed."""

    @property
    def passed(self) -> float:
        """The share of tests that passed."""
        return sum(result is CodeResult.PASSED for result in self.results) / len(self.results)

    @property
    def all_passed(self) -> bool:
        return all(result is CodeResult.PASSED for result in self.results)


def read_tests(value: Any, entry_point: str = "", *, check: bool = True) -> tuple[Test, ...]:
    """Tests in any of the forms that data sets have them in; JSON text is read first.

    `"def check(candidate): ..."` with an entry point (HumanEval); a text or a list of texts of assertions (MBPP);
    `{"inputs": [...], "outputs": [...]}`, with a `fn_name` where a function is called (APPS, TACO, INTELLECT-3); a list of
    `{"input": ..., "output": ...}`, of the `testtype` "functional" where the entry point is called (LiveCodeBench).
    Raises `ValueError` for anything else, and where there is no test. `check` refuses tests that no program can pass: that
    takes seconds for large ones, so it belongs where rows are loaded.
    """
    if isinstance(value, str) and value.lstrip()[:1] in {"[", "{"}:
        value = json.loads(value)
    if isinstance(value, str):
        tests: list[Test] = [AssertTest(f"{value}\ncheck({entry_point})\n" if entry_point else value)]
    elif isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        function = str(value.get("fn_name") or "")
        counts = len(value["inputs"]), len(value["outputs"])
        if counts[0] != counts[1]:
            raise ValueError(f"{counts[0]} inputs and {counts[1]} outputs: each input needs one output")
        tests = [_read_test(given, out, function) for given, out in zip(value["inputs"], value["outputs"], strict=True)]
    elif isinstance(value, Sequence) and all(isinstance(one, str) for one in value):
        tests = [AssertTest(one) for one in value]
    elif isinstance(value, Sequence) and all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in value):
        tests = [_read_test(one["input"], one["output"], _find_function(one, entry_point)) for one in value]
    else:
        raise ValueError(f"tests of the form {type(value).__name__} are not known: {str(value)[:80]}")
    if not tests or any(isinstance(test, AssertTest) and not test.code.strip() for test in tests):
        raise ValueError("there is no test, or an empty one: everything would pass")
    for number, test in enumerate(tests if check else (), 1):
        _check_test(test, f"test {number}", entry_point)
    return tuple(tests)


def check_program(code: str, what: str) -> None:
    """Raises `ValueError` for what Python can't compile, or UTF-8 can't hold. For where rows are loaded: the filter of warnings
    that it sets is the whole process's."""
    try:
        code.encode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, what, "exec", dont_inherit=True)
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds half a character, which no program can: {error}") from error
    except _BROKEN as error:
        line = getattr(error, "lineno", None) or 1
        shown = (code.splitlines() or [""])[min(line, len(code.splitlines()) or 1) - 1]
        raise ValueError(
            f"{what} is not Python, line {line}: {shown.strip()[:80]!r}: {type(error).__name__}: {error}"
        ) from error


def extract_code(answer: str, function: str = "") -> str:
    """The program behind any thought; `""` where there is none.

    Of closed Python blocks it is the last that defines `function`, else the last; blocks of no language count where no other
    says Python. What is only values, or what Python can't read, is taken for what a program printed, and counts where there is
    nothing else. An answer without a fence is a program where Python can read all of
    it. Leading spaces stay: a bare function body is an answer where a prefix comes before it.
    """
    said = ThinkTags(_Text()).parse(answer)
    if said is None:
        return ""
    blocks = _PYTHON.find_all(said)
    if not blocks:
        return "" if any(fence in said for fence in _FENCES) or _parse(said) is None else said
    defining = [block for block in blocks if function and re.search(rf"\bdef {re.escape(function)}\b", block)]
    programs = [block for block in defining or blocks if not _only_values(block)]
    return (programs or defining or blocks)[-1] + "\n"


def prepend(prelude: str, code: str) -> str:
    """The code with a prelude, e.g. of imports, before it. What it imports from `__future__` must come first, and does."""
    if not prelude:
        return code
    lines = code.splitlines(keepends=True)
    first = [line for line in lines if line.startswith("from __future__ import ")]
    rest = [line for line in lines if not line.startswith("from __future__ import ")]
    return "".join([*(line.rstrip("\n") + "\n" for line in first), prelude.rstrip("\n") + "\n", *rest])


async def run_tests(
    sandbox: Sandbox,
    code: str,
    tests: Sequence[Test],
    *,
    test_s: float = 10.0,
    total_s: float = 60.0,
    stop_at_failure: bool = False,
    site_packages: bool = False,
    tolerance: float = 0.0,
) -> CodeVerdict:
    """Run every test in a process of its own. Raises `SandboxError`, never because of the code.

    `site_packages` shows the interpreter's installed packages to the code (start-up costs more). `tolerance` is how far printed
    numbers may be off (`compare_printed`). Raises `ValueError` without tests.
    """
    if not tests:
        raise ValueError("there is no test: everything would pass")
    python = ["python3", *_LONG_NUMBERS, "-I"] if site_packages else ["python3", *_LONG_NUMBERS, "-I", "-S"]
    deadline = time.monotonic() + total_s
    results: list[CodeResult] = []
    complaint = ""
    if any(isinstance(test, StdinTest) for test in tests):
        try:
            await sandbox.upload("main.py", code.encode("utf-8", "replace"))
        except FileRefused as error:  # an earlier program has taken the sandbox down, or filled it
            return CodeVerdict((CodeResult.DIED, *[CodeResult.NOT_RUN] * (len(tests) - 1)), str(error))
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        result, outcome = await _run_test(sandbox, python, code, test, min(test_s, left), tolerance)
        results.append(result)
        if result is not CodeResult.PASSED:
            complaint = complaint or outcome.complaint
            if stop_at_failure or result is CodeResult.DIED:
                break
    results += [CodeResult.NOT_RUN] * (len(tests) - len(results))
    return CodeVerdict(tuple(results), complaint)


def compare_printed(printed: str, wanted: str, tolerance: float = 0.0) -> bool:
    """Whether the two are the same, trailing spaces and empty last lines aside. With a tolerance it is words that are compared,
    and numbers of which one is not an integer may be that far apart, or that share of the wanted one."""
    if _split_lines(printed) == _split_lines(wanted):
        return True
    if tolerance == 0:
        return False
    given, right = printed.split(), wanted.split()
    return len(given) == len(right) and all(
        one == other or _is_close(one, other, tolerance) for one, other in zip(given, right, strict=True)
    )


def compare_returned(returned: str, wanted: str) -> bool:
    """Whether two JSON texts hold the same value. Some data sets put what is wanted into a list of one: that one counts too."""
    try:
        given, right = (json.loads(text, parse_int=_read_whole) for text in (returned, wanted))
    except _BROKEN:
        return False
    return _is_same(given, right) or (isinstance(right, list) and len(right) == 1 and _is_same(given, right[0]))


async def _run_test(
    sandbox: Sandbox, python: list[str], code: str, test: Test, limit_s: float, tolerance: float
) -> tuple[CodeResult, Outcome]:
    if isinstance(test, StdinTest):
        # Written anew would be safer still, but a program that rewrites itself between tests only changes what it answers.
        outcome = await sandbox.exec([*python, "main.py"], stdin=test.stdin.encode(), timeout_s=limit_s)
        right = compare_printed(outcome.text, test.expected, tolerance)
        otherwise = CodeResult.WRONG if outcome.exit_code == 0 else CodeResult.ERROR
        return _read_result(outcome, right and outcome.exit_code == 0, otherwise), outcome
    word = secrets.token_hex(16)
    if isinstance(test, CallTest):
        call = {"code": code, "name": test.function, "arguments": test.arguments, "word": word}
        outcome = await sandbox.exec([*python, "-c", CALLING], stdin=json.dumps(call).encode(), timeout_s=limit_s)
        _, told, value = outcome.text.rpartition(word)
        otherwise = CodeResult.WRONG if outcome.ok and told else CodeResult.ERROR
        return _read_result(outcome, outcome.ok and bool(told) and compare_returned(value, test.expected), otherwise), outcome
    given = json.dumps({"code": code, "test": test.code, "word": word}).encode()
    outcome = await sandbox.exec([*python, "-c", HARNESS], stdin=given, timeout_s=limit_s)
    wrong = CodeResult.WRONG if outcome.complaint.startswith("AssertionError") else CodeResult.ERROR
    return _read_result(outcome, outcome.ok and outcome.stdout.endswith(word.encode()), wrong), outcome


def _read_result(outcome: Outcome, passed: bool, otherwise: CodeResult) -> CodeResult:
    if outcome.ending is not Ending.EXITED:
        return CodeResult(outcome.ending.value)
    return CodeResult.PASSED if passed else otherwise


def _read_test(given: Any, out: Any, function: str) -> Test:
    if not function:
        return StdinTest(_join_text(given), _join_text(out))
    arguments = tuple(map(_read_literal, given.splitlines())) if isinstance(given, str) else tuple(given)
    if isinstance(out, str) and _LONG_WHOLE.fullmatch(out):
        return CallTest(function, repr(arguments), out.strip())
    return CallTest(function, repr(arguments), json.dumps(_read_literal(out) if isinstance(out, str) else out, default=list))


class _Text:
    """All that is there, white space too."""

    def parse(self, completion: str) -> str:
        return completion

    def well_formed(self, completion: str) -> float:
        return 1.0


def _parse(code: str) -> list[ast.stmt] | None:
    """What Python reads in it, as a program or as the body of a function; None: nothing."""
    for whole in (code, f"def body():\n{code}"):
        try:
            return ast.parse(whole).body
        except _BROKEN:
            continue
    return None


def _only_values(code: str) -> bool:
    """Whether a block is what a program printed, such as `6` or `5 5`, and none."""
    body = _parse(code)
    if body is None:
        return True
    return all(isinstance(each, ast.Expr) and not any(isinstance(part, ast.Call) for part in ast.walk(each)) for each in body)


def _check_test(test: Test, what: str, entry_point: str) -> None:
    """Raises `ValueError` for a test that no program can pass."""
    if isinstance(test, AssertTest):
        check_program(test.code, what)
        if (
            entry_point
            and "check" not in test.code.removesuffix(f"check({entry_point})\n")
            and f"check({entry_point})" in test.code
        ):
            raise ValueError(f"{what} calls check({entry_point}), and defines no check: {test.code[:80]!r}")
        return
    for text in (test.arguments, test.expected) if isinstance(test, CallTest) else (test.stdin, test.expected):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{what} holds half a character, which no program can read or print: {text[:80]!a}") from error
    if isinstance(test, CallTest):
        if not test.function.isidentifier():
            raise ValueError(f"{what} calls {test.function[:80]!r}, which is not a name of a function")
        try:
            ast.literal_eval(test.arguments)
        except _BROKEN as error:
            raise ValueError(f"{what} has arguments that can't be written as Python: {test.arguments[:80]!r}") from error
        if not compare_returned(test.expected, test.expected):
            raise ValueError(f"{what} wants {test.expected[:80]!r}, which equals nothing, not even itself")


def _find_function(test: Mapping[str, Any], entry_point: str) -> str:
    """The function that the test calls; "" for a program that reads and prints."""
    kind = test.get("testtype") or "stdin"
    if kind == "stdin":
        return ""
    if kind != "functional":
        raise ValueError(f"tests of the testtype {str(kind)[:80]!r} are not known")
    if not entry_point:
        raise ValueError("a functional test calls a function, and the row names none (entry_point_field)")
    return entry_point


def _read_literal(text: str) -> Any:
    """A value written as JSON, or else as Python writes it. Raises `ValueError`."""
    try:
        return json.loads(text)
    except _BROKEN:
        pass
    try:
        return ast.literal_eval(text.strip())
    except _BROKEN as error:
        raise ValueError(f"an argument or a value of a test is neither JSON nor a literal of Python: {text[:80]!r}") from error


def _read_whole(digits: str) -> int | tuple[str]:
    """A whole number; a longer one by its digits alone, as nothing else in JSON."""
    return int(digits) if len(digits) <= _MOST_DIGITS else (digits,)


def _join_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not any(isinstance(line, list | dict) for line in value):
        return "\n".join(map(str, value))
    return str(value)


def _split_lines(text: str) -> list[str]:
    """Trailing spaces and empty last lines don't count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _is_close(one: str, other: str, tolerance: float) -> bool:
    if not all(len(text) <= LONGEST_NUMBER and _FLOAT.fullmatch(text) for text in (one, other)):
        return False
    if one.lstrip("+-").isdecimal() and other.lstrip("+-").isdecimal():
        return False  # whole numbers are right or wrong
    given, right = float(one), float(other)
    return math.isfinite(given) and math.isclose(given, right, rel_tol=0, abs_tol=tolerance * max(1.0, abs(right)))


def _is_same(given: Any, right: Any) -> bool:
    """As `==`, but that floats need not have all their digits. As deep as `right` is, however deep the other goes."""
    if isinstance(right, list):
        return (
            isinstance(given, list)
            and len(given) == len(right)
            and all(_is_same(*pair) for pair in zip(given, right, strict=True))
        )
    if isinstance(right, dict):
        return (
            isinstance(given, dict) and given.keys() == right.keys() and all(_is_same(given[key], right[key]) for key in right)
        )
    if isinstance(right, float) or isinstance(given, float):
        if not (isinstance(given, int | float) and isinstance(right, int | float)):
            return False
        try:
            return math.isclose(given, right, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
        except OverflowError:  # a whole number beyond all floats
            return False
    return bool(given == right)
