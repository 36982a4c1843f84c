"""`telescope show` of a run whose files are whole and whose rows are not: the file is named, the rest is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from telescope.cli.show.advice import advise
from telescope.cli.show.figures import RunFigures, read_figures
from telescope.cli.show.page import PageStyle, describe
from telescope.runlog.layout import RunDirectory

SCORED = {
    "rollout_id": 4,
    "group_id": 2,
    "index": 3,
    "environment": "sums",
    "status": "scored",
    "reward": 1.0,
    "prompt": "1 + 1?",
    "completion": "2",
    "golden_answers": ["2"],
    "finish_reason": "stop",
    "started_ns": 1,
    "generated_ns": 2,
    "scored_ns": 3,
}
ODD = (None, "x", [], {}, True, 1e200, -(2**62), [[1]])


def write_rows(run: RunDirectory, stream: str, *rows: dict[str, Any]) -> Path:
    path = run.live("orchestrator", stream, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"seq": at, "time_ns": 10**9 * at, **row}) + "\n" for at, row in enumerate(rows)))
    return path


def show(run: RunDirectory) -> RunFigures:
    figures = read_figures(run, "running", 5)
    assert describe(figures, advise(figures), PageStyle())
    return figures


@pytest.mark.parametrize("column", SCORED)
def test_a_rollout_with_an_odd_column_is_told_by_its_others(column: str, tmp_path: Path) -> None:
    for at, odd in enumerate(ODD):
        run = RunDirectory(tmp_path / f"{column}{at}")
        write_rows(run, "groups", {"group_id": 2, "state": "discarded", "version": 0})
        path = write_rows(run, "rollouts", SCORED, {**SCORED, column: odd})
        figures = show(run)
        assert sum(one.scored for one in figures.environments) >= 1
        kinds = {"reward": (int, float), "golden_answers": (object,)}
        kind = kinds.get(column, (int,) if isinstance(SCORED[column], int) else (str,))
        sound = odd is None or (type(odd) in kind if kind != (object,) else True)
        assert [str(path) in one for one in figures.damaged] == ([] if sound else [True]), (odd, figures.damaged)


@pytest.mark.parametrize("stream", ["step_metrics", "policy", "evals", "alerts", "turns", "checkpoints", "groups"])
def test_odd_rows_of_any_stream_end_nothing(stream: str, tmp_path: Path) -> None:
    names = ("step", "version", "metrics", "reward", "state", "eval", "source", "message", "server", "done_ns", "generated_s")
    whole = {"step": 1, "version": 1, "state": "complete", "eval": "x", "reward": 1.0, "done_ns": 1, "generated_s": 1.0}
    rows = [{**whole, "step": at, "version": at, name: odd} for at, odd in enumerate(ODD) for name in names]
    huge = {"sample/exact": 1e200, "reward/policy": -1e308, "reward/policy/rollouts": 1e308, "timing_step_total": 1e300}
    rows += [{**whole, "step": at, "version": at, "metrics": {**huge, "x": odd}} for at, odd in enumerate(ODD, 10)]
    run = RunDirectory(tmp_path / "run")
    write_rows(run, stream, *rows)
    write_rows(run, "rollouts", *({**SCORED, "reward": 1.7e308} for _ in range(4)))
    assert show(run).samples_from == 4
