"""What the remote providers share: one shell line that runs a command under its limits and brings its two streams back whole.

The providers' own calls differ in what they tell (one stream or two, an exception for a non-zero exit code, text or bytes), so
none of that is relied on: the line prints both streams in base64 and the exit code, in the same form everywhere. An image needs
`sh`, `base64`, `head` and `timeout`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import shlex
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

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

T = TypeVar("T")
CALL_S = 120.0
"""How long any one call of a provider may take, on top of a command's own limit."""
HOME = "/tmp/telescope"
_TIMED_OUT, _KILLED = 124, 137


class RemoteSandbox(Sandbox):
    """Subclasses say how to run a shell line, and how to put, get and delete."""

    def __init__(self, provider: str, limits: Limits) -> None:
        self._provider = provider
        self._limits = limits
        self._turn = asyncio.Lock()
        self._count = 0
        self._over = False

    @abstractmethod
    async def run(self, line: str, timeout_s: float) -> str:
        """What a line for `sh -c` prints."""

    @abstractmethod
    async def put(self, path: str, content: bytes) -> None: ...

    @abstractmethod
    async def get(self, path: str) -> bytes: ...

    @abstractmethod
    async def end(self) -> None: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        limit_s = min(timeout_s or self._limits.time_s, self._limits.time_s)
        async with self._turn:
            self._count += 1
            source = f"{HOME}/.in.{self._count}" if stdin else ""
            if source:
                await self._call("upload", self.put(source, stdin), 0)
            line = command_line(argv, source, _path(cwd or ""), env or {}, limit_s, self._limits)
            started = time.monotonic()
            printed = await self._call("exec", self.run(line, limit_s + CALL_S), limit_s)
        return outcome(printed, time.monotonic() - started, limit_s, self._limits.output_kb * 1024)

    async def upload(self, path: str, content: bytes) -> None:
        check_size(path, content, self._limits)
        await self._call("upload", self.put(_path(path), content), 0)

    async def download(self, path: str) -> bytes:
        # Asked first, in the sandbox: no provider promises to stop at a size.
        quoted, most = shlex.quote(_path(path)), self._limits.transfer_mb * 2**20
        said = await self._call("download", self.run(f"wc -c < {quoted} 2>/dev/null || echo none", CALL_S), 0)
        if not said.strip().isdigit():
            raise FileRefused(f"download of {path}: there is no such file")
        if int(said) > most:
            raise FileRefused(f"download of {path}: it is larger than transfer_mb={self._limits.transfer_mb}")
        return await self._call("download", self.get(_path(path)), 0)

    async def delete(self) -> None:
        if not self._over:
            self._over = True
            await self._call("delete", self.end(), 0)

    async def _call(self, verb: str, awaited: Awaitable[T], limit_s: float) -> T:
        return await asked(f"{self._provider} {verb}", awaited, limit_s + CALL_S + 10)


async def asked(what: str, awaited: Awaitable[T], limit_s: float) -> T:
    """The answer of a provider's SDK; whatever it raises is a `SandboxError` that names the call."""
    try:
        async with asyncio.timeout(limit_s):
            return await awaited
    except (SandboxError, FileRefused):
        raise
    except TimeoutError as error:
        raise SandboxError(f"{what}: no answer within {limit_s:g} s") from error
    except Exception as error:
        raise SandboxError(f"{what}: {type(error).__name__}: {error}") from error


