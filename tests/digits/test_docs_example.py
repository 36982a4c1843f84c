"""The algorithm that docs/own_algorithm.md adds in one file really works as printed."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from telescope.maths import packing
from tests.digits.batches import make_batch, outcome

PAGE = Path(__file__).resolve().parents[2] / "docs/own_algorithm.md"


@pytest.fixture
def printed(monkeypatch):
    """The classes of the page's examples, by name."""
    module = types.ModuleType("examples_of_the_docs")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:2]:  # the third uses them
        exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module


@pytest.fixture
def spo(printed):
    return printed.Spo


def test_the_example_of_the_docs_is_a_working_algorithm(spo):
    algorithm = spo(strength=0.5, use_tis=True, tis_cap=100.0)
    batch = make_batch(algorithm, 3)
    rows = packing.pack(batch.lengths, seq_len=64, multiple=8)
    result = outcome(algorithm, batch, rows)
    for item, trajectory, current, old, gradient in zip(
        batch.items, batch.trajectories, batch.current, batch.old, result.gradients, strict=True
    ):
        weight = np.exp(0.5 * current) * np.exp(old - trajectory.logprobs)
        expected = np.where(trajectory.mask, -weight * item.advantage / batch.denominators.tokens, 0.0)
        assert gradient == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_the_example_refuses_what_it_does_not_know(spo):
    with pytest.raises(ValueError, match="strenght"):
        spo(strenght=0.5)


def test_the_example_that_changes_only_the_advantages_compares_with_the_best_of_the_others(printed):
    rewards, groups = np.array([1.0, 0.25, 0.5, 2.0, 3.0]), np.array([7, 7, 7, 9, 9])
    best = printed.Best()
    assert best.advantages(rewards, groups, group_size=3).tolist() == [0.5, -0.75, -0.5, -1.0, 1.0]
    assert best.advantages(rewards[:1], groups[:1], group_size=2).tolist() == [0.0]
