"""Which evals are over, as the rows of a run tell."""

from __future__ import annotations

from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows

OVER = frozenset({"complete", "changed", "left out"})
"""States of an eval that nobody goes on with. One that was cut off by the run's end may go on after a resume."""


def read_ended(run: RunDirectory) -> frozenset[tuple[str, int]]:
    """(name, step) of each eval that is over. Raises `DamagedFile`."""
    return frozenset((row["eval"], row["step"]) for row in rows(run, "evals") if row["state"] in OVER)
