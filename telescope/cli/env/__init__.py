"""`telescope env SUBCOMMAND`: look at environments and at what they have played. No run is started.

The subcommands by name; each is a module with `main(arguments) -> exit code`, imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

SUBCOMMANDS = {
    "check": ("telescope.cli.env.check", "play samples of an environment and print what training would see"),
    "audit": (
        "telescope.cli.env.audit",
        "print trajectories of a run token by token: text, mask, version, log-prob, advantage",
    ),
}
OK, USAGE = 0, 2


def main(arguments: Sequence[str]) -> int:
    """0, or what the subcommand says; 2 for a command line that cannot be read."""
    known = "\n".join(f"  {name:<8}{does}" for name, (_, does) in SUBCOMMANDS.items())
    usage = f"usage: telescope env SUBCOMMAND ...\n{known}\n"
    if arguments and arguments[0] in SUBCOMMANDS:
        module = importlib.import_module(SUBCOMMANDS[arguments[0]][0])
        return int(module.main(arguments[1:]))
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(usage)
        return OK
    sys.stderr.write(usage)
    return USAGE
