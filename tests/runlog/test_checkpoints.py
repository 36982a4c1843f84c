"""A checkpoint is there whole or not at all: names, the one rename, the latest, what is kept, what is swept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from telescope.runlog import checkpoints, digests
from telescope.runlog.checkpoints import CheckpointUnreadable, Complete, Resume
from telescope.runlog.layout import RunDirectory


def facts(step: int, run_id: str = "run", attempt: str = "a") -> Complete:
    return Complete(checkpoints.FORMAT, step, step, run_id, attempt, "hash", 2, True, 8, 0.5, checkpoints.now())


def begin(directory: Path, step: int, attempt: str = "a") -> Path:
    folder = checkpoints.begin(directory, step, attempt)
    (checkpoints.trainer_part(folder) / "weights").write_text(f"{attempt}{step}")
    (checkpoints.orchestrator_part(folder) / "core").write_text("core")
    return folder


def make(directory: Path, *steps: int, attempt: str = "a") -> None:
    for step in steps:
        checkpoints.finish(begin(directory, step, attempt), facts(step, attempt=attempt))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_partial_checkpoint_is_never_the_latest(tmp_path):
    make(tmp_path, 5)
    partial = begin(tmp_path, 10)
    assert partial.name == "step_00000010.partial-a"
    assert checkpoints.latest(tmp_path).name == "step_00000005"
    assert checkpoints.finish(partial, facts(10)).name == "step_00000010"
    assert checkpoints.latest(tmp_path).name == "step_00000010"
    there = {"orchestrator/core": 4, "trainer/weights": 3}
    sums = {"orchestrator/core": "crc32:6b8d854f", "trainer/weights": "crc32:56d04f1b"}
    expected = msgspec.structs.replace(facts(10), nbytes=7, files=there, digests=sums)
    assert checkpoints.read_whole(checkpoints.latest(tmp_path)) == expected
    assert not partial.exists()


def test_a_folder_without_its_complete_json_is_no_checkpoint(tmp_path):
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_9").mkdir()
    (tmp_path / "step_00000011").write_text("a file")
    assert checkpoints.steps(tmp_path) == []
    assert checkpoints.steps(tmp_path / "nowhere") == []


def test_the_latest_is_the_highest_step_beyond_eight_digits_too(tmp_path):
    make(tmp_path, 99_999_999, 100_000_000, 2)
    assert checkpoints.steps(tmp_path) == [2, 99_999_999, 100_000_000]


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_it_returns(tmp_path, monkeypatch):
    done: list[str] = []
    sync, rename = checkpoints._sync, os.rename

    def synced(path):
        done.append(f"sync {path.relative_to(tmp_path)}")
        sync(path)

    def renamed(old, new):
        done.append(f"rename {new.name}")
        rename(old, new)

    monkeypatch.setattr(checkpoints, "_sync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    partial = begin(tmp_path, 3)
    checkpoints.finish(partial, facts(3))
    base = f"sync {partial.name}"
    assert done[-2:] == ["rename step_00000003", "sync ."]
    assert set(done[:-2]) == {
        *(base, f"{base}/trainer", f"{base}/trainer/weights", f"{base}/orchestrator", f"{base}/orchestrator/core"),
        f"{base}/complete.json",
    }
    assert done[-3] == base


def test_a_checkpoint_of_the_same_step_is_replaced_and_never_missing_for_good(tmp_path, monkeypatch):
    make(tmp_path, 4)
    rename, count = os.rename, iter(range(10))

    def dies_at_the_second(old, new):
        if next(count) == 1:
            raise OSError(errno.EIO, "the host went down here")
        rename(old, new)

    partial = begin(tmp_path, 4, "b")
    monkeypatch.setattr(os, "rename", dies_at_the_second)
    with pytest.raises(OSError, match="went down"):
        checkpoints.finish(partial, facts(4, attempt="b"))
    monkeypatch.undo()
    assert checkpoints.steps(tmp_path) == []
    assert checkpoints.sweep(tmp_path) == ["step_00000004.partial-b"]
    assert (checkpoints.find(tmp_path, 4) / "trainer" / "weights").read_text() == "a4"
    make(tmp_path, 4, attempt="b")
    assert (checkpoints.find(tmp_path, 4) / "trainer" / "weights").read_text() == "b4"
    assert names(tmp_path) == ["step_00000004"]


@pytest.mark.parametrize(
    ("last", "every", "left"),
    [(None, None, [10, 20, 30, 40]), (2, None, [30, 40]), (1, 20, [20, 40]), (1, None, [40]), (None, 20, [10, 20, 30, 40])],
)
def test_the_last_ones_and_every_so_many_are_kept(tmp_path, last, every, left):
    make(tmp_path, 10, 20, 30, 40)
    gone = checkpoints.retain(tmp_path, last, every)
    assert checkpoints.steps(tmp_path) == left
    assert sorted(gone + left) == [10, 20, 30, 40]
    assert len(names(tmp_path)) == len(left)


def test_a_partial_newer_one_deletes_nothing(tmp_path):
    make(tmp_path, 10, 20)
    begin(tmp_path, 30)
    assert checkpoints.retain(tmp_path, 1, None) == [10]
    assert checkpoints.latest(tmp_path).name == "step_00000020"


def test_a_deletion_cut_short_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    make(tmp_path, 10, 20)
    monkeypatch.setattr(checkpoints, "_remove", lambda folder: None)
    checkpoints.retain(tmp_path, 1, None)
    monkeypatch.undo()
    assert names(tmp_path) == ["step_00000010.deleted", "step_00000020"]
    assert checkpoints.steps(tmp_path) == [20]
    assert checkpoints.sweep(tmp_path) == ["step_00000010.deleted"]
    assert names(tmp_path) == ["step_00000020"]


def test_what_dead_attempts_left_is_swept_and_complete_ones_stay(tmp_path):
    make(tmp_path, 10)
    begin(tmp_path, 20, "dead"), begin(tmp_path, 10, "older")
    assert checkpoints.sweep(tmp_path) == ["step_00000010.partial-older", "step_00000020.partial-dead"]
    assert names(tmp_path) == ["step_00000010"]


def test_going_back_sets_later_ones_aside_and_deletes_none(tmp_path):
    make(tmp_path, 10, 20, 30)
    assert checkpoints.set_later_aside(tmp_path, 10, "b") == [20, 30]
    assert checkpoints.latest(tmp_path).name == "step_00000010"
    assert names(tmp_path) == ["step_00000010", "step_00000020.before-b", "step_00000030.before-b"]


def test_a_step_that_is_not_there_is_said_with_those_that_are(tmp_path):
    with pytest.raises(CheckpointUnreadable, match=r"no complete checkpoint, nor .* checkpoint\.every=10"):
        checkpoints.find(tmp_path)
    make(tmp_path, 10, 20)
    with pytest.raises(CheckpointUnreadable, match="no complete checkpoint of step 15; there are those of the steps 10, 20"):
        checkpoints.find(tmp_path, 15)


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', "\xff"])
def test_a_damaged_complete_json_names_the_file_and_the_remedy(tmp_path, text):
    make(tmp_path, 10)
    file = tmp_path / "step_00000010" / "complete.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointUnreadable, match=f"{file} is (damaged: .*|empty): .*resume from an earlier step"):
        checkpoints.read(tmp_path / "step_00000010")


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path):
    checkpoints.finish(begin(tmp_path, 1), Complete(99, 1, 1, "run", "a", "hash", 1, True, 8, 0.5, checkpoints.now()))
    with pytest.raises(CheckpointUnreadable, match="of format 99, and this Telescope reads format 1"):
        checkpoints.read(checkpoints.find(tmp_path))


def test_a_folder_of_another_run_is_told_from_ones_own(tmp_path):
    make(tmp_path, 10)
    assert checkpoints.of_another_run(tmp_path, "run") is None
    assert "holds checkpoints of another run (run)" in (checkpoints.of_another_run(tmp_path, "other") or "")


def test_a_folder_is_one_runs_from_before_its_first_checkpoint_on(tmp_path):
    """Two runs that begin with the same empty checkpoint.dir would replace each other's steps, and delete them as old ones."""
    folder = tmp_path / "shared"
    assert checkpoints.claim(folder, "one") is None
    said = checkpoints.claim(folder, "other")
    assert said is not None
    assert said.startswith(f"checkpoint.dir={folder} is in use by another run (one): give each run a folder of its own")
    assert checkpoints.claim(folder, "one") is None  # a later attempt
    make(folder, 10)
    assert "holds checkpoints of another run (run)" in (checkpoints.claim(folder, "one") or "")


