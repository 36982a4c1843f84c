"""Rows of a file: values stay as it wrote them, and only what is used must be sound."""

from __future__ import annotations

import csv
import gzip
import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from telescope.environments.graders.maths import compare_exactly
from telescope.environments.questions.dataset import DatasetSource, NoRows
from telescope.environments.tasks.gsm8k import Gsm8k


def answers(file: Path, answer_field: str = "answer") -> list[str]:
    task = Gsm8k(data_dir=str(file), train_split="train", eval_split="train", answer_field=answer_field)
    return [prompt.answer for prompt in task.prompts("train")]


WRITTEN = {
    "0": "0", "0.0": "0.0", "false": "false", "true": "true", "1.10": "1.10", "2.50e3": "2.50e3", "-0": "-0", "1E400": "1E400",
    "9007199254740993": "9007199254740993", "0.1000000000000000055511151231257827": "0.1000000000000000055511151231257827",
    "1267650600228229401496703205376": "1267650600228229401496703205376", "[1.10, 2]": "[1.10, 2]",
    '"2024-03-01"': "2024-03-01", '"2024-03-01T00:00:00Z"': "2024-03-01T00:00:00Z", '"007"': "007", '"x+1"': "x+1",
    '"1e5"': "1e5", '"NA"': "NA", "9" * 5000: "9" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "lines.json"])
def test_an_answer_is_the_text_of_the_file_nested_ones_too(name: str, tmp_path: Path) -> None:
    objects = [f'{{"question": "q", "answer": {value}, "deep": {{"er": {value}}}}}' for value in WRITTEN]
    text = f"[{','.join(objects)}]" if name == "rows.json" else "\n".join(objects) + "\n\n"
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else b"\xef\xbb\xbf" + content)
    assert answers(tmp_path / name) == list(WRITTEN.values())
    assert answers(tmp_path / name, "deep.er") == list(WRITTEN.values())


def test_a_date_that_stays_a_text_is_right_and_no_subtraction(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "?", "answer": "2024-03-01"}\n{"question": "?", "answer": "1999-12-31"}\n'
    )
    assert [compare_exactly(each, "2024-03-01") is True for each in answers(tmp_path / "rows.jsonl")] == [True, False]


def test_a_csv_keeps_every_cell_as_text_and_a_parquet_what_its_types_say(tmp_path: Path) -> None:
    cells = ["0", "007", "1.10", "2024-03-01", "9007199254740993", "true", "NA", "x+1"]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer", "other"), *(("q", cell, n) for n, cell in enumerate(cells))])
    assert answers(tmp_path / "rows.csv") == cells
    columns = {
        "answer": pa.array([0, 2**53 + 1]),
        "single": pa.array([0.1, 2.5], pa.float32()),
        "day": pa.array([date(2024, 3, 1), date(1999, 12, 31)]),
        "exact": pa.array([Decimal("1.10"), Decimal("0.00")]),
    }
    pq.write_table(pa.table({"question": ["a", "b"], **columns}), tmp_path / "rows.parquet")
    read = {column: answers(tmp_path / "rows.parquet", column) for column in columns}
    assert read == {
        "answer": ["0", "9007199254740993"],
        "single": ["0.1", "2.5"],
        "day": ["2024-03-01", "1999-12-31"],
        "exact": ["1.10", "0.00"],
    }


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "single.parquet"])
def test_what_a_table_lacks_is_no_answer_that_is_called_nan(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """pandas keeps a missing value as NaN, and writes that into both."""
    file, missing = tmp_path / name, [5.0, float("nan")]
    if name == "rows.jsonl":
        file.write_text("".join(json.dumps({"question": "q", "answer": each}) + "\n" for each in missing))
    else:
        kind = pa.float32() if name.startswith("single") else pa.float64()
        pq.write_table(pa.table({"question": ["q", "q"], "answer": pa.array(missing, kind, from_pandas=False)}), file)
    assert [float(answer) for answer in answers(file)] == [5.0]
    assert "1 of 2 rows of train have no question or no answer" in caplog.text


def test_an_infinite_number_is_the_text_of_the_file_and_no_row_is_lost_to_the_type_of_others(tmp_path: Path) -> None:
    values = ["null", "null", '"x+1"', "0.0", "7", "-Infinity"]
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "q", "answer": {each}}}\n' for each in values))
    assert answers(tmp_path / "rows.jsonl") == ["x+1", "0.0", "7", "-Infinity"]


def test_what_stands_in_a_column_that_nobody_asked_for_refuses_no_file(tmp_path: Path) -> None:
    others = [b"1", b'"easy"', b'{"level": 1}', b"[]", b"null", b"NaN", b'"\xe9t\xe9"', b"1" * 5000]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(b'{"question": "q", "extra": %s, "answer": %d}\n' % (each, n) for n, each in enumerate(others)))
    assert answers(file) == [str(n) for n in range(len(others))]
    (tmp_path / "rows.csv").write_bytes(b"question,answer,extra\nq,1,2\nq,x+1,\xe9\n")
    assert answers(tmp_path / "rows.csv") == ["1", "x+1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"question": "q", "answer": {"text": "4"}}', r"jsonl, line 3: column 'answer' holds an object, \{'text': '4'\}"),
        (b'{"question": "q", "answer": ["4", "5"]}', r"holds a list, \['4', '5'\], where .* is wanted: make the column a text"),
        (b'{"question": {"q": 1}, "answer": "4"}', r"line 3: column 'question' holds an object"),
        (b'{"question": "q", "answer": "\xe94"}', r"not UTF-8: line 3, column 'answer' holds '.*4': write the file as UTF-8"),
        (b'{"question": "q", "answer": 4,}', r"line 3 is not JSON: .* at character 31, near .*: mend the line or take it out"),
        (b'"q"', r"line 3 is not an object of columns: 'q'"),
        (b"[" * 100_000, r"line 3 is not JSON: it is nested too deeply"),
    ],
)  # fmt: skip
def test_a_refusal_names_file_line_column_value_and_remedy(line: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "q", "answer": 1}\n\n' + line + b"\n")
    with pytest.raises(NoRows, match=said):
        answers(tmp_path / "rows.jsonl")


def test_a_row_left_out_is_named_with_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "q", "answer": answer} for answer in (0, None, "", False, [], ["12"])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert answers(tmp_path / "rows.jsonl") == ["0", "false", "12"]
    assert "3 of 6 rows of train have no question or no answer: left out, the first: " in caplog.text
    assert "rows.jsonl, line 2" in caplog.text


def test_a_row_knows_its_place_and_the_columns_of_all_rows_count(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    rows = DatasetSource("x", data_dir=str(tmp_path / "rows.jsonl")).rows("train", ("a", "b"))
    assert rows == [{"a": 1, "b": None}, {"a": None, "b": 2}]
    with pytest.raises(NoRows, match=r"rows\.jsonl has no column 'c'; it has a, b: name one of these"):
        DatasetSource("x", data_dir=str(tmp_path / "rows.jsonl")).rows("train", ("c",))


def test_a_packed_file_under_another_name_is_called_packed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(gzip.compress(b'{"a": 1}\n'))
    with pytest.raises(NoRows, match=r"packed by gzip, by its first bytes: call it rows\.jsonl\.gz"):
        DatasetSource("x", data_dir=str(tmp_path / "rows.jsonl")).rows("train", ("a",))
