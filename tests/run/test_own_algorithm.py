"""An algorithm that is no part of the package takes part in a whole run, with its own settings from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.run.conftest import ROOT, Start

EXAMPLE = re.compile(r"```python\n(.*?)```", re.DOTALL)
REAL_TRAINER = ("experiment=fake", "backend=fsdp", "trainer.seq_len=256", "number_of_steps=2")


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, str]:
    """A folder with the algorithm that docs/algorithms.md prints, as `spo.py`."""
    folder = tmp_path / "mine" / "plugins" / "algorithms"
    folder.mkdir(parents=True)
    (code,) = EXAMPLE.findall((ROOT / "docs/algorithms.md").read_text())
    (folder / "spo.py").write_text(code)
    return "--config-dir", str(tmp_path / "mine")


def test_the_algorithm_of_the_docs_trains_with_the_real_backend(start: Start, own: tuple[str, str]):
    run = start(*own, *REAL_TRAINER, "algorithm=spo", "algorithm.strength=0.5", "algorithm.use_tis=true")
    assert run.wait() == 0, run.said()
    algorithm = json.loads(run.directory.config_json.read_text())["algorithm"]
    assert (algorithm["name"], algorithm["strength"], algorithm["use_tis"]) == ("spo", 0.5, True)
    metrics = [row["metrics"] for row in run.rows("step_metrics")]
    assert len(metrics) == 2
    assert all(step["grad_norm"] > 0 and "tis_weight" in step for step in metrics)


def test_its_settings_are_typed(start: Start, own: tuple[str, str]):
    run = start(*own, *REAL_TRAINER, "algorithm=spo", "algorithm.strength=strong", "algorithm.strenght=1")
    assert run.wait() == 1
    assert "algorithm.strength='strong' must be a number" in run.said()
    assert "Did you mean algorithm.strength?" in run.said()
