"""Plug-ins that break one thing on purpose, in a folder as a user would keep it: the controls of the learning tests."""

from __future__ import annotations

from pathlib import Path

SHUFFLED = '''
import numpy as np
from telescope.algorithms.grpo import GRPO

class Shuffled(GRPO):
    """GRPO whose advantages go to the wrong rollouts."""

    def advantages(self, rewards, groups, *, group_size):
        right = super().advantages(rewards, groups, group_size=group_size)
        return np.random.default_rng(int(rewards.sum() * 1000)).permutation(right)
'''
STALE = '''
from telescope.backends.fsdp import FSDP

class Stale(FSDP):
    """Trains as FSDP does, and publishes the weights it began with."""

    def build(self, job):
        backend = super().build(job)
        base = [(name, tensor.detach().clone()) for name, tensor in backend.weights()]
        backend.weights = lambda dtype=None: iter(base)
        return backend
'''
BREAKS = '''
from pathlib import Path
from telescope.backends.fsdp import FSDP

class Breaks(FSDP):
    """Trains as FSDP does; rank 1 fails in step 3, once, while the other waits for it."""

    def build(self, job):
        backend = super().build(job)
        train, broken = backend.train_step, Path(__file__).with_name("broken")

        def train_step(shard):
            if job.world.rank == 1 and shard.step == 3 and not broken.exists():
                broken.touch()
                raise RuntimeError("rank 1 breaks on purpose")
            return train(shard)

        backend.train_step = train_step
        return backend
'''


HANGS = '''
from pathlib import Path
from telescope.backends.fake import Fake

class Hangs(Fake):
    """Saves as Fake does, but for the second step, of which it never says how it went."""

    def build(self, job):
        backend = super().build(job)
        save, hanging = backend.save, Path(__file__).with_name("hanging")

        def never(step, folder, done, *, training_state):
            if step == 2:
                hanging.touch()
            else:
                save(step, folder, done, training_state=training_state)

        backend.save = never
        return backend
'''


def hanging(folder: Path) -> Path:
    """A `--config-dir` with `backend=hangs`; `plugins/backends/hanging` is there once it does."""
    (folder / "plugins" / "backends").mkdir(parents=True, exist_ok=True)
    (folder / "plugins" / "backends" / "hangs.py").write_text(HANGS)
    return folder


def breaking(folder: Path) -> Path:
    """A `--config-dir` with `backend=breaks`."""
    (folder / "plugins" / "backends").mkdir(parents=True, exist_ok=True)
    (folder / "plugins" / "backends" / "breaks.py").write_text(BREAKS)
    return folder


def controls(folder: Path) -> Path:
    """A `--config-dir` with `algorithm=shuffled` and `backend=stale`."""
    for kind, name, text in (("algorithms", "shuffled", SHUFFLED), ("backends", "stale", STALE)):
        (folder / "plugins" / kind).mkdir(parents=True, exist_ok=True)
        (folder / "plugins" / kind / f"{name}.py").write_text(text)
    return folder
