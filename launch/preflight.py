"""What the processes of a plan would refuse where they are to run, known before any of them is started.

Owns the one list that a run, another attempt of it, the head of several hosts, a Slurm job and `telescope check` ask. Refuses
to guess: of hosts other than this one only what the plan says is judged, and what can't be told here is left to the process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from telescope._launch.process_environment import make_child_environment, read_own_environment
from telescope._launch.process_plan import LaunchPlan, PlanError
from telescope._launch.this_host import find_compute_capability
from telescope.config import plugins
from telescope.config.conflicts import conflicts
from telescope.config.model_facts import describe_no_template, has_chat_template
from telescope.config.models import ModelBroken, check_files, check_weights, model_path
from telescope.config.precision import unserved
from telescope.config.run import as_json, dump_run
from telescope.config.secrets import find_missing
from telescope.runlog.layout import write_atomically
from telescope.weights.base import TransportRefused
from telescope.weights.transport_choice import choose, placement_of
from telescope.workers import rehearsal
from telescope.workers.loading import find_obstacle

if TYPE_CHECKING:
    from telescope.config.run import RunConfig


_log = logging.getLogger("telescope.run")
LOOPBACK_S = 2.0
REHEARSAL_S = 5.0
"""For an environment that is checked in a process of its own to be imported, and for its data to be read and checked, which
delays every start; beyond it the worker says what is wrong."""
REHEARSAL_START_S = 15.0
"""For the process in which it is asked, before it comes to the environment, and to end."""
REHEARSED_AT_ONCE = 8
SHIPPED = "telescope."
CHECKED_BY_PROCESS = ("weight_sync.transport", "inference.quantization")
"""Settings of which their own process has a sentence."""


def find_obstacles(config: RunConfig, plan: LaunchPlan, *, elsewhere: bool = False) -> list[str]:
    """Sentences with the remedy, each that of the process which would say it. `elsewhere`: its hosts are not this one alone."""
    return [
        *(() if elsewhere else (*_check_loopback(plan), *_check_packages(config))),
        *_check_variables(config),
        *_check_weights(config, plan),
        *filter(None, (unserved(config, plan.device),)),
        *_check_training(config, plan, elsewhere),
        *_check_device(config, plan),
    ]


def find_absent(config: RunConfig, plan: LaunchPlan, *, elsewhere: bool = False) -> list[str]:
    """What the run needs and this host has not: files of the model, data and packages of the environments. The same kind of
    sentences. Of a run that is elsewhere, or on several hosts, nothing is told."""
    if elsewhere or len(plan.hosts) > 1:
        return []
    return [*_check_model(config), *_check_environments(config, plan)]


def refuse(config: RunConfig, plan: LaunchPlan, *, elsewhere: bool = False) -> None:
    """Raises `PlanError` with all of both, one a line."""
    if found := [*find_absent(config, plan, elsewhere=elsewhere), *find_obstacles(config, plan, elsewhere=elsewhere)]:
        raise PlanError("\n".join(found))


def _check_packages(config: RunConfig) -> Iterator[str]:
    needed = {
        "transformers": ("model.name", config.model.name),
        **({"vllm": ("inference.engine", "vllm")} if config.inference.engine == "vllm" else {}),
        **({"torch": ("backend.name", "fsdp")} if config.backend_name == "fsdp" else {}),
        **({"peft": ("model.lora", "…")} if config.model.lora is not None else {}),
    }
    for package, (setting, value) in needed.items():
        if importlib.util.find_spec(package) is None:
            yield (
                f"{setting}={value} needs the package {package}, which is not installed for {sys.executable}: install the "
                "extra for this machine (pip install -e '.[cpu]' or '.[gpu]', docs/dependencies.md)"
            )


def _check_model(config: RunConfig) -> Iterator[str]:
    """What lies here; what a hub gives is asked of it elsewhere (`config.models.hub_problem`)."""
    name, folder = config.model.name, model_path(config.model.name)
    if folder is None:
        return
    try:
        check_files(name, folder)
        if config.inference.engine != "fake" or config.backend_name != "fake":
            check_weights(name, folder)
        if config.model.chat_template is None and not has_chat_template(name, folder):
            yield describe_no_template(name)
    except ModelBroken as error:
        yield str(error)


def _check_environments(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    """Of environments that come with Telescope in this process; of the user's own, and of those that ask for it, in one that is
    like a worker."""
    if find_missing(as_json(config), read_own_environment()):
        return  # they may be settings of the environment, and are said already
    own = []
    for label, entry in config.played.items():
        try:
            kind = plugins.load(plugins.ENVIRONMENTS, entry.name, config.plugin_path)
        except plugins.PluginError as error:
            where = "environments" if label in config.environments else "evals"
            yield f"{where}.{label}: {error}"
            continue
        if kind.checked_apart or not kind.__module__.startswith(SHIPPED):
            own.append(label)
        elif found := find_obstacle(config, label):
            yield found
    workers = [process for process in plan.processes if process.role == "worker"]
    if own and workers:
        yield from _rehearse(config, own, make_child_environment(workers[0].environment, workers[0].needs))


def _rehearse(config: RunConfig, labels: list[str], environment: Mapping[str, str]) -> list[str]:
    """Each in a process of its own, so that a slow one hides nothing of the others."""
    with tempfile.TemporaryDirectory(prefix="telescope-") as folder:
        place = Path(folder)
        write_atomically(place / rehearsal.CONFIG, dump_run(config), mode=0o600)
        found: list[str] = []
        for begin in range(0, len(labels), REHEARSED_AT_ONCE):
            found += _rehearse_some(place, labels[begin : begin + REHEARSED_AT_ONCE], environment)
    return found


def _rehearse_some(place: Path, labels: list[str], environment: Mapping[str, str]) -> Iterator[str]:
    command = [sys.executable, "-m", rehearsal.__name__, str(place)]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for at, label in enumerate(labels):
            processes[label] = subprocess.Popen(
                [*command, str(at), label, str(REHEARSAL_S)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        until = time.monotonic() + REHEARSAL_START_S + REHEARSAL_S
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for at, (label, process) in enumerate(processes.items()):
            if process.returncode in (None, -signal.SIGALRM):
                _log.warning(
                    "environments.%s was not checked to its end: %s. Its worker will say what it lacks",
                    label,
                    f"its check_data took more than {REHEARSAL_S:g} s, as on a busy machine or with much data "
                    "(docs/environments.md)"
                    if process.returncode is not None
                    else f"the process of the check was not done after {REHEARSAL_START_S + REHEARSAL_S:g} s, most of which "
                    "it should need to start: this machine may be busy",
                )
            with contextlib.suppress(OSError):  # it died; a worker that does the same says why
                if sentence := (place / str(at)).read_text(encoding="utf-8"):
                    yield sentence
                (place / str(at)).unlink()
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _check_variables(config: RunConfig) -> Iterator[str]:
    """A Slurm job asks this on its node, where what the submitting shell had need not be."""
    for name in find_missing(as_json(config), read_own_environment()):
        yield (
            f"the environment variable {name} is not set on this host, but a setting refers to it (${{oc.env:{name}}}): set it "
            "where the run is started (docs/security.md)"
        )


def _check_loopback(plan: LaunchPlan) -> Iterator[str]:
    """Processes of one host talk over its own address, which a container or a namespace without a network has not."""
    if len(plan.hosts) > 1:
        return
    try:
        with socket.create_server((plan.head_address, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as error:
        yield (
            f"{plan.head_address}, over which the processes of a run talk, can't be reached on this host "
            f"({error.strerror or error}): set up its loopback, e.g. `ip link set lo up`"
        )


def _check_device(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    """What is refused at once with the device told, and else only where `cluster.device=auto` has found it."""
    if config.cluster.device != "auto":
        return
    known = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": plan.device})})
    judged = conflicts(config)
    for conflict in conflicts(known):
        if conflict not in judged and conflict.paths[0] not in CHECKED_BY_PROCESS:
            yield f"cluster.device=auto means {plan.device} here. {conflict.sentence}"


def _check_weights(config: RunConfig, plan: LaunchPlan) -> Iterator[str]:
    try:
        choose(config, placement_of(plan))
    except TransportRefused as error:
        yield str(error)


def _check_training(config: RunConfig, plan: LaunchPlan, elsewhere: bool) -> Iterator[str]:
    yield from config.backend.find_obstacles(
        on_gpu=plan.device == "gpu",
        capability=lambda: None if elsewhere else find_compute_capability(),
        model_dtype=config.model.dtype,
        elsewhere=elsewhere,
    )
