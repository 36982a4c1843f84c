"""What the batch file of a run says: settings to submitit's parameters. Pure; writes and submits nothing.

The first node group (a job's only one, or component 0) carries orchestrator, workers and trainer ranks; `#SBATCH hetjob` opens
the second, inference's. submitit has no word for that, so its lines stand at the head of `setup`, before any command, where
sbatch still reads them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from telescope.config.secrets import replace_references
from telescope.config.slurm import SlurmGroup, SlurmSettings

WARNED = "TELESCOPE_WARNED"
"""Set where the warning before the walltime came while the shell was still at its setup lines."""
NAMED = ("partition", "account", "qos", "constraint", "exclude", "nodelist")

NOTE_WARNING = f"trap 'export {WARNED}=1' USR2"
"""A shell that is warned without this dies of it, and a `module load` may take its time."""
IGNORE_WARNING = "trap '' USR2"
"""Until hold.py, which comes next, blocks it."""


def make_parameters(settings: SlurmSettings, name: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of `SlurmExecutor.update_parameters`. `environment`: exported before anything starts."""
    exports = [f"export {variable}={shlex.quote(value)}" for variable, value in sorted(environment.items())]
    given: dict[str, Any] = {
        "job_name": name,
        "time": settings.minutes,
        "nodes": count_nodes(settings),
        "ntasks_per_node": 1,
        "cpus_per_task": settings.cpus_per_node,
        "signal_delay_s": settings.stop_before_s,
        "array_parallelism": settings.array_parallelism,
        "use_srun": False,
        "stderr_to_stdout": True,
        "wckey": None,  # submitit's own would be refused where keys are checked
        "setup": [
            *_make_second_component(settings),
            NOTE_WARNING,
            *exports,
            *_write_setup(settings),
            IGNORE_WARNING,
        ],
        "additional_parameters": _make_additional(settings),
        **{option: value for option in NAMED if (value := getattr(settings, option)) is not None},
    }
    if settings.gpus_per_node:
        given["gpus_per_node"] = settings.gpus_per_node
    return given


def _write_setup(settings: SlurmSettings) -> Iterator[str]:
    """References as the shell of the node reads them: no value stands in the batch file, and one not set ends the job."""
    for line in settings.setup:
        yield replace_references(line, lambda name, other: f"${{{name}{':?is not set' if other is None else f'-{other}'}}}")


def count_nodes(settings: SlurmSettings) -> int:
    """Nodes of the job, or of its first component."""
    extra = settings.inference.nodes if settings.inference is not None and not settings.hetjob else 0
    return settings.nodes + extra


def _make_additional(settings: SlurmSettings) -> dict[str, Any]:
    """What submitit has no parameter for. Its own signal goes to every step, and only the batch process is to hear it."""
    found: dict[str, Any] = {"signal": f"B:USR2@{settings.stop_before_s}"}
    found["requeue" if settings.requeue else "no-requeue"] = True
    if settings.mem is not None:
        found["mem"] = settings.mem
    for option in settings.sbatch:
        name, equals, value = option.lstrip("-").partition("=")
        found[name] = value if equals else True
    return found


def _make_second_component(settings: SlurmSettings) -> Iterator[str]:
    if not settings.hetjob or settings.inference is None:
        return
    yield "#SBATCH hetjob"
    for name, value in _make_group_options(settings, settings.inference).items():
        if value is not None:
            yield f"#SBATCH --{name}={shlex.quote(str(value))}"


def _make_group_options(settings: SlurmSettings, group: SlurmGroup) -> dict[str, Any]:
    gpus = settings.gpus_per_node if group.gpus_per_node is None else group.gpus_per_node
    return {
        "nodes": group.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": group.cpus_per_node or settings.cpus_per_node,
        "gpus-per-node": gpus or None,
        "mem": group.mem or settings.mem,
        "time": settings.minutes,
        "partition": group.partition or settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": group.constraint or settings.constraint,
        "exclude": settings.exclude,
    }
