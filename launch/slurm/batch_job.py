"""What a submitted job runs: one attempt of a run, on the nodes that Slurm gave.

The batch process is the supervisor of all nodes. What is on its own node and needs no GPU runs beside it; servers and trainer
ranks, each under its shim, run where `srun` carries them. On `USR2` (before the walltime) the run stops in good order, and
the job is queued again where `cluster.slurm.restart_after_walltime` says so.
submitit calls `run` from its pickle, which holds this function's name and one path.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from telescope._launch import prepare_attempt
from telescope._launch.automatic_settings import settle_in_job
from telescope._launch.hosts.address import NoAddress, find_interface, find_local_address, is_own_address, resolve_address
from telescope._launch.next_commands import list_next_lines
from telescope._launch.preflight import refuse
from telescope._launch.process_environment import read_own_environment
from telescope._launch.process_plan import PlanError, ProcessPlan, make_plan, write_plan
from telescope._launch.save_forecast import describe_end_save
from telescope._launch.slurm import queue
from telescope._launch.slurm.allocation import LOOPBACK, AllocatedNode, SlurmAllocation, make_hosts, read_allocation, read_job
from telescope._launch.slurm.batch_file import WARNED
from telescope._launch.slurm.requeueing import AttemptEnd, AttemptOutcome, JobFacts, judge_end
from telescope._launch.supervisor import BatchSystem, SupervisedRunEnd, note_failed_start, supervise_in_batch_system
from telescope._launch.unblocked_output import unblock_output
from telescope.config.redacted_output import redact, redact_output
from telescope.config.run import RunConfig, load_run
from telescope.config.slurm import SlurmSettings
from telescope.exit_codes import ERROR
from telescope.runlog import attempts
from telescope.runlog.files import DamagedFile
from telescope.runlog.holder import hold
from telescope.runlog.layout import RunDirectory

log = logging.getLogger(__name__)

CARRIED = ("server", "trainer")
REQUEUE_S = 90.0
"""From asking for another attempt, or hearing of a preemption, to the end of this one."""
WARNED_FACTS_S = 10.0
"""What Slurm gets to answer questions when the walltime is near: half of the margin."""


@redact_output()
@unblock_output()
def run(run_dir: str) -> None:
    """One attempt. Ends the process with the run's exit code, or is ended by Slurm where there is another attempt."""
    early = _listen_for_warnings()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    directory = RunDirectory(Path(run_dir))
    job_id, restarts = read_job(read_own_environment())
    if is_done(directory, job_id):
        log.info("%s is done: there is nothing left to do.", directory.path)
        raise SystemExit(0)
    _note_job(directory, job_id)
    if "_" in job_id:
        _name_point(job_id, directory)
    try:
        config, settings = _read_configuration(directory)
        allocation = read_allocation(settings, read_own_environment())
        trained = has_trained_all(directory, config)
    except (PlanError, ValueError, OSError) as error:
        _refuse(directory, attempts.begin(directory, job_id, f"{job_id}.{restarts}", ()), error)
    if trained is not None:
        log.info("All %d steps of %s are trained and saved.", config.number_of_steps, directory.path)
        attempts.end(directory, trained, "done", 0, requeued=False)
        raise SystemExit(0)
    names = tuple(node.name for node in allocation.nodes)
    attempt = attempts.begin(directory, job_id, allocation.attempt, names)
    log.info("Attempt %d of %s on %s.", attempt.number, directory.path, ", ".join(names))
    try:
        plan = make_plan(config, make_hosts(allocation.nodes, find_networks(names)))
        settled = settle_in_job(directory, config, plan, goes_on=attempt.number > 1)
        config = settled.config
        write_plan(plan, directory.plan_json)
        refuse(config, plan, elsewhere=True)
    except (PlanError, NoAddress, DamagedFile, OSError) as error:
        _refuse(directory, attempt, error)
    if settled.sentence:
        log.info("%s", settled.sentence)
    if settled.misfit:
        log.warning("%s", settled.misfit)
    hold(directory)
    for sentence in describe_end_save(config, directory):
        log.info("%s", sentence)
    try:
        go_on(directory, config, attempt)
    except (prepare_attempt.CannotResume, OSError) as error:
        _refuse(directory, attempt, error)
    concluded = supervise_in_batch_system(directory, _describe_batch_system(settings, allocation, lambda: bool(early)))
    outcome = _judge_run_end(concluded, config, settings, allocation, directory)
    log.info("Attempt %d ended: %s, exit code %d; %s.", attempt.number, outcome.why, concluded.code, outcome.next)
    attempts.end(directory, attempt, outcome.why, concluded.code, requeued=outcome.next != "leave")
    if outcome.next in ("requeue", "await"):
        _go_again(allocation.job_id, at_once=outcome.next == "requeue")
    for line in list_next_lines(config, concluded.code):
        log.info("%s", line)
    raise SystemExit(concluded.code)


