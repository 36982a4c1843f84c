"""Control groups of local sandboxes: memory, processes and processor time of all of a guest's processes together.

Owns finding a group below which this process may make others (version 2, or the three controllers of version 1), one group a
sandbox, and its removal. Where none can be written, sandboxes go without, and their isolation says so.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from dataclasses import dataclass, field
from pathlib import Path

from telescope.environments.sandboxes.base import Limits

_PERIOD_US = 100_000
_NAME = "telescope-"
_V1 = ("memory", "pids", "cpu")


@dataclass(frozen=True)
class Group:
    """The folders of one sandbox's group: one in version 2, one a controller in version 1."""

    folders: tuple[Path, ...]

    def add(self, pid: int) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def pids(self) -> set[int]:
        found: set[int] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
        return found

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed for memory in it."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    fields = dict(line.split(maxsplit=1) for line in (folder / name).read_text().splitlines())
                    if int(fields.get("oom_kill", "0")):
                        return True
        return False

    def remove(self) -> bool:
        """False while a process of it is not gone yet."""
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


@dataclass
class Cgroups:
    """Makes groups below `parents`, one folder in version 2 or one for each controller in version 1."""

    version: int
    parents: tuple[Path, ...]
    _made: int = 0
    _left: list[Group] = field(default_factory=list)

    def make(self, limits: Limits, own_processes: int = 4, own_memory_mb: int = 16) -> Group:
        """A group with its limits set; what the sandbox itself needs comes on top.

        Raises `OSError`, and leaves nothing behind then."""
        self.sweep()
        self._made += 1
        group = Group(tuple(parent / f"sandbox-{self._made}" for parent in self.parents))
        try:
            for folder in group.folders:
                folder.mkdir()
                for name, value in self._files(folder, limits, own_processes, own_memory_mb).items():
                    (folder / name).write_text(value)
        except OSError:
            group.remove()
            raise
        return group

    def forget(self, group: Group) -> None:
        """Kill what is in it and remove it, now or at the next `sweep`: the kernel keeps a group until its last process is."""
        group.kill()
        self._left.append(group)
        self.sweep()

    def sweep(self) -> bool:
        """Remove the groups that have become empty. True: none is left."""
        self._left = [group for group in self._left if not group.remove()]
        return not self._left

    def close(self) -> None:
        self.sweep()
        for parent in self.parents:
            with contextlib.suppress(OSError):
                parent.rmdir()

    def _files(self, folder: Path, limits: Limits, own_processes: int, own_memory_mb: int) -> dict[str, str]:
        memory, quota = str((limits.memory_mb + own_memory_mb) * 2**20), int(limits.cpus * _PERIOD_US)
        most = str(limits.processes + own_processes)
        if self.version == 2:
            wanted = {"memory.max": memory, "memory.swap.max": "0", "pids.max": most, "cpu.max": f"{quota} {_PERIOD_US}"}
            return {name: value for name, value in wanted.items() if (folder / name).exists()}
        kind = folder.parent.parent.name if folder.parent.name.startswith("telescope") else folder.parent.name
        return {
            "memory": {"memory.limit_in_bytes": memory},
            "pids": {"pids.max": most},
            "cpu": {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota)},
        }[kind]


def find(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Cgroups | None:
    """A place for groups that this process may write, or None. Makes a folder `telescope-<pid>-<random>` in it, whose groups
    are the caller's alone: one process may have several environments with sandboxes."""
    name = f"{_NAME}{os.getpid()}-{secrets.token_hex(4)}"
    if (root / "cgroup.controllers").is_file():
        lines = own.read_text().splitlines() if own.is_file() else []
        mine = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
        for place in dict.fromkeys((root / mine, (root / mine).parent, root)):
            if place.is_relative_to(root) and _delegated(place / name):
                _sweep(place)
                return Cgroups(2, (place / name,))
        return None
    parents = tuple(root / kind / name for kind in _V1)
    try:
        for parent in parents:
            if not parent.parent.is_dir():
                return None
            _sweep(parent.parent)
            parent.mkdir(exist_ok=True)
    except OSError:
        for parent in parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        return None
    return Cgroups(1, parents)


def _sweep(place: Path) -> None:
    """Remove the groups of workers that were killed: those that name a process which is no more."""
    for folder in place.glob(f"{_NAME}*"):
        pid = folder.name.removeprefix(_NAME).partition("-")[0]
        if not pid.isdigit() or Path("/proc", pid).exists():
            continue
        for below in (*folder.glob("sandbox-*"), folder):
            with contextlib.suppress(OSError):
                below.rmdir()


def _delegated(folder: Path) -> bool:
    """Whether a group can be made there whose children have limits of memory and processes."""
    try:
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return False
    with contextlib.suppress(OSError):
        (folder / "cgroup.subtree_control").write_text("+cpu")
    return True
