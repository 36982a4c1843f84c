"""Whole runs in which a process falls silent or leaves without a word: the end names it, and the line that it was at."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from telescope.exit_codes import COMPONENT_FAILED
from tests.run.conftest import Start

ENVIRONMENT = """
import os
import re

from telescope.environments.tasks.countdown import Countdown


class Hard(Countdown):
    async def play(self, *given, **named):
        {statement}
        return await super().play(*given, **named)
"""


def environment(folder: Path, statement: str) -> Path:
    """A `--config-dir` with `env=hard`, which does this at each rollout."""
    (folder / "plugins" / "environments").mkdir(parents=True)
    (folder / "plugins" / "environments" / "hard.py").write_text(ENVIRONMENT.format(statement=statement))
    return folder


@pytest.mark.timeout(180)
def test_a_reward_that_holds_the_interpreter_is_named_with_its_line(start: Start, tmp_path: Path):
    place = environment(tmp_path / "mine", 're.match(r"(a+)+$", "a" * 60 + "b")')
    run = start("--config-dir", str(place), "experiment=fake", "env=hard", "orchestrator.silent_s=5", "cluster.device=cpu")
    assert run.wait(120) == COMPONENT_FAILED
    said = run.said()
    line = ENVIRONMENT.splitlines().index("        {statement}") + 1
    assert f"hard.py:{line} (play)" in said, said[-3000:]
    assert "Code of environments.hard held the whole worker" in said
    assert "worker-0 was not heard" in said or "worker-0 (pid" in said
    assert run.left_after(10) == []


@pytest.mark.timeout(180)
def test_a_process_that_leaves_without_a_word_is_missed_at_once(start: Start, tmp_path: Path):
    place = environment(tmp_path / "mine", "os._exit(0)")
    run = start("--config-dir", str(place), "experiment=fake", "env=hard", "orchestrator.silent_s=100", "cluster.device=cpu")
    began = time.monotonic()
    assert run.wait(90) == COMPONENT_FAILED
    assert time.monotonic() - began < 80
    assert "worker-0 ended with exit code 0 while the run went on" in run.said()
    assert run.left_after(10) == []
