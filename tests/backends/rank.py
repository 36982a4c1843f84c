"""One of two ranks, forked for test_ranks.py (forking.py): `tests.backends.rank MODE FOLDER` with torchrun's variables."""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from telescope.backends.base import Outcome, RankLost, Saved, World
from telescope.config.sections import LoraSettings, ModelSettings
from tests.backends.options import flat
from tests.backends.shards import make_job, make_shard, part
from tests.backends.watching import watch

SHARES = ([0, 1, 2, 3, 4, 6, 7], [5])
"""Rank 0 packs its seven into two rows, rank 1 its one into one, and adds a row of padding."""


def main() -> int:
    mode, folder, models = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if mode == "lost":
        os.environ["MASTER_PORT"] = os.environ["PORTS"]
        return lose(models[0])
    for number, model in enumerate(models):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[number]
        if mode == "resume":
            resume(model, folder, ("two", "two-as-two", "one-as-two")[number])
            continue
        train(model, folder / str(number), folder / f"ranks-{number}", sharing=2 if "shared" in Path(model).name else 1)
    return 0


def build(model: str, timeout_s: float, sharing: int = 1, meeting_file: Path | None = None):
    world = World(int(os.environ["RANK"]), 2, "cpu", meeting_file=meeting_file)
    job = make_job(model=model, seq_len=96, pad_to_multiple_of=16, world=world)
    return watch(job, collective_timeout_s=timeout_s, gradient_checkpointing=True, context_parallel_size=sharing)


def train(model: str, folder: Path, meeting_file: Path, sharing: int) -> None:
    """Two steps of ranks that meet by a file; gradients of the first, metrics and weights of the second. Ranks that share rows
    get all trajectories."""
    rank = int(os.environ["RANK"])
    backend = build(model, timeout_s=60.0, sharing=sharing, meeting_file=meeting_file)
    own = SHARES[rank] if sharing == 1 else sorted(SHARES[0] + SHARES[1])
    folder.mkdir(exist_ok=True)
    for step in (1, 2):
        result = backend.train_step(part(make_shard(step, seed=step), own))
        if step == 1:
            torch.save(backend.gradients, folder / f"gradients-{rank}.pt")
    torch.save(dict(backend.weights()), folder / f"weights-{rank}.pt")
    (folder / f"metrics-{rank}.json").write_text(json.dumps(result.metrics))
    backend.close()


def resume(model: str, folder: Path, name: str) -> None:
    """Steps 2 and 3: after step 1 and a save, after that checkpoint, and after that of a single rank. The settings before and
    after a checkpoint are those of HOW. What the moments were shows in the losses of step 3."""
    rank, how = int(os.environ["RANK"]), json.loads(os.environ.get("HOW", "{}"))
    begin = {"two": None, "two-as-two": folder / "by-two", "one-as-two": folder / "by-one"}[name]
    settings = how.get("before" if begin is None else "after", {})
    job = make_job(model=model, seq_len=96, pad_to_multiple_of=16, world=World(rank, 2, "cpu"))
    lora = LoraSettings(rank=2, alpha=4) if how.get("lora") else None
    job = replace(job, model=ModelSettings(name=model, lora=lora), resume=begin)
    backend = watch(job, collective_timeout_s=60.0, **{"gradient_checkpointing": True, **settings})
    if begin is None:
        backend.train_step(part(make_shard(1, seed=1), SHARES[rank]))
        outcomes: queue.Queue[Outcome] = queue.Queue()
        backend.save(1, folder / "by-two", outcomes.put)
        assert isinstance(outcomes.get(timeout=60), Saved)
    found = [backend.train_step(part(make_shard(step, seed=step), SHARES[rank])).metrics for step in (2, 3)]
    ends = dict(backend.weights())
    if rank == 0:
        np.savez(folder / f"{name}.npz", told=[[m["loss"], m["grad_norm"]] for m in found], weights=flat(ends))
    backend.close()


def lose(model: str) -> int:
    """Rank 1 dies without a word; rank 0 says so rather than wait for ever."""
    backend = build(model, timeout_s=5.0)
    if os.environ["RANK"] == "1":
        return 9
    started = time.monotonic()
    try:
        backend.train_step(part(make_shard(), SHARES[0]))
    except RankLost as error:
        print(f"{error} [{time.monotonic() - started:.0f} s]")
        return 3
    return 0
