"""Context parallelism, replicas, checkpoints, adapters, offload, optimisers and float16 at once, on four ranks over gloo."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telescope.backends.base import World
from telescope.backends.common.saving import ShardReader
from tests.backends.combined import COMBINATIONS, Combination, job_of, step
from tests.backends.four_ranks import found_by
from tests.backends.options import flat

pytestmark = pytest.mark.slow  # half a minute of processor time

LIMIT_S = 600.0
PACKING_TELLS = {"rows", "filler_rows", "padding_fraction"}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Path:
    """A folder with what each combination's ranks found."""
    return found_by("tests.backends.combined", tmp_path_factory.mktemp("combined"), LIMIT_S)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_checkpoint_of_every_combination_goes_on_to_the_bit(found: Path, name: str):
    _, went_on, resumed = json.loads((found / name / "metrics.json").read_text())
    assert resumed == went_on
    assert went_on["update_skipped"] == 0.0
    with np.load(found / name / "weights.npz") as file:
        assert np.array_equal(file["went_on"], file["resumed"])


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_one_rank_goes_on_from_what_four_have_saved(found: Path, build, name: str):
    combination = COMBINATIONS[name]
    job = replace(job_of(combination, str(found / "model"), World(0, 1, "cpu")), resume=found / name / "trainer")
    backend = build(job, **alone(combination))
    here = step(backend, combination, 2)
    _, expected, _ = json.loads((found / name / "metrics.json").read_text())
    same = {key: value for key, value in expected.items() if key not in PACKING_TELLS}
    assert {key: here[key] for key in same} == pytest.approx(same, rel=combination.near, abs=combination.near)
    with np.load(found / name / "weights.npz") as file:  # the moments of the checkpoint were in this step
        apart = float(np.abs(file["went_on"] - flat(dict(backend.weights()))).mean())
    assert apart < 1e-5  # of 1e-3, about, that a weight goes in a step


def test_moments_of_a_byte_are_codes_in_the_checkpoint_of_four(found: Path):
    names = ShardReader(found / "shared rows, moments of a byte on the host" / "trainer").shapes
    assert names["optimizer.model.layers.0.mlp.down_proj.weight.exp_avg_codes"] == (25, 300)
    assert names["optimizer.model.layers.0.mlp.down_proj.weight.exp_avg_sq_scales"] == (25, 2)


def alone(combination: Combination) -> dict[str, object]:
    """What decides the numbers, without what spreads them."""
    return {key: value for key, value in combination.backend.items() if key in ("optimizer", "mixed_precision_dtype")}


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_combination_finds_what_one_rank_finds(found: Path, build, name: str):
    """The metrics of the first step, which are counted once whoever shares a row; and of the second, within the optimiser's
    doubling of roundings."""
    combination = COMBINATIONS[name]
    backend = build(job_of(combination, str(found / "model"), World(0, 1, "cpu")), **alone(combination))
    theirs = json.loads((found / name / "metrics.json").read_text())
    for number, near in ((1, combination.near), (2, 100 * combination.near)):
        expected, here = step(backend, combination, number), theirs[number - 1]
        assert here.keys() == expected.keys()
        same = {key: value for key, value in expected.items() if key not in PACKING_TELLS}
        assert {key: here[key] for key in same} == pytest.approx(same, rel=near, abs=near)
