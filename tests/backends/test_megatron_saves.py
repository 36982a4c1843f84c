"""backend=megatron's saves where something breaks: what is a lost checkpoint, and what ends the rank."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed here: the extra `megatron` brings it")

from tests.backends.forking import run_forked
from tests.backends.models import random_model
from tests.ports import free_port


def test_a_rank_that_breaks_while_the_state_is_gathered_ends_and_so_does_the_other(tmp_path):
    """It would go on to the next step's collectives, while the other waits in those of the save."""
    model = random_model(tmp_path / "model")
    environment = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ended = run_forked(2, "tests.backends.megatron_broken_save", [str(tmp_path), model], environment, limit_s=100.0)
    assert [code for code, _ in ended] == [0, 0], ended
    (lost, _), (broken, told) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert lost.startswith("RankLost: another trainer rank was lost, or did not answer in time, while ")
    assert broken.startswith("OutOfMemoryError: CUDA out of memory")
    assert told == 0, "an error of the backend is no checkpoint that could not be written"
