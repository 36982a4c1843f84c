"""Bubblewrap: namespaces of this machine's kernel, no root needed. The default.

Every line of the command has a reason; docs/sandboxes.md lists the attacks that each of them meets.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import ClassVar

from pydantic import PrivateAttr

from telescope.environments.sandboxes import local, seccomp
from telescope.environments.sandboxes.base import Limits, Wall

MISSING = (
    "bubblewrap is not installed: `apt-get install bubblewrap` (Debian, Ubuntu), `dnf install bubblewrap` (Fedora, RHEL), "
    "0.8 or newer; or take another sandbox.provider (gvisor, prime, modal, daytona, e2b)"
)


class Bubblewrap(local.LocalProvider):
    python: str | None = None
    """Interpreter that guests find first on their PATH; null: the system's python3."""
    wall: ClassVar[Wall] = Wall.NAMESPACES
    remedy: ClassVar[str] = (
        "It needs bubblewrap 0.8 or newer and user namespaces: sysctl kernel.unprivileged_userns_clone=1 (old Debian), "
        "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04); in Docker --security-opt seccomp=unconfined. Otherwise "
        "take another sandbox.provider (gvisor, prime, modal, daytona, e2b)"
    )

    _program: str = PrivateAttr(default="")
    _python: local.Python = PrivateAttr()
    _filter: bytes | None = PrivateAttr(default_factory=lambda: seccomp.program(platform.machine()))

    async def find(self) -> None:
        self._program = local.program("bwrap", MISSING)
        self._python = local.find_python(self.python)

    def held(self, limits: Limits) -> tuple[str, ...]:
        filtered = ("no deep system calls (seccomp)",) if self._filter else ()
        return ("no network", "read-only system", f"{limits.disk_mb} MB of files", *filtered)

    def launch(self, limits: Limits, user: int | None, folder: Path) -> local.Launch:
        python, disk = self._python, limits.disk_mb * 2**20
        argv = [*local.as_user(user), self._program]
        # --unshare-all only tries a user namespace, and --disable-userns wants it asked for.
        # The agent is the first process: bubblewrap's own would hold the agent's line under the guest's user, and let the guest
        # write into its memory.
        argv += ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"]
        argv += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp"]
        argv += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path("/", name).is_symlink():
                argv += ["--symlink", f"usr/{name}", f"/{name}"]
            elif Path("/", name).is_dir():
                argv += ["--ro-bind", f"/{name}", f"/{name}"]
        if python.prefix is not None:
            argv += ["--ro-bind", str(python.prefix), str(python.prefix)]
        # Both /dev and the root are file systems in memory without a limit: nothing may be written there.
        argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(max(disk // 4, 4096)), "--tmpfs", "/dev/shm"]
        argv += ["--remount-ro", "/dev", "--size", str(disk), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
        argv += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
        fds: tuple[int, ...] = ()
        if self._filter is not None:
            fds = (_readable(self._filter),)
            argv += ["--seccomp", str(fds[0])]
        argv += [python.path, "-I", "-S", "-c", local.agent_source(), "alone"]
        path = f"{Path(python.path).parent}:/usr/bin:/bin"
        return local.Launch(argv, fds=fds, env={"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8"})


def _readable(content: bytes) -> int:
    """A descriptor from which `content` can be read; short enough for a pipe to hold."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    return reading
