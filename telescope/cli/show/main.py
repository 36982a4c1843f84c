"""`telescope show RUN_DIR`: what a run has learnt, on one page, and what to try next.

Curves, wrong and right answers, what was lost, where time goes. Opens the run directory to look: changes nothing in it, names a
file that can't be used and shows the rest. So it also works while a run goes on. Of a folder of runs, a sweep's say, the table
of `telescope runs list`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from telescope.cli.arguments import from_one, whole_from_zero
from telescope.cli.runs import job_states, run_status, tabulate_runs
from telescope.cli.show.advice import advise
from telescope.cli.show.figures import read_figures
from telescope.cli.show.page import NARROWEST, PageStyle, describe
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import is_run, look

OK, FAILED = 0, 1
SAMPLES = 5


def main(arguments: Sequence[str]) -> int:
    """0; 1 where there is no run; 2 on wrong usage."""
    asked = _parser().parse_args(list(arguments))
    run = RunDirectory(asked.run)
    if not is_run(run.path):
        table, newest = tabulate_runs(run.path) if run.path.is_dir() and not asked.json else ([], None)
        if newest is not None:
            sys.stdout.write("\n".join([*table, "", f"One of them: telescope show {shlex.quote(str(newest))}"]) + "\n")
            return OK
        sys.stderr.write(
            f"{run.path} is not a run directory: it has no run.json; `telescope runs list` has those of a folder\n"
        )
        return FAILED
    seen = look(run)
    figures = read_figures(run, run_status(seen, job_states([seen])).state, asked.samples)
    advice = advise(figures)
    if asked.json:
        found = {**msgspec.to_builtins(figures), "advice": msgspec.to_builtins(advice)}
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return OK
    terminal = sys.stdout.isatty()
    width = asked.width or (shutil.get_terminal_size().columns if terminal else 100)
    style = PageStyle(width, colours=terminal, encoding=sys.stdout.encoding)
    sys.stdout.write("\n".join(describe(figures, advice, style)) + "\n")
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope show", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument(
        "--samples", type=whole_from_zero, default=SAMPLES, metavar="N", help="wrong and right answers, each (%(default)s)"
    )
    parser.add_argument(
        "--width", type=from_one, metavar="COLUMNS", help=f"at least {NARROWEST} (default: the terminal's, else 100)"
    )
    parser.add_argument("--json", action="store_true", help="all numbers, the answers and the advice as one JSON object")
    return parser
