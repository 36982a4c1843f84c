"""Whether a run that has trained all its steps still has evals to play, as its rows tell."""

from __future__ import annotations

from collections.abc import Collection

from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows


def owes_evals(run: RunDirectory, due: Collection[str], step: int) -> bool:
    """Whether one of the evals `due` at the last `step` is not complete, or one of an earlier step was cut off. Raises
    `DamagedFile`."""
    states = {(row["eval"], row["step"], row["state"]) for row in rows(run, "evals")}
    complete = {(name, at) for name, at, state in states if state == "complete"}
    cut_off = {(name, at) for name, at, state in states if state == "cut off"}
    return bool(({(name, step) for name in due} | cut_off) - complete)
