"""A sandbox on this machine: one process tree with an agent in it (agent.py), spoken to over its standard input and output.

Owns the parent's half: launching, frames, the parent's own clock and byte counts, killing, what is cleaned up. Local providers
differ by their command line, and containers by who limits and removes them. Trusts nothing that comes out of a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import math
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from telescope.environments.sandboxes import agent, cgroups
from telescope.environments.sandboxes.base import (
    Ending,
    FileRefused,
    Isolation,
    Limits,
    Outcome,
    Provider,
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    Wall,
    check_size,
)
from telescope.runlog import temporary

START_S = 60.0
"""How long a sandbox may take until its agent says hello; on a crowded machine gVisor has been seen to need ten seconds."""
_GRACE_S = 10.0
"""How long beyond a command's own limit the parent waits for the agent's word before it kills the sandbox."""
_TRANSFER_S = 60.0
_HEADER_BYTES = 65536
_FIRST_UID, _UIDS = 60578, 606
"""User ids that systemd's table keeps unused. Each sandbox gets the next, so that limits by user bind one sandbox alone."""
_REFUSED = "the agent answered what it was not asked"

FOLDER = f"{temporary.PREFIX}sandboxes-"
"""Start of the name of a worker's folder of sandboxes."""


class _Gone(Exception):
    """The sandbox has ended by itself, or speaks nonsense: either way its guest has reached further than it may."""


@dataclass
class Launch:
    """How one sandbox is started: the command, descriptors it inherits, and what is to be removed afterwards."""

    argv: list[str]
    home: str = "/tmp"
    """The folder that relative paths and commands start from, as the agent sees it."""
    fds: tuple[int, ...] = ()
    folder: Path | None = None
    on_end: Callable[[], None] = lambda: None
    remove: Callable[[], Awaitable[None]] | None = None
    """Ends and removes what is not a child of ours: a container. Raises `SandboxError` where it is still there then."""
    one_user: bool = True
    """Whether the kernel counts its user's processes apart from other sandboxes'."""
    counted: bool = False
    """Whether what launches it limits memory and processes of all its processes together."""
    own_env: Mapping[str, str] = field(default_factory=lambda: {"PATH": os.environ.get("PATH", "/usr/bin:/bin")})
    """What the launched program itself finds in its environment."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What commands find in their environment, before what `exec` adds."""


