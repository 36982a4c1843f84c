"""Short-lived folders: made for one process, swept when it is no more."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from telescope.runlog import temporary

HOLD = "import sys; from telescope.runlog import temporary; print(temporary.make(), flush=True); sys.stdin.read()"


def test_a_folder_lives_as_long_as_the_process_that_made_it(monkeypatch):
    base = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    environ = {**os.environ, "TMPDIR": str(base)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environ, text=True, **pipes) as other:
        folder = Path(other.stdout.readline().strip())
        (folder / "socket").write_text("")
        temporary.sweep()
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
        other.kill()
    temporary.sweep()
    assert list(base.iterdir()) == []
    (base / f"{temporary.PREFIX}x").mkdir()  # somebody is just making it
    temporary.sweep()
    assert len(list(base.iterdir())) == 1
    shutil.rmtree(base)


def test_a_sweep_in_the_instant_before_a_folder_is_locked_leaves_it(monkeypatch):
    """Eight servers of one host begin at once, and each sweeps."""
    base, lock = Path(tempfile.mkdtemp(prefix="t-")), fcntl.flock
    monkeypatch.setattr(tempfile, "tempdir", str(base))

    def swept_before(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX:  # its maker's
            temporary.sweep()
        lock(descriptor, how)

    monkeypatch.setattr(temporary.fcntl, "flock", swept_before)
    folder = temporary.make()
    assert (folder / ".lock").exists()
    temporary.sweep()
    assert folder.exists()
    shutil.rmtree(base)


def test_under_a_long_folder_for_temporary_files_the_path_stays_short(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/scratch/" + "x" * 80)
    made = temporary.make()
    assert len(str(made)) < 60
    shutil.rmtree(made)


def test_files_elsewhere_that_a_killed_process_noted_go_with_its_folder_and_no_others(monkeypatch, tmp_path: Path):
    base = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    environ = {**os.environ, "TMPDIR": str(base)}
    mine, replaced, unlisted = (tmp_path / name for name in ("mine", "replaced with spaces", "unlisted"))
    for file in (mine, replaced, unlisted):
        file.write_text("")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environ, text=True, **pipes) as other:
        folder = Path(other.stdout.readline().strip())
        temporary.note(folder, [mine, tmp_path / "never there"])
        temporary.note(folder, [replaced])
        temporary.sweep()
        assert mine.exists()  # its process lives
        other.kill()
    replaced.rename(tmp_path / "kept aside")  # so that its number is not given to the next
    replaced.write_text("somebody else's")
    temporary.sweep()
    assert list(base.iterdir()) == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept aside", "replaced with spaces", "unlisted"]
    shutil.rmtree(base)


def test_a_torn_note_hides_no_other(tmp_path: Path):
    """The disk was full in the middle of a line."""
    first, last = tmp_path / "first", tmp_path / "last"
    for file in (first, last):
        file.write_text("")
    temporary.note(tmp_path, [first])
    with (tmp_path / ".elsewhere").open("a") as notes:
        notes.write("25 1\n")
    temporary.note(tmp_path, [last])
    assert temporary.remove_noted(tmp_path) == [first, last]
    assert temporary.remove_noted(tmp_path) == []


STRANGER = 65534


@pytest.fixture
def shared(monkeypatch) -> Iterator[Path]:
    """A folder for temporary files that anybody may write to, as /tmp is."""
    base = Path(tempfile.mkdtemp(prefix="t-"))
    base.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    yield base
    shutil.rmtree(base)


def note_in(folder: Path, file: Path) -> None:
    """What whoever may write there can: nobody holds the folder, and this file is to go with it."""
    (folder / ".lock").touch()
    found = file.lstat()
    (folder / ".elsewhere").write_text(f"{found.st_dev} {found.st_ino} {file}\n")


def test_a_strangers_link_to_a_folder_that_anybody_may_write_to_removes_nothing(shared: Path, tmp_path: Path):
    """Both folders are this user's own: the link leads to the folder for temporary files itself."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    note_in(shared, precious)
    (shared / f"{temporary.PREFIX}x").symlink_to(shared)
    temporary.sweep()
    assert precious.exists()
    assert temporary.remove_noted(shared) == []


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_to_is_not_swept(shared: Path, tmp_path: Path, mode: int):
    precious, folder = tmp_path / "precious", shared / f"{temporary.PREFIX}x"
    precious.write_text("mine")
    folder.mkdir()
    note_in(folder, precious)
    folder.chmod(mode)
    temporary.sweep()
    assert precious.exists()
    assert folder.exists()
    folder.chmod(0o711)  # as sandboxes have theirs
    temporary.sweep()
    assert not precious.exists()
    assert not folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_another_users_folder_is_not_swept(shared: Path, tmp_path: Path):
    precious, folder = tmp_path / "precious", shared / f"{temporary.PREFIX}x"
    precious.write_text("mine")
    folder.mkdir(mode=0o700)
    note_in(folder, precious)
    os.chown(folder, STRANGER, STRANGER)
    temporary.sweep()
    assert precious.exists()


def test_a_pipe_in_place_of_a_note_holds_up_no_sweep(shared: Path):
    folder = shared / f"{temporary.PREFIX}x"
    folder.mkdir(mode=0o700)
    (folder / ".lock").touch()
    os.mkfifo(folder / ".elsewhere")
    sweep = "from telescope.runlog import temporary; temporary.sweep()"
    subprocess.run([sys.executable, "-c", sweep], env={**os.environ, "TMPDIR": str(shared)}, check=True, timeout=30)
    assert not folder.exists()