def _listen_for_warnings() -> list[int]:
    """Warnings before the walltime that came until now, and those that come until the supervisor listens. hold.py has kept
    them waiting; submitit's own handler would give up the job."""
    early = [int(signal.SIGUSR2)] * bool(read_own_environment().get(WARNED))
    signal.signal(signal.SIGUSR2, lambda number, _: early.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2,))
    return early


def _note_job(directory: RunDirectory, job_id: str) -> None:
    """Where whoever submitted it could not."""
    if attempts.read_submission(directory) is None:
        script = Path(read_own_environment().get("SUBMITIT_FOLDER", ""), f"{job_id.partition('_')[0]}_submission.sh")
        attempts.write_submission(directory, job_id, script)


def _name_point(job_id: str, directory: RunDirectory) -> None:
    """All points of an array begin with the name of the array."""
    try:
        queue.rename(job_id, directory.path.name)
    except queue.SlurmSilent as error:
        log.warning("this point keeps the name of its array: %s", error)


def is_done(directory: RunDirectory, job_id: str) -> bool:
    """Somebody may have the job of a run that has ended well queued again, or Slurm may, on the loss of a node at its end.
    Another job was submitted to go on, with more steps."""
    latest = attempts.read_attempts(directory)[-1:]
    return any(attempt.why == "done" and attempt.job_id == job_id for attempt in latest)


def _read_configuration(directory: RunDirectory) -> tuple[RunConfig, SlurmSettings]:
    config = load_run(directory.config_json)
    if config.cluster.slurm is None:
        raise PlanError(f"{directory.config_json} has no cluster.slurm: the run was not made for Slurm")
    return config, config.cluster.slurm


def _refuse(directory: RunDirectory, attempt: attempts.Attempt, error: Exception) -> NoReturn:
    """End an attempt whose processes were not started."""
    sentence = redact(str(error))
    log.error("%s", sentence)
    note_failed_start(directory, ERROR, sentence)
    attempts.end(directory, attempt, "failed", ERROR, requeued=False)
    raise SystemExit(ERROR) from None


