"""`python -m telescope runs list | tail | stop | resume`: the runs of a folder, one's log as it grows, an end for one, and a
further attempt.

Reads run directories; all but `resume` change nothing in them. `stop` asks the process that watches the run, as Ctrl-C would:
the step under way is finished and, where the run makes checkpoints, saved, and the summary written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from telescope._launch.slurm.queue import (
    QueuedJob,
    SlurmSilent,
    ask_to_stop,
    cancel,
    describe_state,
    find_stage,
    query_jobs,
    query_state,
)
from telescope.cli.arguments import from_one, from_zero
from telescope.cli.sweep import Sweep
from telescope.exit_codes import STOPS
from telescope.runlog.files import DamagedFile, open_file
from telescope.runlog.holder import find_original, find_state, stop
from telescope.runlog.layout import RunDirectory
from telescope.runlog.opening import BestCheckpointFile, EvalReward, RunLook, is_run, look

OK, FAILED, USAGE = 0, 1, 2
DEPTH = 2
"""A sweep's runs lie one folder deeper than others."""
PIECE = 4 << 20
"""Of a log, at a time."""
LOOK_S = 0.25
"""Between two looks at a file that grows."""
JOB_LOOK_S = 1.0
"""Between two questions to Slurm."""
FRESH_S = 60.0
"""A run on another host goes on if its status is younger than this."""


@dataclass(frozen=True)
class RunStatus:
    """How a run stands. `state`: running, done, stopped (by a signal, in good order or not), failed, lost (its supervisor is
    gone and nobody wrote its end), waiting (submitted; or queued again, between two attempts) or no run (a run.json that no run
    wrote, with no configuration beside it)."""

    run: RunDirectory
    state: str
    step: int | None
    steps: int | None
    reward: float | None
    """Of the policy: the mean over the last five versions of the weights that have been scored to the end (fewer in a short
    run), while a run goes on as after its end."""
    rollouts: int | None
    """That it is the mean of."""
    reason: str
    changed: float
    job: str = ""
    """Of Slurm, with its state: `12_3 pending`; empty for a run that was started on a host."""
    evals: Mapping[str, EvalReward] = field(default_factory=dict)
    """The latest score of each."""
    best: BestCheckpointFile | None = None
    damaged: tuple[str, ...] = ()
    """A sentence a file that can't be used; what it would have said is missing above."""


