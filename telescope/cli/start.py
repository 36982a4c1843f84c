"""One run, from a judged configuration to its processes: where it lies, what is written down, and who starts it.

On this host alone the supervisor of this process starts everything; over several hosts this is the head or one of the nodes.
What goes to Slurm is handed over in submitting.py. Heavy imports wait until they are needed.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from telescope._launch.unblocked_output import unblock_output
from telescope.exit_codes import COMPONENT_FAILED, DONE, ERROR

if TYPE_CHECKING:
    from telescope._launch.automatic_settings import FindCard
    from telescope._launch.hosts.node_identity import NodeIdentity
    from telescope._launch.process_plan import LaunchPlan
    from telescope.config.automatic import Decision
    from telescope.config.run import RunConfig
    from telescope.config.words import ConfigProblem
    from telescope.runlog.layout import RunDirectory

OK, CONFIG_ERROR = DONE, ERROR
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""The variable by which vLLM is told to serve a model beyond its positions."""
_log = logging.getLogger("telescope.run")


@dataclass(frozen=True)
class RunOrder:
    """One run, ready to be written down and started; `config` has its name and run_dir."""

    config: RunConfig
    plan: LaunchPlan | None
    """None where the hosts have yet to meet."""
    standing: NodeIdentity
    warnings: tuple[str, ...]
    arguments: tuple[str, ...]
    started: datetime
    program: str = "telescope.run"
    """The module that was given the arguments."""
    by_itself: bool = False
    """An attempt that nobody asked for: it passes over checkpoints that are damaged, where a person is told of them."""
    evaluated: str = ""
    """As `RunIdentity` has it."""
    given: RunConfig | None = None
    """As the command line has it on each host, with `auto` undecided; None: as `config`."""
    chosen: str = ""
    """What `auto` became, in a line; empty where there is nothing to say."""


def with_name(config: RunConfig) -> RunConfig:
    """With a name made of model and algorithm where none was given, e.g. `tiny-grpo`."""
    if config.name:
        return config
    model = re.sub(r"[^A-Za-z0-9._+-]", "-", Path(config.model.name).name)[:60]
    return config.model_copy(update={"name": f"{model}-{config.algorithm_name}"})


def run_folder(config: RunConfig, started: datetime) -> Path:
    """The folder asked for, or a new one under runs/ that no other run of this second has."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser().absolute()
    stem = f"{started:%Y-%m-%d_%H-%M-%S}_{config.name}"
    names = (stem if count == 1 else f"{stem}_{count}" for count in range(1, 1000))
    return next(path for name in names if not (path := Path("runs", name).absolute()).exists())


def make_plan_here(config: RunConfig) -> tuple[NodeIdentity, LaunchPlan | None]:
    """Where this host stands, and the plan of a run that is on it alone, or on the nodes that Slurm is asked for.

    Raises `PlanError`."""
    from telescope._launch.hosts.node_identity import NodeIdentity, identify_node
    from telescope._launch.process_plan import PlanError, make_plan
    from telescope._launch.slurm.allocation import list_nominal_nodes, make_hosts
    from telescope._launch.this_host import inspect_this_host

    if mistake := too_long_for_its_model(config):
        raise PlanError(mistake)
    if config.cluster.slurm is not None:
        return NodeIdentity(), make_plan(config, make_hosts(list_nominal_nodes(config.cluster.slurm)))
    found = identify_node(config.cluster, config.run_dir, os.environ)
    return found, make_plan(config, (inspect_this_host(),)) if found.nodes == 1 else None


def settle(config: RunConfig, plan: LaunchPlan | None, standing: NodeIdentity, find_card: FindCard) -> Decision:
    """What `auto` becomes here; a node that is not the head leaves it to that. A run that goes on keeps what it began with.
    `find_card` as in `automatic_settings.settle`.

    Raises `PlanError` where that can't be read."""
    from telescope._launch.automatic_settings import settle
    from telescope._launch.process_plan import PlanError
    from telescope.config.automatic import Decision
    from telescope.config.run import read_settings
    from telescope.runlog.files import DamagedFile
    from telescope.runlog.layout import RunDirectory

    if standing.rank:
        return Decision(config)
    before = None
    if config.checkpoint.resume is not False and config.run_dir is not None:
        try:
            before = read_settings(RunDirectory(Path(config.run_dir).expanduser().absolute()).config_json)
        except FileNotFoundError:
            before = None  # what can't be resumed is refused in its own words
        except (DamagedFile, OSError) as error:
            raise PlanError(str(error)) from error
    return settle(config, plan, before, find_card, standing.nodes)


