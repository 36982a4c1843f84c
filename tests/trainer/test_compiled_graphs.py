"""Where what torch.compile has made outlives a run."""

from __future__ import annotations

import errno
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from telescope.trainer.compiled_graphs import GRAPHS, KERNELS, keep_graphs

ASKED = (
    "from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir; print(cache_dir(), triton_cache_dir(0))"
)


SYSTEM = "-".join(part for part in (platform.machine(), *platform.libc_ver()) if part)


def torch_says(environ: dict[str, str]) -> list[str]:
    both = {**{name: value for name, value in os.environ.items() if name not in (GRAPHS, KERNELS)}, **environ}
    return subprocess.run(
        [sys.executable, "-c", ASKED], env=both, check=True, capture_output=True, text=True, timeout=120
    ).stdout.split()  # fmt: skip


def test_torch_finds_graphs_and_kernels_of_the_run_before_in_a_folder_of_the_users(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    folder = keep_graphs(environ)
    assert folder == tmp_path / ".cache" / "telescope" / "compiled" / SYSTEM
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.parents[:2])] == [0o700] * 3
    assert list(folder.iterdir()) == []
    assert keep_graphs({"HOME": str(tmp_path)}) == folder  # the next run's
    assert torch_says(environ) == [str(folder), str(folder / "triton" / "0")]


def test_folders_that_the_user_has_named_stay(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": "/nowhere"}
    assert keep_graphs(cache) == tmp_path / "cache" / "telescope" / "compiled" / SYSTEM
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


def test_a_folder_that_can_not_be_written_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("telescope.trainer.compiled_graphs.tempfile.TemporaryFile", refuse)
    assert keep_graphs(environ := {"HOME": str(tmp_path)}) is None
    assert GRAPHS not in environ


@pytest.mark.parametrize("place", ["telescope", "telescope/compiled"])
@pytest.mark.parametrize("mode", [0o777, 0o770, None])
def test_code_is_loaded_from_no_folder_that_others_can_write(place: str, mode: int | None, tmp_path: Path) -> None:
    """None: a link, which may lead anywhere."""
    folder = tmp_path / place
    folder.parent.mkdir(exist_ok=True, mode=0o755)
    if mode is None:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(mode)
    assert keep_graphs({"XDG_CACHE_HOME": str(tmp_path)}) is None


def test_code_is_loaded_from_no_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telescope.trainer.compiled_graphs.os.geteuid", lambda: os.getuid() + 1)
    assert keep_graphs({"XDG_CACHE_HOME": str(tmp_path)}) is None
