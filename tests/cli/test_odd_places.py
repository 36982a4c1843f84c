"""Commands that are given a file, or a folder of something else, where they expect a run directory: one sentence each."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope.cli.main import main


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "runs stop {file}",
            "{file} is not known to be watched by any process: it never started, or this is not a run directory\n",
        ),
        ("show {file}", "{file} is not a run directory: it has no run.json; `telescope runs list` has those of a folder\n"),
        ("env audit {file}", "{file} has no config.json: it is not a run directory\n"),
        ("bundle {file}", "telescope bundle: {file}: Not a directory; name a new folder\n"),
        (
            "export latest --to {new} --run-dir {garbage}",
            "telescope export: {garbage}/config.json is damaged: JSON is malformed: invalid character (byte 0)\n",
        ),
        (
            "run experiment=fake run_dir={garbage} checkpoint.resume=true",
            "{garbage}/config.json is damaged: JSON is malformed: invalid character (byte 0)\nNothing was started.\n",
        ),
    ],
)
def test_what_is_no_run_directory_is_told_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, said: str
):
    file, garbage = tmp_path / "file", tmp_path / "garbage"
    file.write_text("x")
    garbage.mkdir()
    for name in ("config.json", "run.json"):
        (garbage / name).write_bytes(b"\x8a\xff")
    names = {"file": file, "garbage": garbage, "new": tmp_path / "new"}
    assert main(command.format(**names).split()) == 1
    assert capsys.readouterr().err == said.format(**names)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-m", "hydra/sweeper=basic", "--info"], "--info shows points that are known; those of hydra/sweeper"),
        (["--cfg", "hydra", "--package", "nope"], "--package=nope: there is no such part with --cfg hydra"),
    ],
)
def test_what_can_not_be_shown_is_refused_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"telescope.run: {said}")
    assert list(tmp_path.iterdir()) == []
