"""Where an attempt begins: at step 1, or where a checkpoint was made.

Reads `resume.json`, the orchestrator's part of that checkpoint and the rows of earlier attempts. Decides nothing: the core says
whether it can go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telescope.flow.core import Core
from telescope.flow.settings import FlowSettings
from telescope.orchestrator import saved
from telescope.orchestrator.shelf import Scored
from telescope.runlog.attempts import Lineage, read_lineage
from telescope.runlog.checkpoints import read_resume
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows


class CannotGoOn(ValueError):
    """The run's settings do not fit the checkpoint."""


@dataclass(frozen=True)
class Beginning:
    core: Core
    lineage: Lineage
    shelf: tuple[Scored, ...] = ()
    counters: saved.Counters = saved.Counters()  # noqa: RUF009 immutable
    history: tuple[Mapping[str, Any], ...] = ()
    """Metrics of the steps before, in order."""


def begin(run: RunDirectory, settings: FlowSettings) -> Beginning:
    """Raises `ModelFilesUnreadable`, and `CannotGoOn` with a sentence."""
    resume, lineage = read_resume(run), read_lineage(run)
    if resume is None:
        return Beginning(Core(settings), lineage)
    state, shelf = saved.read(Path(resume.folder))
    try:
        core = Core.restore(settings, state.core)
    except ValueError as error:
        raise CannotGoOn(str(error)) from error
    steps = {row["step"]: row["metrics"] for row in rows(run, "step_metrics") if row["step"] <= resume.step}
    history = tuple(steps[step] for step in sorted(steps))
    return Beginning(core, lineage, tuple(shelf), state.counters, history)
