"""The key of the servers' HTTP that a run makes where its user gave none: `http.key`, for its owner alone.

Made by whoever makes the run directory, before any server starts; kept for later attempts. Never printed, never logged.
"""

from __future__ import annotations

import secrets

from telescope.runlog.layout import RunDirectory, write_atomically

BYTES = 32


def make(run: RunDirectory) -> None:
    """A new key, unless there is one."""
    if not run.http_key.exists():
        write_atomically(run.http_key, secrets.token_urlsafe(BYTES) + "\n", mode=0o600)


def read(run: RunDirectory) -> str:
    """Raises `FileNotFoundError`."""
    return run.http_key.read_text(encoding="ascii").strip()
