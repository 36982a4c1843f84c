"""A provider of one's own: one file in the user's folder, named and set like ours, and used by a run's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.config.run import config_hash, dump_run, load_run
from tests.config.conftest import compose_one, sentences, write

PROVIDER = '''
from typing import ClassVar
from pydantic import Field
from telescope.environments.sandboxes.base import Wall
from telescope.environments.sandboxes.unsafe_subprocess import UnsafeSubprocess

class Chroot(UnsafeSubprocess):
    depth: int = Field(default=3, ge=1, le=9)
    """How deep."""
    wall: ClassVar[Wall] = Wall.NAMESPACES

    async def start(self, limits):
        found = await super().start(limits)
        print("started", self.name, self.depth)
        return found
'''
ENVIRONMENT = """
from pydantic import PrivateAttr
from telescope.environments.base import SingleTurn, Prompt, Reward
from telescope.environments.sandboxes.pool import Pool, SandboxSettings

class Checked(SingleTurn):
    sandbox: SandboxSettings = SandboxSettings()
    _pool: Pool | None = PrivateAttr(default=None)

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": "?"},))]

    async def set_up(self):
        self._pool = await Pool.open(self.sandbox)

    async def tear_down(self):
        await self._pool.close()

    async def reward(self, prompt, answer):
        async with self._pool.sandbox() as guest:
            return Reward(float((await guest.exec(["echo", answer])).text == "yes\\n"))
"""
OURS = "environments.checked.kwargs.sandbox"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    write(tmp_path / "mine" / "plugins" / "sandboxes" / "chroot.py", PROVIDER)
    write(tmp_path / "mine" / "plugins" / "environments" / "checked.py", ENVIRONMENT)
    return tmp_path / "mine"


async def test_it_is_named_set_hashed_and_used_by_an_environment(mine: Path, tmp_path: Path, capsys) -> None:
    point = compose_one(
        "env=checked", f"{OURS}.provider=chroot", f"{OURS}.depth=5", f"{OURS}.limits.time_s=20.0", config_dir=mine
    )
    assert point.config is not None, point.problems
    (tmp_path / "config.json").write_text(dump_run(point.config))
    config = load_run(tmp_path / "config.json")  # as a worker reads it
    assert config_hash(config) == config_hash(point.config)
    assert config.environments["checked"].kwargs["sandbox"]["depth"] == 5
    deeper = compose_one(
        "env=checked", f"{OURS}.provider=chroot", f"{OURS}.depth=6", f"{OURS}.limits.time_s=20.0", config_dir=mine
    )
    assert config_hash(deeper.config) != config_hash(config)
    environment = config.environment("checked")
    await environment.set_up()
    reward = await environment.reward(environment.prompts("train")[0], "yes")
    await environment.tear_down()
    assert reward.total == 1.0
    assert "started chroot 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["provider=chrot"], f"{OURS}.provider: there is no sandbox provider 'chrot'. Did you mean chroot?"),
        (["provider=chroot", "dept=4"], f"{OURS}.dept: there is no such setting. Did you mean depth?"),
        (["provider=chroot", "limts=4"], f"{OURS}.limts: there is no such setting. Did you mean limits?"),
        (["provider=chroot", "depth=12"], f"{OURS}.depth=12 must be at most 9"),
        (["provider=chroot", "depth=x"], f"{OURS}.depth='x' must be a whole number"),
        (
            ["provider=docker", "program=podmen"],
            f"{OURS}.program='podmen' must be auto | docker | podman. Did you mean podman?",
        ),
        (["provider=docker", "python=/usr/bin/python3"], f"{OURS}.python: there is no such setting."),
        (["provider=modal", "lifetime_s=5"], f"{OURS}.lifetime_s=5 must be at least 60.0"),
        (["most=0"], f"{OURS}.most=0 must be at least 1"),
    ],
)
def test_a_mistake_in_it_is_told_with_its_place(mine: Path, overrides: list[str], sentence: str) -> None:
    point = compose_one("env=checked", *(f"{OURS}.{override}" for override in overrides), config_dir=mine)
    assert sentences(point).startswith(sentence)


def test_an_installed_package_offers_one_as_an_entry_point(tmp_path: Path) -> None:
    write(tmp_path / "walls" / "__init__.py", "")
    write(tmp_path / "walls" / "chroot.py", PROVIDER)
    write(tmp_path / "walls-1.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: walls\nVersion: 1.0\n")
    write(tmp_path / "walls-1.0.dist-info" / "entry_points.txt", "[telescope.sandboxes]\nchroot = walls.chroot\n")
    code = (
        "from telescope.environments.sandboxes.pool import SandboxSettings\n"
        "made = SandboxSettings(provider='chroot', depth=2).make_provider()\n"
        "print(made.name, made.depth, type(made).__module__)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True, capture_output=True, text=True)
    assert said.stdout == "chroot 2 walls.chroot\n"