def find_networks(nodes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Address and interface of each node, the batch node first; loopback where there is one only. Raises `NoAddress`.

    Slurm's NodeAddr is the network of its daemons, on which nodes reach each other; an interface is known of this node alone,
    elsewhere torch and NCCL find it by the address, or by `cluster.env.NCCL_SOCKET_IFNAME`."""
    if len(nodes) == 1:
        return {nodes[0]: LOOPBACK}
    found = {node: resolve_address(address) for node, address in queue.query_addresses(nodes).items()}
    if not is_own_address(found[nodes[0]]):  # reached through a name of another network
        found[nodes[0]] = find_local_address(None, facing=found[nodes[1]])
    here = find_interface(found[nodes[0]])
    return {node: (address, here if node == nodes[0] or here == LOOPBACK[1] else "") for node, address in found.items()}


def make_carrier(settings: SlurmSettings, allocation: SlurmAllocation) -> Callable[[ProcessPlan], tuple[str, ...]]:
    """The srun of each process; none for what runs beside the supervisor."""
    nodes = {node.name: node for node in allocation.nodes}

    def carrier(process: ProcessPlan) -> tuple[str, ...]:
        if process.role not in CARRIED and process.host == allocation.nodes[0].name:
            return ()
        return make_srun_command(settings, nodes[process.host], process.name)

    return carrier


def make_srun_command(settings: SlurmSettings, node: AllocatedNode, name: str) -> tuple[str, ...]:
    """A step sees all of its node, shared with the others: which GPU is whose is the plan's to say, and cards that are to reach
    each other (CUDA IPC, NCCL) must be visible to both."""
    group = () if node.het_group is None else (f"--het-group={node.het_group}",)
    return (
        *("srun", *group, "--nodes=1", "--ntasks=1", f"--nodelist={node.name}", "--overlap"),
        *(f"--cpus-per-task={node.cpus}", "--cpu-bind=none", "--mpi=none", "--unbuffered", "--quiet", "--kill-on-bad-exit=0"),
        *(f"--job-name={name}", "--export=ALL", *settings.srun),
    )


def _describe_batch_system(
    settings: SlurmSettings, allocation: SlurmAllocation, warned_before: Callable[[], bool]
) -> BatchSystem:
    return BatchSystem(make_carrier(settings, allocation), signal.SIGUSR2, "walltime", warned_before, settings.stop_s)


def has_trained_all(directory: RunDirectory, config: RunConfig) -> attempts.Attempt | None:
    """The attempt before, if it was lost between the checkpoint of the last step and its end. Raises `CannotResume`."""
    known = attempts.read_attempts(directory)
    source = prepare_attempt.find_latest(directory, config) if known else None
    return known[-1] if source is not None and prepare_attempt.has_played_all(directory, config, source.step) else None


def go_on(directory: RunDirectory, config: RunConfig, attempt: attempts.Attempt) -> None:
    """Begin at the latest complete checkpoint, if this is not the first attempt; at step 1 where none can be gone on from.

    Raises OSError, and `CannotResume` where there are only checkpoints that can't be read: what was trained is not to be given
    up for that."""
    if attempt.number == 1:
        return
    source = prepare_attempt.find_latest(directory, config)
    if source is None:
        prepare_attempt.begin_anew(directory, config)
        log.warning("This attempt begins at step 1: no checkpoint is complete that has the training's state.")
    else:
        prepare_attempt.begin_at(directory, config, source, attempt.number)
        log.info("This attempt goes on after step %d.", source.step)


def _judge_run_end(
    concluded: SupervisedRunEnd,
    config: RunConfig,
    settings: SlurmSettings,
    allocation: SlurmAllocation,
    directory: RunDirectory,
) -> AttemptOutcome:
    ended = AttemptEnd(concluded.code, concluded.warned, concluded.interrupted is not None, bool(concluded.carrier_lost))
    nodes = [node.name for node in allocation.nodes]
    said = (path.read_text(errors="replace") for path in directory.carrier_logs())
    within_s = WARNED_FACTS_S if concluded.warned else queue.CLIENT_S
    job = JobFacts() if concluded.code == 0 else queue.query_job(allocation.job_id, nodes, allocation.restarts, said, within_s)
    log.info("%s; %s", ended, job)
    budget = settings.max_requeues - _count_requeues(directory)
    asked = settings.restart_after_walltime
    again = config.checkpoint.every > 0 if asked is None else asked
    return judge_end(ended, job, requeue=settings.requeue, restart_after_walltime=again, budget=budget)


def _count_requeues(directory: RunDirectory) -> int:
    """Requeues that the run itself has asked for: not those after a preemption."""
    return sum(attempt.requeued and attempt.why in ("walltime", "node_failed") for attempt in attempts.read_attempts(directory))


def _go_again(job_id: str, *, at_once: bool) -> None:
    """Nothing of the run is left here: be ended by Slurm. Returns only where Slurm does not do it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    for asks in (at_once, True):
        if asks:
            try:
                queue.requeue(job_id)
            except queue.SlurmSilent as error:
                log.error("the job could not be queued again: %s", error)
        if signal.sigtimedwait((signal.SIGTERM,), REQUEUE_S):
            return
