"""What a sandbox is: a place for code that nobody trusts, with five verbs and hard limits. Types only; no processes in here.

    provider = Bubblewrap()
    isolation = await provider.start(limits)           # probes, and says what holds
    sandbox = await provider.create(limits)
    await sandbox.upload("main.py", b"print(6 * 7)")
    outcome = await sandbox.exec(["python3", "main.py"])     # outcome.stdout == b"42\\n"
    await sandbox.delete()

A provider is a plug-in: one file with one class derived from `Provider`, whose fields are its settings.

What the guest does (it crashes, hangs, floods its output, kills its own sandbox) is an `Outcome`. What the provider does is a
`SandboxError`, an infrastructure failure: the two must never be mixed up, or a policy learns to break its sandbox.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from telescope.environments.failures import InfrastructureError
from telescope.settings import Settings


class SandboxError(InfrastructureError):
    """The provider did not do what it was asked; another try may go well."""


class SandboxUnavailable(SandboxError):
    """The provider can't be used on this machine or with these settings; the message says what to install or to set."""


class FileRefused(LookupError):
    """A file that can not be read or written there (missing, a folder, too large, no space left): the guest's doing, not the
    provider's."""


class Limits(Settings):
    """What one sandbox may use. docs/sandboxes.md says which provider holds which of them, and how."""

    cpus: float = Field(default=1.0, gt=0, le=64)
    """Processor cores."""
    memory_mb: int = Field(default=512, ge=64, le=1_048_576)
    """Memory of all processes and files together; where no cgroup can be written, of each process."""
    disk_mb: int = Field(default=64, ge=1, le=1_048_576)
    """What all files together may take. Locally they lie in memory and count there as well."""
    processes: int = Field(default=32, ge=1, le=10_000)
    """Processes and threads at a time."""
    open_files: int = Field(default=256, ge=16, le=65_536)
    """Open files of a process."""
    time_s: float = Field(default=10.0, gt=0, le=86_400)
    """Wall-clock seconds of one command, unless `exec` is given fewer; then all its processes are killed."""
    output_kb: int = Field(default=256, ge=1, le=65_536)
    """Bytes read of each of standard output and standard error; a command that writes more is killed."""
    transfer_mb: int = Field(default=16, ge=1, le=1024)
    """The largest file that `upload` and `download` carry."""
    network: bool = False
    """Whether commands reach the network. Remote providers only: a local sandbox would share this machine's own network."""


class Ending(StrEnum):
    """Why a command is over."""

    EXITED = "exited"
    TIMED_OUT = "timed_out"
    FLOODED = "flooded"
    """It wrote more than `output_kb`."""
    DIED = "died"
    """It took its whole sandbox down: out of memory, or it killed what watches it. No later command can run there: each has
    this ending too, and `upload` and `download` raise `FileRefused`."""


@dataclass(frozen=True)
class Outcome:
    """What came of one command, e.g. `Outcome(0, b"42\\n", b"", Ending.EXITED, 0.021)`."""

    exit_code: int
    """As a shell tells it: 128 + n where signal n ended it (137: killed)."""
    stdout: bytes
    stderr: bytes
    ending: Ending
    seconds: float
    """Wall-clock seconds as seen from outside."""

    @property
    def ok(self) -> bool:
        return self.ending is Ending.EXITED and self.exit_code == 0

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def complaint(self) -> str:
        """The last line of standard error, e.g. `ZeroDivisionError: division by zero`."""
        lines = self.stderr.decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


def check_size(path: str, content: bytes, limits: Limits) -> None:
    if len(content) > limits.transfer_mb * 2**20:
        raise ValueError(f"{path}: {len(content)} bytes are more than sandbox.limits.transfer_mb={limits.transfer_mb}")


class Sandbox(ABC):
    """One guest. Made by a provider, used by one rollout, deleted and never handed on."""

    @abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Outcome:
        """Run one command to its end; one at a time. Whatever it started is killed with it, as far as the provider's `lacks`
        allow. Raises `SandboxError`, also where the sandbox was deleted."""

    @abstractmethod
    async def upload(self, path: str, content: bytes) -> None:
        """Write a file, its folders too; a relative path is below the home folder.

        Raises `FileRefused`, `SandboxError`, and `ValueError` where the content is larger than `transfer_mb`."""

    @abstractmethod
    async def download(self, path: str) -> bytes:
        """Read a file. Raises `FileRefused`, also where it is larger than `transfer_mb`, and `SandboxError`."""

    @abstractmethod
    async def delete(self) -> None:
        """Kill what runs and forget all files. A second call does nothing."""


class Wall(StrEnum):
    """What stands between a guest and this machine, strongest first."""

    REMOTE = "another machine"
    KERNEL = "a kernel of its own"
    NAMESPACES = "namespaces of this machine's kernel"
    NONE = "nothing"


@dataclass(frozen=True)
class Isolation:
    """What a provider was found to hold when it was probed."""

    provider: str
    wall: Wall
    holds: tuple[str, ...]
    """E.g. `("no network", "512 MB memory in all (cgroup)", ...)`."""
    lacks: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        said = f"{self.provider}: {self.wall.value} between guest and host; holds {', '.join(self.holds) or 'nothing'}"
        return f"{said}; does not hold {', '.join(self.lacks)}" if self.lacks else said


class Provider(Settings):
    """Makes sandboxes. One a worker process; `start` before, `close` after. Fields are settings, what it holds is private."""

    @property
    def name(self) -> str:
        """What users type as `sandbox.provider`: the name of the file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def ends_after_s(self) -> float:
        """Seconds after which a sandbox ends by itself, used or not; by default it never does."""
        return math.inf

    @abstractmethod
    async def start(self, limits: Limits) -> Isolation:
        """Probe: make one sandbox, run a command in it, delete it. Raises `SandboxUnavailable` with the remedy, also where a
        program or a package is missing."""

    @abstractmethod
    async def create(self, limits: Limits) -> Sandbox:
        """A fresh sandbox. Raises `SandboxError`; nothing is left behind then."""

    @abstractmethod
    async def close(self) -> None:
        """Delete every sandbox that is still there."""
