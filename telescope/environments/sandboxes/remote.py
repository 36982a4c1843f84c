"""What the remote providers share: one shell line that runs a command under its limits and brings its two streams back whole.

The providers' own calls differ in what they tell (one stream or two, an exception for a non-zero exit code, text or bytes), so
none of that is relied on: the line prints both streams in base64 and the exit code, in the same form everywhere. An image needs
`sh`, `base64`, `cat`, `head`, `mktemp`, `timeout` and `tr`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import secrets
import shlex
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import Field, PrivateAttr

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

log = logging.getLogger(__name__)

T = TypeVar("T")
CALL_S = 120.0
"""How long any one call of a provider may take, on top of a command's own limit."""
HOME = "/tmp/telescope"
NOT_BEGUN = "telescope-not-begun"
"""What the line prints where it can't make its folders."""
LEFT = "left"
"""What the line prints for an exit code where something that the command started could not be ended."""
_TIMED_OUT, _KILLED = 124, 137


class RemoteSandbox(Sandbox):
    """Subclasses say how to run a shell line, and how to put, get and delete."""

    def __init__(self, provider: str, limits: Limits) -> None:
        self._provider = provider
        self._limits = limits
        self._turn = asyncio.Lock()
        self._deleting = asyncio.Lock()
        self._begun = False
        """Whether a command was ever begun: before, whatever goes wrong is not the guest's doing."""
        self._taken_down = False
        self._over = False
        self.on_end: Callable[[], None] = lambda: None
        """Called once, when the provider has deleted it."""

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
            started = time.monotonic()
            self._refuse_if_deleted()
            if self._taken_down:
                return _died(0.0)
            source = f"{HOME}/.in.{secrets.token_hex(16)}" if stdin else ""
            if source:
                try:
                    await self._put(source, stdin)
                except FileRefused:  # an earlier command left no room
                    self._taken_down = True
                    return _died(time.monotonic() - started)
                started = time.monotonic()
            line = command_line(argv, source, _path(cwd or ""), env or {}, limit_s, self._limits)
            printed = await self._call("exec", self.run(line, limit_s + CALL_S), limit_s)
            if not self._begun and printed.strip() == NOT_BEGUN:
                raise SandboxError(f"{self._provider} exec: no folder can be made in a new sandbox: is its image read-only?")
            self._begun = True
            told = outcome(printed, time.monotonic() - started, limit_s, self._limits.output_kb * 1024)
            self._taken_down = told.ending is Ending.DIED
            return told

    async def upload(self, path: str, content: bytes) -> None:
        check_size(path, content, self._limits)
        self._refuse_if_taken_down(f"upload of {path}")
        await self._put(_path(path), content)

    async def _put(self, path: str, content: bytes) -> None:
        """Write a file. Where that fails in a sandbox that has run a command, the sandbox is asked whether it takes as many
        bytes at all: a disk that its guest has filled, or folders that it has shut, are `FileRefused`."""
        try:
            await self._call("upload", self.put(path, content), 0)
        except SandboxError as error:
            if not self._begun:
                raise
            folder, probe = shlex.quote(os.path.dirname(path)), shlex.quote(f"{path}.{secrets.token_hex(4)}")
            size = len(content)
            line = (
                f"mkdir -p {folder} && head -c {size} /dev/zero > {probe} && [ ! -d {shlex.quote(path)} ] "
                f"&& echo fits; rm -f {probe}"
            )
            if (await self._call("upload", self.run(line, CALL_S), 0)).strip() == "fits":
                raise
            raise FileRefused(f"upload of {path}: the guest left no room for {size} bytes there") from error

    async def download(self, path: str) -> bytes:
        # Asked first, in the sandbox: no provider promises to stop at a size.
        self._refuse_if_taken_down(f"download of {path}")
        quoted, most = shlex.quote(_path(path)), self._limits.transfer_mb * 2**20
        line = f"[ -f {quoted} ] && wc -c < {quoted} 2>/dev/null || echo none"  # a pipe would hold it up
        said = await self._call("download", self.run(line, CALL_S), 0)
        if not said.strip().isdigit():
            raise FileRefused(f"download of {path}: there is no such file")
        if int(said) > most:
            raise FileRefused(f"download of {path}: it is larger than transfer_mb={self._limits.transfer_mb}")
        return await self._call("download", self.get(_path(path)), 0)

    async def delete(self) -> None:
        """As often as it fails it can be tried again; what a provider was not told to delete costs money."""
        async with self._deleting:
            if not self._over:
                await self._call("delete", self.end(), 0)
                self._over = True
                self.on_end()

    def _refuse_if_deleted(self) -> None:
        if self._over:
            raise SandboxError("this sandbox is over: it was deleted")

    def _refuse_if_taken_down(self, what: str) -> None:
        self._refuse_if_deleted()
        if self._taken_down:
            raise FileRefused(f"{what}: the guest took its sandbox down")

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
    """A line for `sh -c` that prints base64(stdout), base64(stderr) and the exit code, a line each; or `NOT_BEGUN`.

    Streams go to files, so that a process left behind can hold none of them open; `timeout` puts the command into a group of
    its own, which is killed afterwards, and then whatever else was not there before the command (`_sweep`). A file grows no
    larger than the disk limit. The file with the standard input is opened, removed and then fed through a pipe: the command
    finds it under no name, and reads it once.
    """
    most, blocks = limits.output_kb * 1024 + 1, limits.disk_mb * 2048
    words = ["timeout", "-k", "1", f"{limit_s:g}"]
    words += ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
    quoted = shlex.quote(stdin)
    feed = f"(exec < {quoted}; rm -f {quoted}; exec cat 2> /dev/null) | " if stdin else ""
    return (
        f"mkdir -p {shlex.quote(cwd)} && cd {shlex.quote(cwd)} && o=$(mktemp -d) || {{ echo {NOT_BEGUN}; exit 0; }}; "
        f"{_SEEN}{feed}(ulimit -c 0; ulimit -f {blocks}; exec {shlex.join([*words, *argv])}) "
        f'{"" if stdin else "< /dev/null "}> "$o/1" 2> "$o/2" & p=$!; wait $p; c=$?; kill -9 -$p 2> /dev/null; '
        f"{_sweep(here())}"
        f'for s in 1 2; do head -c {most} "$o/$s" | base64 | tr -d "\n"; echo; done; echo ${{k:-$c}}; rm -rf "$o"'
    )


