from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from telescope.config import plugins
from telescope.config.plugins import ALGORITHMS, BACKENDS, ENVIRONMENTS, PluginError
from telescope.environments.adapters import textworld, verifiers
from tests.config.conftest import ALGORITHM, write

ROOT = Path(__file__).parents[2]


def test_every_shipped_algorithm_is_found_by_its_file_name():
    assert {"grpo", "rloo", "reinforce_pp", "dr_grpo", "cispo", "gspo", "sapo"} <= set(plugins.find(ALGORITHMS))


def test_what_lies_among_the_tasks_is_an_environment_and_the_machinery_beside_them_is_none():
    found = plugins.find(ENVIRONMENTS)
    assert {"countdown", "reverse_letters", "verifiers"} <= set(found)
    assert set(found) == set(plugins.files(ENVIRONMENTS))
    assert not {"base", "chat", "multi_turn", "tools", "tasks"} & set(found)


def test_a_users_file_is_a_plugin_of_its_name(plugin_path):
    assert plugins.load(ALGORITHMS, "flat", plugin_path)().slope == 0.5
    assert plugins.name_of(plugins.load(BACKENDS, "toy", plugin_path)(size=4)) == "toy"


def test_a_users_folder_may_split_its_plugin_over_files(tmp_path):
    write(tmp_path / "environments" / "quiz" / "scoring.py", "BEST = 7\n")
    code = (
        "from telescope.environments.base import Environment\nfrom .scoring import BEST\n"
        "class Quiz(Environment):\n    best: int = BEST\n"
    )
    write(tmp_path / "environments" / "quiz" / "__init__.py", code)
    quiz = plugins.load(ENVIRONMENTS, "quiz", (str(tmp_path),))()
    assert quiz.best == 7
    assert plugins.name_of(quiz) == "quiz"


def installed(site: Path, name: str, module: str) -> dict[str, str]:
    """The environment of a process in which a package is installed that offers an algorithm."""
    write(site / "mine" / "__init__.py", "")
    write(site / "mine" / "steep.py", ALGORITHM)
    write(site / "mine-1.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    write(site / "mine-1.0.dist-info" / "entry_points.txt", f"[telescope.algorithms]\n{name} = {module}\n")
    return {**os.environ, "PYTHONPATH": str(site)}


def test_an_installed_package_offers_an_algorithm_as_an_entry_point(tmp_path):
    code = (
        "from tests.config.conftest import compose_one, sentences\n"
        "point = compose_one('algorithm=steep', 'algorithm.slope=0.25')\n"
        "assert point.config is not None, sentences(point)\n"
        "assert (point.config.algorithm_name, point.config.algorithm.slope) == ('steep', 0.25)\n"
        "print(sentences(compose_one('algorithm=steep', 'algorithm.slop=0.25')))\n"
    )
    environment = installed(tmp_path, "steep", "mine.steep")
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, timeout=60, check=True, capture_output=True, text=True
    )
    assert "Did you mean algorithm.slope?" in said.stdout


def test_an_entry_point_of_another_name_than_its_module_is_refused_in_words(tmp_path):
    code = "from telescope.config import plugins\nplugins.load(plugins.ALGORITHMS, 'other')"
    environment = installed(tmp_path, "other", "mine.steep")
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, timeout=60, check=False, capture_output=True, text=True
    )
    assert "an entry point has the name of its module, so it must be steep" in said.stderr


def test_two_folders_with_a_plugin_of_one_name_do_not_mix(tmp_path):
    for folder, size in (("a", 1), ("b", 2)):
        code = f"from telescope.backends.base import BackendSettings\nclass B(BackendSettings):\n    size: int = {size}\n"
        write(tmp_path / folder / "backends" / "mine.py", code)
    sizes = [plugins.load(BACKENDS, "mine", (str(tmp_path / folder),))().size for folder in ("a", "b")]
    assert sizes == [1, 2]


def test_a_missing_plugin_is_refused_with_the_nearest_name():
    with pytest.raises(PluginError, match=r"there is no algorithm 'cipso'. Did you mean cispo\?"):
        plugins.load(ALGORITHMS, "cipso")


def test_a_name_that_is_ours_is_refused(tmp_path):
    write(tmp_path / "algorithms" / "grpo.py", "")
    with pytest.raises(PluginError, match=r"has the name of the algorithm in .*grpo.py: rename one of them"):
        plugins.files(ALGORITHMS, (str(tmp_path),))


def test_a_file_that_raises_names_its_error_and_its_path(tmp_path):
    write(tmp_path / "environments" / "broken.py", "import nothing_of_this_name\n")
    found = plugins.find(ENVIRONMENTS, (str(tmp_path),))
    assert isinstance(found["broken"], PluginError)
    with pytest.raises(
        PluginError, match=r"'broken' can't be imported: ModuleNotFoundError: .*nothing_of_this_name.*broken.py"
    ):
        plugins.load(ENVIRONMENTS, "broken", (str(tmp_path),))


def test_a_file_with_two_classes_is_refused(tmp_path):
    code = "from telescope.environments.base import Environment\nclass A(Environment): ...\nclass B(Environment): ...\n"
    write(tmp_path / "environments" / "pair.py", code)
    with pytest.raises(PluginError, match=r"defines several Environment classes \(A, B\): keep one a file"):
        plugins.load(ENVIRONMENTS, "pair", (str(tmp_path),))


def test_a_class_that_another_of_the_file_derives_from_is_a_helper(tmp_path):
    code = "from telescope.environments.base import Environment\nclass Shared(Environment): ...\nclass Real(Shared): ...\n"
    write(tmp_path / "environments" / "layered.py", code)
    assert plugins.load(ENVIRONMENTS, "layered", (str(tmp_path),)).__name__ == "Real"


