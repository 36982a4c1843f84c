"""Presets and overrides that Hydra would refuse in words of its own, or take and let act on nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope.compose.load import UsageError, places_for
from tests.config.conftest import compose_one, sentences, write

EXPERIMENT = "# @package _global_\n"


@pytest.mark.parametrize(
    ("group", "content", "said"),
    [
        ("env", "defaults: [mine, _self_]\n", ": its defaults lead back to itself (mine → mine)"),
        ("env", "name: countdown\na: &a [*a]\n", " holds an alias (*name) within what it stands for"),
        ("env", "# @package\nname: countdown\n", ": Expected header format"),
        ("env", "# @package _global_\nname: countdown\n", ": `# @package _global_` is not the place of an environment"),
        ("env", "# @package environments.mine\ndefaults: [countdown, _self_]\n", ": its defaults go to their own place"),
        ("env", "defaults: countdown\n", ": defaults='countdown' must be a list, e.g. defaults: [countdown, _self_]"),
        ("env", "defaults: [3, _self_]\n", ": defaults holds 3: an entry is the name of a preset"),
        ("env", "defaults: [{a: b, c: d}]\n", ': defaults holds {"a": "b", "c": "d"}: an entry is'),
        (
            "env",
            "defaults: [countdwn, _self_]\n",
            ": defaults names env=countdwn: there is no such option. Did you mean countdown?",
        ),
        ("env", "defaults: ['${nope}', _self_]\n", ": defaults names ${nope}: ${…} can stand for a group's choice alone"),
        ("env", "kwargs: {a: '${..b'}\n", ": kwargs.a can't be read"),
        (
            "env",
            "defaults: [{override /model: tiny}]\n",
            ": `override /model`: experiments alone choose options of other groups",
        ),
        ("algorithm", "# @package algorithm.mine\ndefaults: [grpo]\n", ": `# @package algorithm.mine` puts its settings where"),
        ("experiment", "defaults: [{override /model: tiny}]\n", " must begin with the line `# @package _global_`"),
        ("experiment", "# @package experiment\nseed: 3\n", " must begin with the line `# @package _global_`"),
        (
            "experiment",
            f"{EXPERIMENT}defaults: [{{override model: tiny}}]\n",
            ": `override model` means a group below this one",
        ),
        ("experiment", f"{EXPERIMENT}defaults: [{{/model: tiny}}]\n", ": `/model` is in the defaults list already"),
        ("experiment", f"{EXPERIMENT}defaults: [{{override /nope: x}}]\n", ": `override /nope`: there is no such group."),
        (
            "experiment",
            f"{EXPERIMENT}defaults: [{{override /algorithm: [grpo, rloo]}}]\n",
            "has 2 options, and algorithm takes one",
        ),
        ("experiment", f"{EXPERIMENT}defaults: [/run]\n", ": `/run`: conf/run.yaml is what every run begins with"),
        ("experiment", f"{EXPERIMENT}hydra: {{run: {{dir: x}}}}\n", "run_dir=… names the run's directory"),
        (
            "experiment",
            f"{EXPERIMENT}defaults: [{{override /hydra/launcher: joblib}}]\n",
            ": Telescope launches its runs itself",
        ),
        ("experiment", f"{EXPERIMENT}plugin_path: [x]\n", ": plugin_path follows from --config-dir"),
    ],
)
def test_a_preset_that_can_not_do_what_it_says_is_refused_with_its_file(tmp_path: Path, group: str, content: str, said: str):
    file = tmp_path / group / "mine.yaml"
    write(file, content)
    point = compose_one(f"{group}=mine", config_dir=tmp_path)
    assert sentences(point).startswith(str(file))
    assert said in sentences(point)
    assert len(point.problems) == 1


def test_a_circle_over_two_files_is_told_with_both(tmp_path: Path):
    write(tmp_path / "env" / "hard.yaml", "defaults: [harder, _self_]\n")
    write(tmp_path / "env" / "harder.yaml", "defaults: [hard, _self_]\n")
    assert "(hard → harder → hard)" in sentences(compose_one("env=hard", config_dir=tmp_path))


def test_a_preset_whose_name_is_a_number_is_to_be_renamed(tmp_path: Path):
    write(tmp_path / "env" / "7.yaml", "defaults: [countdown, _self_]\n")
    said = sentences(compose_one("env=[countdown,7]", config_dir=tmp_path))
    assert said == f"env=7 is read as 7, which is not a name: rename {tmp_path / 'env' / '7.yaml'}"


@pytest.mark.parametrize(
    "content", ["defaults: [countdown, _self_]\n", "# @package environments.hard\ndefaults: [countdown@_here_]\n"]
)
def test_both_ways_to_write_an_environment_are_taken(tmp_path: Path, content: str):
    write(tmp_path / "env" / "hard.yaml", content)
    point = compose_one("env=[countdown,hard]", config_dir=tmp_path)
    assert point.config is not None, sentences(point)
    assert list(point.config.environments) == ["countdown", "hard"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("~env.x", "~env.x takes away what is not there: leave it out, or see the names with --cfg job"),
        (
            "~trainer.weight_decay=5",
            "~trainer.weight_decay=5 takes trainer.weight_decay away only where it has this value, and it is 0.0: type "
            "~trainer.weight_decay",
        ),
        (
            "env@environments.x=countdown",
            "env@environments.x=countdown replaces an entry, and no list of defaults has env@environments.x: add one with "
            "+env@environments.x=countdown",
        ),
        (
            "+env@environments=countdown",
            "+env@environments=countdown: an environment stands at environments.<name>: type "
            "+env@environments.<name>=countdown",
        ),
        ("+algorithm@foo=grpo", "+algorithm@foo=grpo: the settings of algorithm have their place: leave out @foo"),
        ("plugin_path.0=x", "plugin_path.0 follows from --config-dir: put plug-ins into <config-dir>/plugins"),
    ],
)
def test_an_override_of_what_is_not_there_says_what_to_type(override: str, said: str):
    assert sentences(compose_one(override)) == said


PROVIDER = """
from telescope.environments.sandboxes.base import Provider

