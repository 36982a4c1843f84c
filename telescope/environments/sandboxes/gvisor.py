"""gVisor: a kernel of its own in user space between guest and host. A far stronger wall than namespaces, at a higher cost.

Runs `runsc` without root or Docker, on a bundle (OCI runtime specification 1.0) that lies in the sandbox's own folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from telescope.environments.sandboxes import local
from telescope.environments.sandboxes.base import Limits, Wall

MISSING = (
    "gVisor is not installed: `apt-get install runsc` (Debian), or the binary from https://gvisor.dev/docs/user_guide/install/ "
    "on PATH; or take another sandbox.provider (bubblewrap, prime, modal, daytona, e2b)"
)


class GVisor(local.LocalProvider):
    python: str | None = None
    """Interpreter that guests find first on their PATH; null: the system's python3."""
    wall: ClassVar[Wall] = Wall.KERNEL
    remedy: ClassVar[str] = "It needs runsc on PATH and user namespaces"
    own_processes: ClassVar[int] = 400
    own_memory_mb: ClassVar[int] = 128  # the threads and the memory of its kernel and its file server

    _program: str = PrivateAttr(default="")
    _python: local.Python = PrivateAttr()

    async def find(self) -> None:
        self._program = local.program("runsc", MISSING)
        self._python = local.find_python(self.python)

    def held(self, limits: Limits) -> tuple[str, ...]:
        return ("no network", "read-only system", f"{limits.disk_mb} MB of files")

    def launch(self, limits: Limits, user: int | None, folder: Path) -> local.Launch:
        bundle, state = folder / "bundle", folder / "state"
        root = bundle / "rootfs"
        for path in (state, *(root / name for name in ("usr", "tmp", "dev", "proc"))):
            path.mkdir(parents=True)
        mounts = [_mount("/usr", "bind", "/usr", "ro", "rbind")]
        for name in ("bin", "sbin", "lib", "lib64"):
            host = Path("/", name)
            if host.is_symlink():
                (root / name).symlink_to(f"usr/{name}")
            elif host.is_dir():
                (root / name).mkdir()
                mounts.append(_mount(f"/{name}", "bind", f"/{name}", "ro", "rbind"))
        prefix = self._python.prefix
        if prefix is not None:
            (root / prefix.relative_to("/")).mkdir(parents=True, exist_ok=True)
            mounts.append(_mount(str(prefix), "bind", str(prefix), "ro", "rbind"))
        size = f"size={limits.disk_mb * 2**20}"
        mounts += [_mount("/proc", "proc", "proc"), _mount("/tmp", "tmpfs", "tmpfs", size, "mode=1777")]
        mounts.append(_mount("/dev", "tmpfs", "tmpfs", "size=65536", "mode=755"))
        (bundle / "config.json").write_text(json.dumps(_specification(self._argv(), mounts)))
        if user is not None:
            for path in (state, bundle, root, *root.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)
        argv = [*local.as_user(user), self._program, "--rootless", "--network=none", "--ignore-cgroups", "--root", str(state)]
        argv += ["run", "--bundle", str(bundle), folder.name.replace("_", "-")]
        path_variable = f"{Path(self._python.path).parent}:/usr/bin:/bin"
        return local.Launch(argv, env={"PATH": path_variable, "HOME": "/tmp", "LANG": "C.UTF-8"})

    def _argv(self) -> list[str]:
        return [self._python.path, "-I", "-S", "-c", local.agent_source(), "alone", "guest=65534"]


def _mount(where: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": where, "type": kind, "source": source, "options": ["nosuid", "nodev", *options]}


def _specification(argv: list[str], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    # Its kernel does not keep a process's descriptors from others of the same user: the agent is another user, and the
    # commands that it runs have lost these three.
    few = ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"]
    kinds = ("bounding", "effective", "inheritable", "permitted", "ambient")
    capabilities: dict[str, list[str]] = {kind: few if kind in kinds[:2] + kinds[3:4] else [] for kind in kinds}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": ["PATH=/usr/bin:/bin", "HOME=/tmp"],
            "cwd": "/tmp",
            "noNewPrivileges": True,
            "capabilities": capabilities,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
