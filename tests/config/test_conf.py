"""conf/ says what the classes say, and is all that Hydra needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from omegaconf import OmegaConf

from telescope.compose.load import load_points, places_for
from telescope.compose.options import CHOSEN_PARTS, GROUPS, PLUGIN_GROUPS, Places
from tests.config.conftest import write
from tests.product import load_script

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
PLAIN = """
import json, sys
from importlib.abc import MetaPathFinder

class NoTelescope(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "telescope":
            raise ImportError("telescope is not there")

sys.meta_path.insert(0, NoTelescope())
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

with initialize_config_dir(sys.argv[1], version_base="1.3"):
    for overrides in json.load(sys.stdin):
        print(json.dumps(OmegaConf.to_container(compose("run", overrides))))
assert not any(name.partition(".")[0] == "telescope" for name in sys.modules)
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "scripts" / "write_conf.py")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CONF, tmp_path / "conf"))


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_every_preset_says_what_its_class_says(script: ModuleType) -> None:
    assert [str(file) for file in script.find_outdated()] == [], "run python scripts/write_conf.py"
    assert script.find_strangers() == []


def test_every_choice_of_a_class_is_a_file(script: ModuleType) -> None:
    written = {preset.file for preset in script.presets()}
    for group in (*PLUGIN_GROUPS, *CHOSEN_PARTS):
        assert {file.relative_to(CONF) for file in (CONF / group).glob("*.yaml")} == {
            file for file in written if file.parent.name == group
        }


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("run.yaml", "learning_rate: 1.0e-06", "learning_rate: 2.0e-06"),
        ("run.yaml", "seed: 0", "seed: 0  # mine"),
        ("algorithm/cispo.yaml", "clip_low: 1.0", "clip_low: 0.5"),
        ("env/countdown.yaml", "  max_number: 9\n", ""),
        ("cluster/one_gpu.yaml", "  dry_run: false", "  dry_run: true"),
        ("backend/fsdp.yaml", "\n# auto | flash", "\n# flash"),
    ],
)
def test_a_default_that_is_changed_by_hand_is_noticed_and_mended(
    script: ModuleType, conf: Path, file: str, old: str, new: str
) -> None:
    change(conf / file, old, new)
    assert list(script.find_outdated(conf)) == [conf / file]
    assert script.find_outdated(conf)[conf / file] == (CONF / file).read_text()


def test_a_default_that_is_changed_in_the_class_is_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from telescope.config.sections import TrainerSettings

    monkeypatch.setattr(TrainerSettings.model_fields["grad_clip"], "default", 2.0)
    assert list(script.find_outdated()) == [CONF / "run.yaml"]


def test_what_a_preset_changes_is_kept(script: ModuleType, conf: Path) -> None:
    marked = conf / "inference" / "vllm.yaml"
    change(marked, "max_model_len: 4096", "max_model_len: 8192  # preset")
    change(conf / "cluster" / "slurm.yaml", "  nodes: 1\n", "  nodes: 3  # preset\n")
    for file, text in script.find_outdated(conf).items():
        file.write_text(text)
    assert "max_model_len: 8192  # preset (class: 4096)\n" in marked.read_text()
    assert "  nodes: 3  # preset (class: 1)\n" in (conf / "cluster" / "slurm.yaml").read_text()
    assert script.find_outdated(conf) == {}


def test_a_value_without_its_mark_is_the_classs_again(script: ModuleType, conf: Path) -> None:
    change(conf / "algorithm" / "grpo.yaml", "use_tis: true  # preset (class: false)", "use_tis: true")
    (text,) = script.find_outdated(conf).values()
    assert "\nuse_tis: false\n" in text


def test_a_mark_on_what_the_class_does_not_have_is_not_dropped_unseen(script: ModuleType, conf: Path) -> None:
    change(conf / "cluster" / "slurm.yaml", "  nodes: 1\n", "  nodes: 1\n  knots: 3  # preset\n")
    with pytest.raises(SystemExit, match=r"conf/cluster/slurm.yaml has a mark at slurm.knots, which its class does not have"):
        script.find_outdated(conf)


