"""What a point of a sweep prints goes to its own file, and the terminal has its last line."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

import pytest

from telescope._launch.unblocked_output import UnblockedStream, unblock_output
from telescope.cli.point_output import keep_output
from telescope.config.redacted_output import redact_output


def test_both_streams_and_the_log_go_to_the_file_and_the_last_line_is_shown(tmp_path: Path, capsys) -> None:
    shown: list[str] = []
    log, root = tmp_path / "sweep" / "000_seed-1.log", logging.getLogger()
    before = list(root.handlers)
    with redact_output():
        with keep_output(log, shown.append, shown.append), unblock_output():
            logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
            print("step 1/2")
            print("step 2/2", file=sys.stderr)
            logging.getLogger("telescope.run").info("logged")
            print("two\nlines\n")
        root.warning("after the point")
        print("its line")
    root.handlers[:] = before
    assert log.read_text() == "step 1/2\nstep 2/2\nlogged\ntwo\nlines\n\n"
    assert (shown[:3], shown[-1]) == (["step 1/2", "step 2/2", "logged"], "lines")
    assert log.stat().st_mode & 0o777 == 0o600
    told = capsys.readouterr()
    assert (told.out, told.err) == ("its line\n", "after the point\n")


def test_a_point_that_ends_with_an_exception_gives_the_streams_back(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    try:
        with keep_output(tmp_path / "0.log", lambda line: None, print):
            print("said before")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert (sys.stdout, sys.stderr) == before
    assert (tmp_path / "0.log").read_text() == "said before\n"


def test_what_is_hidden_stays_hidden_in_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PLAINWORD", "correct-horse-battery")
    with redact_output(["PLAINWORD"]), keep_output(tmp_path / "0.log", lambda line: None, print):
        print("the word is correct-horse-battery")
    assert "correct-horse-battery" not in (tmp_path / "0.log").read_text()
    assert (tmp_path / "0.log").read_text().startswith("the word is ")


def test_many_points_leave_no_threads_and_no_descriptors(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    with keep_output(tmp_path / "first.log", lambda line: None, print):
        pass
    before = count()
    for number in range(5):
        with keep_output(tmp_path / f"{number}.log", lambda line: None, print):
            writers = [thread for thread in threading.enumerate() if thread.name.startswith("output-")]
            print(number)
        for writer in writers:
            writer.join(10)
    assert count() <= before


def test_a_file_that_cannot_be_opened_is_told_and_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    said = list[str]()
    with keep_output(tmp_path / "file" / "0.log", said.append, said.append):
        print("heard")
    assert capsys.readouterr().out == "heard\n"
    assert "0.log can't be written (File exists)" in said[0]


def test_writing_nothing_ends_no_output(tmp_path: Path):
    with open(tmp_path / "said", "w", encoding="utf-8") as opened:
        stream = UnblockedStream(opened)
        for text in ("before\n", "", "after\n"):
            stream.write(text)
        stream.end()
    assert (tmp_path / "said").read_text() == "before\nafter\n"
