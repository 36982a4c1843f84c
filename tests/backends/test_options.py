"""Each option of the FSDP backend makes the update of the plain one: on one, two and four ranks over gloo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.backends.four_ranks import found_by
from tests.backends.options import BY_SGD, SAME_TO_THE_BIT, save
from tests.backends.shards import make_job, make_shard

pytestmark = (
    pytest.mark.slow
)  # half a minute of processor time; on one rank most of it is in test_recompute and test_optimizers

SLIGHT = 2e-6
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Path:
    """A folder with what each option's ranks found."""
    return found_by("tests.backends.options", tmp_path_factory.mktemp("options"), LIMIT_S)


def read(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of both steps, and the weights."""
    with np.load(folder / f"{name}.npz") as file:
        return file["gradients"], file["weights"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in SAME_TO_THE_BIT if name != "plain"])
def test_what_is_kept_where_and_how_long_changes_no_bit_of_two_updates_by_adamw(found: Path, name: str):
    for one, other in zip(read(found, name), read(found, "plain"), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.timeout(400)
def test_replicas_and_ranks_make_the_updates_of_one_rank(found: Path, build, tmp_path):
    backend = build(make_job(model=str(found / "model"), learning_rate=1.0), optimizer="sgd")
    for step in (1, 2):
        backend.train_step(make_shard(step, seed=step))
    save(tmp_path / "one", backend.updates, dict(backend.weights()))
    gradients, weights = read(tmp_path, "one")
    first = len(weights)
    for name in (*BY_SGD, "2", "2, all on the host"):
        theirs, other = read(found, name)
        largest = np.abs(gradients[:first]).max()
        assert np.abs(theirs[:first] - gradients[:first]).max() <= SLIGHT * largest, name
        assert np.abs(other - weights).max() <= 1e-3 * np.abs(weights).max(), name
