"""The journal and its replay, by the core and by the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from telescope.cli.replay import main
from telescope.flow.replay import JournalDamaged, replay
from telescope.runlog.journal import Journal
from telescope.runlog.layout import RunDirectory
from tests.flow.harness import Manners, World, settings, sometimes_equal

TROUBLED = Manners(
    straggler_share=0.1, failure_share=0.1, worker_life_s=20, server_life_s=30, repeat_share=0.1, reward=sometimes_equal
)


def journal_of(seed: int) -> list[bytes]:
    case = settings(environments=(("countdown", 1.0), ("math", 0.3)), max_async_rollout=2)
    return World(case, TROUBLED, seed, journal=True).run().lines


@pytest.mark.parametrize("seed", range(5))
def test_a_replayed_journal_gives_the_same_commands(seed: int):
    lines = journal_of(seed)
    found = replay(lines)
    assert found.disagreement is None
    assert found.events == len(lines) - 1
    assert found.commands > 100


def test_two_worlds_of_one_seed_write_the_same_bytes():
    assert journal_of(3) == journal_of(3)
    assert journal_of(3) != journal_of(4)


def test_the_journal_does_not_depend_on_pythons_hash_seed():
    script = "from tests.flow.test_replay import journal_of; print(b''.join(journal_of(3)).hex())"
    journals = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for seed in ("1", "2")
    }
    assert len(journals) == 1


def test_a_changed_command_is_found_with_its_line():
    lines = journal_of(0)
    number = next(i for i, line in enumerate(lines) if b'"type":"Run"' in line)
    lines[number] = lines[number].replace(b'"seed":', b'"seed":1', 1)
    found = replay(lines)
    assert found.disagreement is not None
    assert found.disagreement.line == number + 1
    assert found.events == number - 1
    assert str(found.disagreement).startswith(f"line {number + 1}: ")


def test_a_journal_without_opening_and_a_damaged_line_are_refused_in_words():
    lines = journal_of(0)
    with pytest.raises(JournalDamaged, match="the journal is empty"):
        replay([])
    with pytest.raises(JournalDamaged, match="line 1 does not open a journal"):
        replay(lines[1:])
    with pytest.raises(JournalDamaged, match="line 5 is damaged"):
        replay([*lines[:4], lines[4][:-3], *lines[5:]])
    with pytest.raises(JournalDamaged, match="format 4, this program reads 2 and 3"):
        replay([lines[0].replace(b'"journal":3', b'"journal":4'), *lines[1:]])


def written(folder: Path, lines: list[bytes]) -> RunDirectory:
    run = RunDirectory.create(folder / "run")
    journal = Journal(run.journal)
    for line in lines:
        journal.append(line)
    journal.close()
    return run


def test_the_command_says_how_much_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = journal_of(0)
    run = written(tmp_path, lines)
    assert main([str(run.path)]) == 0
    assert capsys.readouterr().out == f"{len(lines) - 1} events and {replay(lines).commands} commands agree.\n"


def test_a_torn_last_line_is_legal_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = journal_of(0)
    run = written(tmp_path, lines)
    with run.journal.open("ab") as file:
        file.write(b'{"now":99.5,"event":{"type":"Ti')
    assert main([str(run.path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{len(lines) - 1} events and ")
    assert said.endswith("the last line was cut off in writing and is left out.\n")


def test_the_command_shows_the_first_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = journal_of(0)
    run = written(tmp_path, [*lines[:10], *lines[20:]])
    assert main([str(run.path)]) == 1
    said = capsys.readouterr().out
    assert "commands agree; the first difference is in line " in said
    assert "the journal says" in said


def test_a_folder_that_is_no_run_gives_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path)]) == 1
    assert "is " + str(tmp_path) + " a run directory?" in capsys.readouterr().err
    assert main([]) == 2
