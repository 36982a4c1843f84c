"""What textworld's environment does without the package; its games are played in the slow lane (test_textworld_runs.py)."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from telescope.environments.adapters.textworld import Textworld, locate_game


def test_without_the_package_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'textworld>=1\.7,<1\.8'"):
        Textworld().prompts("train")


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        ("<think>east?</think>I go. <command>Go  East</command>", "go east"),
        ("go east", None),
        ("<command></command>", None),
        (f"<command>{'x' * 300}</command>", None),
        ("<command>open\nchest</command>", "open chest"),
    ],
)
def test_a_command_is_read_from_its_tag(answer: str, command: str | None):
    assert Textworld().find_command(answer) == command


def test_without_a_tag_the_answer_is_the_command():
    assert Textworld(answer_tag=None).find_command(" Take key\n") == "take key"


def test_a_game_s_file_is_named_by_all_that_it_is_made_from():
    made = [Textworld(rooms=2), Textworld(objects=9), Textworld(quest_length=4), Textworld(theme="basic"), Textworld()]
    files = {locate_game(game._options(seed), "/games") for game in made for seed in (0, 1)}
    assert len(files) == 10


async def test_a_folder_of_games_that_others_may_write_to_is_refused_before_any_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await Textworld().set_up()
    (made,) = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    with pytest.raises(ValueError, match="this user alone may write to: remove it, or name another games_dir"):
        await Textworld().set_up()
    made.rmdir()
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", made)
    with pytest.raises(ValueError, match="this user alone"):
        await Textworld().set_up()
    await Textworld(games_dir=str(made)).set_up()


async def test_what_a_killed_process_made_a_game_in_is_swept_once_nobody_can_be_at_it(tmp_path: Path):
    game, old, new = tmp_path / "textworld-1.7-x.z8", tmp_path / "making-old", tmp_path / "making-new"
    game.write_text("")
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (1, 1))
    os.utime(game, (1, 1))
    await Textworld(games_dir=str(tmp_path)).set_up()
    assert sorted(tmp_path.iterdir()) == sorted([game, new])
