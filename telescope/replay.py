"""`python -m telescope.replay RUN_DIR`: does today's core give the commands that the run's journal recorded?

Exit code 0 where every command agrees, 1 where one differs or the journal cannot be read, 2 on wrong usage. Never writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from telescope._launch import terminal
from telescope.flow.replay import JournalDamaged, Replay, replay
from telescope.runlog.journal import journal_lines
from telescope.runlog.layout import RunDirectory

USAGE = "usage: python -m telescope.replay RUN_DIR\n"


def main(arguments: list[str]) -> int:
    """The exit code; answers go to stdout, complaints to stderr."""
    if arguments in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write(USAGE)
        return 2
    journal = RunDirectory(Path(arguments[0])).journal
    try:
        found = replay(journal_lines(journal))
        torn = is_torn(journal)
    except OSError as error:
        sys.stderr.write(f"cannot read {journal}: {error.strerror}; is {arguments[0]} a run directory?\n")
        return 1
    except JournalDamaged as error:
        sys.stderr.write(f"{journal}: {error}\n")
        return 1
    sys.stdout.write(describe(found, torn) + "\n")
    return 1 if found.disagreement else 0


def describe(found: Replay, torn: bool) -> str:
    """Sentences, e.g. `5120 events and 9034 commands agree.`"""
    said = f"{found.events} events and {found.commands} commands agree"
    if found.disagreement is not None:
        return f"{said}; the first difference is in {found.disagreement}"
    return f"{said}; the last line was cut off in writing and is left out." if torn else f"{said}."


def is_torn(journal: Path) -> bool:
    """Whether the writer was stopped in the middle of the last line."""
    with journal.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


if __name__ == "__main__":
    terminal.prepare()
    sys.exit(main(sys.argv[1:]))
