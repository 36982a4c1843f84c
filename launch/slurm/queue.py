"""What Slurm is asked and told: squeue, scontrol, scancel, each with a deadline. Needs no accounting database.

A controller that does not answer is not an error of the run: what is not known is said to be unknown.
"""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from telescope._launch.slurm.requeueing import JobFacts
from telescope.runlog.attempts import Attempt
from telescope.runlog.opening import RunLook

log = logging.getLogger(__name__)

CLIENT_S = 60.0
"""For one question."""
NAMING_S = 5.0
"""For a name, without which a job runs as well."""
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


class QueuedJob(NamedTuple):
    """A job that Slurm still knows: `RUNNING`, or `PENDING` for a reason in Slurm's own word, e.g. `Resources`."""

    state: str
    reason: str = ""


def query_jobs(job_ids: Iterable[str]) -> dict[str, QueuedJob]:
    """Those that Slurm still knows, e.g. `{"12": QueuedJob("PENDING", "Priority")}`. Raises `SlurmSilent`."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    lines = ask("squeue", "--all", "--array", "--noheader", "--states=all", "--format=%i|%T|%r").splitlines()
    known: dict[str, QueuedJob] = {}
    for line in lines:
        job, _, told = line.partition("|")
        state, _, reason = told.partition("|")
        known[job] = QueuedJob(state, "" if reason in NO_TIME else reason)
    return {job: found for job in wanted if (found := known.get(job) or known.get(f"{job}+0"))}


def query_state(job_id: str) -> str:
    """Empty where Slurm does not know the job any more. Raises `SlurmSilent`."""
    return query_jobs([job_id]).get(job_id, QueuedJob("")).state


def describe_state(seen: RunLook, known: Mapping[str, QueuedJob]) -> str:
    """How a submitted run stands in a word: Slurm's own while it has one, else what the run wrote down last.

    `known` is what `query_jobs` found. A job that waits says why, e.g. `pending: Resources`.
    Empty for a run that was not submitted; `not submitted` after a dry run; `unknown` where a run began and nobody saw its
    end."""
    if not seen.job:
        return "not submitted" if seen.submission is not None else ""
    state, reason = known.get(seen.job, QueuedJob(""))
    last = seen.last_of_job
    if last is not None and last.why and not (last.requeued and state):
        return last.why
    return f"{state.lower() or 'unknown'}{f': {reason}' if reason and state in AHEAD else ''}"


def find_stage(last: Attempt | None, state: str) -> Literal["waiting", "running", "over", "unknown"]:
    """How the job of a submitted run stands as a whole; `state` is Slurm's, empty where it has none or does not say;
    `last`: the latest attempt of this job. Those of a job before it, which the run was submitted as once, say nothing of it.

    Between two attempts `exit.json` is the last one's, and the run is not over: what Slurm says goes first."""
    ended = last is not None and bool(last.why)
    if state in AHEAD or (state == "COMPLETING" and last is not None and last.requeued):
        return "waiting"
    if state in AT_WORK:
        return "over" if last is not None and ended and not last.requeued else "running"
    if state:
        return "over"
    return "over" if last is not None and ended and not last.requeued else "unknown"


def query_job(job_id: str, nodes: Sequence[str], restarts: int, said: Iterable[str], within_s: float = CLIENT_S) -> JobFacts:
    """The job at this moment. `restarts`: as this attempt knows them; `said`: what its step daemons had to say; `within_s`: for
    all questions together, as many as the job has nodes or not.

    A job that is preempted or queued again counts its next restart before any of its tasks hears of it, and forgets why at
    once; with a grace time it has a PreemptTime first. The step daemons know: `… CANCELLED AT … DUE TO PREEMPTION ***`."""
    until = time.monotonic() + within_s
    job = next(iter(_show("job", job_id, within_s)), {})
    state = job.get("JobState", "")
    causes = {found for text in said for found in _CAUSE.findall(text)}
    return JobFacts(
        state=state,
        preempted=state.startswith("PREEMPTED") or "PREEMPTION" in causes or job.get("PreemptTime", "") not in NO_TIME,
        requeued=int(job.get("Restarts", "0")) > restarts,
        nodes_down=_query_down(nodes, max(1.0, until - time.monotonic())),
    )


def requeue(job_id: str) -> None:
    """Raises `SlurmSilent`."""
    ask("scontrol", "requeue", job_id)


def rename(job_id: str, name: str) -> None:
    """What squeue calls the job, or the point of an array. Raises `SlurmSilent`."""
    ask("scontrol", "update", f"JobId={job_id}", f"JobName={name}", timeout_s=NAMING_S)


def ask_to_stop(job_id: str) -> None:
    """The batch process alone, as Ctrl-C would: its steps go on until it ends them. Raises `SlurmSilent`."""
    ask("scancel", "--batch", "--signal=INT", job_id)


def cancel(*job_ids: str) -> None:
    """Raises `SlurmSilent`."""
    ask("scancel", *job_ids)


def query_addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Where each node is reached, as Slurm has it; the node's name where it does not say."""
    known = {words["NodeName"]: words for words in _show("node", ",".join(nodes), CLIENT_S) if "NodeName" in words}
    return {node: known.get(node, {}).get("NodeAddr", node) for node in nodes}


def _query_down(nodes: Sequence[str], within_s: float) -> tuple[str, ...]:
    shown = _show("node", ",".join(nodes), within_s)
    states = {words["NodeName"]: words.get("State", "") for words in shown if "NodeName" in words}
    return tuple(node for node in nodes if _is_down(states.get(node, "")))


def _is_down(state: str) -> bool:
    return any(word in state for word in DOWN) or state.partition("+")[0].endswith("*")


def _show(kind: str, names: str, within_s: float) -> list[dict[str, str]]:
    """`scontrol show`, a mapping a line; of a word that comes twice the first counts, for later ones are in free text."""
    try:
        text = ask("scontrol", "show", "--oneliner", kind, names, timeout_s=within_s)
    except SlurmSilent as error:
        log.warning("nothing is known of %s %s: %s", kind, names, error)
        return []
    pairs = ([word.split("=", 1) for word in line.split() if "=" in word] for line in text.splitlines())
    return [dict(reversed(line)) for line in pairs if line]
