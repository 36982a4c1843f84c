"""What Slurm is asked and told: squeue, scontrol, scancel, each with a deadline. Needs no accounting database.

A controller that does not answer is no error of the run: what is not known is said to be unknown.
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Iterable, Sequence
from typing import Literal

from telescope._launch.slurm.verdict import JobFacts
from telescope.runlog.attempts import read_attempts, read_submission
from telescope.runlog.layout import RunDirectory

log = logging.getLogger(__name__)

CLIENT_S = 60.0
NO_TIME = ("", "None", "N/A", "Unknown")
DOWN = ("DOWN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN")
AHEAD = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD")
AT_WORK = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
_CAUSE = re.compile(r"DUE TO ([A-Z ]+?) \*\*\*")


class SlurmSilent(RuntimeError):
    """A client of Slurm failed or did not answer; the text says which and how."""


def ask(*command: str, timeout_s: float = CLIENT_S) -> str:
    """A client's output. Raises `SlurmSilent`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmSilent(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise SlurmSilent(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def states(job_ids: Iterable[str]) -> dict[str, str]:
    """The state of each job that Slurm still knows, e.g. `{"12": "RUNNING", "13_0": "PENDING"}`. Raises `SlurmSilent`."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    lines = ask("squeue", "--all", "--array", "--noheader", "--states=all", "--format=%i|%T").splitlines()
    known = dict(line.split("|", 1) for line in lines if "|" in line)
    return {job: state for job in wanted if (state := known.get(job) or known.get(f"{job}+0"))}


def state_of(run: RunDirectory, known: dict[str, str]) -> str:
    """How a submitted run stands in a word: Slurm's own while it has one, else what the run wrote down last.

    `known` is what `states` found. Empty for a run that was not submitted; `not submitted` after a dry run; `unknown` where a
    run began and nobody saw its end."""
    submission = read_submission(run)
    if submission is None:
        return ""
    if not submission.job_id:
        return "not submitted"
    state = known.get(submission.job_id, "")
    attempts = read_attempts(run)
    if attempts and attempts[-1].why and not (attempts[-1].requeued and state):
        return attempts[-1].why
    return state.lower() or "unknown"


def stage_of(run: RunDirectory, state: str) -> Literal["waiting", "running", "over", "unknown"]:
    """How the job of a submitted run stands as a whole; `state` is Slurm's, empty where it has none or does not say.

    Between two attempts `exit.json` is the last one's, and the run is not over: what Slurm says goes first."""
    last = next(reversed(read_attempts(run)), None)
    ended = last is not None and bool(last.why)
    if state in AHEAD or (state == "COMPLETING" and last is not None and last.requeued):
        return "waiting"
    if state in AT_WORK:
        return "over" if last is not None and ended and not last.requeued else "running"
    if state:
        return "over"
    return "over" if last is not None and ended and not last.requeued else "unknown"


def facts(job_id: str, nodes: Sequence[str], restarts: int, said: Iterable[str]) -> JobFacts:
    """The job at this moment. `restarts`: as this attempt knows them; `said`: what its step daemons had to say.

    A job that is preempted or queued again counts its next restart before any of its tasks hears of it, and forgets why at
    once; with a grace time it has a PreemptTime first. The step daemons know: `… CANCELLED AT … DUE TO PREEMPTION ***`."""
    job = _words(f"job {job_id}", "scontrol", "show", "--oneliner", "job", job_id)
    state = job.get("JobState", "")
    causes = {found for text in said for found in _CAUSE.findall(text)}
    return JobFacts(
        state=state,
        preempted=state.startswith("PREEMPTED") or "PREEMPTION" in causes or job.get("PreemptTime", "") not in NO_TIME,
        requeued=int(job.get("Restarts", "0")) > restarts,
        nodes_down=tuple(node for node in nodes if _is_down(node)),
    )


def requeue(job_id: str) -> None:
    """Raises `SlurmSilent`."""
    ask("scontrol", "requeue", job_id)


def cancel(job_id: str) -> None:
    """Raises `SlurmSilent`."""
    ask("scancel", job_id)


def address(node: str) -> str:
    """Where a node is reached, as Slurm has it; the node's name where it does not say."""
    return _words(f"node {node}", "scontrol", "show", "--oneliner", "node", node).get("NodeAddr", node)


def _is_down(node: str) -> bool:
    state = _words(f"node {node}", "scontrol", "show", "--oneliner", "node", node).get("State", "")
    return any(word in state for word in DOWN) or state.partition("+")[0].endswith("*")


def _words(what: str, *command: str) -> dict[str, str]:
    try:
        text = ask(*command)
    except SlurmSilent as error:
        log.warning("nothing is known of %s: %s", what, error)
        return {}
    return dict(word.split("=", 1) for word in text.split() if "=" in word)