def test_sections_of_other_groups_are_left_to_hands(script: ModuleType, conf: Path) -> None:
    change(conf / "model" / "tiny.yaml", "number_of_steps: 60", "number_of_steps: 61  # one more")
    assert script.find_outdated(conf) == {}


def test_a_preset_without_a_python_file_is_noticed(script: ModuleType, conf: Path) -> None:
    (conf / "algorithm" / "gone.yaml").write_text("name: gone\n")
    assert script.find_strangers(conf) == [conf / "algorithm" / "gone.yaml"]


def test_a_new_preset_is_written_from_the_class_alone(script: ModuleType, conf: Path) -> None:
    (conf / "algorithm" / "sapo.yaml").unlink()
    assert script.find_outdated(conf) == {conf / "algorithm" / "sapo.yaml": (CONF / "algorithm" / "sapo.yaml").read_text()}


def test_a_python_file_of_ours_is_a_choice_before_its_preset_is_written(conf: Path) -> None:
    places = Places(conf)
    for file in ("algorithm/sapo.yaml", "env/wordle.yaml"):
        (conf / file).unlink()
    overrides = ["algorithm=sapo", "env=[wordle,countdown]", "algorithm.sapo_tau_neg=1.5"]
    (without,), (written,) = load_points(overrides, places, {}), load_points(overrides, places_for(None), {})
    assert without.config == written.config is not None
    (helper,) = load_points(["env=chat"], places, {})
    assert "env=chat: there is no such option" in helper.problems[0].sentence


def test_every_preset_is_the_same_to_any_reader_of_yaml() -> None:
    """`1e-6` is a text to PyYAML and a number to OmegaConf."""
    for file in CONF.rglob("*.yaml"):
        assert yaml.safe_load(file.read_text()) == OmegaConf.to_container(OmegaConf.load(file), resolve=False), file


@pytest.mark.timeout(600)
def test_hydra_alone_composes_every_choice_as_we_do() -> None:
    """Without Telescope being importable."""
    places = places_for(None)
    lines = [[], ["env=[countdown,hendrycks_math]", "environments.countdown.weight=2"], ["+env@environments.hard=countdown"]]
    lines += [[f"{group}={option}"] for group in GROUPS for option in places.options(group)]
    lines += [[f"model={model}", "algorithm=cispo", "backend=fake"] for model in places.options("model")]
    lines += [["experiment=gsm8k", f"cluster={cluster}", "logging.progress=false"] for cluster in places.options("cluster")]
    told = subprocess.run(
        [sys.executable, "-c", PLAIN, str(CONF)],
        input=json.dumps(lines), capture_output=True, text=True, check=True, timeout=110, cwd=CONF,
    )  # fmt: skip
    plain = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(plain) == len(lines) > 80
    for overrides, theirs in zip(lines, plain, strict=True):
        (point,) = load_points(overrides, places, {})
        assert theirs == OmegaConf.to_container(point.composed), overrides
        assert list(theirs) == list(point.composed)


def test_the_examples_of_the_documentation_work(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "hydra.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    named = {found[1]: block for block in blocks if (found := re.search(r"# (mine/\S+)", block))}
    assert sorted(named) == ["mine/algorithm/careful.yaml", "mine/env/hard.yaml", "mine/experiment/first.yaml"]
    for name, block in named.items():
        write(tmp_path / name, block)
    write(tmp_path / "mine" / "env" / "hard_for_hydra.yaml", blocks[-1].replace("environments.hard", "environments.harder"))
    mine = places_for(str(tmp_path / "mine"))
    (point,) = load_points(["experiment=first", "algorithm=careful", "+env=hard_for_hydra"], mine, {})
    assert point.config is not None
    assert point.config.trainer.learning_rate == 2e-6
    assert point.config.algorithm.model_dump()["clip_high"] == 0.2
    weights = {name: (entry.weight, entry.kwargs["max_number"]) for name, entry in point.config.environments.items()}
    assert weights == {"countdown": (1.0, 9), "hard": (2.0, 20), "harder": (1.0, 20)}
    (python,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = python.replace("/path/to/telescope/conf", str(CONF))
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path)
    assert told.stdout == "1.0\n"