def find_absent(config: RunConfig, plan: LaunchPlan | None, known: dict[str, list[str]]) -> list[str]:
    """What the run needs and this machine has not: sentences with the remedy. Of several hosts that have yet to meet the head
    asks. `known`: what was found already, for the points of a sweep with the same model, backend and environments."""
    from telescope._launch.preflight import find_absent
    from telescope.config.run import as_json

    if plan is None:
        return []
    settings = as_json(config)
    shared = [settings[part] for part in ("plugin_path", "environments", "model", "inference", "cluster")]
    key = repr([*shared, config.backend_name])  # of a fake one the weights are not looked at
    if key not in known:
        known[key] = find_absent(config, plan, elsewhere=config.cluster.slurm is not None)
    return known[key]


def find_obstacles(config: RunConfig, plan: LaunchPlan | None, hub: Callable[[str], ConfigProblem | None]) -> list[str]:
    """Why a run of that plan would not start on this machine, though its configuration is right and nothing is absent
    (`find_absent`): sentences with the remedy. `hub`: `hub_problem`, cached where there are many points."""
    from telescope._launch.preflight import find_obstacles

    found = [] if plan is None else find_obstacles(config, plan, elsewhere=config.cluster.slurm is not None)
    problem = hub(config.model.name)
    return found if problem is None else [*found, problem.sentence]


def too_long_for_its_model(config: RunConfig) -> str:
    """Why vLLM would refuse `inference.max_model_len`; "" where it would not, or where that can't be told here."""
    from telescope.config.models import positions

    inference, model = config.inference, config.model.name
    allowed = {**os.environ, **config.cluster.env}.get(LONGER, "0") not in ("", "0")
    most = None if allowed or inference.engine != "vllm" else positions(model)
    if most is None or inference.max_model_len <= most:
        return ""
    return (
        f"inference.max_model_len={inference.max_model_len} is above the {most} positions of model.name={model}, and vLLM "
        f"serves no model beyond them: set inference.max_model_len={most}, or name another model"
    )


@unblock_output()
def run_one(order: RunOrder, *, kept_by_sweep: bool = False) -> int:
    """Make the run directory, write what was resolved, and let this machine's supervisor start and watch the processes; again
    from the latest checkpoint where a part of the run has died and the attempt has come further than the one before.
    `kept_by_sweep`: a sweep keeps what the run has saved, or deletes it: when it is done the sweep's table says what comes
    next."""
    from telescope._launch.next_commands import list_next_lines

    code = _attempt(order)
    for _ in range(order.config.checkpoint.max_restarts):
        again = None if code is None else _after_failure(order, code)
        if again is None:
            break
        say("A part of the run has died: it goes on from its latest checkpoint (checkpoint.max_restarts).")
        order, code = again, _attempt(again)
    if code is None:
        return CONFIG_ERROR
    for line in () if kept_by_sweep and code == DONE else list_next_lines(order.config, code):
        say(line)
    return code


def _after_failure(order: RunOrder, code: int) -> RunOrder | None:
    """The order of a further attempt, or None where there is none to be had."""
    from telescope._launch.next_commands import find_way_on
    from telescope.runlog.attempts import read_lineage
    from telescope.runlog.layout import RunDirectory
    from telescope.runlog.opening import look

    config = order.config
    if code != COMPONENT_FAILED or order.plan is None:
        return None
    run, latest = RunDirectory(Path(str(config.run_dir))), find_way_on(config)
    told_to_stop = look(run).exit.interrupted is not None
    if told_to_stop or not latest or latest <= read_lineage(run).step:
        return None
    resume = config.checkpoint.model_copy(update={"resume": True})
    return replace(order, config=config.model_copy(update={"checkpoint": resume}), by_itself=True)


