"""The edge of a process of a run: its arguments, its log, its hello, and how the reason of its end reaches the user.

Every process of floor 3 begins with `run_process`. Owns what they have in common; knows nothing of what any of them does.
Exit codes: 0 done, 1 error, 2 usage, 70 a part failed for good, 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from telescope.config.redaction import Redactor
from telescope.config.run import RunConfig, config_hash, load_run, make_redactor
from telescope.exit_codes import COMPONENT_FAILED, ERROR
from telescope.records import Role
from telescope.runlog.identity import RunIdentity, read_identity
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.wire.messages import Hello

log = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGUSR1
"""The supervisor sends it to whoever is given up as silent. C code writes the answer, even while no Python code can run."""
LOOPBACK = "127.0.0.1"
ADDRESS = "TELESCOPE_ADDRESS"
"""The launcher's variable for `ProcessContext.address`."""


@dataclass(frozen=True)
class ProcessContext:
    """Where a process stands: its run, and its name in it, e.g. `server-0`."""

    directory: RunDirectory
    name: str
    config: RunConfig
    identity: RunIdentity
    address: str = LOOPBACK
    """Where this process's sockets bind: its host's on the run's network, loopback where the run has one host."""
    redactor: Redactor = field(default_factory=Redactor)
    """Of what it must not write into the run's files. Its log is redacted by the shim."""

    @classmethod
    def read(cls, directory: RunDirectory, name: str) -> ProcessContext:
        address = os.environ.get(ADDRESS, LOOPBACK)
        config = load_run(directory.config_json)
        return cls(directory, name, config, read_identity(directory), address, make_redactor(config))

    def make_hello(self, role: Role, *, capacity: int, **facts: Any) -> Hello:
        """`facts`: what only this role has to say, e.g. `rank=1`."""
        return Hello(
            role=role,
            name=self.name,
            run=self.identity.run_id,
            attempt=self.identity.attempt,
            incarnation=secrets.token_hex(8),
            config_hash=config_hash(self.config),
            capacity=capacity,
            pid=os.getpid(),
            host=socket.gethostname(),
            **facts,
        )


class Interrupted(KeyboardInterrupt):
    """A signal came while the process was in synchronous code."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessSignals:
    """Interrupts from the first line to the last: as an exception while a process starts, as a future on the loop, as a note
    where locks are in use.

    A signal that came in between is remembered, because the event loop's own code may swallow an exception. `held`: it is only
    noted from the start on, until the loop or `check` asks for it.
    """

    def __init__(self, *, held: bool = False) -> None:
        self._number: int | None = None
        self._held = held

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Within, a signal is only noted; `check` raises it. An exception in the middle of a lock's own code leaves it locked,
        and the link's thread then waits for it for ever."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self._number is not None:
            raise Interrupted(self._number)

    def watch(self) -> None:
        for number in INTERRUPTS:
            signal.signal(number, self._raise)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)  # which the launcher may have kept waiting until now

    def watch_on_loop(self) -> asyncio.Future[int]:
        """Done with the signal's number once one has come. A second one then kills: the default action is back."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[int] = loop.create_future()

        def tell(number: int) -> None:
            if came.done():  # both came in one turn of the loop
                return
            came.set_result(number)
            for other in INTERRUPTS:
                loop.remove_signal_handler(other)
                signal.signal(other, signal.SIG_DFL)  # for SIGINT the loop has put KeyboardInterrupt there

        for number in INTERRUPTS:
            loop.add_signal_handler(number, tell, number)
        if self._number is not None:
            tell(self._number)
        return came

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        if not self._held:
            raise Interrupted(number)


@dataclass(frozen=True)
class KnownErrors:
    """Errors whose text is the sentence to be shown, with their exit codes."""

    errors: tuple[type[BaseException], ...]
    """Our own classes: each text is written for the user and says all there is to say."""
    gone: tuple[type[BaseException], ...] = ()
    """A part that this process cannot do without is gone: exit code 70."""

    def describe_end(self, name: str, error: BaseException) -> tuple[str, int]:
        """The sentence for the user and the exit code. What no class of ours explains leaves its traceback in the log."""
        if isinstance(error, self.gone):
            return _make_sentence(name, error), COMPONENT_FAILED
        if isinstance(error, self.errors):
            log.debug("the cause", exc_info=error)
            return _make_sentence(name, error), ERROR
        log.error("%s ends with an error", name, exc_info=error)
        if isinstance(error, ValueError | OSError):  # they mostly come with a text that a user understands
            return _make_sentence(name, error), ERROR
        return f"{name} ended with {type(error).__name__}: {error}", ERROR


def run_process(
    life: Callable[[ProcessContext, ProcessSignals], int],
    *,
    prog: str,
    known: KnownErrors,
    arguments: Sequence[str] | None = None,
    held: bool = False,
) -> int:
    """Parse the arguments, read the run, live, and say why it ended. Gives the exit code. `held`: a signal ends nothing before
    the process asks for it (`ProcessSignals`).

    An error that is not `known` leaves its traceback in the log, and is shown with its type unless it is a ValueError or an
    OSError.
    """
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True, help="e.g. worker-0")
    given = parser.parse_args(arguments)
    directory, name = RunDirectory(given.run_dir.absolute()), given.name
    raise_file_limit()
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    signals = ProcessSignals(held=held)
    redactor = Redactor.of(os.environ)
    try:
        signals.watch()
        context = ProcessContext.read(directory, name)
        redactor = context.redactor
        if context.config.debug:
            logging.getLogger("telescope").setLevel(logging.DEBUG)
        return life(context, signals)
    except Interrupted as interrupted:
        log.info("%s", interrupted)
        return 128 + interrupted.number
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 the process edge: said, recorded, never silent
        sentence, code = known.describe_end(name, error)
        return say_why(directory, name, redactor.text(sentence), code)


def raise_file_limit() -> None:
    """As many open files as the system allows: strangers who connect to a port of ours must not use up the run's own."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a limit beyond the kernel's own stays as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _make_sentence(name: str, error: BaseException) -> str:
    said = str(error) or type(error).__name__
    return said if said.startswith(name) else f"{name}: {said}"


def say_why(directory: RunDirectory, name: str, sentence: str, exit_code: int) -> int:
    """The sentence to the failure file and, last of all, to stderr, whose last line the supervisor quotes."""
    try:
        write_atomically(directory.failure(name), sentence + "\n")
    except OSError as error:
        log.error("the reason of the failure can't be written: %s", error)
    sys.stderr.write(sentence + "\n")
    return exit_code


def leave(code: int) -> NoReturn:
    """Exit without the interpreter's farewell, which would wait for threads: those of a reward function that hangs, of a
    collective whose other ranks are gone, of a client whose server does not answer."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # an environment may have closed it, or put None there
            stream.flush()
    os._exit(code)


def freeze_heap() -> None:
    """Collect what is garbage, and set all other objects aside for good: they are freed as ever when nobody refers to them,
    only cycles among them are not looked for. To be called once a process is ready, before its work begins.

    Python's full collections visit every container object and stop all threads of the process meanwhile. With torch and vLLM
    imported these are 600,000 objects, and a collection takes tens to hundreds of milliseconds: a pause for each request in
    flight."""
    gc.collect()
    gc.freeze()
    log.debug("%d objects are set aside from garbage collection", gc.get_freeze_count())
