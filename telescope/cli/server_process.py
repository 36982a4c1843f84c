"""One inference server as a child of a command: started under a shim, waited for, and gone with all below it when the command
is, whatever ended that.

The engine and its HTTP are those of a run's server (telescope/inference/alone.py). Owns its short-lived folder, signals while
the command waits for it, and why it ended. Refuses to know what it serves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType

import msgspec

from telescope._launch import shim
from telescope._launch.causes import describe_end, read_own_sentence, read_tail, read_tail_text
from telescope._launch.child_processes import ChildProcesses, LocalProcess
from telescope._launch.process_plan import PlanError, ProcessPlan, make_plan
from telescope._launch.process_plan import read_plan as read_launch_plan
from telescope._launch.progress import Console, StartDisplay, describe_newest
from telescope._launch.this_host import inspect_this_host
from telescope._launch.unblocked_output import unblock_output
from telescope.cli.served_model import ServedModel, is_going_on
from telescope.cli.start import find_obstacles, say, too_long_for_its_model
from telescope.cli.targets import TargetRefused
from telescope.config.models import hub_problem
from telescope.config.run import RunConfig, config_hash, dump_run
from telescope.inference.alone import AloneServer, write_alone
from telescope.inference.vllm.outputs import OWN_WORDS
from telescope.runlog import temporary
from telescope.runlog.files import DamagedFile
from telescope.runlog.identity import new_identity, write_identity
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.wire.process import Interrupted

PROGRAM = ("-m", "telescope.inference.alone")
LATE_S = 60.0
"""Beyond cluster.placement_timeout_s, after which the server itself says that it did not start."""
LEAVE_S = 12.0
"""From the order to leave to the kill: the engine's close has 8 s."""
NOTICE_S = 2.0
"""For the word of its end, once its connections have broken."""
MOST_ERRORS = 3
_ERROR = re.compile(r"\b\w*(?:Error|Exception): \S")
KILL_S = shim.KILL_WAIT_S + 1.0
LOOK_S = 0.5
"""Between two looks at how far a start is."""


class ServerProcessEnded(RuntimeError):
    """The server is not there any more, or did not come; the text says why."""


def plan_server(model: ServedModel) -> ProcessPlan:
    """Where the one server goes on this host: on no GPU of the run that it is of. Raises `TargetRefused`."""
    config, host = model.config, inspect_this_host()
    taken = list_gpus_of(model.source, host.name) if model.source is not None else frozenset()
    free = tuple(gpu for gpu in host.gpus if gpu not in taken)
    if len(free) < config.inference.tensor_parallel_size <= len(host.gpus) and config.cluster.device != "cpu":
        raise TargetRefused(
            f"{model.label}: the run goes on and has {len(taken)} of this host's {len(host.gpus)} GPUs, which leaves too few "
            "for another server: `telescope servers RUN_DIR` says where its own answer; or give cluster.device=cpu, or wait "
            "for its end"
        )
    try:
        if mistake := too_long_for_its_model(config):
            raise PlanError(mistake)
        plan = make_plan(config, (msgspec.structs.replace(host, gpus=free),))
    except PlanError as error:
        raise TargetRefused(str(error)) from error
    if found := find_obstacles(config, plan, hub_problem):
        raise TargetRefused("\n".join(found))
    return next(process for process in plan.processes if process.role == "server")


def list_gpus_of(run: RunDirectory, host: str) -> frozenset[str]:
    """GPUs of this host that a run has while it goes on."""
    if not is_going_on(run):
        return frozenset()
    with contextlib.suppress(OSError, DamagedFile):
        plan = read_launch_plan(run.plan_json)
        return frozenset(gpu for process in plan.processes if process.host == host for gpu in process.gpus)
    return frozenset()


