"""A run whose directory is deleted or moved under it ends, and says so: nothing of it would be kept."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

from telescope._launch.run_dir_watch import RunDirWatch


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    return tmp_path / "run" / "plan.json"


def test_a_directory_that_stays_is_no_cause(plan: Path):
    watch = RunDirWatch(plan)
    assert [watch.check(float(second)) for second in range(100)] == [""] * 100


def test_ten_seconds_without_it_are_the_end_with_the_file_that_is_gone(plan: Path):
    watch = RunDirWatch(plan, missing_s=10.0)
    assert watch.check(100.0) == ""
    plan.parent.rename(plan.parent.with_name("elsewhere"))
    assert [watch.check(100.0 + second) for second in range(1, 11)] == [""] * 10
    assert watch.check(111.0).startswith(f"{plan} has been gone for 10 s: the run directory was deleted or moved")


def test_one_that_comes_back_in_time_is_no_cause(plan: Path):
    watch, elsewhere = RunDirWatch(plan, missing_s=10.0), plan.parent.with_name("elsewhere")
    plan.parent.rename(elsewhere)
    assert [watch.check(100.0 + second) for second in range(10)] == [""] * 10
    elsewhere.rename(plan.parent)
    assert watch.check(110.0) == ""
    plan.parent.rename(elsewhere)
    assert [watch.check(111.0 + second) for second in range(10)] == [""] * 10


def test_a_file_server_that_hangs_and_then_misses_it_twice_is_no_cause(plan: Path):
    """The look itself took a minute; or the machine slept."""
    watch = RunDirWatch(plan)
    plan.unlink()
    assert [watch.check(second) for second in (100.0, 160.0, 161.0)] == ["", "", ""]


def test_an_error_of_the_file_system_is_no_absence(plan: Path, monkeypatch: pytest.MonkeyPatch):
    def stale(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    watch = RunDirWatch(plan)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stale)
        said = [watch.check(float(second)) for second in range(0, 100, 5)]
    assert said == [""] * 20


def test_an_error_between_two_absences_begins_them_anew(plan: Path, monkeypatch: pytest.MonkeyPatch):
    """A file server that starts again: for a moment it has no such file, then no such handle."""
    answers = cycle([FileNotFoundError(2, ""), OSError(116, "Stale file handle")])

    def stat(path: Path) -> None:
        raise next(answers)

    watch = RunDirWatch(plan)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat)
        said = [watch.check(100.0 + second) for second in range(60)]
    assert said == [""] * 60
    assert watch.check_at_end() == ""


def test_at_the_end_of_a_run_a_directory_that_went_a_moment_ago_is_missed(plan: Path):
    watch = RunDirWatch(plan)
    assert (watch.check(0.0), watch.check_at_end()) == ("", "")
    plan.parent.rename(plan.parent.with_name("elsewhere"))
    plan.parent.mkdir()  # a save makes it anew
    assert watch.check(2.0) == ""
    said = f"made since then are in {plan.parent}: put them together before you use either"
    assert watch.check_at_end().startswith(f"{plan} is gone now that the run is over")
    assert said in watch.check_at_end()
