"""How a run stands or has ended, for those who only look: its small JSON files, and the sentence that says why it failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telescope.runlog.layout import RunDirectory


def read_object(path: Path) -> Mapping[str, Any]:
    """A JSON object of the run directory; empty where it is not there, or is being written, or is no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def reason(run: RunDirectory) -> str:
    """The supervisor's verdict where there is one (it names the process that failed), else what the summary says."""
    try:
        return run.run_failure.read_text(encoding="utf-8").strip()
    except OSError:
        return str(read_object(run.summary_json).get("exit_reason", ""))
