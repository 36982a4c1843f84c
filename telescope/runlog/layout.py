"""Every path of a run directory, in one place. Knows names, not contents.

A run directory is never reused, and is its owner's alone: `create` refuses a folder that is not empty, or another user's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)


class RunDirectoryInUse(ValueError):
    """The folder exists, and is not empty or another user's."""


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make the folder, readable by its owner alone, as an empty one that is there becomes. Raises `RunDirectoryInUse` where
        something lies in it already, or it is another user's."""
        path = path.absolute()
        try:
            path.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            cls.refuse_used(path)
            path.chmod(0o700)
        run = cls(path)
        run.make_folders()
        return run

    @staticmethod
    def refuse_used(path: Path) -> None:
        """Raises `RunDirectoryInUse` where a run can't have the folder: something lies in it, or it is another user's, who
        could read and replace what the run writes."""
        if path.exists() and not path.is_dir():
            raise RunDirectoryInUse(f"run_dir={path} is not a folder: name another")
        if path.exists() and (owner := path.stat().st_uid) != os.getuid():
            raise RunDirectoryInUse(
                f"run_dir={path} belongs to the user {_name_user(owner)}, not to you: name a folder of your own, or one "
                "that is not there yet"
            )
        if path.exists() and any(path.iterdir()):
            raise RunDirectoryInUse(f"run_dir={path} exists and is not empty; a run directory is never reused: name another")

    def make_folders(self) -> None:
        """Those that an attempt finds empty."""
        for folder in ("journal", "live", "blocks", "logs", "failures", "wire"):
            (self.path / folder).mkdir(mode=0o700)

    # resolved once, by telescope.run
    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def config_yaml(self) -> Path:
        return self.path / "config.yaml"

    @property
    def plan_json(self) -> Path:
        return self.path / "plan.json"

    @property
    def cmdline(self) -> Path:
        return self.path / "cmdline.txt"

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    # the wire's meeting point and keys
    @property
    def hub_json(self) -> Path:
        return self.path / "wire" / "hub.json"

    @property
    def nodes_json(self) -> Path:
        """Where the head's supervisor is, and the key to it, for nodes that see this directory."""
        return self.path / "nodes" / "head.json"

    def secret_key(self, process: str) -> Path:
        return self.path / "wire" / f"{process}.key_secret"

    def public_key(self, process: str) -> Path:
        return self.path / "wire" / f"{process}.key"

    def server(self, process: str) -> Path:
        """Where a server's HTTP listens, while it does: `{"url": "http://127.0.0.1:8100/v1", …}`."""
        return self.path / "servers" / f"{process}.json"

    @property
    def http_key(self) -> Path:
        """What HTTP requests must bring, where it is open to other machines and the user gave no key."""
        return self.path / "http.key"

    def scratch(self, process: str) -> Path:
        """A process's own temporary files, e.g. the adapters that a server has loaded; made and removed by it."""
        return self.path / "scratch" / process

    # what happens
    @property
    def journal(self) -> Path:
        return self.path / "journal" / "core.jsonl"

    @property
    def status_json(self) -> Path:
        return self.path / "status.json"

    @property
    def summary_json(self) -> Path:
        return self.path / "summary.json"

    @property
    def exit_json(self) -> Path:
        """How the run and each of its processes ended; written by the supervisor, last of all."""
        return self.path / "exit.json"

    @property
    def holder_json(self) -> Path:
        """Which process watches the run (runlog/holder.py)."""
        return self.path / "holder.json"

    @property
    def manifest(self) -> Path:
        return self.path / "MANIFEST.jsonl"

    def log(self, process: str, incarnation: int = 1) -> Path:
        """A process that was started again writes a log of its own, e.g. `server-0.2.log` of its second incarnation."""
        return self.path / "logs" / (f"{process}.log" if incarnation == 1 else f"{process}.{incarnation}.log")

    def carrier_log(self, process: str, incarnation: int = 1) -> Path:
        """What srun says that carries a process to its node: `server-0.srun.log`."""
        return self.log(process, incarnation).with_suffix(".srun.log")

    def carrier_logs(self) -> list[Path]:
        return sorted((self.path / "logs").glob("*.srun.log"))

    def failure(self, process: str) -> Path:
        """One sentence, written by a process that ends for a reason it knows."""
        return self.path / "failures" / f"{process}.txt"

    def earlier_failure(self, process: str, incarnation: int) -> Path:
        """The same of an incarnation that was followed by another: `server-0.1.txt`."""
        return self.path / "failures" / f"{process}.{incarnation}.txt"

    # a run in Slurm (runlog/attempts.py)
    @property
    def slurm_json(self) -> Path:
        """The job that it was submitted as."""
        return self.path / "slurm.json"

    @property
    def attempts(self) -> Path:
        """One line when an attempt starts, one when it ends."""
        return self.path / "attempts.jsonl"

    def earlier_attempt(self, number: int) -> Path:
        """What attempt `number` left in this directory, put aside when the next one began."""
        return self.path / "attempts" / str(number)

    def earlier_attempts(self) -> list[RunDirectory]:
        """What all of them left, the latest first."""
        numbers = (int(folder.name) for folder in (self.path / "attempts").glob("*") if folder.name.isdecimal())
        return [RunDirectory(self.earlier_attempt(number)) for number in sorted(numbers, reverse=True)]

    @property
    def whole(self) -> RunDirectory:
        """The run's own directory, where this is what an earlier attempt left in it."""
        return RunDirectory(self.path.parent.parent) if self.path.parent.name == "attempts" else self

    @property
    def run_failure(self) -> Path:
        """Why the run ends, in one sentence; written by the supervisor before it tells the rest to leave."""
        return self.failure("supervisor")

    def live(self, writer: str, stream: str, segment: int) -> Path:
        return self.path / "live" / writer / f"{stream}-{segment:06d}.jsonl"

    def block(self, writer: str, stream: str, segment: int) -> Path:
        return self.path / "blocks" / f"{stream}" / f"{writer}-{segment:06d}.parquet"

    def tokens(self, step: int) -> Path:
        return self.path / "tokens" / f"step={step:06d}"

    def kept(self, step: int) -> Path:
        """A train step's batch, kept to be run again (runlog/kept_steps.py)."""
        return self.path / "kept" / f"step_{step:08d}"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie unless `checkpoint.dir` names another folder (runlog/checkpoints.py)."""
        return self.path / "checkpoints"

    @property
    def lineage_json(self) -> Path:
        """Which rows of earlier attempts count (runlog/attempts.py)."""
        return self.path / "lineage.json"

    @property
    def resume_json(self) -> Path:
        """Where this attempt begins, if not at step 1."""
        return self.path / "resume.json"

    @property
    def evals(self) -> Path:
        """Evals that were played outside the run (runlog/eval_rows.py)."""
        return self.path / "evals"

    @property
    def served(self) -> Path:
        """Weights of checkpoints while `telescope serve` or `chat` has them (cli/served_model.py)."""
        return self.path / "served"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"


def _name_user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


@contextlib.contextmanager
def reserved(*paths: Path, nbytes: int) -> Iterator[None]:
    """While the block runs, `write_atomically` of these paths succeeds on a full disk too: the room is taken in advance.

    For texts of at most `nbytes`; on a file system that overwrites in place (all but copy-on-write ones). Where the room can't
    be had, the block runs without.
    """
    try:
        for path in paths:
            write_atomically(_reserve(path), " " * nbytes)
    except OSError as error:
        log.warning("no room can be set aside for the last words of this run: %s", error)
    try:
        yield
    finally:
        for path in paths:
            with contextlib.suppress(OSError):
                _reserve(path).unlink(missing_ok=True)


def _reserve(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserve")


def _write_into_reserve(path: Path, text: str) -> bool:
    data, reserve = text.encode(), _reserve(path)
    try:
        with reserve.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < len(data):
                return False
            file.write(data)
            file.truncate()
        os.replace(reserve, path)
    except OSError:
        return False
    return True


def write_atomically(path: Path, text: str, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write beside and rename: a reader sees the old text or the new, never half of one. `durable`: also after a power loss.

    Raises OSError where it can't be written, and leaves nothing then; on a full disk the room of `reserved` is used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _write_into_reserve(path, text):
            raise