def _attempt(order: RunOrder) -> int | None:
    """Its exit code; None where it was refused, in words, before anything began. A signal waits until the directory is whole: a
    new one is then taken back, a run that goes on is stopped in good order by its supervisor. Where the hosts do not come
    together, a new directory is taken back too; of a run that goes on that attempt has failed."""
    from telescope._launch.held_signals import hold_signals
    from telescope._launch.hosts.head import NothingStarted, gather_nodes
    from telescope._launch.save_forecast import describe_end_save
    from telescope._launch.supervisor import note_failed_start, supervise
    from telescope.cli.half_done import HalfDone
    from telescope.config.run import config_hash
    from telescope.runlog.attempts import note_end

    again = order.config.checkpoint.resume is not False
    with hold_signals() as held:
        before = HalfDone(Path(str(order.config.run_dir)))
        directory = make_directory(order)
        if directory is None:
            return held.exit_code or None
        if held.number is not None and not again:
            before.take_back_or_say(say)
            say("Nothing was started.")
            return held.exit_code
        for sentence in (*filter(None, (order.chosen,)), *describe_end_save(order.config, directory)):
            say(sentence)
        try:
            given = config_hash(order.given or order.config)
            nodes, port = (None, 0) if order.plan else gather_nodes(directory, order.config, order.standing, say, held, given)
            code = supervise(directory, nodes=nodes, port=port, held=held)
        except NothingStarted as error:
            code = error.code
            say(f"{error}\nNothing was started.")
            if not again:
                before.take_back_or_say(say)
                return code
            note_failed_start(directory, code, str(error))
    note_end(directory, code)
    return code


@unblock_output()
def join_run(order: RunOrder) -> int:
    """Be one of the nodes that are not the head."""
    from telescope._launch.hosts.node import NodeOptions, run_node
    from telescope.config.run import config_hash

    config, cluster = order.config, order.config.cluster
    folder = None if config.run_dir is None else Path(config.run_dir)
    invitation = NodeOptions(order.standing, config_hash(config), folder, cluster.interface, cluster.placement_timeout_s)
    return run_node(invitation, say)


def make_directory(order: RunOrder, until_held: ExitStack | None = None) -> RunDirectory | None:
    """The run's directory with all that was resolved; None, and a sentence for the user, where it can't be made. A further
    attempt is nobody else's to make until `until_held` ends: where there is none, until its holder is written down."""
    from telescope._launch.prepare_attempt import CannotResume
    from telescope._launch.process_plan import write_plan
    from telescope.runlog.holder import hold
    from telescope.runlog.layout import RunDirectory, RunDirectoryInUse

    path = Path(str(order.config.run_dir))
    level = logging.DEBUG if order.config.debug else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=level, format="%(message)s", force=True)
    again = order.config.checkpoint.resume is not False
    if refusal := _unreadable(path):
        say(refusal)
        return None
    try:
        with ExitStack() as until_made:
            directory = _resume_directory(path, order, until_held or until_made) if again else RunDirectory.create(path)
            if not again:
                write_down(directory, order)
            if order.plan:
                write_plan(order.plan, directory.plan_json)
            if order.config.cluster.slurm is None:  # else the job will
                hold(directory)
    except (RunDirectoryInUse, CannotResume) as error:
        say(f"{error}\nNothing was started." if again else str(error))
        return None
    except OSError as error:
        say(f"run_dir={path} can't be written: {error.strerror} ({error.filename}); name another with run_dir=…")
        return None
    for warning in order.warnings:
        _log.warning("Warning: %s", warning)
    return directory


