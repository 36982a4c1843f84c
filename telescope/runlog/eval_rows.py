"""Rows of evals: which are over, and those of evals that were played outside their run, by `telescope eval`.

    evals/<digest of what is played>/step_00000020/     a run directory: the weights of step 20, evals and nothing else

The run itself may go on meanwhile: nothing else of its directory is touched, and each part has its one writer. Owns the names;
refuses to start anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import is_run
from telescope.runlog.reader import rows

PLAYED, CHANGED = "complete", "changed"
OVER = frozenset({PLAYED, CHANGED, "left out"})
"""States of an eval that nobody goes on with. One that was cut off by the run's end may go on after a resume."""
_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class StandaloneEval:
    """Weights of one step, played outside their run. `digest`: of what is played and how it is sampled."""

    digest: str
    step: int
    run: RunDirectory


def read_ended(run: RunDirectory) -> frozenset[tuple[str, int]]:
    """(name, step) of each eval of the run itself that is over. Raises `DamagedFile`."""
    return frozenset((row["eval"], row["step"]) for row in rows(run, "evals") if row["state"] in OVER)


def read_in_state(run: RunDirectory, state: str) -> frozenset[tuple[str, int]]:
    """(name, step) of each eval of the run itself that has such a row. Raises `DamagedFile`."""
    return frozenset((row["eval"], row["step"]) for row in rows(run, "evals") if row["state"] == state)


def standalone_folder(run: RunDirectory, digest: str, step: int) -> Path:
    return run.evals / digest / f"step_{step:08d}"


def find_standalone(run: RunDirectory) -> Iterator[StandaloneEval]:
    """All that were begun, by digest and step."""
    for folder in sorted(run.evals.glob("*/step_*")):
        named = _STEP.fullmatch(folder.name)
        if named is not None and is_run(folder):
            yield StandaloneEval(folder.parent.name, int(named[1]), RunDirectory(folder))


def sent_file(folder: Path) -> Path:
    """There once the numbers of the standalone eval in `folder` have gone to W&B."""
    return folder.with_name(f"{folder.name}.wandb")


def put_aside(folder: Path, name: str) -> None:
    """The standalone eval of a step that is another model by now becomes `step_….before-<name>`, which nothing reads. Raises
    OSError."""
    folder.rename(folder.with_name(f"{folder.name}.before-{name}"))
    sent_file(folder).unlink(missing_ok=True)


def set_later_aside(run: RunDirectory, step: int, attempt: str) -> None:
    """Those of steps after `step`, from which an attempt goes another way, as their checkpoints are. Raises OSError."""
    for one in find_standalone(run):
        if one.step > step:
            put_aside(one.run.path, attempt)


def read_eval_rows(run: RunDirectory, stream: str) -> list[dict[str, Any]]:
    """Rows of `evals` or `eval_samples`: the run's own, and behind them those of its standalone evals, which have their
    digest as `standalone`. Raises `DamagedFile`."""
    found = rows(run, stream)
    for one in find_standalone(run):
        found += ({**row, "standalone": one.digest} for row in rows(one.run, stream))
    return found
