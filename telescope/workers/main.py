"""An environment worker process: `python -m telescope.workers --run-dir DIR --name worker-0`.

Loads the run's environments and tokenizer, says hello, plays rollouts until told to stop. Exit codes: 0 done, 1 error,
2 usage, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from telescope.config.models import ModelNotFound, model_folder
from telescope.config.run import config_hash, load_run
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.wire.link import Link, LinkLost, WireRefused, WireTimeout
from telescope.wire.messages import Hello
from telescope.workers.load import EnvironmentBroken, Loaded, check_lengths, load_environments
from telescope.workers.play import Limits
from telescope.workers.service import Service, WorkerHopeless
from telescope.workers.tokenizer import TokenizerError, load_template

log = logging.getLogger(__name__)

KNOWN = (
    EnvironmentBroken, TokenizerError, ModelNotFound, WorkerHopeless, LinkLost, WireRefused, WireTimeout, ValueError, OSError,
)  # fmt: skip
"""Errors whose text is the sentence to be shown; anything else is shown with its type and a traceback in the log."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m telescope.workers", description="Play the rollouts of one run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True, help="e.g. worker-0")
    given = parser.parse_args(arguments)
    directory = RunDirectory(given.run_dir.absolute())
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    signals = Signals()
    try:
        signals.watch()
        return Worker(directory, given.name, signals).run()
    except Interrupted as interrupted:
        return 128 + interrupted.number
    except KNOWN as error:
        return _failed(directory, given.name, str(error) or type(error).__name__)
    except Exception as error:  # the process edge: said, recorded, and the exit code is 1
        log.exception("the worker ends with an error")
        return _failed(directory, given.name, f"{given.name} ended with {type(error).__name__}: {error}")


class Interrupted(KeyboardInterrupt):
    """A signal came while the process was in synchronous code."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Signals:
    """SIGINT and SIGTERM from the first line to the last: as an exception in synchronous code, as a future on the loop.

    A signal that came in between is remembered, because the event loop's own code may swallow an exception.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    def watch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._raise)

    def watch_on_loop(self) -> asyncio.Future[int]:
        """Done with the signal's number once one has come."""
        loop = asyncio.get_running_loop()
        came: asyncio.Future[int] = loop.create_future()

        def tell(number: int) -> None:
            if not came.done():
                came.set_result(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, tell, number)
        if self._number is not None:
            tell(self._number)
        return came

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        raise Interrupted(number)


class Worker:
    """The life of the process: load, say hello, play, say goodbye."""

    def __init__(self, directory: RunDirectory, name: str, signals: Signals) -> None:
        self._directory = directory
        self._signals = signals
        self._name = name
        self._config = load_run(directory.config_json)
        if self._config.debug:
            logging.getLogger("telescope").setLevel(logging.DEBUG)

    def run(self) -> int:
        config = self._config
        limits = Limits(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            max_prompt_tokens=config.inference.max_model_len - config.rollout.max_tokens,
            timeout_s=config.rollout.timeout_s,
        )
        environments = load_environments(config)
        template = load_template(config.model, model_folder(config.model.name))
        for loaded in environments.values():
            check_lengths(loaded, template, limits.max_prompt_tokens)
        link = Link.connect(self._directory, self._hello(environments), deadline_s=config.cluster.placement_timeout_s)
        error = ""
        try:
            service = Service(link, self._name, environments, template, limits)
            return asyncio.run(_until_stopped(service, self._signals))
        except Exception as raised:
            error = str(raised) or type(raised).__name__
            raise
        finally:
            link.close(error)

    def _hello(self, environments: dict[str, Loaded]) -> Hello:
        config = self._config
        identity = read_identity(self._directory)
        return Hello(
            role="worker",
            name=self._name,
            run=identity.run_id,
            attempt=identity.attempt,
            incarnation=secrets.token_hex(8),
            config_hash=config_hash(config),
            capacity=config.cluster.rollouts_per_env_worker,
            pid=os.getpid(),
            host=socket.gethostname(),
            environments=tuple(loaded.card for loaded in environments.values()),
        )


async def _until_stopped(service: Service, signals: Signals) -> int:
    """0 after the orchestrator's Stop, 128 + n after a signal n."""
    signalled = signals.watch_on_loop()
    running = asyncio.ensure_future(service.run())
    await asyncio.wait((running, signalled), return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return 128 + signalled.result()
    log.info("stopped: %s", running.result())
    return 0


def _failed(directory: RunDirectory, name: str, sentence: str) -> int:
    """The sentence to the failure file and, last of all, to stderr."""
    try:
        write_atomically(directory.failure(name), sentence + "\n")
    except OSError as error:
        log.error("the reason of the failure can't be written: %s", error)
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201 - the supervisor quotes the last line
    return 1


def leave(code: int) -> None:
    """Exit without waiting for threads: a reward function that hangs would keep the interpreter from ending."""
    logging.shutdown()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
