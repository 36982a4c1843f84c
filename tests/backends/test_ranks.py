"""Two ranks over gloo, as real processes: the update is that of one rank, and a lost rank is said, not waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from telescope.backends.base import RankLost, World
from telescope.backends.common import ranks
from tests.backends.forking import run_forked
from tests.backends.models import random_experts, random_model
from tests.backends.shards import make_job, make_shard
from tests.backends.watching import distance
from tests.ports import free_port, free_ports


def run_ranks(mode: str, folder: Path, *models: str, how: Mapping[str, object] | None = None) -> list[tuple[int, str]]:
    """Exit code and output of both. `how`: what rank.py says of HOW."""
    # One a model: a process group can't be founded again at the port of the one before.
    ports = ",".join(str(port) for port in free_ports(len(models)))
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PORTS": ports, "GLOO_SOCKET_IFNAME": "lo"}
    environment["HOW"] = json.dumps(how or {})
    return run_forked(2, "tests.backends.rank", [mode, str(folder), *models], environment, limit_s=300.0)


def test_two_ranks_make_the_update_of_one(build, tmp_path):
    """Of a model with a tied head, of one without whose sizes two ranks can't share evenly, and of one with three experts a
    layer, whose every row the two share."""
    models = (
        "tiny",
        random_model(tmp_path / "untied", tie_word_embeddings=False, hidden_size=25, head_dim=10, vocab_size=129),
        random_experts(tmp_path / "experts, shared", num_experts=3),
    )
    for code, output in run_ranks("equal", tmp_path, *models):
        assert code == 0, output
    for number, model in enumerate(models):
        compare(build(make_job(model=model)), tmp_path / str(number), model)


def compare(backend, folder: Path, model: str) -> None:
    backend.train_step(make_shard(1, seed=1))
    for rank in (0, 1):
        assert distance(backend.gradients, torch.load(folder / f"gradients-{rank}.pt")) < 2e-6
    result = backend.train_step(make_shard(2, seed=2))
    first, second = (json.loads((folder / f"metrics-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert (first["rows"], first["filler_rows"]) == ((2.0, 0.0) if "experts" in model else (4.0, 1.0))
    for name in (
        "loss",
        "entropy",
        "grad_norm",
        "ratio_mean",
        "ratio_std",
        "trained_tokens",
        "staleness_mean",
        "staleness_max",
    ):
        assert first[name] == pytest.approx(result.metrics[name], rel=1e-5), name
    weights = torch.load(folder / "weights-0.pt")
    for name, tensor in backend.weights():
        # AdamW divides by the gradient's size, so an entry whose gradient is nearly 0 moves by its rounding, some share of the
        # rate (1e-3); test_rank_invariance.py compares updates exactly, with SGD
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-4)
        assert float((weights[name] - tensor).abs().mean()) < 1e-6
    assert torch.load(folder / "weights-1.pt") == {}


def test_a_lost_rank_is_said_within_the_time_of_a_collective(tmp_path):
    (code, output), (lost, _) = run_ranks("lost", tmp_path, "tiny")
    assert lost == 9
    assert code == 3, output
    last = output.strip().splitlines()[-1]
    assert last.startswith("another trainer rank was lost, or did not answer in time, while training step 1: ")
    assert int(last.rpartition("[")[2].removesuffix(" s]")) <= 20


def test_a_rank_that_nobody_meets_at_their_file_says_so_in_time(tmp_path):
    """With the file's folder there, and without."""
    world = World(rank=0, size=2, device="cpu", meeting_file=tmp_path / "ranks")
    with pytest.raises(RankLost, match="did not answer in time, while meeting"), ranks.watched("meeting"):
        ranks.join(world, 1.0)
    with pytest.raises(RankLost, match="/gone/ranks is not on this host"):
        ranks.join(replace(world, meeting_file=tmp_path / "gone" / "ranks"), 1.0)


def test_the_meeting_place_of_the_ranks_is_at_its_one_address(tmp_path):
    """By itself torch listens on every address of the host."""
    code = (
        "import os, socket; from datetime import timedelta; from telescope.backends.base import World; "
        "from telescope.backends.common import ranks; "
        "store = ranks._store(World(rank=0, size=2, device='cpu'), timedelta(seconds=60)); store.set('a', 'b'); "
        "port = int(os.environ['MASTER_PORT']); socket.create_connection(('127.0.0.2', port)).close(); "
        "socket.create_server(('127.0.0.3', port)).close(); print('alone')"
    )
    port = free_port("127.0.0.2")
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "alone\n", done.stderr
