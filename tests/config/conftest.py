"""A user's own folder with plug-ins and presets, as `--config-dir` takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from telescope.compose.load import Point, load_points, places_for

ALGORITHM = """
from __future__ import annotations
import numpy as np
from pydantic import Field
from telescope.algorithms.base import Algorithm

class Flat(Algorithm):
    slope: float = Field(default=0.5, gt=0)
    \"\"\"How steep.\"\"\"
"""
BACKEND = """
from telescope.backends.base import BackendSettings

class Toy(BackendSettings):
    size: int = 3
"""
ENVIRONMENT = """
from typing import Literal
from telescope.environments.base import SingleTurn, Prompt, Reward

class Echo(SingleTurn):
    word: str = "hello"
    times: int = 2
    tone: Literal["plain", "loud"] = "plain"
    judge_api_key: str | None = None

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": self.word},))] * self.times
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """`mine/` with an algorithm, a backend and an environment of the user's own."""
    folder = tmp_path / "mine"
    write(folder / "plugins" / "algorithms" / "flat.py", ALGORITHM)
    write(folder / "plugins" / "backends" / "toy.py", BACKEND)
    write(folder / "plugins" / "environments" / "echo.py", ENVIRONMENT)
    return folder


@pytest.fixture
def plugin_path(user: Path) -> tuple[str, ...]:
    return (str(user / "plugins"),)


def compose_one(*overrides: str, config_dir: Path | None = None, environ: dict[str, str] | None = None) -> Point:
    """The one point of a command line without a sweep."""
    places = places_for(None if config_dir is None else str(config_dir))
    (point,) = load_points(overrides, places, environ or {})
    return point


def sentences(point: Point) -> str:
    return "\n".join(problem.sentence for problem in point.problems)