@dataclass(frozen=True)
class Running:
    """A launched process and the two directions of the line to its agent.

    The line is a socket and no pair of pipes: a pipe could be opened anew through /proc by a guest that may look there.
    """

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class LocalSandbox(Sandbox):
    def __init__(self, running: Running, launch: Launch, limits: Limits, group: cgroups.Group | None) -> None:
        self._running = running
        self._process = running.process
        self._launch = launch
        self._limits = limits
        self._group = group
        self._counted = group is not None or launch.counted
        self._turn = asyncio.Lock()
        self._complaint = bytearray()
        self._draining = asyncio.ensure_future(self._drain())
        self._over = False
        self._begun = False
        """Whether a command was ever begun: before, whatever goes wrong is not the guest's doing."""
        self._taken_down = False

    async def hello(self) -> None:
        """Wait until the agent is there. Raises `SandboxError` with what the launcher complained about."""
        try:
            async with asyncio.timeout(START_S):
                await self._frame()
        except (TimeoutError, _Gone) as error:
            kind = f"no sandbox after {START_S:g} s" if isinstance(error, TimeoutError) else "no sandbox"
            await self.delete()
            said = self._complaint.decode("utf-8", "replace").strip()
            raise SandboxError(f"{kind}: {said or 'its process ended'} ({Path(self._launch.argv[0]).name})") from error

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        limits = self._limits
        limit_s = min(timeout_s or limits.time_s, limits.time_s)
        request = {
            "op": "exec",
            "argv": list(argv),
            "cwd": self._path(cwd or ""),
            "env": {**self._launch.env, **(env or {})},
            "timeout_s": limit_s,
            "output": limits.output_kb * 1024,
            "rlimits": rlimits(limits, limit_s, counted=self._counted, by_user=self._launch.one_user),
        }
        started = time.monotonic()
        if self._taken_down:
            return Outcome(137, b"", b"", Ending.DIED, 0.0)
        self._begun = True
        try:
            header, bodies = await self._ask(request, stdin, limit_s + _GRACE_S, 2, limits.output_kb * 1024)
            outcome = _outcome(header, bodies, time.monotonic() - started)
        except (TimeoutError, _Gone):  # its agent is stopped, starved, killed or fooled by its own guest
            self._taken_down = True
            await self.delete()
            return Outcome(137, b"", bytes(self._complaint), Ending.DIED, time.monotonic() - started)
        return outcome

    async def upload(self, path: str, content: bytes) -> None:
        check_size(path, content, self._limits)
        header, _ = await self._transfer({"op": "put", "path": self._path(path)}, content, 0)
        if not header.get("ok"):
            raise FileRefused(f"upload of {path}: {header.get('error')}")

    async def download(self, path: str) -> bytes:
        most = self._limits.transfer_mb * 2**20
        header, bodies = await self._transfer({"op": "get", "path": self._path(path), "most": most}, b"", 1)
        if not header.get("ok"):
            raise FileRefused(f"download of {path}: {header.get('error')}")
        if len(bodies[0]) > most:
            raise FileRefused(f"download of {path}: it is larger than transfer_mb={self._limits.transfer_mb}")
        return bodies[0]

    async def delete(self) -> None:
        if self._over:
            return
        self._over = True
        try:
            if self._launch.remove is not None:
                await self._launch.remove()
            self._running.writer.close()
            if self._group is not None:
                self._group.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()
                await self._draining
        except TimeoutError:
            self._draining.cancel()
        finally:
            self._launch.on_end()
            if self._launch.folder is not None:
                await asyncio.to_thread(shutil.rmtree, self._launch.folder, ignore_errors=True)

    async def _transfer(self, request: Mapping[str, Any], body: bytes, answers: int) -> tuple[dict[str, Any], list[bytes]]:
        what = f"{request['op']} of {request['path']}"
        if self._taken_down:
            raise FileRefused(f"{what}: the guest took its sandbox down")
        try:
            return await self._ask(request, body, _TRANSFER_S, answers, self._limits.transfer_mb * 2**20 + 1)
        except (TimeoutError, _Gone) as error:
            self._taken_down = self._begun
            await self.delete()
            if self._begun:
                raise FileRefused(f"{what}: the guest took its sandbox down") from error
            raise SandboxError(f"{what}: the sandbox has died") from error

    async def _ask(
        self, request: Mapping[str, Any], body: bytes, limit_s: float, answers: int, most: int
    ) -> tuple[dict[str, Any], list[bytes]]:
        if self._over:
            raise SandboxError("this sandbox is over: it was deleted")
        async with self._turn:
            try:
                async with asyncio.timeout(limit_s):
                    head = json.dumps({**request, "sizes": [len(body)]}).encode()
                    await self._write(struct.pack(">I", len(head)) + head + body)
                    return await self._frame(answers, most)
            except asyncio.CancelledError:
                await asyncio.shield(self.delete())  # half a frame is in the pipe: nothing can be asked any more
                raise

    async def _write(self, frame: bytes) -> None:
        try:
            self._running.writer.write(frame)
            await self._running.writer.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _Gone from error

    async def _frame(self, answers: int = 0, most: int = 0) -> tuple[dict[str, Any], list[bytes]]:
        """One answer. Raises `_Gone` where it ends early, or claims more bodies or bytes than were asked for."""
        stdout = self._running.reader
        try:
            (length,) = struct.unpack(">I", await stdout.readexactly(4))
            if length > _HEADER_BYTES:
                raise _Gone(_REFUSED)
            header = json.loads(await stdout.readexactly(length))
            sizes = header["sizes"]
            if len(sizes) > answers or not all(type(size) is int and 0 <= size <= most for size in sizes):
                raise _Gone(_REFUSED)
            return header, [await stdout.readexactly(size) for size in sizes]
        except (asyncio.IncompleteReadError, ConnectionResetError, ValueError, KeyError, TypeError) as error:
            raise _Gone(_REFUSED) from error

    async def _drain(self) -> None:
        """Reads the launcher's own complaints, so that it never blocks; keeps the first of them."""
        stderr = self._process.stderr
        assert stderr is not None
        while part := await stderr.read(4096):
            self._complaint += part[: 4096 - len(self._complaint)]

    def _path(self, path: str) -> str:
        return os.path.join(self._launch.home, path)