def test_an_attempt_learns_where_it_begins(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    assert checkpoints.read_resume(run) is None
    checkpoints.write_resume(run, Resume(1, 10, "/somewhere/step_00000010"))
    assert checkpoints.read_resume(run) == Resume(1, 10, "/somewhere/step_00000010", True)
    run.resume_json.write_text("{")
    with pytest.raises(CheckpointUnreadable, match=r"resume\.json is damaged: .*: start the attempt again"):
        checkpoints.read_resume(run)
    assert checkpoints.root(run, None) == run.path / "checkpoints"
    assert checkpoints.root(run, "/elsewhere") == Path("/elsewhere")


def lose(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    os.truncate(file, 1)


@pytest.mark.parametrize(
    ("harm", "sentence"), [(lose, "trainer/weights is missing"), (cut, "trainer/weights has 1 bytes of 3")]
)
def test_a_checkpoint_that_has_lost_a_part_is_named_with_the_file(tmp_path, harm, sentence):
    make(tmp_path, 10)
    folder = checkpoints.latest(tmp_path)
    harm(folder / "trainer" / "weights")
    with pytest.raises(CheckpointUnreadable, match=sentence):
        checkpoints.read_whole(folder)


def flip(file: Path) -> None:
    """One bit of the middle byte."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_is_named_with_its_file_and_the_remedy(tmp_path):
    make(tmp_path, 10)
    folder = checkpoints.latest(tmp_path)
    flip(folder / "orchestrator" / "core")
    with pytest.raises(CheckpointUnreadable) as refused:
        checkpoints.read_whole(folder)
    assert str(refused.value).startswith(f"{folder}/orchestrator/core is damaged: its bytes are not those that were written.")
    assert f"Remove the folder {folder} and take an earlier step; checkpoint.verify=false" in str(refused.value)
    assert checkpoints.read_whole(folder, verify=False).step == 10


def test_of_several_damaged_files_the_first_is_named(tmp_path):
    partial = begin(tmp_path, 10)
    for number in range(12):
        (checkpoints.trainer_part(partial) / f"shard-{number:02d}").write_bytes(bytes([number]) * (digests.PIECE_BYTES // 64))
    folder = checkpoints.finish(partial, facts(10))
    for number in (7, 3, 11):
        flip(folder / "trainer" / f"shard-{number:02d}")
    with pytest.raises(CheckpointUnreadable, match="shard-03 is damaged"):
        checkpoints.read_whole(folder)


def test_the_digest_that_a_writer_noted_counts_and_not_what_lies_on_the_disk_when_the_checkpoint_is_completed(tmp_path):
    """What changes between the writer and the disk is found, as the sum is of what the writer gave."""
    partial = begin(tmp_path, 10)
    part = checkpoints.trainer_part(partial)
    tally = digests.FileDigests()
    tally.add(b"what was meant")
    digests.note(part, "00001", {"weights": str(tally)})
    (part / "weights").write_bytes(b"what was meanT")
    folder = checkpoints.finish(partial, facts(10))
    assert checkpoints.read(folder).digests["trainer/weights"] == str(tally)
    with pytest.raises(CheckpointUnreadable, match="trainer/weights is damaged"):
        checkpoints.read_whole(folder)


def test_a_checkpoint_of_an_older_version_is_taken_with_a_word_about_it(tmp_path, caplog):
    make(tmp_path, 10)
    folder = checkpoints.latest(tmp_path)
    old = msgspec.structs.replace(checkpoints.read(folder), digests={})
    (folder / checkpoints.COMPLETE).write_bytes(msgspec.json.encode(old))
    flip(folder / "trainer" / "weights")
    with caplog.at_level("WARNING"):
        assert checkpoints.read_whole(folder).step == 10
    assert "has no digests, as an older version wrote it: only the lengths of its files are known to be right" in caplog.text


def test_a_folder_where_nothing_can_be_saved_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointUnreadable, match=r"checkpoint.dir=.*/file can't be written: .*; name a folder"):
        checkpoints.make_root(tmp_path / "file")
    assert checkpoints.steps(tmp_path / "file") == []
    checkpoints.make_root(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