def _list_errors(log: str) -> list[str]:
    """The first lines that name an error, of which later ones follow; else the last lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    return [line for line in lines if _ERROR.search(line)][:MOST_ERRORS] or lines[-MOST_ERRORS:]


class ServerProcess:
    """A context manager, for the main thread. Within, the server lives until it ends or the block does."""

    def __init__(self, model: ServedModel, plan: ProcessPlan) -> None:
        self._config: RunConfig = model.config
        self._model = model
        self._plan = msgspec.structs.replace(plan, program=PROGRAM)
        self._start_s = model.config.cluster.placement_timeout_s + LATE_S
        self._heard: list[int] = []
        self._said = b""

    def __enter__(self) -> ServerProcess:
        """Starts it. Raises `ServerProcessEnded` where it can't be started."""
        self._folder = temporary.make()
        self._run = RunDirectory.create(self._folder / "server")
        self._ready, ready_end = os.pipe()
        os.set_blocking(self._ready, False)
        self._wakeup = shim.Wakeup()
        write_atomically(self._run.config_json, dump_run(self._config), mode=0o600)
        write_identity(self._run, new_identity(self._model.name, datetime.now().astimezone(), config_hash(self._config)))
        adapter = "" if self._model.adapter is None else str(self._model.adapter)
        write_alone(self._run, AloneServer(model=self._model.name, ready=ready_end, adapter=adapter))
        shim.set_process_flag(shim.PR_SET_CHILD_SUBREAPER, 1)
        self._children = ChildProcesses((self._ready, self._wakeup.reader), say)
        refused = self._children.begin(self._plan, self._run, {}, passed=(ready_end,))
        os.close(ready_end)
        if refused:
            self._close()
            raise ServerProcessEnded(refused)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._hear_signals():
                self._stop()
        finally:
            self._close()

    def wait_until_ready(self) -> str:
        """The URL of its API, `http://127.0.0.1:8100/v1`. On stderr meanwhile: how far its start is. Raises
        `ServerProcessEnded`, and `Interrupted` after a signal."""
        until = time.monotonic() + self._start_s
        with self._hear_signals(), unblock_output():  # a terminal that is stopped must not hide a signal
            display = StartDisplay(Console(sys.stderr, sys.stdout), announced=True)
            try:
                while True:
                    self._wait(min(LOOK_S, max(0.0, until - time.monotonic())))
                    if self._heard:
                        raise Interrupted(self._heard[0])
                    if url := self._read_url():
                        return url
                    self._refuse_ended()
                    if time.monotonic() >= until:
                        raise ServerProcessEnded(f"the server of {self._model.label} did not start within {self._start_s:g} s")
                    display.show("starting the server", self._describe_newest)
            finally:
                display.end()

    def _describe_newest(self) -> str:
        return describe_newest(self._run.log(self._plan.name), self._plan.name)

    def wait_until_ended(self, announce: Callable[[], None]) -> int:
        """The number of the signal that ends the wait. `announce` says that it serves: who has read it may send one. Raises
        `ServerProcessEnded` where the server ends first."""
        with self._hear_signals(), unblock_output():
            announce()
            while not self._heard:
                self._refuse_ended()
                self._wait(None)
        return self._heard[0]

    def refuse_ended(self) -> None:
        """Raises `ServerProcessEnded` where it is gone, or goes just now: for whoever asked it in vain."""
        self._wait(NOTICE_S)
        self._refuse_ended()

    @property
    def pid(self) -> int | None:
        """Of the server itself, once it has begun."""
        return self._process.pid

    @property
    def _process(self) -> LocalProcess:
        return self._children.processes[self._plan.name]

    def _read_url(self) -> str:
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(self._ready, 4096)
        return str(json.loads(self._said)["url"]) if self._said.endswith(b"\n") else ""

    def _refuse_ended(self) -> None:
        if not self._process.ended:
            return
        why, log = read_own_sentence(self._run, self._plan.name), self._run.log(self._plan.name)
        if OWN_WORDS in why:  # the log goes with the folder
            why = "\n".join([why.replace(OWN_WORDS, ". Its own words:"), *_list_errors(read_tail_text(log))])
        if not why and self._process.end is not None:
            tail = read_tail(log)
            why = "\n".join([f"the server {describe_end(self._process.end)}" + (". Its last words:" if tail else ""), *tail])
        raise ServerProcessEnded(why.removeprefix(f"{self._plan.name}: "))

    def _stop(self) -> None:
        """Ask it to leave, and kill it where it does not follow, or a signal says so."""
        process, heard = self._process, len(self._heard)
        if not process.gone:
            process.leave(LEAVE_S, signal.SIGTERM)
        until, killed = time.monotonic() + LEAVE_S + KILL_S, False
        while not process.gone and time.monotonic() < until:
            self._wait(max(0.0, until - time.monotonic()))
            if len(self._heard) > heard and not killed:
                process.kill()
                killed = True
        if not process.gone:
            process.kill_shim()
            self._wait(KILL_S)

    def _close(self) -> None:
        self._children.close()
        shim.set_process_flag(shim.PR_SET_CHILD_SUBREAPER, 0)
        self._wakeup.close()
        os.close(self._ready)
        temporary.discard(self._folder)

    @contextlib.contextmanager
    def _hear_signals(self) -> Iterator[None]:
        """Within, INT, TERM and HUP end a wait and nothing else."""
        self._wakeup.listen(shim.ENDING_SIGNALS)
        try:
            yield
        finally:
            self._wakeup.rest()

    def _wait(self, seconds: float | None) -> None:
        """Until a child or a signal has something to tell, or the time is up."""
        self._children.wait(seconds)
        self._heard += [number for number in self._wakeup.arrived() if number in shim.ENDING_SIGNALS]


def write_curl(url: str, name: str, key_env: str | None, *, chat: bool) -> str:
    """The line that asks it something, for a shell."""
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello", "max_tokens": 32}
    key = f' -H "Authorization: Bearer ${key_env}"' if key_env else ""
    path = "chat/completions" if chat else "completions"
    body = shlex.quote(json.dumps({"model": name, **asked}))
    return f"curl {url}/{path} -H 'Content-Type: application/json'{key} -d {body}"