_SEEN = 'set -- /proc/[0-9]*; b=" $* "; '
"""Notes the processes that are there; the shell itself is among them, and no other process of this line is."""


def _sweep(never: str) -> str:
    """Kills every process that was not there when `_SEEN` looked, over and over, as new ones may come; `k` is `LEFT` at the end
    where some are there still. The shell's own commands do all but the waiting: where no process can be started, it works.

    `never` names a machine on which nothing is done: it is the worker's, whose other processes are none of a guest's.
    """
    return (
        'k=; n=0; h="$(cat /proc/sys/kernel/random/boot_id 2> /dev/null) $(readlink /proc/self/ns/pid 2> /dev/null)"; '
        f'[ "$h" = {shlex.quote(never)} ] || k={LEFT}; while [ -n "$k" ] && [ $n -lt 200 ]; do k=; n=$((n + 1)); '
        'for d in /proc/[0-9]*; do case "$b" in *" $d "*) continue;; esac; read -r t 2> /dev/null < "$d/stat" || continue; '
        f'case "${{t##*) }}" in [ZX]*) continue;; esac; kill -9 "${{d#/proc/}}" 2> /dev/null; k={LEFT}; done; '
        '[ -z "$k" ] || [ $n -lt 20 ] || sleep 0.05; done; '
    )


def here() -> str:
    """This machine and its table of processes, as `_sweep` asks for them; a name that no machine has where nothing is known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "no Linux"


def outcome(printed: str, seconds: float, limit_s: float, most: int) -> Outcome:
    """Reads what `command_line` made a shell print. Where it is something else, the guest has got at the shell, or runs on
    and can't be ended: `DIED`."""
    lines = printed.rstrip("\n").split("\n")
    try:
        first, second, code = (
            base64.b64decode(lines[-3], validate=True),
            base64.b64decode(lines[-2], validate=True),
            int(lines[-1]),
        )
    except (IndexError, ValueError, binascii.Error):
        return _died(seconds, printed[:200])
    if code == _TIMED_OUT or (code == _KILLED and seconds >= limit_s):
        return Outcome(_KILLED, first[:most], second[:most], Ending.TIMED_OUT, seconds)
    flooded = len(first) > most or len(second) > most
    return Outcome(code, first[:most], second[:most], Ending.FLOODED if flooded else Ending.EXITED, seconds)


