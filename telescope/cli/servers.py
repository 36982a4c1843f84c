"""`telescope servers RUN_DIR`: where a run's inference servers listen, while they do. Never prints a key."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from telescope.config.secrets import parse_reference
from telescope.runlog import opening
from telescope.runlog.files import DamagedFile, read_json, read_object
from telescope.runlog.layout import RunDirectory

USAGE = "usage: telescope servers RUN_DIR\n"
SHOWN = ("url", "model", "version")


def main(arguments: Sequence[str]) -> int:
    """0, 1 where no server listens or this is not a run directory, 2 on wrong usage."""
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write(USAGE)
        return 2
    run = RunDirectory(Path(arguments[0]))
    if not opening.is_run(run.path):
        sys.stderr.write(f"{run.path} is not a run directory: it has no run.json\n")
        return 1
    damaged: list[DamagedFile] = []
    lines = list(listening(run, damaged))
    sys.stderr.write("".join(f"{error}\n" for error in damaged))
    if not lines:
        sys.stderr.write(f"no server of {run.path} listens at the moment\n")
        return 1
    if key := _key_in_shell(run):
        url = lines[0].split()[1]
        lines.append(f'requests need the key: curl -H "Authorization: Bearer {key}" {url}/models')
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _key_in_shell(run: RunDirectory) -> str:
    """How a shell reads the key; empty where none is asked for."""
    if run.http_key.exists():
        return f"$(cat {shlex.quote(str(run.http_key))})"
    given = read_object(run.config_json).get("inference")
    variable = parse_reference(given.get("api_key")) if isinstance(given, dict) else None
    return f"${variable}" if variable else ""


def listening(run: RunDirectory, damaged: list[DamagedFile]) -> Iterator[str]:
    """A line a server, e.g. `server-0  http://127.0.0.1:8100/v1  tiny`. What can't be used is added to `damaged`."""
    folder = run.server("any").parent
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            found = read_json(path, dict[str, Any])
        except FileNotFoundError:  # it has gone
            continue
        except DamagedFile as error:
            damaged.append(error)
            continue
        if found.get("url"):
            yield "  ".join([path.stem, *(str(found[name]) for name in SHOWN if found.get(name) is not None)])
