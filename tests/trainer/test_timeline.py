"""What a rank did when and how much memory it held is in the run directory, and no disk of it ends a run."""

from __future__ import annotations

import threading
from pathlib import Path

from telescope.backends.base import Span
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog
from telescope.trainer.timeline import Timeline, resident
from telescope.wire.link import LinkLost
from telescope.wire.messages import RowsLost


def opened(folder: Path, told: list[RowsLost] | None = None, **settings: float) -> tuple[RunDirectory, Timeline]:
    """`told`: where what it says of lost rows is put."""
    run = RunDirectory.create(folder / "run")
    tell = ([] if told is None else told).append
    rows = RunLog(run, "trainer-1", seals_at_end=False)
    return run, Timeline(rows, process="trainer-1", device="cpu", tell=tell, **settings)


def test_spans_are_rows_with_their_place(tmp_path):
    run, timeline = opened(tmp_path)
    timeline.step(7, [Span("forward", 1_000, 0.5, minibatch=1, row=2), Span("prepare_tensors", 900, 0.25)])
    timeline.span("publish", 7, 2_000, 0.125)
    timeline.close()
    found = [{name: row.get(name) for name in ("step", "process", "name", "minibatch", "row", "started_ns", "seconds")}
             for row in rows(run, "spans")]  # fmt: skip
    assert [tuple(row.values()) for row in found] == [
        (7, "trainer-1", "forward", 1, 2, 1_000, 0.5),
        (7, "trainer-1", "prepare_tensors", None, None, 900, 0.25),
        (7, "trainer-1", "publish", None, None, 2_000, 0.125),
    ]


def test_spans_that_nobody_wants_are_not_stored(tmp_path):
    run, timeline = opened(tmp_path, spans=False)
    timeline.step(1, [Span("forward", 1, 1.0)])
    timeline.span("publish", 1, 1, 1.0)
    timeline.close()
    assert rows(run, "spans") == []


def test_memory_is_sampled_until_the_end_and_what_waits_is_stored(tmp_path):
    """Drained at the end alone: the interval of a minute does not pass here."""
    run, timeline = opened(tmp_path, sample_s=0.001, drain_s=3600.0)
    read, enough = timeline._read, threading.Event()
    count = 0

    def counted() -> dict[str, int]:
        nonlocal count
        count += 1
        if count == 5:
            enough.set()
        return read()

    timeline._read = counted
    assert enough.wait(60)
    timeline.step(3, [])
    timeline.close()
    found = rows(run, "memory")
    assert len(found) >= 5
    assert {row["process"] for row in found} == {"trainer-1"}
    assert all(row["rss"] > 1_000_000 for row in found)
    assert "allocated" not in found[0]
    times = [row["sampled_ns"] for row in found]
    assert times == sorted(times)
    assert found[-1]["step"] == 3
    assert resident() > 1_000_000


def test_memory_of_an_attempt_that_goes_on_is_of_the_steps_it_goes_on_from(tmp_path):
    run, timeline = opened(tmp_path, sample_s=0.001, drain_s=3600.0, step=20)
    read, sampled = timeline._read, threading.Event()

    def told() -> dict[str, int]:
        sampled.set()
        return read()

    timeline._read = told
    assert sampled.wait(60)
    timeline.close()
    assert {row["step"] for row in rows(run, "memory")} == {20}


def test_samples_are_handed_on_while_the_run_goes_on(tmp_path):
    _, timeline = opened(tmp_path, sample_s=0.001, drain_s=0.001)
    append, handed_on = timeline._append, threading.Event()

    def told(stream: str, row: dict[str, object]) -> None:
        append(stream, row)
        handed_on.set()

    timeline._append = told
    assert handed_on.wait(60)
    timeline.close()


def test_a_log_that_has_failed_is_done_without(tmp_path, caplog):
    told: list[RowsLost] = []
    _, timeline = opened(tmp_path, told)
    log = timeline._rows
    assert log is not None
    log.close()
    log._failure = OSError("gone")
    timeline.step(1, [Span("forward", 1, 1.0)])
    timeline.step(2, [Span("forward", 1, 1.0)])
    timeline.close()
    assert caplog.text.count("spans and memory samples are no longer written") == 1
    assert told == [RowsLost(unlogged=1, dropped=0), RowsLost(unlogged=2, dropped=0)]


def test_rows_that_no_disk_takes_are_told_at_the_end_and_whole_ones_are_not(tmp_path):
    told: list[RowsLost] = []
    run, timeline = opened(tmp_path, told)
    run.live("trainer-1", "spans", 0).mkdir(parents=True)  # in the way of its file
    timeline.step(1, [Span("forward", 1, 1.0), Span("backward", 2, 1.0)])
    timeline.span("publish", 1, 3, 1.0)
    timeline.close()
    assert told == [RowsLost(unlogged=3, dropped=0)]
    whole: list[RowsLost] = []
    _, timeline = opened(tmp_path / "second", whole)
    timeline.step(1, [Span("forward", 1, 1.0)])
    timeline.close()
    assert whole == []


def test_a_link_that_is_over_ends_no_run_over_lost_rows(tmp_path):
    def tell(lost: RowsLost) -> None:
        raise LinkLost("the hub is gone")

    run = RunDirectory.create(tmp_path / "run")
    run.live("trainer-1", "spans", 0).mkdir(parents=True)
    timeline = Timeline(RunLog(run, "trainer-1", seals_at_end=False), process="trainer-1", device="cpu", tell=tell)
    timeline.step(1, [Span("forward", 1, 1.0)])
    timeline.close()


def test_nothing_wanted_is_nothing_done(tmp_path):
    told: list[RowsLost] = []
    timeline = Timeline(None, process="trainer-0", device="cpu", sample_s=0.001, tell=told.append)
    timeline.step(1, [Span("forward", 1, 1.0)])
    timeline.close()
    assert (timeline._thread, told) == (None, [])