def test_no_plugin_and_no_part_of_the_configuration_imports_torch():
    code = (
        "import sys\nfrom telescope.config import run, validate, plugins\n"
        "for kind in (plugins.ALGORITHMS, plugins.BACKENDS, plugins.ENVIRONMENTS): assert plugins.find(kind)\n"
        "heavy = {'torch', 'transformers', 'vllm', 'hydra', 'zmq'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


SHOP = """
from telescope.environments.base import Prompt, Reward, SingleTurn

class Shop(SingleTurn):
    fruit: str = "pear"

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": self.fruit},))]

    def reward(self, prompt, answer):
        return Reward(1.0)
"""


def test_an_installed_package_offers_an_environment_as_an_entry_point(tmp_path):
    write(tmp_path / "orchard" / "__init__.py", "")
    write(tmp_path / "orchard" / "shop.py", SHOP)
    write(tmp_path / "orchard-1.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: orchard\nVersion: 1.0\n")
    write(tmp_path / "orchard-1.0.dist-info" / "entry_points.txt", "[telescope.environments]\nshop = orchard.shop\n")
    code = (
        "from telescope.config import plugins\n"
        "kind = plugins.load(plugins.ENVIRONMENTS, 'shop')\n"
        "print(kind.__module__, kind().prompts('train')[0].turns[0]['content'])\n"
        "try: plugins.load(plugins.ENVIRONMENTS, 'shopp')\n"
        "except plugins.PluginError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, timeout=60, check=True, capture_output=True, text=True
    )
    assert said.stdout == "orchard.shop pear\nthere is no environment 'shopp'. Did you mean shop?\n"


def test_a_package_that_a_file_imports_and_is_not_there_gives_the_install_line(tmp_path):
    write(tmp_path / "environments" / "needs.py", "import nothing_of_this_name.inner\n")
    with pytest.raises(PluginError, match="If it is a package, install it: python -m pip install nothing_of_this_name"):
        plugins.load(ENVIRONMENTS, "needs", (str(tmp_path),))
    stated = "import nothing_of_this_name\nREQUIRED_PACKAGES = ['no-such-package>=2', 'numpy']\n"
    write(tmp_path / "environments" / "states.py", stated)
    with pytest.raises(PluginError, match="install it: python -m pip install 'no-such-package>=2'"):
        plugins.load(ENVIRONMENTS, "states", (str(tmp_path),))


def test_a_class_that_requires_what_is_not_installed_is_refused_with_the_install_line(tmp_path):
    code = SHOP.replace("    fruit:", "    requires = ('pytest', 'no-such-package[all]<3')\n    fruit:")
    write(tmp_path / "environments" / "shop.py", code)
    with pytest.raises(PluginError, match=r"needs what is not installed: python -m pip install 'no-such-package\[all\]<3'"):
        plugins.load(ENVIRONMENTS, "shop", (str(tmp_path),))


def test_a_package_of_another_version_is_as_good_as_missing_and_the_refusal_says_which_is_there(tmp_path):
    there = version("pytest")
    code = SHOP.replace("    fruit:", "    requires = ('pytest<2', 'no-such-package')\n    fruit:")
    write(tmp_path / "environments" / "shop.py", code)
    said = f"python -m pip install 'pytest<2' no-such-package (pytest {there} is installed)"
    with pytest.raises(PluginError, match=f"needs what is not installed: {re.escape(said)}$"):
        plugins.load(ENVIRONMENTS, "shop", (str(tmp_path),))


@pytest.mark.parametrize(
    "met",
    ["pytest", "PyTest>=2", "pytest>=2,!=2.5", "no-such-package; python_version < '3'", "pytest @ https://example.org/p.whl"],
)
def test_a_requirement_that_is_met_or_asks_for_nothing_here_is_no_obstacle(met: str):
    assert plugins.lacking([met], "shop.py") == {}


def test_a_requirement_that_pip_would_not_take_is_told_with_its_file(tmp_path):
    code = SHOP.replace("    fruit:", "    requires = ('pytest=>8',)\n    fruit:")
    file = tmp_path / "environments" / "shop.py"
    write(file, code)
    with pytest.raises(
        PluginError, match=rf"'shop' in {re.escape(str(file))} requires 'pytest=>8', which is not a requirement"
    ):
        plugins.load(ENVIRONMENTS, "shop", (str(tmp_path),))


def test_shipped_environments_require_the_versions_that_the_extras_install():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {
        requirement
        for found in plugins.find(ENVIRONMENTS).values()
        if isinstance(found, type)
        for requirement in found.requires
    }
    assert asked == {"math-verify>=0.9,<0.10", "reasoning-gym>=0.1.25,<0.2", "textarena>=0.7.4,<0.8"}
    assert asked <= {*extras["math"], *extras["reasoning-gym"], *extras["textarena"]}
    assert (extras["textworld"], extras["verifiers"]) == ([textworld.REQUIREMENT], [verifiers.REQUIREMENT])


def test_a_name_that_is_like_no_other_is_refused_with_the_folder_in_which_it_would_be_found(tmp_path):
    with pytest.raises(PluginError, match=rf"Your own are looked for in {re.escape(str(tmp_path))}/environments\.$"):
        plugins.load(ENVIRONMENTS, "quizzical", (str(tmp_path),))
    with pytest.raises(PluginError, match=r"looked for in plugins/environments below the folder given as --config-dir\.$"):
        plugins.load(ENVIRONMENTS, "quizzical")
