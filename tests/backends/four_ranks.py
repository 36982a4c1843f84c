"""Four ranks over gloo in one process group of the system: a module imports everything once and forks them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from telescope.backends.common import ranks
from tests.backends.models import random_model

SHARES = ([0, 3], [1, 2, 4], [6, 7], [5])
"""Trajectories of four ranks that have rows of their own."""


def found_by(module: str, folder: Path, limit_s: float) -> Path:
    """Run `python -m module FOLDER MODEL`, and give the folder that it has filled. The model's sizes are such that four ranks
    can't share evenly, and its largest matrices such that moments of a byte are codes, in more blocks a row than one."""
    model = random_model(folder / "model", hidden_size=25, head_dim=10, intermediate_size=300, vocab_size=130)
    run_module(module, str(folder), model, limit_s=limit_s)
    return folder


def run_module(module: str, *arguments: str, limit_s: float) -> None:
    """`python -m module …`, with all that it starts gone after `limit_s`."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
        assert process.returncode == 0, said[-6000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def forked(run: Callable[[int], None]) -> int:
    """`run(rank)` on four ranks; the worst of their exit codes."""
    children = []
    for rank in range(4):
        child = os.fork()
        if child == 0:
            os._exit(_guarded(run, rank))
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _guarded(run: Callable[[int], None], rank: int) -> int:
    try:
        run(rank)
    except BaseException:  # noqa: BLE001 the edge of a forked process: it must not return into its parent's code
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def meet(file: Path, rank: int, size: int) -> None:
    """Once for all backends of a world: each of them would meet anew."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    ranks.join, ranks.leave = (lambda *_, **__: None), (lambda: None)  # type: ignore[assignment]
