"""Containers by Apptainer (once Singularity), as clusters have it: an image's system, without root and without a daemon.

A container is a process tree below the worker's, in a user namespace: the worker's own groups limit it, and it ends with its
agent (agent.py), which is its first process. The image needs `python3`, 3.9 or newer with ctypes.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import ClassVar

from pydantic import Field, PrivateAttr

from telescope.environments.sandboxes import local, seccomp
from telescope.environments.sandboxes.base import Isolation, Limits, SandboxUnavailable, Wall

MISSING = (
    "Apptainer is not installed: https://apptainer.org/docs/admin/main/installation.html, or `module load apptainer` on a "
    "cluster; or take another sandbox.provider (bubblewrap, gvisor, docker, prime, modal, daytona, e2b)"
)


class Apptainer(local.LocalProvider):
    image: str = Field(default="python.sif", min_length=1)
    """File or folder with the guest's system (`apptainer pull python.sif docker://python:3.11-slim`)."""
    wall: ClassVar[Wall] = Wall.NAMESPACES
    remedy: ClassVar[str] = (
        "`apptainer exec --userns --containall IMAGE python3 -V` must work in a shell of the same user: it needs user "
        "namespaces, and for an image in one file squashfuse; otherwise take another sandbox.provider (bubblewrap, gvisor, "
        "docker, prime, modal, daytona, e2b)"
    )
    own_processes: ClassVar[int] = 16
    own_memory_mb: ClassVar[int] = 64  # what mounts the image

    _program: str = PrivateAttr(default="")
    _forbid: str = PrivateAttr(default_factory=lambda: (seccomp.program(platform.machine()) or b"").hex())

    async def find(self) -> None:
        self._program = local.program("apptainer", MISSING)
        if os.geteuid() == 0:
            raise SandboxUnavailable(
                "sandbox.provider=apptainer is for a worker that is not root: root outside would be root inside. Start the run "
                "as an ordinary user, or take another sandbox.provider (bubblewrap, gvisor, docker)"
            )
        if not Path(self.image).exists():
            raise SandboxUnavailable(
                f"sandbox.image={self.image} is not there: `apptainer pull {Path(self.image).name} docker://python:3.11-slim` "
                "makes one, and sandbox.image names it"
            )

    def held(self, limits: Limits) -> tuple[str, ...]:
        filtered = ("no deep system calls (seccomp)",) if self._forbid else ()
        return ("no network", "read-only system", f"{limits.disk_mb} MB a file", "no capabilities", *filtered)

    def isolation(self, limits: Limits) -> Isolation:
        found = super().isolation(limits)
        files = "the size of all files (its administrator's `sessiondir max size` does)"
        return Isolation(found.provider, found.wall, found.holds, (*found.lacks, files))

    def launch(self, limits: Limits, user: int | None, folder: Path) -> local.Launch:
        argv = [self._program, "--quiet", "exec", "--userns", "--containall", "--no-init", "--no-home", "--no-privs"]
        argv += ["--net", "--network=none", "--hostname=sandbox", "--pwd=/tmp"]
        argv += [str(Path(self.image).absolute()), "python3", "-I", "-S", "-c", local.agent_source(), "alone"]
        argv += [f"forbid={self._forbid}"] if self._forbid else []
        return local.Launch(argv, env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"})
