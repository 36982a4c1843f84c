"""What the start of a run says of the save at its end."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope._launch import save_forecast
from telescope.runlog import disk_speed
from telescope.runlog.layout import RunDirectory
from tests.config.conftest import compose_one

BIG = ("model=qwen3-4b",)
SAID = "At the end the run saves the weights (16.1 GB, about 40 s), at Ctrl-C the training state (48.3 GB, about 121 s)."


def told(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *given: str, free: float = 1e12, speed: float | None = 4e8
) -> list[str]:
    """On a disk with so many bytes free, which takes so many a second."""
    monkeypatch.setattr(save_forecast.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free)))
    monkeypatch.setattr(save_forecast, "measure_write_speed", lambda folder, nbytes: speed)
    return save_forecast.describe_end_save(compose_one(*given).config, RunDirectory(folder))


def test_bytes_and_seconds_of_the_save_at_the_end_and_at_a_stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert told(monkeypatch, tmp_path, *BIG, "checkpoint.stop_timeout_s=200") == [SAID]
    both = "At the end, and at Ctrl-C, the run saves the weights (16.1 GB)."
    assert told(monkeypatch, tmp_path, *BIG, "checkpoint.at_end=weights", speed=None) == [both]


@pytest.mark.parametrize("given", [(), ("experiment=fake",), (*BIG, "checkpoint.at_end=none"), ("model=any", "model.name=a/b")])
def test_nothing_is_said_of_little_of_nothing_and_of_what_is_not_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: tuple[str, ...]
):
    assert told(monkeypatch, tmp_path, *given) == []


def test_a_disk_without_the_room_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    place = tmp_path / "checkpoints"
    _, warning = told(monkeypatch, tmp_path, *BIG, free=3e9)
    assert warning == (
        f"Warning: {place} has 3.0 GB free, and the save at the end takes 16.1 GB: free some, name another folder with "
        "checkpoint.dir=…, or set checkpoint.at_end=none"
    )
    _, warning = told(monkeypatch, tmp_path, *BIG, free=20e9)
    assert warning == (
        f"Warning: {place} has 20.0 GB free: at Ctrl-C the weights alone are saved then, from which no run can go on. Free "
        "some, or name another folder with checkpoint.dir=…"
    )
    assert told(monkeypatch, tmp_path, free=5e5)[-1].startswith(
        f"Warning: {place} has 0.5 MB free"
    )  # of the embedded model too


def test_a_stop_without_the_time_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _, warning = told(monkeypatch, tmp_path, *BIG)
    assert warning == (
        "Warning: a stop has 120 s for its step and its save: at Ctrl-C the weights alone are saved then, from which no run "
        "can go on. Raise checkpoint.stop_timeout_s"
    )
    _, warning = told(monkeypatch, tmp_path, *BIG, "checkpoint.every=10")
    assert warning.endswith("for its step and its save: nothing may be saved by then. Raise checkpoint.stop_timeout_s")
    _, warning = told(monkeypatch, tmp_path, *BIG, "cluster=slurm")
    assert warning.endswith("Raise checkpoint.stop_timeout_s and cluster.slurm.stop_before_s")


def test_the_disk_is_tried_with_little_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    speed = disk_speed.measure_write_speed(tmp_path, 100_000)
    assert speed is not None
    assert speed > 0
    assert list(tmp_path.iterdir()) == []
    assert disk_speed.measure_write_speed(tmp_path / "gone", 100_000) is None
    assert disk_speed.measure_write_speed(tmp_path, 0) is None
    monkeypatch.setattr(disk_speed, "LONGEST_S", 0.0)
    assert disk_speed.measure_write_speed(tmp_path, 100_000) is None


def test_the_real_disk_is_asked(tmp_path: Path):
    said = save_forecast.describe_end_save(compose_one("model=qwen2.5-0.5b").config, RunDirectory(tmp_path))
    assert re.fullmatch(r"At the end the run saves the weights \(2\.0 GB(, about \d+ s)?\), at Ctrl-C .*", said[0])
