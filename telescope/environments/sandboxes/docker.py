"""Containers by Docker or Podman: the image's own system, namespaces of this machine's kernel, limits by its control groups.

The agent (agent.py) is the container's first process, so the image needs `python3`, 3.9 or newer with ctypes, and nothing else.
A container is not a child of the worker's: it has a name that says whose it is, by which it is removed in the end, and by the
next worker that starts if its own was killed. An image is never pulled here: a run would wait for it without saying so.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import resource
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import PrivateAttr

from telescope.environments.sandboxes import local, seccomp
from telescope.environments.sandboxes.base import Limits, Outcome, SandboxError, SandboxUnavailable, Wall
from telescope.environments.sandboxes.cgroups import Cgroups
from telescope.environments.sandboxes.remote import here

CALL_S = 60.0
"""How long Docker or Podman may take for anything but a start."""
MISSING = (
    "neither Podman nor Docker is installed: `apt-get install podman` (Debian, Ubuntu), `dnf install podman` (Fedora, RHEL), "
    "or https://docs.docker.com/engine/install/; or take another sandbox.provider (bubblewrap, gvisor, prime, modal, daytona, "
    "e2b)"
)
LABEL = "telescope-sandbox"
_PROCESSES = 32768
_GONE = ("no such container", "no container with")
GUEST = 65534
_ASK_FOR_LIMITS = """
def read(*paths):
    for path in paths:
        try:
            return open("/sys/fs/cgroup/" + path).read().strip()
        except OSError:
            pass