def command_line(argv: Sequence[str], stdin: str, cwd: str, env: Mapping[str, str], limit_s: float, limits: Limits) -> str:
    """A line for `sh -c` that prints base64(stdout), base64(stderr) and the exit code, a line each.

    Streams go to files, so that a process left behind can hold none of them open; `timeout` puts the command into a group of
    its own, which is killed afterwards. A file grows no larger than the disk limit.
    """
    most, blocks = limits.output_kb * 1024 + 1, limits.disk_mb * 2048
    words = ["timeout", "-k", "1", f"{limit_s:g}"]
    words += ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
    return (
        f"mkdir -p {shlex.quote(cwd)} && cd {shlex.quote(cwd)} && o=$(mktemp -d) || exit 1; "
        f"(ulimit -c 0; ulimit -f {blocks}; exec {shlex.join([*words, *argv])}) "
        f'< {shlex.quote(stdin or "/dev/null")} > "$o/1" 2> "$o/2" & p=$!; wait $p; c=$?; kill -9 -$p 2> /dev/null; '
        f'for s in 1 2; do head -c {most} "$o/$s" | base64 | tr -d "\\n"; echo; done; echo $c; rm -rf "$o"'
    )


def outcome(printed: str, seconds: float, limit_s: float, most: int) -> Outcome:
    """Reads what `command_line` made a shell print. Raises `SandboxError` where it is something else."""
    lines = printed.rstrip("\n").split("\n")
    try:
        first, second, code = (
            base64.b64decode(lines[-3], validate=True),
            base64.b64decode(lines[-2], validate=True),
            int(lines[-1]),
        )
    except (IndexError, ValueError, binascii.Error) as error:
        raise SandboxError(
            f"exec: the sandbox printed {printed[:200]!r}: its image needs sh, base64, head and timeout"
        ) from error
    if code == _TIMED_OUT or (code == _KILLED and seconds >= limit_s):
        return Outcome(_KILLED, first[:most], second[:most], Ending.TIMED_OUT, seconds)
    flooded = len(first) > most or len(second) > most
    return Outcome(code, first[:most], second[:most], Ending.FLOODED if flooded else Ending.EXITED, seconds)


def _path(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path}".rstrip("/")


class RemoteProvider(Provider):
    """Subclasses connect, make one sandbox, and say which limits the provider takes."""

    holds: ClassVar[tuple[str, ...]] = ()
    lacks: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._sandboxes: set[RemoteSandbox] = set()

    @abstractmethod
    async def connect(self) -> None:
        """Make the SDK's client. Raises `SandboxUnavailable`, e.g. for a missing key."""

    @abstractmethod
    async def make(self, limits: Limits) -> RemoteSandbox:
        """One sandbox, ready for commands. Deletes what it has begun where it fails."""

    async def disconnect(self) -> None:
        """Close the SDK's client."""

    async def start(self, limits: Limits) -> Isolation:
        try:
            await asked(f"{self.name} connect", self.connect(), CALL_S)
            sandbox = await self.create(limits)
            try:
                told = await sandbox.exec(["sh", "-c", "echo $((6 * 7))"])
            finally:
                await sandbox.delete()
            if told.stdout != b"42\n":
                raise SandboxError(f"its shell answered {told.stdout[:80]!r}, not 42")
        except SandboxError as error:
            await self.close()
            raise SandboxUnavailable(f"sandbox.provider={self.name} does not work: {error}") from error
        network = () if limits.network else ("no network",)
        return Isolation(self.name, Wall.REMOTE, (*network, f"{limits.time_s:g} s a command", *self.holds), self.lacks)

    async def create(self, limits: Limits) -> Sandbox:
        sandbox = await asked(f"{self.name} create", self.make(limits), 5 * CALL_S)
        self._sandboxes.add(sandbox)
        return sandbox

    async def close(self) -> None:
        """Deletes what is left, also after a run that broke off: remote sandboxes cost money until they end."""
        await asyncio.gather(*(sandbox.delete() for sandbox in self._sandboxes), return_exceptions=True)
        self._sandboxes.clear()
        await asked(f"{self.name} close", self.disconnect(), CALL_S)


def needed(module: str, package: str, load: Callable[[], T]) -> T:
    """An SDK, or a sentence that says how to get it."""
    try:
        return load()
    except ImportError as error:
        raise SandboxUnavailable(
            f"this sandbox provider needs the package {package}, and {error.name or module} can't be imported: "
            f"pip install 'telescope-rl[sandboxes]', or pip install {package}"
        ) from error
