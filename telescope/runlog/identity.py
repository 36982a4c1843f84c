"""Who a run is: run.json, written once by `telescope.run` and read by every process for its hello."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from telescope.runlog.files import read_json
from telescope.runlog.layout import RunDirectory, write_atomically

FORMAT = 1


class RunIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """`run_id` names the run for good; `attempt` names this start of it, so that no process meets one of another start."""

    format: int
    run_id: str
    attempt: str
    name: str
    created: str
    """ISO 8601, UTC."""
    config_hash: str
    warnings: tuple[str, ...]
    """What the check of the configuration had to say."""
    evaluated: str = ""
    """Of a run of `telescope eval`: a digest of the weights, of what is played, and of how they are served and sampled."""


def new_identity(
    name: str, started: datetime, config_hash: str, warnings: Sequence[str] = (), evaluated: str = ""
) -> RunIdentity:
    created = started.astimezone(UTC).isoformat(timespec="seconds")
    ids = secrets.token_hex(8), secrets.token_hex(4)
    return RunIdentity(FORMAT, *ids, name, created, config_hash, tuple(warnings), evaluated)


def write_identity(run: RunDirectory, identity: RunIdentity) -> None:
    write_atomically(run.run_json, msgspec.json.format(msgspec.json.encode(identity)).decode() + "\n", mode=0o600)


def read_identity(run: RunDirectory) -> RunIdentity:
    """Raises FileNotFoundError where there is no run.json, and `DamagedFile`."""
    return read_json(run.run_json, RunIdentity)
