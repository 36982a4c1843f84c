"""A trainer rank's process: `python -m telescope.trainer --run-dir DIR --name trainer-0`.

Builds the backend (all ranks together), says hello when it can train, serves orders until told to stop. Exit codes: 0 done,
1 error, 2 usage, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from telescope.backends.base import Job, RankLost, World
from telescope.config.run import RunConfig, config_hash, load_run
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.trainer.placement import placement
from telescope.trainer.service import OutOfOrder, Service
from telescope.weights.base import NoRoomForWeights
from telescope.weights.shared_memory import SharedMemoryPublisher
from telescope.wire.link import Link, LinkLost, WireRefused, WireTimeout
from telescope.wire.messages import Hello

log = logging.getLogger(__name__)

KNOWN = (OutOfOrder, RankLost, NoRoomForWeights, LinkLost, WireRefused, WireTimeout, ValueError, OSError)
"""Errors whose text is the sentence to be shown; anything else is shown with its type, and a traceback in the log."""
CREDITS = 2
"""Orders that may lie here at once: the next one waits while a step runs."""


class Interrupted(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by signal {number}")
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m telescope.trainer", description="One trainer rank of one run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True, help="e.g. trainer-0")
    given = parser.parse_args(arguments)
    directory = RunDirectory(given.run_dir.absolute())
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        return Rank(directory, given.name).run()
    except Interrupted as interrupted:
        log.info("%s", interrupted)
        return 128 + interrupted.number
    except KNOWN as error:
        log.debug("the cause", exc_info=True)
        return _failed(directory, given.name, f"{given.name}: {error}")
    except Exception as error:  # the process edge: said, recorded, and the exit code is 1
        log.exception("the trainer rank ends with an error")
        return _failed(directory, given.name, f"{given.name} ended with {type(error).__name__}: {error}")


class Rank:
    """The life of the process."""

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self._directory = directory
        self._name = name
        self._config = load_run(directory.config_json)
        self._world = placement(os.environ, self._config.cluster)
        self._link: Link | None = None
        if self._config.debug:
            logging.getLogger("telescope").setLevel(logging.DEBUG)

    def run(self) -> int:
        """0 after the orchestrator's Stop. The hello comes after the build, so that it means: ready to train."""
        config = self._config
        backend = config.backend.build(job(config, self._world, self._progress))
        publisher = SharedMemoryPublisher(read_identity(self._directory).run_id) if self._world.rank == 0 else None
        error = ""
        try:
            self._link = Link.connect(self._directory, self._hello(), deadline_s=config.cluster.placement_timeout_s)
            log.info("stopped: %s", Service(self._link, backend, publisher).run())
            backend.close()  # not after an error: it would wait for ranks that are gone
            return 0
        except BaseException as raised:
            error = str(raised) or type(raised).__name__
            raise
        finally:
            if publisher is not None:
                publisher.close()
            if self._link is not None:
                self._link.close(error)

    def _progress(self, doing: str) -> None:
        if self._link is not None:
            self._link.progress(doing)

    def _hello(self) -> Hello:
        return Hello(
            role="trainer",
            name=self._name,
            run=read_identity(self._directory).run_id,
            attempt=read_identity(self._directory).attempt,
            incarnation=secrets.token_hex(8),
            config_hash=config_hash(self._config),
            capacity=CREDITS,
            pid=os.getpid(),
            host=socket.gethostname(),
            rank=self._world.rank,
        )


def job(config: RunConfig, world: World, progress: Callable[[str], None]) -> Job:
    """What a backend is told of the run."""
    return Job(
        algorithm=config.algorithm,
        model=config.model,
        trainer=config.trainer,
        number_of_steps=config.number_of_steps,
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        seed=config.seed,
        world=world,
        progress=progress,
    )


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


def _failed(directory: RunDirectory, name: str, sentence: str) -> int:
    """The sentence to the failure file and, last of all, to stderr."""
    try:
        write_atomically(directory.failure(name), sentence + "\n")
    except OSError as error:
        log.error("the reason of the failure can't be written: %s", error)
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201 - the supervisor quotes the last line
    return 1


def leave(code: int) -> NoReturn:
    """Exit without the interpreter's farewell: threads of a collective whose other ranks are gone would hang it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
