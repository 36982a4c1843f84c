"""`python -m telescope.replay RUN_DIR`: does today's core give the commands that the run's journal recorded?

Exit code 0 where every command agrees, 1 where one differs or the journal cannot be read, 2 on wrong usage. Never writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from telescope.flow.replay import JournalDamaged, Replay, replay
from telescope.runlog.layout import RunDirectory


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m telescope.replay RUN_DIR\n")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    journal = RunDirectory(Path(arguments[0])).journal
    try:
        with journal.open("rb") as lines:
            found = replay(lines)
    except OSError as error:
        sys.stderr.write(f"cannot read {journal}: {error.strerror}; is {arguments[0]} a run directory?\n")
        return 1
    except JournalDamaged as error:
        sys.stderr.write(f"{journal}: {error}\n")
        return 1
    sys.stdout.write(describe(found) + "\n")
    return 1 if found.disagreement else 0


def describe(found: Replay) -> str:
    """Sentences, e.g. `5120 events and 9034 commands agree.`"""
    said = f"{found.events} events and {found.commands} commands agree"
    if found.disagreement is not None:
        return f"{said}; the first difference is in {found.disagreement}"
    return f"{said}; the last line was cut off in writing and is left out." if found.torn else f"{said}."


if __name__ == "__main__":
    sys.exit(main())
