"""Saves until it is killed: `python -m tests.backends.saver FOLDER KILLS SEED`, started by test_killed_saves.py.

Imports torch once and forks a child for each kill. A child saves step after step as a run does (begin, write, finish, keep the
last two), its tensors drawn from the step; it is killed with SIGKILL at a drawn instant; another child then looks at what it
left. Prints how many kills came in the middle of a save.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch

from telescope.backends.base import Saved, SaveSettings
from telescope.backends.common import saving
from telescope.backends.common.saving import Saver, ShardReader
from telescope.runlog import checkpoints
from telescope.runlog.checkpoints import Complete

SHAPES = {"model.embedding": (257, 64), "model.norm": (64,), "optimizer.embedding.exp_avg": (257, 64), "optimizer.step": (1,)}
MEASURED = 5
PATIENCE_S = 60


def tensors(step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def save(directory: Path, saver: Saver, step: int) -> None:
    partial = checkpoints.begin(directory, step, "a")
    outcomes: list[object] = []
    saver.save(tensors(step), checkpoints.trainer_part(partial), outcomes.append)
    saver.settle()
    assert isinstance(outcomes[0], Saved), outcomes
    checkpoints.finish(partial, Complete(1, step, step, "run", "a", "hash", 1, True, 0, 0.0, checkpoints.now()))
    checkpoints.retain(directory, keep_last=2, keep_every=None)


def save_on_and_on(directory: Path, told: int) -> None:
    """Says a byte after each save."""
    saver, step = Saver(0, "cpu", SaveSettings()), (checkpoints.steps(directory) or [0])[-1]
    checkpoints.sweep(directory)
    while True:
        step += 1
        save(directory, saver, step)
        os.write(told, b".")


def look(directory: Path) -> None:
    """The latest complete checkpoint has its step's tensors to the bit, and so has every other complete one."""
    assert checkpoints.steps(directory), "no complete checkpoint is left"
    for step in checkpoints.steps(directory):
        folder = checkpoints.find(directory, step)
        assert checkpoints.read(folder).step == step
        reader = ShardReader(checkpoints.trainer_part(folder))
        found = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
        reader.read_into(found)
        expected = tensors(step)
        assert reader.shapes == SHAPES
        assert all(torch.equal(found[name], expected[name]) for name in SHAPES), f"step {step}"


def child(work) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(code)


def wait_for_saves(heard: int, count: int) -> None:
    for _ in range(count):
        assert select.select([heard], [], [], PATIENCE_S)[0], "the child saves no more"
        assert os.read(heard, 1) == b".", "the child ended"


def main() -> int:
    directory, kills, draws = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    saving.FILE_BYTES = 64 << 10  # several files a checkpoint
    duration, in_the_middle = 0.1, 0
    for number in range(kills):
        heard, told = os.pipe()
        pid = child(lambda told=told: save_on_and_on(directory, told))
        os.close(told)
        wait_for_saves(heard, 1)
        if number == 0:
            started = time.perf_counter()
            wait_for_saves(heard, MEASURED)
            duration = (time.perf_counter() - started) / MEASURED
        time.sleep((draws.randrange(3) + (number + draws.random()) / kills) * duration)  # the instant itself
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(heard)
        in_the_middle += any(directory.glob("*.partial-*"))
        if os.waitpid(child(lambda: look(directory)), 0)[1]:
            return 1
    print(in_the_middle)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