class Wall(Provider):
    image: str = "x"
    async def start(self, {parameters}): ...
    async def create(self, limits): ...
    async def close(self): ...
"""
TRANSPORT = """
from telescope.weights.base import Transport

class Way(Transport):
    def publisher(self, source, end): ...
"""
SANDBOX = "environments.code_generation.kwargs.sandbox"


def check_wall(folder: Path, text: str) -> str:
    write(folder / "plugins" / "sandboxes" / "wall.py", text)
    return sentences(compose_one("env=code_generation", f"++{SANDBOX}.provider=wall", config_dir=folder))


def test_a_provider_of_ones_own_is_taken(tmp_path: Path):
    assert check_wall(tmp_path, PROVIDER.format(parameters="limits")) == ""


def test_a_provider_with_other_parameters_than_it_is_called_with_is_refused(tmp_path: Path):
    said = check_wall(tmp_path, PROVIDER.format(parameters=""))
    assert "wall.py: Wall.start(self) can't be called as Provider says, start(self, limits: 'Limits')" in said


@pytest.mark.parametrize(
    ("begin", "error"), [("raise RuntimeError('boom')", "RuntimeError: boom"), ("pass", "AttributeError: ")]
)
def test_a_provider_that_can_not_be_made_is_refused_with_its_error(tmp_path: Path, begin: str, error: str):
    said = check_wall(tmp_path, PROVIDER.format(parameters="limits") + f"    def __init__(self, **settings): {begin}\n")
    assert f"sandbox provider 'wall' can't be made of its settings: {error}" in said
    assert "wall.py)" in said


def test_a_transport_without_one_of_its_ends_is_refused(tmp_path: Path):
    write(tmp_path / "plugins" / "transports" / "way.py", TRANSPORT)
    said = sentences(compose_one("weight_sync.transport=way", config_dir=tmp_path))
    assert said.endswith("way.py: Way lacks receiver: define each as Transport says")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("sandboxes/docker.py", "has the name of the sandbox provider in"),
        ("transports/nccl.py", "has the name of the weight transport in"),
        ("transports/auto.py", "no weight transport can be called auto"),
    ],
)
def test_a_file_with_a_name_of_ours_is_refused_though_nothing_chooses_it(tmp_path: Path, file: str, said: str):
    write(tmp_path / "plugins" / file, "")
    with pytest.raises(UsageError, match=said):
        places_for(str(tmp_path))
