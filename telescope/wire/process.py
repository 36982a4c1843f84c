"""The edge of a process of a run: its arguments, its log, its hello, and how the reason of its end reaches the user.

Every process of floor 3 begins with `run_process`. Owns what they have in common; knows nothing of what any of them does.
Exit codes: 0 done, 1 error, 2 usage, 70 a part failed for good, 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from telescope.config.run import RunConfig, config_hash, load_run
from telescope.records import Role
from telescope.runlog.identity import RunIdentity, read_identity
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.wire.messages import Hello

log = logging.getLogger(__name__)

ERROR = 1
COMPONENT_FAILED = 70


@dataclass(frozen=True)
class Place:
    """Where a process stands: its run, and its name in it, e.g. `server-0`."""

    directory: RunDirectory
    name: str
    config: RunConfig
    identity: RunIdentity

    @classmethod
    def read(cls, directory: RunDirectory, name: str) -> Place:
        return cls(directory, name, load_run(directory.config_json), read_identity(directory))

    def hello(self, role: Role, *, capacity: int, **facts: Any) -> Hello:
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


class Ended(Exception):
    """A process ends for a reason it knows: a sentence for the user, and the exit code."""

    def __init__(self, sentence: str, exit_code: int = ERROR) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def run_process(
    life: Callable[[Place], int], *, prog: str, known: tuple[type[BaseException], ...], arguments: Sequence[str] | None
) -> int:
    """Parse the arguments, read the run, live, and say why it ended. Gives the exit code.

    `known`: errors whose text is the sentence to be shown; any other is shown with its type, and its traceback in the log.
    """
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True, help="e.g. worker-0")
    given = parser.parse_args(arguments)
    directory, name = RunDirectory(given.run_dir.absolute()), given.name
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    try:
        place = Place.read(directory, name)
        if place.config.debug:
            logging.getLogger("telescope").setLevel(logging.DEBUG)
        return life(place)
    except Ended as ended:
        return say_why(directory, name, str(ended), ended.exit_code)
    except KeyboardInterrupt:
        return 130
    except known as error:
        log.debug("the cause", exc_info=True)
        return say_why(directory, name, f"{name}: {error}" if str(error) else f"{name}: {type(error).__name__}", ERROR)
    except Exception as error:  # the process edge: said, recorded, and the exit code is 1
        log.exception("%s ends with an error", name)
        return say_why(directory, name, f"{name} ended with {type(error).__name__}: {error}", ERROR)


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
