"""`telescope COMMAND`: every command answers to its name, what is unknown is guessed, and completion knows what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from telescope.cli import check, main
from telescope.cli.completion import SCRIPTS, candidates


@pytest.mark.parametrize("name", main.COMMANDS)
def test_each_command_answers(name: str, capsys):
    try:
        code = main.main([name, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    assert capsys.readouterr().out.strip()


def test_without_a_command_it_says_what_there_is(capsys):
    assert main.main([]) == 2
    assert main.main(["--help"]) == 0
    assert capsys.readouterr().out.count("  replay ") == 2


def test_it_says_which_version_it_is(capsys):
    assert main.main(["--version"]) == 0
    assert re.fullmatch(r"Telescope \S.*, Hydra [\d.]+\n", capsys.readouterr().out)


def test_an_unknown_command_is_guessed(capsys):
    assert main.main(["rplay"]) == 2
    assert "telescope rplay: there is no such command. Did you mean replay?" in capsys.readouterr().err


def test_check_says_all_that_is_wrong_and_starts_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check.main(["trainer.learning_rat=1"]) == 1
    assert "Did you mean trainer.learning_rate?" in capsys.readouterr().err
    assert check.main(["-m", "algorithm=grpo,gspo", "algorithm.use_tis=true"]) == 1
    assert "1 of 2 points are invalid." in capsys.readouterr().out
    assert check.main(["experiment=fake"]) == 0
    assert capsys.readouterr().out.startswith("experiment=fake: valid, hash ")
    assert check.main(["cluster.device=gpu", "cluster.inference_num_workers=64"]) == 1
    assert "need 65 GPUs" in capsys.readouterr().err
    assert (
        check.main(["cluster=bare_metal", "cluster.nodes=2"]) == 1
    )  # as telescope.run would: it does not know which host this is
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("telescope re", ["replay"]),
        ("telescope run algorithm=gr", ["algorithm=grpo"]),
        ("telescope run seed=1 trainer.learning_r", ["trainer.learning_rate="]),
        ("telescope plan train", ["trainer."]),
        ("telescope runs s", ["stop"]),
        ("telescope runs ", ["list", "resume", "stop", "tail"]),
        ("telescope runs tail ", []),
        ("telescope runs resume ", []),
        ("telescope runs resume runs/mine number_of", ["number_of_steps="]),
        ("telescope env ", ["audit", "check"]),
        ("telescope env check reason", ["reasoning_gym"]),
        ("telescope doctor ", ["logprobs", "weights"]),
        ("telescope doctor weights see", ["seed="]),
        ("telescope completion z", ["zsh"]),
        ("telescope replay x", []),
    ],
)
def test_the_last_word_is_completed(line: str, expected: list[str]):
    assert candidates(line) == expected


def test_every_option_of_a_group_is_offered():
    found = candidates("telescope run algorithm=")
    assert {"algorithm=cispo", "algorithm=grpo", "algorithm=gspo"} <= set(found)


@pytest.mark.parametrize("shell", ["bash"])
def test_the_shell_takes_the_script(shell: str):
    ended = subprocess.run(
        [shell, "-c", SCRIPTS[shell] + "\ncomplete -p telescope"], capture_output=True, text=True, check=True
    )
    assert "-F _telescope telescope" in ended.stdout


def test_the_actions_that_are_completed_are_those_that_there_are(capsys):
    from telescope.cli.completion import ACTIONS
    from telescope.cli.env import SUBCOMMANDS

    assert ACTIONS["env"] == tuple(sorted(SUBCOMMANDS))
    assert ACTIONS["completion"] == tuple(sorted(SCRIPTS))
    for command in ("runs", "doctor"):
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
        said = capsys.readouterr().out
        assert all(action in said for action in ACTIONS[command])


def test_where_nothing_is_offered_bash_completes_files():
    ended = subprocess.run(
        ["bash", "-c", SCRIPTS["bash"] + "\ncomplete -p telescope"], capture_output=True, text=True, check=True
    )
    assert "-o default" in ended.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], ["runs", "--help"], ["show", "--help"], ["completion", "bash"], ["env", "--help"]]
)
def test_what_cannot_be_printed_is_one_sentence_and_an_exit_code(arguments: list[str], tmp_path):
    command = [sys.executable, "-m", "telescope", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    name = "telescope" if arguments == ["--help"] else f"telescope {arguments[0]}"
    assert done.stderr == f"{name}: standard output can't be written: No space left on device\n"
    assert done.returncode == 1


def test_a_reader_that_has_gone_is_told_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "telescope", "completion", "bash"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
