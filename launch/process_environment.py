"""Environment variables of the processes of a run. The only file of the launcher that reads `os.environ`.

A child inherits what the user's shell has (keys of services and proxies too, which are passed on and never printed), less
what some other launcher left there for this process, plus what the plan gives it.
"""

from __future__ import annotations

import os
import re
import site
from collections.abc import Collection, Mapping
from itertools import takewhile
from pathlib import Path

import telescope
from telescope._launch.process_plan import OWNED_VARIABLES
from telescope.config.secrets import SecretMissing, reveal_all

FOREIGN_VARIABLES = OWNED_VARIABLES | {
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
}
FOREIGN_PREFIXES = ("TORCHELASTIC_",)
_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")


def make_child_environment(given: Mapping[str, str], needs: Collection[str] = ()) -> dict[str, str]:
    """The variables of one process: the inherited ones, cleaned, under those of the plan (`given`), references followed.

    Raises `SecretMissing` where `given` refers to a variable (`${oc.env:NAME}`) that is not set on this host, or where one of
    those is not that the process `needs`.
    """
    inherited = {name: value for name, value in os.environ.items() if not _is_foreign(name) and name != "PYTHONPATH"}
    found = inherited | add_to_environment(given)
    if missing := sorted(set(needs) - found.keys()):
        raise SecretMissing(
            f"the environment variable {missing[0]} is not set on this host, but a setting refers to it "
            f"(${{oc.env:{missing[0]}}}): set it where the run is started here"
        )
    return found


def add_to_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a process has beyond the inherited variables: its part of the plan with references followed, and a way to our code.

    Raises `SecretMissing`."""
    path = find_python_path()
    # the last words of a process that dies must be in its log
    return {**({"PYTHONPATH": path} if path else {}), "PYTHONUNBUFFERED": "1", **reveal_all(given)}


def list_foreign_variables() -> list[str]:
    """Variables here that a process must not inherit."""
    return sorted(filter(_is_foreign, os.environ))


def read_own_environment() -> dict[str, str]:
    """All variables of this process."""
    return dict(os.environ)


def find_python_path() -> str:
    """PYTHONPATH with which the processes of a run find this code; empty where they need none."""
    return _python_path(os.environ.get("PYTHONPATH", ""))


def find_visible_gpus() -> tuple[str, ...] | None:
    """What CUDA_VISIBLE_DEVICES leaves to this run; None where it is not set. Read as CUDA does: up to the first entry
    that names no device, e.g. -1."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = takewhile(_DEVICE.fullmatch, (part.strip() for part in value.split(",")))
    return tuple(dict.fromkeys(names))


def _is_foreign(name: str) -> bool:
    return name in FOREIGN_VARIABLES or name.startswith(FOREIGN_PREFIXES)


def _python_path(inherited: str) -> str:
    """A checkout is importable from any working directory; an installed package needs no help."""
    home = str(Path(telescope.__file__).resolve().parent.parent)
    parts = [part for part in inherited.split(os.pathsep) if part]
    installed = {str(Path(folder).resolve()) for folder in (*site.getsitepackages(), site.getusersitepackages())}
    if home not in installed and home not in parts:
        parts.insert(0, home)
    return os.pathsep.join(parts)
