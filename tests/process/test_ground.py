"""A run whose directory is deleted or moved under it ends, and says so: nothing of it would be kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope._launch.ground import Ground


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text("{}")
    return tmp_path / "run" / "plan.json"


def test_a_directory_that_stays_is_no_cause(plan: Path):
    ground = Ground(plan)
    assert [ground.lost(float(second)) for second in range(100)] == [""] * 100


def test_ten_seconds_without_it_are_the_end_with_the_file_that_is_gone(plan: Path):
    ground = Ground(plan, missing_s=10.0)
    assert ground.lost(0.0) == ""
    plan.parent.rename(plan.parent.with_name("elsewhere"))
    assert [ground.lost(second) for second in (1.0, 5.0, 10.9)] == ["", "", ""]
    assert ground.lost(12.0).startswith(f"{plan} has been gone for 11 s: the run directory was deleted or moved")


def test_one_that_comes_back_in_time_is_no_cause(plan: Path):
    ground, elsewhere = Ground(plan, missing_s=10.0), plan.parent.with_name("elsewhere")
    plan.parent.rename(elsewhere)
    assert (ground.lost(0.0), ground.lost(9.0)) == ("", "")
    elsewhere.rename(plan.parent)
    assert ground.lost(11.0) == ""
    plan.parent.rename(elsewhere)
    assert (ground.lost(13.0), ground.lost(22.0)) == ("", "")


def test_an_error_of_the_file_system_is_no_absence(plan: Path, monkeypatch: pytest.MonkeyPatch):
    def stale(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    ground = Ground(plan)
    monkeypatch.setattr(Path, "stat", stale)
    assert [ground.lost(float(second)) for second in range(0, 100, 5)] == [""] * 20
    assert ground.lost_at_the_end() == ""


def test_at_the_end_of_a_run_a_directory_that_went_a_moment_ago_is_missed(plan: Path):
    ground = Ground(plan)
    assert (ground.lost(0.0), ground.lost_at_the_end()) == ("", "")
    plan.parent.rename(plan.parent.with_name("elsewhere"))
    plan.parent.mkdir()  # a save makes it anew
    assert ground.lost(2.0) == ""
    said = f"made since then are in {plan.parent}: put them together before you use either"
    assert ground.lost_at_the_end().startswith(f"{plan} is gone now that the run is over")
    assert said in ground.lost_at_the_end()