def _resume_directory(path: Path, order: RunOrder, until_held: ExitStack) -> RunDirectory:
    """The directory of an earlier run, ready for another attempt that begins at a checkpoint, and nobody else's until
    `until_held` ends. On Slurm the job itself sees to it when it starts. Raises `CannotResume` and OSError."""
    from telescope._launch import prepare_attempt
    from telescope.config.resume import find_obstacles_to_resume, remark_on_resume
    from telescope.config.run import as_json, config_hash
    from telescope.runlog import http_key
    from telescope.runlog.files import DamagedFile
    from telescope.runlog.identity import write_identity
    from telescope.runlog.layout import RunDirectory
    from telescope.runlog.opening import NotARun, go_on

    config, directory, asked = order.config, RunDirectory(path), order.config.checkpoint.resume
    try:
        begun = go_on(directory)
    except NotARun as error:
        raise prepare_attempt.CannotResume(f"{error}, and checkpoint.resume goes on in one: name another") from error
    except DamagedFile as error:
        raise prepare_attempt.CannotResume(str(error)) from error
    before, here = begun.settings, as_json(config)
    problems = find_obstacles_to_resume(before, here)
    if problems:
        raise prepare_attempt.CannotResume("\n".join(problems))
    until_held.enter_context(prepare_attempt.lock_attempts(directory))
    prepare_attempt.refuse_alive(directory)
    prepare_attempt.refuse_queued(directory)
    if not config.trains:
        return _go_on_with_evals(directory, order)
    on_slurm = config.cluster.slurm is not None
    if on_slurm and asked is not True:
        raise prepare_attempt.CannotResume(
            f"checkpoint.resume={asked}: a job takes the latest checkpoint; set checkpoint.resume=true"
        )
    whole = prepare_attempt.find_latest(directory, config) if order.by_itself else None
    source = whole or prepare_attempt.find_resume_point(directory, config, None if asked is True else asked)
    for remark in remark_on_resume(before, here, source.step):
        _log.warning("Warning: %s", remark)
    if config.inference.makes_http_key:
        http_key.make(directory)
    if on_slurm:
        prepare_attempt.keep_settings(directory)
        write_identity(directory, msgspec.structs.replace(begun.identity, config_hash=config_hash(config)))
        _write_settings(directory, order)
        return directory
    number = prepare_attempt.begin_attempt(directory, config_hash(config), secrets.token_hex(4))
    _write_settings(directory, order)
    prepare_attempt.begin_at(directory, config, source, number)
    _log.info("Going on after step %d, in attempt %d of %s.", source.step, number, path)
    return directory


def _go_on_with_evals(directory: RunDirectory, order: RunOrder) -> RunDirectory:
    """The directory of a run that does not train, ready to play what is left. Raises `CannotResume` and OSError."""
    from telescope._launch import prepare_attempt
    from telescope.config.run import config_hash
    from telescope.runlog import http_key

    prepare_attempt.refuse_all_played(directory, order.config)
    if order.config.inference.makes_http_key:
        http_key.make(directory)
    number = prepare_attempt.begin_attempt(directory, config_hash(order.config), secrets.token_hex(4))
    _write_settings(directory, order)
    prepare_attempt.begin_with_rows(directory, number)
    _log.info("Going on with what is left of the evals, in attempt %d of %s.", number, directory.path)
    return directory


def _unreadable(path: Path) -> str:
    """A sentence where the path has bytes that are not text here: no file of ours, in UTF-8 all, could name it."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        return (
            f"run_dir={shown} is not text in this locale (encoding {sys.getfilesystemencoding()}): set LC_ALL=C.UTF-8, or name "
            "another with run_dir=…"
        )
    return ""


def write_down(directory: RunDirectory, order: RunOrder) -> None:
    """Readable by its owner alone: config.json is what the processes read, config.yaml is for people."""
    from telescope.config.run import config_hash
    from telescope.runlog import http_key
    from telescope.runlog.identity import new_identity, write_identity

    _write_settings(directory, order)
    config = order.config
    write_identity(directory, new_identity(config.name, order.started, config_hash(config), order.warnings, order.evaluated))
    if order.config.inference.makes_http_key:
        http_key.make(directory)


def _write_settings(directory: RunDirectory, order: RunOrder) -> None:
    from telescope.config.run import as_yaml, dump_run
    from telescope.runlog.layout import write_atomically

    command = shlex.join(["python", "-m", *order.program.split(), *order.arguments])
    write_atomically(directory.config_json, dump_run(order.config), mode=0o600)
    write_atomically(directory.config_yaml, as_yaml(order.config), mode=0o600)
    write_atomically(directory.cmdline, f"{command}\n", mode=0o600)


def new_key(path: Path) -> int:
    from telescope._launch.hosts.node_identity import write_key

    try:
        write_key(path)
    except OSError as error:
        say(f"telescope.run: --new-key {path} can't be written: {error.strerror}")
        return CONFIG_ERROR
    say(f"Made {path}. Copy it to every host of your runs, readable by you alone, and give cluster.key_file={path}.")
    return OK


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
