"""What the policy must not read: values of secrets in the error texts that it is told.

A tool's exception often quotes what it was called with (a URL with its key, a header). The worker says which values are
secret while it plays a rollout; elsewhere those of environment variables with a secret's name are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from contextvars import ContextVar

from telescope.config.secrets import scrubbed, secret_values


@contextlib.contextmanager
def declare_secrets(secrets: Collection[str]) -> Iterator[None]:
    """Within it, in its tasks and in the threads of `run_function`, `redact` hides these."""
    token = _SECRETS.set(secrets)
    try:
        yield
    finally:
        _SECRETS.reset(token)


def redact(text: str) -> str:
    """The text as the policy may read it."""
    secrets = _SECRETS.get()
    return scrubbed(text, secret_values(os.environ) if secrets is None else secrets)


_SECRETS: ContextVar[Collection[str] | None] = ContextVar("declared_secrets", default=None)
