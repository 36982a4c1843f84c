"""backend=megatron where something breaks in a save or on another stage: what is a lost checkpoint, what ends the rank."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed here: the extra `megatron` brings it")

from telescope.backends.base import Outcome, RankLost, Saved, SaveSettings
from telescope.backends.common.saving import Saver, ShardReader
from telescope.backends.megatron.masters import Masters
from tests.backends.forking import run_forked
from tests.backends.megatron_watching import on_cpu, watch
from tests.backends.models import random_model
from tests.backends.shards import make_job
from tests.ports import free_port


def run_two(folder: Path, module: str) -> None:
    """Two ranks of a test module, each of which leaves what it saw in the folder."""
    model = random_model(folder / "model")
    environment = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ended = run_forked(2, f"tests.backends.{module}", [str(folder), model], environment, limit_s=100.0)
    assert [code for code, _ in ended] == [0, 0], ended


def test_a_rank_that_breaks_while_the_state_is_gathered_ends_and_so_does_the_other(tmp_path):
    """It would go on to the next step's collectives, while the other waits in those of the save."""
    run_two(tmp_path, "megatron_broken_save")
    (lost, _), (broken, told) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert lost.startswith("RankLost: another trainer rank was lost, or did not answer in time, while ")
    assert broken.startswith("OutOfMemoryError: CUDA out of memory")
    assert told == 0, "an error of the backend is no checkpoint that could not be written"


def test_a_stage_whose_loss_breaks_says_so_and_the_others_have_lost_a_rank(tmp_path):
    run_two(tmp_path, "megatron_broken_stage")
    lost, broken = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert lost.startswith("RankLost: another trainer rank was lost, or did not answer in time, while training step 1: ")
    assert "this rule knows no such row" in broken


def test_a_collective_of_a_save_that_fails_is_a_lost_rank(tmp_path, monkeypatch):
    told: list[Outcome] = []

    def closed(*_: object) -> None:
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]")

    with on_cpu():
        backend = watch(make_job(model=random_model(tmp_path / "model")))
        monkeypatch.setattr(Masters, "whole", closed)
        with pytest.raises(RankLost, match="while gathering the state of step 1: "):
            backend.save(1, tmp_path / "checkpoint", told.append)
        backend.close()
    assert told == []


@pytest.mark.parametrize("background", [True, False])
def test_tensors_that_are_made_one_after_another_are_never_all_there_at_once(tmp_path, background: bool):
    alive, most, told = set[int](), 0, list[Outcome]()

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(8):
            array = np.full(5, number, np.float32)
            alive.add(number)
            weakref.finalize(array, alive.discard, number)
            most = max(most, len(alive))
            tensor = torch.from_numpy(array)
            del array
            yield f"tensor {number}", tensor

    saver = Saver(0, "cpu", SaveSettings(background=background))
    saver.save(made(), tmp_path, told.append)
    assert saver.settle()
    assert isinstance(told[0], Saved)
    assert most <= 2
    reader = ShardReader(tmp_path)
    assert [float(reader.read(f"tensor {number}", torch.float32)[4]) for number in range(8)] == list(range(8))
