"""What textworld's environment does without the package; its games are played in the slow lane (test_textworld_runs.py)."""

from __future__ import annotations

import sys

import pytest

from telescope.environments.textworld import Textworld, file_of


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
    assert Textworld().command_in(answer) == command


def test_without_a_tag_the_answer_is_the_command():
    assert Textworld(answer_tag=None).command_in(" Take key\n") == "take key"


def test_a_game_s_file_is_named_by_all_that_it_is_made_from():
    made = [Textworld(rooms=2), Textworld(objects=9), Textworld(quest_length=4), Textworld(theme="basic"), Textworld()]
    files = {file_of(game._options(seed), "/games") for game in made for seed in (0, 1)}
    assert len(files) == 10
