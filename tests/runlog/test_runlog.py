"""A row is on disk before it is acknowledged, counted once however it is read, and never lost in silence."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from telescope.config.redaction import Redactor
from telescope.runlog import writer
from telescope.runlog.journal import Journal, JournalError, journal_lines
from telescope.runlog.layout import RunDirectory, RunDirectoryInUse, write_atomically
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog, RunLogFailed
from tests.deadlines import refuse_late


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_a_run_directory_is_never_reused(run: RunDirectory):
    with pytest.raises(RunDirectoryInUse, match="exists and is not empty"):
        RunDirectory.create(run.path)


def test_an_empty_folder_becomes_its_owners_alone(tmp_path: Path):
    tmp_path.chmod(0o777)
    RunDirectory.create(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize(("owner", "name"), [(65534, "nobody"), (12345, "12345")])
def test_another_users_folder_is_refused(tmp_path: Path, owner: int, name: str):
    """He could read status.json and summary.json, and put another checkpoint in the place of the run's."""
    os.chown(tmp_path, owner, owner)
    with pytest.raises(
        RunDirectoryInUse, match=f"{tmp_path} belongs to the user {name}, not to you: name a folder of your own"
    ):
        RunDirectory.create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_row_lies_in_the_file_when_its_callback_comes(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    found: list[int] = []
    done = threading.Event()

    def written() -> None:
        found.append(len(rows(run, "groups")))
        done.set()

    log.append("groups", {"group_id": 3, "state": "kept", "reason": "", "version": 0}, written)
    assert done.wait(60)
    assert found == [1]
    log.close()


def test_segments_become_blocks_at_their_row_limit_and_each_row_is_read_once(run: RunDirectory):
    log = RunLog(run, "orchestrator", rows_per_block=10)
    for group in range(35):
        log.append("groups", {"group_id": group, "state": "queued", "reason": "", "version": group})
    log.close()
    assert [row["group_id"] for row in rows(run, "groups")] == list(range(35))
    assert log.counters.rows == 35
    assert list((run.path / "live").rglob("*.jsonl")) == []
    manifest = run.manifest.read_text().splitlines()
    assert len(manifest) == log.counters.sealed_blocks
    assert sum(int(line.split('"rows":')[1].split(",")[0]) for line in manifest) == 35


def test_a_row_both_live_and_sealed_counts_once(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    log.append("groups", {"group_id": 1, "state": "queued", "reason": "", "version": 0})
    done = threading.Event()
    log.append("groups", {"group_id": 2, "state": "queued", "reason": "", "version": 0}, done.set)
    assert done.wait(60)
    segment = run.live("orchestrator", "groups", 0)
    copy = segment.read_bytes()
    log.close()
    segment.write_bytes(copy)
    assert [row["group_id"] for row in rows(run, "groups")] == [1, 2]


def test_a_torn_last_line_is_skipped(run: RunDirectory):
    segment = run.live("orchestrator", "groups", 0)
    segment.parent.mkdir(parents=True)
    segment.write_bytes(b'{"seq":1,"group_id":1}\n{"seq":2,"gro')
    assert [row["group_id"] for row in rows(run, "groups")] == [1]


def test_nan_becomes_null_and_its_column_is_named(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    log.append("rollouts", {"rollout_id": 1, "reward": float("nan"), "metrics": {"exact": 1.0}})
    log.close()
    (row,) = rows(run, "rollouts")
    assert "reward" not in row
    assert row["not_finite"] == ["reward"]
    assert row["metrics"] == {"exact": 1.0}


def test_nan_within_a_json_column_is_named_by_its_path(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    log.append("rollouts", {"rollout_id": 1, "reward": 1.0, "metrics": {"exact": float("nan"), "format": 1.0}})
    log.append("batches", {"step": 1, "advantages": [1.0, float("inf"), float("nan")]})
    log.close()
    (row,) = rows(run, "rollouts")
    assert row["not_finite"] == ["metrics.exact"]
    assert row["metrics"] == {"exact": None, "format": 1.0}
    (batch,) = rows(run, "batches")
    assert batch["not_finite"] == ["advantages"]
    assert batch["advantages"] == [1.0, None, None]


def test_text_that_is_no_unicode_costs_its_characters_and_no_row(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    done = threading.Event()
    log.append("rollouts", {"rollout_id": 1, "prompt": "six\ud800 and nine", "metrics": {"bad\udfff": 1.0, "huge": 2**70}})
    log.append("rollouts", {"rollout_id": 2, "prompt": "seven"}, done.set)
    assert done.wait(60)
    log.close()
    first, second = rows(run, "rollouts")
    assert first["prompt"] == "six? and nine"
    assert first["metrics"] == {"bad?": 1.0, "huge": "1180591620717411303424"}
    assert second["prompt"] == "seven"
    assert (log.counters.rows, log.counters.unlogged) == (2, 0)


def test_a_row_that_no_json_holds_is_counted_and_acknowledged_and_said_once(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
):
    endless: dict[str, object] = {}
    endless["again"] = endless
    log = RunLog(run, "orchestrator")
    done = threading.Event()
    log.append("rollouts", {"rollout_id": 1, "metrics": endless}, done.set)
    log.append("rollouts", {"rollout_id": 2, "metrics": endless})
    log.append("rollouts", {"rollout_id": 3})
    assert done.wait(60)
    log.close()
    assert [row["rollout_id"] for row in rows(run, "rollouts")] == [3]
    assert (log.counters.rows, log.counters.unlogged) == (1, 2)
    assert [r.levelname for r in caplog.records if "cannot be written as JSON" in r.getMessage()] == ["ERROR"]


def test_an_error_in_the_writers_thread_reaches_who_appends_and_who_closes(run: RunDirectory):
    log = RunLog(run, "orchestrator")

    def broken() -> None:
        raise LookupError("nobody waits for this row")

    log.append("groups", {"group_id": 1, "state": "kept", "reason": "", "version": 0}, broken)
    log._thread.join(60)
    with pytest.raises(RunLogFailed, match=r"no longer written.*LookupError: nobody waits for this row"):
        log.append("groups", {"group_id": 2, "state": "kept", "reason": "", "version": 0})
    with pytest.raises(RunLogFailed, match="LookupError"):
        log.close()


def test_an_unknown_column_is_refused_by_name(run: RunDirectory):
    log = RunLog(run, "orchestrator")
    with pytest.raises(KeyError, match="no column \\['colour'\\]"):
        log.append("groups", {"colour": 1})
    log.close()


def test_rows_that_cannot_be_written_are_counted_and_still_acknowledged(run: RunDirectory):
    (run.path / "live" / "orchestrator").write_text("a file where the folder should be")
    log = RunLog(run, "orchestrator")
    done = threading.Event()
    log.append("groups", {"group_id": 1, "state": "queued", "reason": "", "version": 0}, done.set)
    assert done.wait(60)
    log.close()
    assert log.counters.unlogged == 1
    assert log.counters.rows == 0


def test_a_row_that_fits_no_block_stays_readable_and_stops_nothing(run: RunDirectory):
    log = RunLog(run, "orchestrator", rows_per_block=2)
    log.append("groups", {"group_id": 1, "state": "kept", "reason": "", "version": 0})
    log.append("groups", {"group_id": "not a number", "state": "kept", "reason": "", "version": 0})
    done = threading.Event()
    log.append("groups", {"group_id": 3, "state": "kept", "reason": "", "version": 0}, done.set)
    assert done.wait(60)
    log.close()
    assert [row["group_id"] for row in rows(run, "groups")] == [1, "not a number", 3]


def test_no_acknowledged_row_is_lost_to_a_sigkill(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    script = (
        "import sys, pathlib, itertools\n"
        "from telescope.runlog.layout import RunDirectory\n"
        "from telescope.runlog.writer import RunLog\n"
        "log = RunLog(RunDirectory(pathlib.Path(sys.argv[1])), 'orchestrator', rows_per_block=50)\n"
        "for i in itertools.count():\n"
        "    row = {'group_id': i, 'state': 'kept', 'reason': '', 'version': 0}\n"
        "    log.append('groups', row, lambda i=i: print(i, flush=True))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(333)]
    os.kill(process.pid, signal.SIGKILL)
    acknowledged += [int(line) for line in process.stdout.read().splitlines() if line.isdigit()][:-1]
    process.wait(60)
    assert {row["group_id"] for row in rows(run, "groups")} >= set(acknowledged)


def test_a_journal_that_cannot_be_written_says_so_in_a_sentence(tmp_path: Path):
    Journal(tmp_path / "core.jsonl").close()
    with pytest.raises(JournalError, match=r"core\.jsonl cannot be written"):
        Journal(tmp_path / "core.jsonl")


def test_a_full_disk_under_the_journal_says_so_in_a_sentence(tmp_path: Path):
    journal = Journal(tmp_path / "core.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._descriptor)
    os.close(full)
    with pytest.raises(JournalError, match="No space left on device"):
        journal.append(b"{}")


def test_room_set_aside_takes_the_last_words_on_a_full_disk(tmp_path: Path):
    """The real thing, a tiny file system, is in tests/run/test_faults.py."""
    script = (
        "import errno, os, pathlib, sys\n"
        "from telescope.runlog import layout\n"
        "def full(*_): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "said, other = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "with layout.reserved(said, nbytes=100):\n"
        "    os.fsync = full\n"
        "    layout.write_atomically(said, 'the disk is full')\n"
        "    try:\n"
        "        layout.write_atomically(other, 'nobody kept room for this')\n"
        "    except OSError as error:\n"
        "        print(error.strerror)\n"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "said.txt"), str(tmp_path / "other.txt")]
    assert subprocess.check_output(arguments, text=True, timeout=60) == "No space left on device\n"
    assert (tmp_path / "said.txt").read_text() == "the disk is full"
    assert [file.name for file in tmp_path.iterdir()] == ["said.txt"]


def test_the_journal_leaves_out_a_torn_last_line(tmp_path: Path):
    path = tmp_path / "core.jsonl"
    journal = Journal(path)
    journal.append(b'{"now":1}')
    journal.close()
    path.write_bytes(path.read_bytes() + b'{"now":')
    assert list(journal_lines(path)) == [b'{"now":1}']


def test_a_reader_sees_the_old_text_or_the_new_one(tmp_path: Path):
    path = tmp_path / "status.json"
    write_atomically(path, "old")
    write_atomically(path, "new", mode=0o600)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_rows_that_the_disk_does_not_take_wait_and_are_written_in_order_later(run: RunDirectory, monkeypatch):
    log = RunLog(run, "orchestrator")
    full = threading.Event()
    full.set()
    write = os.write

    def refuse(descriptor: int, data: bytes) -> int:
        if full.is_set() and threading.current_thread().name == "runlog-orchestrator":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(writer.os, "write", refuse)
    told = threading.Event()
    log.append("rollouts", {"rollout_id": 1}, told.set)
    assert told.wait(60)
    assert "rows of rollouts cannot be written" in log.trouble
    log.append("rollouts", {"rollout_id": 2})
    full.clear()
    deadline = time.monotonic() + 60
    while log.trouble or log.counters.rows < 2:
        refuse_late(deadline)
        time.sleep(0.01)
    log.close()
    assert [row["rollout_id"] for row in rows(run, "rollouts")] == [1, 2]
    assert (log.counters.rows, log.counters.unlogged, log.counters.waiting) == (2, 0, 0)


def test_a_write_that_breaks_off_doubles_no_row_and_loses_none(run: RunDirectory, monkeypatch):
    log = RunLog(run, "orchestrator")
    write, parts = os.write, iter([50, None])

    def break_off(descriptor: int, data: bytes) -> int:
        if threading.current_thread().name != "runlog-orchestrator":
            return write(descriptor, data)
        part = next(parts, 10**9)
        if part is None:
            raise OSError(errno.EIO, "Input/output error")
        return write(descriptor, bytes(data)[:part])

    monkeypatch.setattr(writer.os, "write", break_off)
    for number in range(20):
        log.append("rollouts", {"rollout_id": number})
    log.close()
    assert [row["rollout_id"] for row in rows(run, "rollouts")] == list(range(20))
    assert (log.counters.rows, log.counters.unlogged) == (20, 0)


def test_rows_beyond_what_memory_should_hold_are_counted_as_lost(run: RunDirectory, monkeypatch):
    monkeypatch.setattr(writer, "WAITING_BYTES", 1000)
    monkeypatch.setattr(RunLog, "_open", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")))
    log = RunLog(run, "orchestrator")
    for number in range(100):
        log.append("rollouts", {"rollout_id": number})
    log.close()
    assert (log.counters.rows, log.counters.unlogged) == (0, 100)


@pytest.mark.parametrize("stream", ["rollouts", "eval_samples"])
def test_texts_that_a_worker_has_seen_to_are_not_gone_through_again_and_causes_are(run: RunDirectory, stream: str):
    log = RunLog(run, "orchestrator", redactor=Redactor(["hidden-word"]))
    log.append(stream, {"rollout_id": 1, "completion": "a hidden-word"})
    log.append(stream, {"rollout_id": 2, "cause": "a hidden-word"})
    log.close()
    seen_to, failed = sorted(rows(run, stream), key=lambda row: row["rollout_id"])
    assert seen_to["completion"] == "a hidden-word"
    assert failed["cause"] == "a <redacted>"


def test_a_journal_hides_what_was_said_and_nothing_that_a_replay_compares(run: RunDirectory):
    journal = Journal(run.journal, Redactor(["discarded", "group_id"]))
    journal.append(rb'{"state":"discarded","group_id":3,"reason":"was \"discarded\" by group_id","cause":""}')
    journal.close()
    (line,) = journal_lines(run.journal)
    assert line == rb'{"state":"discarded","group_id":3,"reason":"was \"<redacted>\" by <redacted>","cause":""}'


def test_blocks_are_read_without_arrows_own_threads(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    """With a file of Python's and threads of Arrow's, about one process in seven aborted at its end (apache/arrow#50482)."""
    log = RunLog(run, "orchestrator")
    log.append("step_metrics", {"step": 1, "metrics": {}})
    log.close()
    asked: list[tuple[object, dict[str, object]]] = []
    read_table = parquet.read_table
    monkeypatch.setattr(parquet, "read_table", lambda source, **how: asked.append((source, how)) or read_table(source, **how))
    assert len(rows(run, "step_metrics")) == 1
    ((source, how),) = asked
    assert isinstance(source, pyarrow.OSFile)
    assert how == {"use_threads": False, "pre_buffer": False}