def main(arguments: Sequence[str]) -> int:
    """0; 1 where there is no such run or it can't be stopped from here; 2 on wrong usage."""
    asked = _parser().parse_args(list(arguments))
    act: Callable[[argparse.Namespace], int] = asked.act
    return act(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telescope runs", description=__doc__, allow_abbrev=False)
    actions = parser.add_subparsers(required=True, metavar="list|tail|stop|resume")
    listing = actions.add_parser("list", help="the runs below a folder, latest last")
    listing.add_argument("folder", nargs="?", default="runs", type=Path)
    listing.add_argument("--json", action="store_true", help="one object a line")
    listing.set_defaults(act=_list)
    tail = actions.add_parser("tail", help="the end of a process's log, and what follows while the run goes on")
    tail.add_argument("run", type=Path)
    tail.add_argument("--process", default="orchestrator", help="e.g. server-0, trainer-0, worker-0 (default: orchestrator)")
    tail.add_argument("-n", "--lines", type=from_one, default=20)
    tail.add_argument("--once", action="store_true", help="print what is there and leave")
    tail.set_defaults(act=_tail)
    stopping = actions.add_parser("stop", help="end a run as Ctrl-C would, and wait for its end")
    stopping.add_argument("run", type=Path)
    stopping.add_argument(
        "--timeout", type=from_zero, default=60.0, metavar="S", help="how long to wait for its end (default: 60; 0: not)"
    )
    stopping.set_defaults(act=_stop)
    resuming = actions.add_parser("resume", help="go on from the latest checkpoint, in the same directory, with its settings")
    resuming.add_argument("run", type=Path)
    resuming.add_argument("overrides", nargs="*", help="settings to change, e.g. number_of_steps=600 checkpoint.resume=40")
    resuming.set_defaults(act=_resume)
    return parser


# ---- list


def _list(asked: argparse.Namespace) -> int:
    if not asked.folder.is_dir():
        sys.stderr.write(f"{asked.folder}: there is no such folder; `list FOLDER` names another\n")
        return FAILED
    found = _read_runs(asked.folder)
    if not found:
        sys.stderr.write(_nothing(asked.folder))
    if asked.json:
        for one in found:
            sys.stdout.write(json.dumps(_as_json(one)) + "\n")
        return OK
    sys.stdout.write("\n".join(_tabulate(found, asked.folder)) + "\n")
    return OK


def tabulate_runs(folder: Path) -> tuple[list[str], Path | None]:
    """The lines that `list` prints, and the directory of the run that changed last; of a folder without a run nothing."""
    found = _read_runs(folder)
    return (_tabulate(found, folder), found[-1].run.path) if found else ([], None)


def _read_runs(folder: Path) -> list[RunStatus]:
    """Those below the folder, the one that changed last at the end."""
    runs = [look(run) for run in runs_below(folder)]
    jobs = job_states(runs)
    return sorted((run_status(seen, jobs) for seen in runs), key=lambda one: one.changed)


def _tabulate(found: Sequence[RunStatus], folder: Path) -> list[str]:
    head = f"{'state':<8} {'step':>11} {'reward':>8} {'rollouts':>9}  run"
    return [head, *map(_line, found), *_sweep_table(folder)]


def _sweep_table(folder: Path) -> list[str]:
    """Of a sweep's own folder; its points in Slurm have ended since sweep.json was written."""
    try:
        sweep = Sweep.load(folder)
    except FileNotFoundError:
        return []
    except DamagedFile as error:
        return [str(error)]
    sweep.collect()
    return ["", sweep.table()]


def _nothing(folder: Path) -> str:
    """Why a list is empty."""
    whole = next((above for above in folder.absolute().parents if is_run(above)), None)
    if whole is not None:
        return f"{folder} is a part of the run {whole}, not a folder of runs: `list {whole}` shows how it stands\n"
    return f"{folder}: there is no run in it, nor in a folder of it; `list FOLDER` names another\n"


def runs_below(folder: Path, depth: int = DEPTH) -> Iterator[RunDirectory]:
    """Those in a folder, and the points of sweeps in it; of a run directory itself that run. A folder that can't be read,
    somebody else's say, is named and passed over."""
    if is_run(folder):
        yield RunDirectory(folder)
        return
    try:
        for path in sorted(folder.iterdir()):
            if is_run(path):
                yield RunDirectory(path)
            elif depth > 1 and path.is_dir() and not path.is_symlink():
                yield from runs_below(path, depth - 1)
    except OSError as error:
        sys.stderr.write(f"{folder} is passed over: {error.strerror or error}\n")


def job_states(runs: Sequence[RunLook]) -> dict[str, QueuedJob]:
    """Slurm's states of the runs' jobs; empty where none was submitted or Slurm does not answer here."""
    ids = [seen.job for seen in runs if seen.job]
    try:
        return query_jobs(ids)
    except SlurmSilent as error:
        sys.stderr.write(f"the states of Slurm jobs are not shown: {error}\n")
        return {}


def run_status(seen: RunLook, jobs: Mapping[str, QueuedJob] = MappingProxyType({})) -> RunStatus:
    run, status = seen.run, seen.status
    changed = max((path.stat().st_mtime for path in (run.status_json, run.run_json) if path.exists()), default=0.0)
    known = jobs.get(seen.job, QueuedJob("")).state
    stage = find_stage(seen.last_of_job, known) if known else "unknown"
    state = stage if stage in ("waiting", "running") else _state_of_files(seen, changed, over=stage == "over")
    reason = seen.reason if state in ("failed", "stopped") else ""
    reward, rollouts = _read_reward(seen)
    job = f"{seen.job} {describe_state(seen, jobs)}".strip()
    damaged = tuple(map(str, seen.damaged))
    return RunStatus(
        run,
        state,
        status.step,
        status.steps,
        reward,
        rollouts,
        reason,
        changed,
        job,
        status.eval_rewards,
        status.best_checkpoint,
        damaged,
    )


def _read_reward(seen: RunLook) -> tuple[float | None, int | None]:
    """With the number of rollouts; from the summary where there is one."""
    if not seen.summary:
        return seen.status.reward_policy_last, seen.status.policy_last.rollouts
    policy = seen.summary.get("policy_last")
    rollouts = policy.get("rollouts") if isinstance(policy, Mapping) else None
    return seen.summary.get("reward_policy_last", seen.summary.get("reward_mean_last")), rollouts  # the latter of version 0.1


def _state_of_files(seen: RunLook, changed: float, *, over: bool) -> str:
    """What the run directory alone says; `over`: its job is known to be gone."""
    code = seen.exit.ended
    if code is not None:
        return "done" if code == 0 else "stopped" if code in STOPS else "failed"
    holder = seen.holder
    if holder is None and seen.blames(seen.run.holder_json):
        return "lost"
    if holder is None and seen.identity is None and not seen.run.config_json.exists() and not seen.run.journal.parent.exists():
        return "no run"
    if holder is None:  # a job that was gone before it began never wrote an end
        return "failed" if over else "waiting"
    here = find_state(holder, seen.run)
    goes_on = not over and (here == "alive" or (here == "elsewhere" and time.time() - changed < FRESH_S))
    return "running" if goes_on else "lost"


def _line(one: RunStatus) -> str:
    step = "-" if one.step is None else f"{one.step}/{one.steps}" if one.steps else str(one.step)
    reward = f"{one.reward:.3f}" if isinstance(one.reward, int | float) else "-"
    rollouts = f"{one.rollouts:,}" if isinstance(one.rollouts, int) else "-"
    evals = [f"eval {name} {score.reward:.3f}" for name, score in one.evals.items() if score.reward is not None]
    best = _describe_best(one.best) if one.best is not None else ""
    more = [text for text in (*evals, best, f"job {one.job}" if one.job else "", one.reason, *one.damaged) if text]
    return f"{one.state:<8} {step:>11} {reward:>8} {rollouts:>9}  {one.run.path}{_bracketed(more)}"


def _describe_best(best: BestCheckpointFile) -> str:
    """With the versions that its score is of, where other weights than the checkpoint's had a part in it."""
    played = {best.version_first, best.version_last} - {None, best.step}
    versions = f" by versions {best.version_first} to {best.version_last}" if played else ""
    return f"best step {best.step}: {best.measure} {best.score:.4g}{versions}"


def _bracketed(words: Sequence[str]) -> str:
    return f"  ({'; '.join(words)})" if words else ""


def _as_json(one: RunStatus) -> dict[str, Any]:
    return {
        "run_dir": str(one.run.path),
        "state": one.state,
        "step": one.step,
        "steps": one.steps,
        "reward": one.reward,
        "rollouts": one.rollouts,
        "evals": {name: {"step": score.step, "reward": score.reward} for name, score in one.evals.items()},
        "best_step": one.best.step if one.best is not None else None,
        "reason": one.reason,
        "job": one.job,
        "damaged": one.damaged,
    }


# ---- tail


def _tail(asked: argparse.Namespace) -> int:
    run = RunDirectory(asked.run)
    log = run.log(asked.process)
    try:
        opened = open_file(log)
    except FileNotFoundError:
        if not log.parent.is_dir() and not run.config_json.exists():
            sys.stderr.write(f"{asked.run} is not a run directory: it has neither logs nor config.json\n")
            return FAILED
        there = ", ".join(sorted(path.stem for path in log.parent.glob("*.log"))) or "none yet"
        sys.stderr.write(f"{asked.run} has no log of {asked.process}; there are: {there}\n")
        return FAILED
    except DamagedFile as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    with opened:
        _go_to_last_lines(opened, asked.lines)
        file = TextIOWrapper(opened, encoding="utf-8", errors="replace")
        while True:
            over = asked.once or run_status(look(run)).state != "running"  # before the last look: its last words are seen too
            while piece := file.read(PIECE):
                sys.stdout.write(piece)
            sys.stdout.flush()
            if over:
                break
            time.sleep(LOOK_S)
    return OK


def _go_to_last_lines(file: BinaryIO, lines: int) -> None:
    """To where the last `lines` begin: not before the last `PIECE` bytes, in which a log has thousands."""
    begin = max(0, file.seek(0, os.SEEK_END) - PIECE)
    file.seek(begin)
    held = file.read(PIECE)
    found = held.splitlines(keepends=True)
    file.seek(begin + len(held) - sum(map(len, found[-lines:])))


# ---- stop


def _stop(asked: argparse.Namespace) -> int:
    run = RunDirectory(asked.run)
    seen = look(run)
    holder = seen.holder
    if holder is not None and not seen.has_ended and (original := find_original(holder, run)) is not None:
        sys.stderr.write(f"{asked.run} is a copy of {original}: `telescope runs stop {original}` ends the run itself\n")
        return FAILED
    if seen.job:
        return _stop_job(seen, asked.timeout)
    if seen.has_ended:
        return _has_ended(run)
    if holder is None:
        named = "; ".join(map(str, seen.damaged)) or "it never started, or this is not a run directory"
        sys.stderr.write(f"{asked.run} is not known to be watched by any process: {named}\n")
        return FAILED
    if find_state(holder, run) == "elsewhere":
        sys.stderr.write(f"{asked.run} is watched by process {holder.pid} on {holder.host}: stop it there\n")
        return FAILED
    match stop(holder, asked.timeout):
        case "gone":
            sys.stderr.write(
                f"{asked.run}: process {holder.pid}, which watched it, is gone; its other processes went with it\n"
            )
            return FAILED
        case "late":
            sys.stderr.write(f"{asked.run} has not ended within {asked.timeout:g} s; it was asked to, and goes on ending\n")
            return FAILED
        case "ended":
            sys.stdout.write(f"{asked.run} has ended.\n")
            return OK


# ---- resume


def _resume(asked: argparse.Namespace) -> int:
    """The settings are those of the run's config.json, so that no command line has to be found again."""
    from telescope.cli.resume import WrongOverride, go_on

    try:
        return go_on(asked.run, asked.overrides)
    except WrongOverride as error:
        sys.stderr.write(f"telescope runs resume: {error}\n")
        return USAGE


def _has_ended(run: RunDirectory) -> int:
    sys.stdout.write(f"{run.path} has ended already.\n")
    return OK


def _stop_job(seen: RunLook, timeout_s: float) -> int:
    """A job that runs is asked to stop in good order, and its end is waited for; one that waits, between two attempts too, is
    taken out of the queue."""
    run, job = seen.run, seen.job
    try:
        stage = find_stage(seen.last_of_job, query_state(job))
        if stage == "over" or (stage == "unknown" and seen.has_ended):  # long gone: Slurm has forgotten it
            return _has_ended(run)
        if stage != "running":
            cancel(job)
            sys.stdout.write(f"{run.path}: job {job} is cancelled.\n")
            return OK
        ask_to_stop(job)
        deadline = time.monotonic() + timeout_s
        while find_stage(look(run).last_of_job, query_state(job)) == "running":
            if time.monotonic() >= deadline:
                sys.stderr.write(
                    f"{run.path}: job {job} has not ended within {timeout_s:g} s; it was asked to, and goes on ending. "
                    f"`scancel {job}` ends it without the step under way\n"
                )
                return FAILED
            time.sleep(JOB_LOOK_S)
    except SlurmSilent as error:
        sys.stderr.write(f"{run.path} is Slurm's job {job}, which could not be stopped: {error}\n")
        return FAILED
    sys.stdout.write(f"{run.path} has ended.\n")
    return OK
