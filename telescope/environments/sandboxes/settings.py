"""The settings of sandboxes, for an environment to have as a field, and the one place that knows all providers by name."""

from __future__ import annotations

import importlib
from typing import Literal

from pydantic import Field

from telescope.environments.sandboxes.base import Limits, Provider
from telescope.settings import Settings

_LOCAL = {
    "bubblewrap": ("bubblewrap", "Bubblewrap"),
    "gvisor": ("gvisor", "GVisor"),
    "unsafe_subprocess": ("unsafe", "UnsafeSubprocess"),
}
_REMOTE = {
    "prime": ("prime", "Prime"),
    "modal": ("modal", "Modal"),
    "daytona": ("daytona", "Daytona"),
    "e2b": ("e2b", "E2B"),
}


class SandboxSettings(Settings):
    """Where code that a model wrote is run. docs/sandboxes.md says what each provider holds."""

    provider: Literal["bubblewrap", "gvisor", "prime", "modal", "daytona", "e2b", "unsafe_subprocess"] = "bubblewrap"
    """What makes sandboxes. `unsafe_subprocess` is no wall at all and is never chosen by itself."""
    limits: Limits = Limits()
    """What one sandbox may use."""
    ready: int = Field(default=2, ge=0, le=1000)
    """Sandboxes started ahead in each worker process; a rollout takes one of these at once."""
    most: int = Field(default=16, ge=1, le=10_000)
    """Sandboxes in use at a time in each worker process; further rollouts wait in the order they came."""
    python: str | None = None
    """Interpreter that guests find first on their PATH (local providers); null: the system's python3."""
    image: str = "python:3.11-slim"
    """Image of remote sandboxes (`prime`, `modal`, `daytona`), or the name of the template (`e2b`, which takes no image: there
    the default means its own code-interpreter template)."""
    lifetime_s: float = Field(default=3600.0, ge=60, le=86_400)
    """A remote sandbox ends by itself after this long, whatever becomes of the run."""


def make_provider(settings: SandboxSettings) -> Provider:
    """The provider that the settings name, not started yet. Imports its module, and so its SDK, alone.

    Raises `SandboxUnavailable` where a program or a package is missing, with the line that installs it.
    """
    module, name = {**_LOCAL, **_REMOTE}[settings.provider]
    kind = getattr(importlib.import_module(f"telescope.environments.sandboxes.{module}"), name)
    made: Provider = kind(settings.python) if settings.provider in _LOCAL else kind(settings.image, settings.lifetime_s)
    return made