open("/tmp/.written", "w").close()
print(read("memory.max", "memory/memory.limit_in_bytes"), read("pids.max", "pids/pids.max"))
print(42)
"""


class Docker(local.LocalProvider):
    image: str = "python:3.11-slim"
    """Image that holds the guest's system; it must be there already (`docker pull`) and have python3."""
    program: Literal["auto", "docker", "podman"] = "auto"
    """What runs the containers; auto: podman where it is installed, else docker."""
    options: tuple[str, ...] = ()
    """Further words for `docker run`, e.g. `[--runtime=runsc]`."""
    wall: ClassVar[Wall] = Wall.NAMESPACES
    one_user_each: ClassVar[bool] = False
    remedy: ClassVar[str] = (
        "`docker run --rm IMAGE true` (or podman) must work in a shell of the same user, and the image needs python3 with "
        "ctypes; otherwise take another sandbox.provider (bubblewrap, gvisor, prime, modal, daytona, e2b)"
    )

    _program: str = PrivateAttr(default="")
    _environment: dict[str, str] = PrivateAttr(default_factory=dict)
    """The image's own variables, its PATH among them."""
    _limits_hold: bool = PrivateAttr(default=True)
    """Whether the limits of all its processes together were found inside."""
    _name: str = PrivateAttr(default_factory=lambda: f"{_name_of(os.getpid())}-{secrets.token_hex(4)}")
    """What the names of its containers begin with."""
    _forbid: str = PrivateAttr(default_factory=lambda: (seccomp.program(platform.machine()) or b"").hex())

    async def find(self) -> None:
        wanted = ("podman", "docker") if self.program == "auto" else (self.program,)
        found = next(filter(None, map(shutil.which, wanted)), None)
        if found is None:
            raise SandboxUnavailable(MISSING if self.program == "auto" else f"sandbox.program={self.program}: {MISSING}")
        self._program = found
        try:
            await self._sweep(is_left_behind)
            code, said = await self._call("image", "inspect", "--format", "{{json .Config.Env}}", self.image)
        except SandboxError as error:
            raise SandboxUnavailable(f"sandbox.provider=docker does not work here: {error}. {self.remedy}") from error
        if code:
            raise SandboxUnavailable(
                f"sandbox.image={self.image} is not on this machine, and a run pulls none by itself: "
                f"`{Path(found).name} pull {self.image}` ({_last_line(said)})"
            )
        given = dict(pair.partition("=")[::2] for pair in json.loads(said) or ())
        self._environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"} | given | {"HOME": "/tmp"}

    def groups(self) -> Cgroups | None:
        """None of ours: the container has its own."""
        return None

    def held(self, limits: Limits) -> tuple[str, ...]:
        filtered = ("no deep system calls (seccomp)",) if self._forbid else ()
        return ("no network", "read-only system", f"{limits.disk_mb} MB of files", "no capabilities", *filtered)

    def launch(self, limits: Limits, user: int | None, folder: Path) -> local.Launch:
        name = f"{self._name}-{secrets.token_hex(4)}"
        disk = limits.disk_mb * 2**20
        argv = [self._program, "run", "--interactive", "--rm", "--pull=never", f"--name={name}", f"--label={LABEL}"]
        argv += ["--log-driver=none", "--stop-timeout=0"]  # what goes through its standard output is not a log
        argv += ["--network=none", "--hostname=sandbox", "--workdir=/tmp", f"--user={GUEST}:{GUEST}"]
        argv += ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only"]
        argv += [f"--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size={disk}", f"--shm-size={max(disk // 4, 4096)}"]
        memory_mb = limits.memory_mb + self.own_memory_mb
        argv += [f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m"]  # both together: no swap
        argv += [f"--pids-limit={limits.processes + self.own_processes}", f"--cpus={limits.cpus:g}"]
        argv += [f"--ulimit=nofile={limits.open_files}:{limits.open_files}"]
        if Path(self._program).name == "podman":
            argv += ["--read-only-tmpfs=false"]  # else /run and /var/tmp are memory without a limit
            argv += [f"--ulimit=nproc={_most_processes()}"]  # else it asks for more than this process may have
        argv += [*self.options, "--entrypoint=python3", self.image, "-I", "-S", "-c", local.agent_source(), "alone"]
        argv += [f"forbid={self._forbid}"] if self._forbid else []
        return local.Launch(
            argv,
            own_env=_own_environment(),
            env=self._environment,
            counted=self._limits_hold,
            one_user=self.one_user_each,
            remove=lambda: self._remove(name),
        )

    async def probe(self, sandbox: local.LocalSandbox, limits: Limits) -> Outcome:
        """Also looks, from inside, whether the limits that were asked for are there: without control groups they are not."""
        outcome = await sandbox.exec(["python3", "-I", "-S", "-c", _ASK_FOR_LIMITS])
        found, _, rest = outcome.text.partition("\n")
        wanted = f"{(limits.memory_mb + self.own_memory_mb) * 2**20} {limits.processes + self.own_processes}"
        self._limits_hold = found == wanted
        return replace(outcome, stdout=rest.encode())

    @property
    def limits_together(self) -> str:
        return "the container's cgroup" if self._limits_hold else ""

    async def close(self) -> None:
        await super().close()
        if self._program:
            with contextlib.suppress(SandboxError):  # what is left then, the next worker removes
                await self._sweep(lambda name: name.startswith(f"{self._name}-"))

    async def _sweep(self, is_left: Callable[[str], bool]) -> None:
        _, said = await self._call("ps", "--all", f"--filter=label={LABEL}", "--format={{.Names}}")
        await asyncio.gather(*(self._remove(name) for name in said.split() if is_left(name)))

    async def _remove(self, name: str) -> None:
        deadline = time.monotonic() + CALL_S
        while True:
            code, said = await self._call("rm", "--force", name)
            if not code or any(words in said.lower() for words in _GONE):
                return
            if time.monotonic() > deadline:
                raise SandboxError(f"the container {name} can't be removed: {_last_line(said)}")
            await asyncio.sleep(0.05)  # one that has just ended by itself is being removed already

    async def _call(self, *words: str) -> tuple[int, str]:
        """Exit code and output, or complaint where it failed, of a call that runs no guest."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._program, *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=_own_environment()
        )
        try:
            async with asyncio.timeout(CALL_S):
                stdout, stderr = await process.communicate()
        except TimeoutError as error:
            raise SandboxError(f"`{Path(self._program).name} {words[0]}` did not answer within {CALL_S:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
        code = process.returncode or 0
        return code, (stderr if code else stdout).decode("utf-8", "replace")


def _own_environment() -> dict[str, str]:
    """What Docker and Podman find their storage and their daemon by; none of it reaches a container."""
    known = ("PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    return {
        name: value
        for name, value in os.environ.items()
        if name in known or name.startswith(("DOCKER_", "CONTAINER_", "CONTAINERS_"))
    }


def _name_of(pid: int) -> str:
    """What the names of a worker's containers begin with: the machine, the process and when that was started."""
    return f"{LABEL}-{_machine()}-{pid}-{_started(pid)}"


def _machine() -> str:
    """Of the processes that one table of them holds, e.g. `08f1c2aa`."""
    return hashlib.blake2b(here().encode(), digest_size=4).hexdigest()


def _started(pid: int) -> str:
    """Clock ticks from the machine's start to the process's, e.g. `48211`; 0 where there is none of that number."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"


def is_left_behind(name: str) -> bool:
    """Whether a container's name is that of a worker of this machine that is no more."""
    machine, pid, started, *rest = [*name.removeprefix(f"{LABEL}-").split("-"), "", "", ""]
    return machine == _machine() and pid.isdigit() and started != _started(int(pid)) and bool(rest)


def _most_processes() -> str:
    """Soft and hard limit for a user, of which all sandboxes have the same: `32768:32768`, or what this process may hand on."""
    mine = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = _PROCESSES if mine == resource.RLIM_INFINITY else min(mine, _PROCESSES)
    return f"{most}:{most}"


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["it said nothing"])[-1]
