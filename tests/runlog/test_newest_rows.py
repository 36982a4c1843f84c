"""Rows for those who look: the newest first, each once, those of earlier attempts that count, and damage passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from telescope.runlog import reader
from telescope.runlog.attempts import CountedRows, Lineage, write_lineage
from telescope.runlog.files import DamagedFile
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import newest_rows, rows
from telescope.runlog.schema import STREAMS
from telescope.runlog.sealing import seal


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Rows 0 to 3 are sealed in two blocks, 4 and 5 are live."""
    run = RunDirectory.create(tmp_path / "run")
    for segment in range(3):
        write(run, segment, [2 * segment, 2 * segment + 1], sealed=segment < 2)
    return run


def write(run: RunDirectory, segment: int, numbers: list[int], *, sealed: bool) -> None:
    path = run.live("orchestrator", "step_metrics", segment)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = ({"seq": number, "time_ns": 0, "mono_ns": 0, "step": number, "metrics": {"x": number}} for number in numbers)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in made))
    if sealed:
        seal(run, "orchestrator", STREAMS["step_metrics"], segment)


def numbers(run: RunDirectory, *columns: str) -> tuple[list[int], list[DamagedFile]]:
    damaged: list[DamagedFile] = []
    return [row["seq"] for row in newest_rows(run, "step_metrics", damaged, columns)], damaged


def test_the_newest_rows_come_first_and_are_those_that_the_other_reader_has(run: RunDirectory):
    assert numbers(run) == ([5, 4, 3, 2, 1, 0], [])
    found = list(newest_rows(run, "step_metrics", []))
    assert found[::-1] == rows(run, "step_metrics")


def test_a_row_that_is_sealed_and_still_live_comes_once(run: RunDirectory):
    write(run, 1, [2, 3], sealed=False)
    assert sorted(numbers(run)[0]) == [0, 1, 2, 3, 4, 5]


def test_wanted_columns_alone_are_read_with_the_number_of_the_row(run: RunDirectory):
    found = list(newest_rows(run, "step_metrics", [], ("metrics",)))
    assert found[0] == {"seq": 5, "metrics": {"x": 5}}
    assert found[-1] == {"seq": 0, "metrics": {"x": 0}}


def test_a_block_that_an_older_version_wrote_may_lack_a_column(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    columns = {**STREAMS["step_metrics"].columns, "later": "int"}
    monkeypatch.setitem(reader.STREAMS, "step_metrics", reader_stream(columns))
    assert list(newest_rows(run, "step_metrics", [], ("later", "step")))[-1] == {"seq": 0, "step": 0}


def reader_stream(columns: Any) -> Any:
    return type(STREAMS["policy"])("step_metrics", columns)


def test_who_has_seen_enough_opens_no_further_file(run: RunDirectory):
    first = run.block("orchestrator", "step_metrics", 0)
    first.write_bytes(b"broken")
    damaged: list[DamagedFile] = []
    found = newest_rows(run, "step_metrics", damaged)
    assert [next(found)["seq"] for _ in range(4)] == [5, 4, 3, 2]
    assert damaged == []
    assert list(found) == []
    assert [error.path for error in damaged] == [first]


def test_damaged_files_are_named_and_all_others_are_read(run: RunDirectory):
    block, live = run.block("orchestrator", "step_metrics", 1), run.live("orchestrator", "step_metrics", 2)
    block.write_bytes(b"")
    live.unlink()
    live.mkdir()
    found, damaged = numbers(run)
    assert found == [1, 0]
    assert [error.path for error in damaged] == [live, block]


def test_of_earlier_attempts_rows_up_to_the_checkpoint_count(run: RunDirectory):
    earlier = RunDirectory(run.earlier_attempt(1))
    write(earlier, 0, [7, 8, 9], sealed=True)
    write_lineage(run, Lineage(2, 8, (CountedRows(1, 8, 8),)))
    assert numbers(run) == ([5, 4, 3, 2, 1, 0, 8, 7], [])
    assert numbers(run, "metrics")[0] == [5, 4, 3, 2, 1, 0, 8, 7]


def test_a_damaged_lineage_leaves_the_attempt_s_own_rows(run: RunDirectory):
    run.lineage_json.write_text("{")
    found, damaged = numbers(run)
    assert found == [5, 4, 3, 2, 1, 0]
    assert [error.path for error in damaged] == [run.lineage_json]
