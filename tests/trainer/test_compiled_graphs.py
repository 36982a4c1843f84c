"""Where what torch.compile has made outlives a run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from telescope.trainer.compiled_graphs import GRAPHS, KERNELS, keep_graphs

ASKED = (
    "from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir; print(cache_dir(), triton_cache_dir(0))"
)


def torch_says(environ: dict[str, str]) -> list[str]:
    both = {**{name: value for name, value in os.environ.items() if name not in (GRAPHS, KERNELS)}, **environ}
    return subprocess.run(
        [sys.executable, "-c", ASKED], env=both, check=True, capture_output=True, text=True, timeout=120
    ).stdout.split()  # fmt: skip


def test_torch_finds_graphs_and_kernels_of_the_run_before_in_a_folder_of_the_users(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    folder = keep_graphs(environ)
    assert folder == tmp_path / ".cache" / "telescope" / "compiled"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert keep_graphs({"HOME": str(tmp_path)}) == folder  # the next run's
    assert torch_says(environ) == [str(folder), str(folder / "triton" / "0")]


def test_folders_that_the_user_has_named_stay(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": "/nowhere"}
    assert keep_graphs(cache) == tmp_path / "cache" / "telescope" / "compiled"
    named = {GRAPHS: str(tmp_path / "mine"), KERNELS: str(tmp_path / "kernels")}
    assert keep_graphs(given := dict(named)) == tmp_path / "mine"
    assert given == named
    kernels = {KERNELS: str(tmp_path / "kernels"), "HOME": str(tmp_path)}
    assert keep_graphs(kernels) is not None
    assert kernels[KERNELS] == str(tmp_path / "kernels")


def test_where_no_folder_can_be_made_torch_has_its_own(tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("not a folder")
    environ = {"HOME": str(tmp_path)}
    assert keep_graphs(environ) is None
    assert GRAPHS not in environ