def _outcome(header: Mapping[str, Any], bodies: Sequence[bytes], seconds: float) -> Outcome:
    if not header.get("ok"):
        raise SandboxError(f"exec: {header.get('error')}")
    try:
        return Outcome(int(header["code"]), bodies[0], bodies[1], Ending(header["ending"]), seconds)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise _Gone(_REFUSED) from error


def rlimits(limits: Limits, limit_s: float, *, counted: bool, by_user: bool = True) -> dict[str, int]:
    """What binds each process of a command. Where a group counts memory, an address space may be twice as large: what is
    reserved is not used. `by_user`: whether the kernel's count of a user's processes is that of one sandbox."""
    most = {
        "CPU": math.ceil(limit_s * max(limits.cpus, 1.0)) + 1,
        "AS": limits.memory_mb * 2**20 * (2 if counted else 1),
        "FSIZE": limits.disk_mb * 2**20,
        "NOFILE": limits.open_files,
        "CORE": 0,
    }
    if by_user and (_counts_by_namespace() or os.geteuid() == 0):
        most["NPROC"] = limits.processes + 2  # the agent and what started it count too
    return most


def _counts_by_namespace() -> bool:
    """From Linux 5.14 on RLIMIT_NPROC counts a user's processes in its own namespace; before, all that it has anywhere."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(itertools.takewhile(str.isdigit, minor)))) >= (5, 14)


class LocalProvider(Provider):
    """Launches sandboxes, each under a user of its own where this process is root, in a group where one can be made."""

    wall: ClassVar[Wall]
    remedy: ClassVar[str] = ""
    """What to do where it does not work."""
    one_user_each: ClassVar[bool] = True
    """Whether the kernel counts the processes of each sandbox's user apart from others'."""
    own_processes: ClassVar[int] = 4
    own_memory_mb: ClassVar[int] = 16
    """What a sandbox needs for itself, on top of what its guest may use."""

    _cgroups: cgroups.Cgroups | None = PrivateAttr(default=None)
    _sandboxes: set[LocalSandbox] = PrivateAttr(default_factory=set)
    _next_user: int = PrivateAttr(default_factory=lambda: secrets.randbelow(_UIDS))  # other workers' guests have users too
    _folder: Path | None = PrivateAttr(default=None)

    @abstractmethod
    async def find(self) -> None:
        """Look for what it needs on this machine. Raises `SandboxUnavailable` with the line that installs it."""

    @abstractmethod
    def launch(self, limits: Limits, user: int | None, folder: Path) -> Launch:
        """The command line of one sandbox. `user` is None where this process can't change it."""

    @abstractmethod
    def held(self, limits: Limits) -> tuple[str, ...]:
        """What this kind of sandbox holds besides what rlimits and groups do."""

    async def start(self, limits: Limits) -> Isolation:
        if limits.network:
            raise SandboxUnavailable(
                f"sandbox.limits.network=true with provider={self.name}: a local sandbox would share this machine's network, "
                "with the servers on its loopback. Take a remote provider (prime, modal, daytona, e2b), or leave it off"
            )
        await self.find()
        self._folder = temporary.make(FOLDER)
        self._folder.chmod(0o711)  # a sandbox's user must reach its own folder below
        self._cgroups = self.groups()
        try:
            sandbox = await self.create(limits)
            try:
                outcome = await self.probe(sandbox, limits)
            finally:
                await sandbox.delete()
        except SandboxError as error:
            await self.close()
            raise SandboxUnavailable(f"sandbox.provider={self.name} does not work here: {error}. {self.remedy}") from error
        if outcome.stdout != b"42\n":
            await self.close()
            raise SandboxUnavailable(
                f"sandbox.provider={self.name} runs no python3 here: {outcome.ending}, exit code {outcome.exit_code}, "
                f"{outcome.complaint}. {self.remedy}"
            )
        return self.isolation(limits)

    def groups(self) -> cgroups.Cgroups | None:
        """Where each sandbox gets a group of its own, if it can have one."""
        return cgroups.find()

    async def probe(self, sandbox: LocalSandbox, limits: Limits) -> Outcome:
        """The first command, which prints 42."""
        return await sandbox.exec(["python3", "-I", "-S", "-c", "print(6 * 7)"])

    @property
    def limits_together(self) -> str:
        """What limits all processes of a sandbox together, in a word; empty where nothing does."""
        return "cgroup" if self._cgroups is not None else ""

    def isolation(self, limits: Limits) -> Isolation:
        holds = [*self.held(limits), f"{limits.time_s:g} s a command", f"{limits.output_kb} kB of output"]
        lacks = []
        if self.limits_together:
            held = f"{limits.memory_mb} MB, {limits.processes} processes and {limits.cpus:g} cores in all"
            holds.append(f"{held} ({self.limits_together})")
        else:
            holds.append(f"{limits.memory_mb} MB a process")
            lacks += ["memory of all processes together (no cgroup can be written)", "cores"]
            if "NPROC" in rlimits(limits, 1.0, counted=False, by_user=self.one_user_each):
                holds.append(f"{limits.processes} processes")
            else:
                lacks.append("the number of processes (Linux before 5.14, and not root)")
        return Isolation(self.name, self.wall, tuple(holds), tuple(lacks))

    async def create(self, limits: Limits) -> LocalSandbox:
        if self._folder is None:
            raise SandboxError(f"the provider {self.name} was not started")
        user = self._user()
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        group = None
        try:
            if user is not None:
                os.chown(folder, user, user)
            group = self._cgroups.make(limits, self.own_processes, self.own_memory_mb) if self._cgroups is not None else None
            launch = self.launch(limits, user, folder)
            running = await self._spawn(launch, group, folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if group is not None and self._cgroups is not None:
                self._cgroups.forget(group)
            raise SandboxError(f"no sandbox: {error}") from error
        launch.folder = folder
        sandbox = LocalSandbox(running, launch, limits, group)
        self._sandboxes.add(sandbox)
        launch.on_end = lambda: self._ended(sandbox, group)
        try:
            await sandbox.hello()
        except asyncio.CancelledError:
            await asyncio.shield(sandbox.delete())
            raise
        return sandbox

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.delete() for sandbox in list(self._sandboxes)))
        if self._cgroups is not None:
            deadline = time.monotonic() + _GRACE_S
            while not self._cgroups.sweep() and time.monotonic() < deadline:
                await asyncio.sleep(0.02)  # the kernel tells nobody when a group's last process is reaped
            self._cgroups.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _ended(self, sandbox: LocalSandbox, group: cgroups.Group | None) -> None:
        self._sandboxes.discard(sandbox)
        if group is not None and self._cgroups is not None:
            self._cgroups.forget(group)

    def _user(self) -> int | None:
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            return None
        self._next_user = (self._next_user + 1) % _UIDS
        return _FIRST_UID + self._next_user

    async def _spawn(self, launch: Launch, group: cgroups.Group | None, folder: Path) -> Running:
        argv = launch.argv
        if group is not None:  # nothing runs before it is in its group
            argv = ["/bin/sh", "-c", 'read -r go && exec "$@"', "sh", *argv]
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=asyncio.subprocess.PIPE,
                env=dict(launch.own_env),
                cwd=folder,  # where Podman's monitor notes that memory ran out
                pass_fds=launch.fds,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in launch.fds:
                os.close(fd)
        reader, writer = await asyncio.open_connection(sock=ours)
        if group is not None:
            try:
                group.add(process.pid)
            except OSError:
                writer.close()
                process.kill()
                await process.wait()
                raise
            writer.write(b"go\n")
        return Running(process, reader, writer)


def program(name: str, missing: str) -> str:
    """The path of a program. Raises `SandboxUnavailable` with the sentence `missing`."""
    found = shutil.which(name)
    if found is None:
        raise SandboxUnavailable(missing)
    return found


def as_user(user: int | None) -> list[str]:
    """The prefix that changes the user of a command, groups and all."""
    return [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]


def agent_source() -> str:
    return inspect.getsource(agent)


@dataclass(frozen=True)
class Python:
    """The interpreter that guests find, and a folder that must be shown to them for it (None: /usr is enough)."""

    path: str
    prefix: Path | None


def find_python(wanted: str | None = None) -> Python:
    """The system's own interpreter if there is one, else the one that runs this, whose folder others must be able to read."""
    for path in [wanted] if wanted else ["/usr/bin/python3", "/usr/local/bin/python3"]:
        if os.access(path, os.X_OK):
            real = Path(path).resolve()
            return Python(path, None if real.is_relative_to("/usr") else real.parent.parent)
    if wanted:
        raise SandboxUnavailable(f"sandbox.python={wanted} is not there, or is not a program")
    return Python(str(Path(sys.base_prefix) / "bin" / "python3"), Path(sys.base_prefix))
