"""Which of the worker's environment variables a program beside it gets: a list of what is allowed, so that no key of a service
is among them."""

from __future__ import annotations

import os
from collections.abc import Mapping

ALLOWED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "SSL_CERT_FILE", "TMPDIR")


def pick_variables(*more: str) -> Mapping[str, str]:
    """The allowed variables that are set, and `more` of them by name."""
    return {name: os.environ[name] for name in (*ALLOWED, *more) if name in os.environ}
