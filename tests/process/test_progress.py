"""What the terminal shows of a run, whatever of it is known."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from telescope._launch.progress import Console, LogCopy, Progress, duration, status_line, summary_table
from telescope.runlog.layout import RunDirectory

STATUS = {
    "state": "running", "step": 12, "steps": 60, "reward": 0.4123, "exact": 0.375, "tokens_per_s": 5130.0, "lag": 1.24,
    "queue": 14, "in_flight": 96, "eta_s": 65, "doing": "train step 12",
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_says_everything_in_one_row() -> None:
    assert status_line(STATUS) == (
        "step 12/60 · reward 0.412 · exact 38% · 5.1k tok/s · lag 1.2 · queue 14 · ETA 1:05 · in flight 96 · train step 12"
    )


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({}, ""),
        ({"state": "starting", "message": "waiting for server-0"}, "starting · waiting for server-0"),
        ({"step": 1, "reward": None, "lag": "?", "tokens_per_s": 12}, "step 1 · 12 tok/s"),
    ],
)
def test_what_is_not_known_is_left_out(status: dict[str, object], line: str) -> None:
    assert status_line(status) == line


def test_durations_are_read_as_clocks() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 65, 7384, -3)] == ["0:00", "1:00", "1:05", "2:03:04", "0:00"]


def test_a_terminal_gets_one_line_written_over(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    errors = Terminal()
    console = Console(errors, io.StringIO())
    progress = Progress(run, console)
    progress.show()
    run.status_json.write_text('{"step": 1, "steps": 2}')
    progress.show()
    run.status_json.write_text('{"step": 2, "ste')  # half a file, or another process's mistake
    progress.show()
    run.status_json.write_text('{"step": 2, "steps": 2}')
    progress.show()
    console.say("done")
    assert errors.getvalue() == "\r\x1b[Kstep 1/2\r\x1b[Kstep 2/2\r\x1b[Kdone\n"


def test_a_terminal_that_went_away_ends_nothing() -> None:
    closed = io.StringIO()
    console = Console(closed, closed)
    closed.close()
    console.say("nobody hears this")
    console.result("nor this")


def test_logs_are_copied_in_whole_lines(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    errors = io.StringIO()
    copy = LogCopy(run, ("server-0", "worker-0"), Console(errors, io.StringIO()))
    run.log("server-0").write_text("one\ntw")
    copy.copy()
    with run.log("server-0").open("a") as file:
        file.write("o\nthr")
    copy.copy()
    copy.copy(last=True)
    assert errors.getvalue() == "server-0 | one\nserver-0 | two\nserver-0 | thr\n"


def test_the_summary_is_a_small_table() -> None:
    summary = {
        "steps": 60,
        "reward_mean_first": 0.30123,
        "rollouts": {"trained": 960, "failed": 2},
        "reasons": {},
        "exit_reason": None,
    }
    assert summary_table(summary) == (
        "  steps              60\n"  # a fact a line, unknown ones left out
        "  reward mean first  0.3012\n"
        "  rollouts           trained 960, failed 2"
    )
