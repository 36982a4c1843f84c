"""What the end of an attempt means, and whether there is another one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Why = Literal["done", "walltime", "preempted", "requeued", "node_failed", "cancelled", "failed"]
Next = Literal["leave", "requeue", "await", "go"]
"""Leave for good; ask Slurm to run the job again; wait: Slurm does so by itself, and an exit code would end the job; or go:
Slurm has ended this attempt, counts the next one already, and gives the nodes to others once this process is gone."""


@dataclass(frozen=True)
class AttemptEnd:
    """An attempt as its supervisor saw it end."""

    code: int
    warned: bool = False
    """Stopped on the signal before the walltime."""
    interrupted: bool = False
    """Stopped by SIGTERM or the like."""
    carrier_lost: bool = False
    """A process ended the run whose srun, or step daemon, failed rather than itself."""


@dataclass(frozen=True)
class JobFacts:
    """What Slurm says of the job at that moment."""

    state: str = ""
    preempted: bool = False
    requeued: bool = False
    """Slurm counts one more restart than this attempt: it runs the job again whatever comes of this one."""
    nodes_down: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttemptOutcome:
    why: Why
    next: Next


def judge_end(ended: AttemptEnd, job: JobFacts, *, requeue: bool, restart_after_walltime: bool, budget: int) -> AttemptOutcome:
    """`requeue`, `restart_after_walltime`: the settings; `budget`: requeues that the run may still ask for.

    Tasks get SIGTERM before the batch process hears of a preemption, so that a failure may be one: Slurm is asked first."""
    if ended.code == 0:
        return AttemptOutcome("done", "leave")
    again: Next = "requeue" if requeue and budget > 0 else "leave"
    if job.state.startswith("CANCELLED"):
        return AttemptOutcome("cancelled", "leave")
    if job.requeued:
        why: Why = "preempted" if job.preempted else "node_failed" if job.nodes_down else "requeued"
        return AttemptOutcome(why, "go" if ended.interrupted else "await")
    if job.preempted:
        return AttemptOutcome("preempted", "await" if requeue else "leave")
    if job.nodes_down or job.state == "NODE_FAIL" or ended.carrier_lost:
        return AttemptOutcome("node_failed", again)
    if ended.warned:
        return AttemptOutcome("walltime", again if restart_after_walltime else "leave")
    return AttemptOutcome("cancelled" if ended.interrupted else "failed", "leave")
