"""What `--version` prints."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def describe_version() -> str:
    """`Telescope 0.1.0, Hydra 1.3.8`."""
    try:
        own = version("telescope-rl")
    except PackageNotFoundError:
        own = "from a checkout that is not installed"
    return f"Telescope {own}, Hydra {version('hydra-core')}\n"
