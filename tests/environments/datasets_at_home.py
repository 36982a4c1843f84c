"""Small local copies of the published data sets, in the layout and columns that the hub gives; all questions are made up."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SIZE = 8


def write_all(folder: Path) -> dict[str, Path]:
    """One folder for each environment that reads a data set."""
    copies = {name: folder / name for name in WRITERS}
    for name, write in WRITERS.items():
        write(copies[name])
    return copies


def parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sums(split: str) -> list[tuple[str, int]]:
    start = {"train": 1, "test": 101}[split]
    return [(f"What is {n} + 1?", n + 1) for n in range(start, start + SIZE)]


def _gsm8k(folder: Path) -> None:
    for split in ("train", "test"):
        rows = [{"question": asked, "answer": f"One more: <<{n - 1}+1={n}>>{n}\n#### {n}"} for asked, n in sums(split)]
        parquet(folder / "main" / f"{split}-00000-of-00001.parquet", rows)
        parquet(folder / "socratic" / f"{split}-00000-of-00001.parquet", [{"question": "not these", "answer": "#### 0"}])


def _hendrycks_math(folder: Path) -> None:
    subjects = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra")
    for subject in (*subjects, "number_theory", "prealgebra", "precalculus"):
        for split in ("train", "test"):
            rows = [
                {"problem": f"{subject}: {asked}", "level": "Level 1", "type": subject, "solution": f"It is $\\boxed{{{n}}}$."}
                for asked, n in sums(split)[:2]
            ]
            parquet(folder / subject / f"{split}-00000-of-00001.parquet", rows)


def _dapo_math(folder: Path) -> None:
    for language in ("all", "cn", "en"):
        rows = [
            {"prompt": f"{language} {asked}", "solution": str(n), "reward_model": {"ground_truth": str(n), "style": "rule"}}
            for asked, n in sums("train")
        ]
        parquet(folder / language / "train-00000-of-00001.parquet", rows)


def _deepscaler(folder: Path) -> None:
    folder.mkdir(parents=True)
    rows = [{"problem": asked, "answer": str(n), "solution": ""} for asked, n in sums("train")]
    (folder / "deepscaler.json").write_text(json.dumps(rows))


def _math500(folder: Path) -> None:
    lines(
        folder / "test.jsonl", [{"problem": asked, "solution": "…", "answer": str(n), "level": 1} for asked, n in sums("test")]
    )


def _aime_2024(folder: Path) -> None:
    parquet(
        folder / "data" / "train-00000-of-00001.parquet", [{"problem": asked, "answer": str(n)} for asked, n in sums("train")]
    )


def _aime_2025(folder: Path) -> None:
    lines(folder / "test.jsonl", [{"problem": asked, "answer": str(n), "id": str(n)} for asked, n in sums("test")])


def _gpqa_diamond(folder: Path) -> None:
    folder.mkdir(parents=True)
    names = ("Record ID", "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    for subset in ("gpqa_diamond", "gpqa_main"):
        with (folder / f"{subset}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for asked, n in sums("train"):
                writer.writerow([f"rec{n}", f'{asked}\n({subset}, "quoted", twice)', n, n + 1, n + 2, f"{n}.50"])


def _code_generation(folder: Path) -> None:
    for split in ("train", "test"):
        rows = [
            {
                "text": f"Write add(x), which gives x + {n}.",
                "code": f"def add(x): return x + {n}",
                "test_setup_code": "",
                "test_list": [f"assert add({x}) == {x + n}" for x in range(3)],
            }
            for _, n in sums(split)
        ]
        lines(folder / f"{split}.jsonl", rows)


def _i3_code(folder: Path) -> None:
    called = {"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}
    printed = {"fn_name": None, "inputs": ["1 2\n"], "outputs": ["3\n"]}
    rows = [
        {
            "question": f"Task {n}: add two numbers.",
            "info": json.dumps({"tests": json.dumps((called, printed)[n % 2]), "source": "x"}),
        }
        for n in range(SIZE)
    ]
    parquet(folder / "code" / "train-00000-of-00001.parquet", rows)
    parquet(folder / "math" / "train-00000-of-00001.parquet", [{"question": "not these", "answer": "0"}])


WRITERS = {
    "code_generation": _code_generation,
    "i3_code": _i3_code,
    "gsm8k": _gsm8k,
    "hendrycks_math": _hendrycks_math,
    "dapo_math": _dapo_math,
    "deepscaler": _deepscaler,
    "math500": _math500,
    "aime_2024": _aime_2024,
    "aime_2025": _aime_2025,
    "gpqa_diamond": _gpqa_diamond,
}
