"""What a run needs and this machine has not is told before anything starts, alike by `telescope check` and `telescope run`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from telescope._launch import preflight
from telescope._launch.preflight import find_absent, find_obstacles
from telescope._launch.process_plan import Host, make_plan
from telescope.cli import check, run, start
from telescope.config.models import EMBEDDED
from telescope.runlog import temporary
from tests.config.conftest import compose_one

CPU = Host("a", cpus=4)
FAKE = ("experiment=fake",)
OWN = """
import os
from pathlib import Path
from telescope.environments.base import Prompt, Reward, SingleTurn

class Own(SingleTurn):
    file: str = "/nowhere/puzzles.jsonl"

    def prompts(self, split):
        texts = Path(os.environ.get("PUZZLES", self.file)).read_text().splitlines()
        return [Prompt(({"role": "user", "content": text},)) for text in texts]

    def reward(self, prompt, answer):
        return Reward(0.0)
"""


def absent(*overrides: str, config_dir: Path | None = None, elsewhere: bool = False) -> list[str]:
    found = compose_one(*FAKE, *overrides, config_dir=config_dir)
    assert found.config is not None, found.problems
    return find_absent(found.config, make_plan(found.config, (CPU,)), elsewhere=elsewhere)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    home = tmp_path / "mine" / "plugins" / "environments"
    home.mkdir(parents=True)
    (home / "own.py").write_text(OWN)
    return tmp_path / "mine"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED / "tiny", tmp_path / "model"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("env=[gsm8k]", "environments.gsm8k.kwargs.data_dir=/nowhere"),
            "data_dir='/nowhere' is not there: give the folder or the file that holds the data set",
        ),
        (("env=[gpqa_diamond]", "environments.gpqa_diamond.kwargs.data_dir=/nowhere"), "data_dir='/nowhere' is not there"),
        (("env=[questions]", "environments.questions.kwargs.path=/nowhere.csv"), "path='/nowhere.csv' is not there"),
        (
            ("env=[questions]", "environments.questions.kwargs={path: /dev/null, scoring: function, function: /nowhere.py}"),
            "/nowhere.py is not a Python file that is there",
        ),
        (
            ("env=[code_generation]", "environments.code_generation.kwargs.data_dir=/nowhere"),
            "data_dir='/nowhere' is not there",
        ),
        (
            ("env=[agent_program]", "environments.agent_program.kwargs={command: [a], tasks: /nowhere}"),
            "the tasks in /nowhere can't be read",
        ),
        (("env=[tau]", "environments.tau.kwargs.data=/nowhere"), "data=/nowhere has no "),
        (
            ("env=[verifiers]", "environments.verifiers.kwargs.python=/nowhere/python"),
            "python=/nowhere/python can't be started",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_missing_file_of_an_environment_is_no_valid_run(
    overrides: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check.main([*FAKE, *overrides]) == 1
    said = capsys.readouterr()
    assert "What it needs is not here, or not in order:" in said.err
    assert sentence in said.err
    assert said.out == ""
    assert run.main([*FAKE, *overrides]) == 1
    refused = capsys.readouterr().err
    assert sentence in refused
    assert refused.endswith("Nothing was started.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_data_file_that_can_not_be_read_or_has_no_such_split_is_told(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "main").mkdir(parents=True)
    (data / "main" / "test.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    (sentence,) = absent("env=[gsm8k]", f"environments.gsm8k.kwargs.data_dir={data}")
    assert "has no file of the split 'train'" in sentence
    (data / "main" / "train.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (sentence,) = absent("env=[gsm8k]", f"environments.gsm8k.kwargs.data_dir={data}")
    assert "train.jsonl can't be read: FileNotFoundError" in sentence


def test_a_package_that_an_environment_needs_is_told_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    look = preflight.importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name in ("datasets", "textworld") else look(name)
    )
    (hub,) = absent("env=[gsm8k]")
    assert "dataset='openai/gsm8k' comes from the Hugging Face hub by a package that is not installed: python -m pip ins" in hub
    (textworld,) = absent("env=[textworld]")
    assert "env=textworld needs a package that is not installed: pip install 'textworld" in textworld


def test_a_package_of_the_engine_is_told_beside_what_else_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    look = preflight.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name in ("vllm", "peft") else look(name))
    config = compose_one("model.lora={}").config
    assert config is not None
    plan = make_plan(config, (CPU,))
    found = [each for each in find_obstacles(config, plan) if "needs the package" in each]
    assert [each.partition(", which")[0] for each in found] == [
        "inference.engine=vllm needs the package vllm",
        "model.lora=… needs the package peft",
    ]
    assert not [each for each in find_obstacles(config, plan, elsewhere=True) if "needs the package" in each]


def test_an_environment_of_the_users_own_is_asked_in_a_process_like_a_worker(own: Path, tmp_path: Path) -> None:
    (sentence,) = absent("env=[own]", config_dir=own)
    assert sentence.startswith("environments.own (environment 'own') in ")
    assert "FileNotFoundError" in sentence
    assert "/nowhere/puzzles.jsonl" in sentence
    assert "own.py line 10" in sentence
    puzzles = tmp_path / "puzzles"
    puzzles.write_text("a\nb\n")
    assert absent("env=[own]", f"environments.own.kwargs.file={puzzles}", config_dir=own) == []
    assert absent("env=[own]", f"cluster.env={{PUZZLES: {puzzles}}}", config_dir=own) == []  # a worker's variables


def test_what_an_interrupted_check_leaves_is_swept(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the command at once, in the middle of it."""
    places: list[Path] = []
    monkeypatch.setattr(preflight, "_rehearse_some", lambda place, *_: places.append(place) or [])
    assert absent("env=[own]", config_dir=own) == []
    (place,) = places
    assert place.name.startswith(temporary.PREFIX)
    assert not place.exists()