def _died(seconds: float, said: str = "") -> Outcome:
    return Outcome(_KILLED, b"", said.encode("utf-8", "replace"), Ending.DIED, seconds)


def _path(path: str) -> str:
    return path if path.startswith("/") else f"{HOME}/{path}".rstrip("/")


class RemoteProvider(Provider):
    """Subclasses connect, make one sandbox, and say which limits the provider takes."""

    image: str = "python:3.11-slim"
    """Image of the sandboxes."""
    lifetime_s: float = Field(default=3600.0, ge=60, le=86_400)
    """A sandbox ends by itself after this long, whatever becomes of the run."""
    holds: ClassVar[tuple[str, ...]] = ()
    lacks: ClassVar[tuple[str, ...]] = ()

    _sandboxes: set[RemoteSandbox] = PrivateAttr(default_factory=set)
    _abandoned: set[asyncio.Task[None]] = PrivateAttr(default_factory=set)
    """Sandboxes that are being made though nobody waits for them any more."""

    @property
    def ends_after_s(self) -> float:
        return self.lifetime_s

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
                answered = told.stdout[:80] or told.stderr[:200]
                raise SandboxError(
                    f"its shell answered {answered!r}, not 42: its image needs sh, base64, cat, head, mktemp, timeout and tr"
                )
        except SandboxError as error:
            await self.close()
            raise SandboxUnavailable(f"sandbox.provider={self.name} does not work: {error}") from error
        holds = [*([] if limits.network else ["no network"]), f"{limits.time_s:g} s a command", *self.holds]
        return Isolation(self.name, Wall.REMOTE, tuple(holds), self.lacks)

    async def create(self, limits: Limits) -> Sandbox:
        making = asyncio.ensure_future(self.make(limits))
        try:
            sandbox = await asked(f"{self.name} create", asyncio.shield(making), 5 * CALL_S)
        except (asyncio.CancelledError, SandboxError):
            # Broken off in the middle, a request may have been granted without anyone knowing the sandbox's name.
            if not making.done() or not (making.cancelled() or making.exception()):
                abandoned = asyncio.ensure_future(self._abandon(making))
                self._abandoned.add(abandoned)
                abandoned.add_done_callback(self._abandoned.discard)
            raise
        return self._known(sandbox)

    def _known(self, sandbox: RemoteSandbox) -> RemoteSandbox:
        self._sandboxes.add(sandbox)
        sandbox.on_end = lambda: self._sandboxes.discard(sandbox)
        return sandbox

    async def _abandon(self, making: asyncio.Future[RemoteSandbox]) -> None:
        try:
            await self._known(await asked(f"{self.name} create", making, 5 * CALL_S)).delete()
        except SandboxError as error:
            log.warning("a sandbox that nobody waits for: %s", error)

    async def close(self) -> None:
        """Deletes what is left, also after a run that broke off: remote sandboxes cost money until they end."""
        if self._abandoned:
            _, late = await asyncio.wait(self._abandoned, timeout=CALL_S)
            for task in late:
                task.cancel()
        left = list(self._sandboxes)
        for failed in await asyncio.gather(*(sandbox.delete() for sandbox in left), return_exceptions=True):
            if failed is not None:
                log.warning("a sandbox is left with the provider, until its life time ends: %s", failed)
        self._sandboxes.clear()
        await asked(f"{self.name} close", self.disconnect(), CALL_S)


def needed(module: str, package: str, load: Callable[[], T]) -> T:
    """An SDK, or a sentence that says how to get it."""
    try:
        return load()
    except ImportError as error:
        raise SandboxUnavailable(
            f"this sandbox provider needs the package {package}, and {error.name or module} can't be imported: "
            f"pip install -e '.[sandboxes]', or pip install {package}"
        ) from error
