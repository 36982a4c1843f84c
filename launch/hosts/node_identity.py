"""Which host this is in a run of several: its number, how many there are, and how they meet.

From the settings of `cluster`, and where they say nothing from torchrun's variables. Opens nothing.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from telescope._launch import shim
from telescope._launch.process_plan import PlanError
from telescope.config.cluster import split_address

if TYPE_CHECKING:
    from telescope.config.cluster import ClusterSettings

KEY_BYTES = 32
KEY_MARK = "telescope-key-1"
TORCHRUN = "TORCHELASTIC_RUN_ID"


class BadKeyFile(PlanError):
    """The file with the hosts' key is missing, open to others, or no key."""


@dataclass(frozen=True)
class NodeIdentity:
    """This host among `nodes`; 0 is the head. They meet at `head` with `key`, or in the run directory without a key."""

    nodes: int = 1
    rank: int = 0
    head: tuple[str, int] | None = None
    key: bytes | None = None
    under_torchrun: bool = False

    def __repr__(self) -> str:
        return f"NodeIdentity(node {self.rank} of {self.nodes})"  # the key is not for logs

    @property
    def name(self) -> str:
        return make_node_name(self.rank)


def end_with_parent() -> None:
    """SIGTERM to this process when torchrun is gone, which would otherwise leave it running."""
    shim.set_process_flag(shim.PR_SET_PDEATHSIG, signal.SIGTERM)


def make_node_name(rank: int) -> str:
    return f"node-{rank}"


def identify_node(cluster: ClusterSettings, run_dir: str | None, environ: Mapping[str, str]) -> NodeIdentity:
    """Raises `PlanError` with a sentence where settings and torchrun's variables leave something open or contradict."""
    if cluster.launcher == "local":
        _refuse_many(environ)
        return NodeIdentity()
    torchrun = _torchrun(environ)
    nodes = _agreed("nodes", cluster.nodes, torchrun, "WORLD_SIZE", 1)
    rank = _agreed("node_rank", cluster.node_rank, torchrun, "RANK", 0 if nodes == 1 else None)
    if not 0 <= rank < nodes:
        raise PlanError(f"cluster.node_rank={rank} must be below cluster.nodes={nodes}: hosts are counted from 0")
    if nodes == 1:
        return NodeIdentity(under_torchrun=bool(torchrun))
    key = None if cluster.key_file is None else read_key(Path(cluster.key_file).expanduser())
    if key is None and run_dir is None:
        raise PlanError(
            f"{nodes} hosts without cluster.key_file meet in the run directory, and run_dir names none: set run_dir to a "
            "folder that all of them see, or give cluster.key_file (and cluster.head=host:port without torchrun)"
        )
    return NodeIdentity(nodes, rank, _head(cluster, torchrun, key is not None), key, bool(torchrun))


def write_key(path: Path) -> None:
    """A new key for the hosts of runs, readable by its owner alone. Raises `OSError`; never replaces a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{KEY_MARK} {secrets.token_hex(KEY_BYTES)}\n")


def read_key(path: Path) -> bytes:
    """The 32 bytes of a key file. Raises `BadKeyFile`."""
    make = f"make one with `python -m telescope.run --new-key {path}` and copy it to every host"
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise BadKeyFile(f"cluster.key_file={path} can't be read ({error.strerror}): {make}") from error
    if mode & 0o077:
        raise BadKeyFile(f"cluster.key_file={path} is open to others (mode {mode & 0o777:o}): chmod 600 it")
    mark, _, digits = text.strip().partition(" ")
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if mark != KEY_MARK or len(key) != KEY_BYTES:
        raise BadKeyFile(f"cluster.key_file={path} holds no key: {make}")
    return key


def _torchrun(environ: Mapping[str, str]) -> Mapping[str, str]:
    """torchrun's variables; nothing where this process is not torchrun's. Raises `PlanError` for several a host."""
    if TORCHRUN not in environ:
        return {}
    if environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise PlanError(
            f"torchrun started {environ['LOCAL_WORLD_SIZE']} of this command on a host, and one is enough, which starts the "
            "rest: give --nproc-per-node 1"
        )
    return environ


def _refuse_many(environ: Mapping[str, str]) -> None:
    size = environ.get("WORLD_SIZE", "1")
    if TORCHRUN in environ and size != "1":
        raise PlanError(
            f"torchrun started {size} of this command, and cluster=local would make as many runs: set cluster=bare_metal, or "
            "start it without torchrun"
        )


def _agreed(name: str, setting: int | None, torchrun: Mapping[str, str], variable: str, default: int | None) -> int:
    told = torchrun.get(variable, "")
    if setting is not None and told.isdigit() and int(told) != setting:
        raise PlanError(f"cluster.{name}={setting}, but torchrun says {variable}={told}: leave the setting out")
    if setting is not None:
        return setting
    if told.isdigit():
        return int(told)
    if default is None:
        raise PlanError(f"cluster.{name} is not set, and torchrun did not start this command: set it on each host, from 0")
    return default


def _head(cluster: ClusterSettings, torchrun: Mapping[str, str], with_key: bool) -> tuple[str, int] | None:
    if cluster.head is not None:
        return split_address(cluster.head)
    address, port = torchrun.get("MASTER_ADDR", ""), torchrun.get("MASTER_PORT", "")
    if address and port.isdigit():
        # The port itself is torchrun's. Without a key file the hosts meet in the run directory, at any port.
        return address, (int(port) + 1 if with_key else 0)
    if with_key:
        raise PlanError("cluster.key_file needs cluster.head=host:port, the head's address, where torchrun does not tell it")
    return None
