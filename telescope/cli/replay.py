"""`telescope replay RUN_DIR`: does today's core give the commands that the run's journal recorded? With `--step N`:
runs one train step that the run kept again, alone (replay_step.py).

Exit code 0 where every command agrees, or all of the step is finite; 1 where not, or where it can't be read; 2 on wrong usage.
Never writes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from telescope.cli.arguments import from_one
from telescope.flow.replay import JournalDamaged, Replay, replay
from telescope.runlog.files import DamagedFile, open_file
from telescope.runlog.journal import journal_lines
from telescope.runlog.layout import RunDirectory

STEP_ONLY = ("weights", "device")


def main(arguments: list[str]) -> int:
    """The exit code; answers go to stdout, complaints to stderr."""
    parser = _parser()
    try:
        given = parser.parse_args(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    if given.step is not None:
        return _step(given)
    if any(getattr(given, name) is not None for name in STEP_ONLY):
        sys.stderr.write(f"{parser.format_usage()}--weights and --device are for --step\n")
        return 2
    return _journal(given.run_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope replay", description="Does today's core decide as the run's journal says?")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--step", type=from_one, metavar="N", help="run this train step again, alone, if the run kept it")
    parser.add_argument("--weights", metavar="FOLDER", help="with --step: a checkpoint's or model's folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="with --step: where; else a GPU if there is one")
    return parser


def _step(given: argparse.Namespace) -> int:
    from telescope.backends.base import RankLost
    from telescope.cli.replay_step import CannotReplay, replay_step
    from telescope.runlog.kept_steps import NothingKept

    try:
        finite, report = replay_step(RunDirectory(given.run_dir), given.step, weights=given.weights, device=given.device)
    except (NothingKept, CannotReplay, RankLost, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if report:
        sys.stdout.write(report + "\n")
    return 0 if finite else 1


def _journal(run_dir: Path) -> int:
    journal = RunDirectory(run_dir).journal
    try:
        found = replay(journal_lines(journal))
        torn = is_torn(journal)
    except FileNotFoundError:
        sys.stderr.write(f"{journal} is not there; is {run_dir} a run directory?\n")
        return 1
    except DamagedFile as error:
        sys.stderr.write(f"{error}\n")
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
    with open_file(journal) as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