def test_what_is_wrong_with_the_users_rows_comes_as_its_sentence_alone(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text('{"question": "a", "answer": "b"}\n{"qestion": "a", "answer": "b"}\n')
    (found,) = absent("env=[questions]", f"environments.questions.kwargs.path={file}")
    assert found.startswith(f"environments.questions: {file}, line 2 has no column 'question'")
    assert ".py" not in found


def test_an_empty_data_file_is_told(own: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (found,) = absent("env=[own]", f"environments.own.kwargs.file={tmp_path}/empty.txt", config_dir=own)
    assert "it has no prompts in its train split" in found


def test_an_environment_that_takes_long_or_dies_is_left_to_its_worker(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = own / "plugins/environments/own.py"
    file.write_text(OWN.replace("        texts =", "        import threading; threading.Event().wait(60)\n        texts ="))
    monkeypatch.setattr(preflight, "REHEARSAL_S", 1.0)
    assert absent("env=[own]", config_dir=own) == []
    assert "environments.own was not checked to its end: its check_data took more than 1 s, as on a busy machine" in caplog.text
    caplog.clear()
    file.write_text(OWN.replace("        texts =", "        os._exit(3)\n        texts ="))
    monkeypatch.setattr(preflight, "REHEARSAL_S", 60.0)
    assert absent("env=[own]", config_dir=own) == []
    assert caplog.text == ""


def test_a_slow_environment_hides_nothing_of_the_others(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = OWN.replace("class Own", "class Slow").replace(
        "        texts =", "        import time; time.sleep(60)\n        texts ="
    )
    (own / "plugins/environments/slow.py").write_text(slow)
    monkeypatch.setattr(preflight, "REHEARSAL_S", 4.0)
    (sentence,) = absent("env=[slow,own]", config_dir=own)
    assert sentence.startswith("environments.own (environment 'own') in ")
    assert "environments.slow was not checked to its end" in caplog.text
    assert "environments.own" not in caplog.text


def test_a_data_set_of_the_hub_is_not_fetched_for_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    assert absent("env=[gsm8k,code_generation]") == []


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("config.json", "config.json can't be read as JSON"),
        ("model.safetensors", "the weights in .*model.safetensors can't be read"),
        ("chat_template.jinja", "has no chat template (a base model?): give one as model.chat_template, in Jinja"),
    ],
)
def test_a_model_folder_that_no_process_could_load_is_told(folder: Path, fault: str, sentence: str) -> None:
    if fault == "chat_template.jinja":
        (folder / fault).unlink()
    else:
        os.truncate(folder / fault, 12)
    place = ("model=any", f"model.name={folder}", "inference=vllm")
    (found,) = absent(*place)
    assert all(part in found for part in sentence.split(".*"))
    assert f"model.name={folder}" in found
    if fault == "chat_template.jinja":
        assert absent(*place, "model.chat_template='{{ messages }}'") == []


def test_of_other_hosts_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ("env=[gsm8k]", "environments.gsm8k.kwargs.data_dir=/nowhere")
    assert len(absent(*missing)) == 1
    assert absent(*missing, elsewhere=True) == []


def test_points_of_a_sweep_with_the_same_environments_are_asked_once(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    asked: list[object] = []

    def rehearse(*_: object) -> list[str]:
        asked.append(None)
        return ["it is not there"]

    monkeypatch.setattr(preflight, "_rehearse", rehearse)
    assert check.main([*FAKE, "--config-dir", str(own), "env=[own]", "-m", "seed=1,2,3"]) == 1
    assert len(asked) == 1
    assert "3 of 3 points are invalid." in capsys.readouterr().out


def test_points_of_a_sweep_with_another_backend_are_judged_apart(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 12)
    known: dict[str, list[str]] = {}
    found = []
    for backend in ("fake", "fsdp"):
        config = compose_one(*FAKE, "model=any", f"model.name={folder}", f"backend={backend}").config
        assert config is not None
        found.append(start.find_absent(config, make_plan(config, (CPU,)), known))
    assert found[0] == []
    assert "model.safetensors can't be read" in found[1][0]
