"""A server's process: `python -m telescope.inference --run-dir DIR --name server-0`.

Starts the engine, opens HTTP beside it, says hello when it can serve, serves until told to stop. Exit codes: 0 done, 1 error,
2 usage, 70 the engine or the orchestrator is gone, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from telescope.config.models import ModelNotFound, model_folder
from telescope.config.run import RunConfig, config_hash, load_run
from telescope.inference.deadline import Deadline, fail
from telescope.inference.engine import Engine, EngineDead
from telescope.inference.fake import FakeEngine
from telescope.inference.http import PortTaken, bind, http_beside
from telescope.inference.server import Server, first_of
from telescope.inference.vllm_options import Device, ServerPlan, vllm_environment
from telescope.runlog.identity import read_identity
from telescope.runlog.layout import RunDirectory
from telescope.weights.shared_memory import SharedMemoryReader
from telescope.wire.link import Link, LinkLost, WireRefused, WireTimeout
from telescope.wire.messages import Hello

log = logging.getLogger(__name__)

CREDITS_FOR_ORDERS = 8
"""Weight orders may come on top of all requests."""
CLOSE_S = 9.0
"""Closing takes no longer than this, whatever the engine does."""
GONE = 70


class Interrupted(Exception):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m telescope.inference", description="One inference server of one run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True, help="e.g. server-0")
    given = parser.parse_args(arguments)
    directory = RunDirectory(given.run_dir.absolute())
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    try:
        return asyncio.run(serve(directory, given.name))
    except Interrupted as interrupted:
        log.info("%s", interrupted)
        return 128 + interrupted.number
    except (EngineDead, LinkLost) as error:
        return fail(directory, given.name, f"{given.name}: {error}", GONE)
    except (PortTaken, ModelNotFound, WireRefused, WireTimeout, OSError) as error:
        log.debug("the cause", exc_info=True)
        return fail(directory, given.name, f"{given.name}: {error}", 1)
    except Exception as error:  # the process edge: said, recorded, and the exit code is 1
        log.exception("the server ends with an error")
        return fail(directory, given.name, f"{given.name} ended with {type(error).__name__}: {_first_line(error)}", 1)


async def serve(directory: RunDirectory, name: str) -> int:
    """0 after the orchestrator's Stop."""
    config = load_run(directory.config_json)
    if config.debug:
        logging.getLogger("telescope").setLevel(logging.DEBUG)
    index = server_index(name)
    listener = bind(config.inference.host, config.inference.base_port, index) if _http_wanted(config) else None
    deadline = Deadline(directory, name)
    engine = build_engine(config, directory, device_of(config, os.environ))
    with deadline(config.cluster.placement_timeout_s, "its engine did not start within cluster.placement_timeout_s"):
        await engine.start()
    interrupted = _watch_signals()
    link: Link | None = None
    error = ""
    try:
        async with http_beside(engine.client, listener, config.model):
            link = await asyncio.to_thread(
                Link.connect, directory, hello(config, directory, name), config.cluster.placement_timeout_s
            )
            serving = asyncio.create_task(Server(link, engine).run())
            await first_of(serving, interrupted)
            if not serving.done():
                serving.cancel()
                raise Interrupted(interrupted.result())
            log.info("stopped: %s", serving.result())
            return 0
    except BaseException as raised:
        error = str(raised) or type(raised).__name__
        raise
    finally:
        with deadline(CLOSE_S, "it did not close in time", code=GONE if error else 0):
            if link is not None:
                await asyncio.to_thread(link.close, error)
            await engine.close()


def hello(config: RunConfig, directory: RunDirectory, name: str) -> Hello:
    identity = read_identity(directory)
    return Hello(
        role="server",
        name=name,
        run=identity.run_id,
        attempt=identity.attempt,
        incarnation=secrets.token_hex(8),
        config_hash=config_hash(config),
        capacity=lanes(config) + CREDITS_FOR_ORDERS,
        pid=os.getpid(),
        host=socket.gethostname(),
        version=0,
    )


def lanes(config: RunConfig) -> int:
    """Requests that the orchestrator may have in flight at one server: as a group stays with its server, that may be all."""
    lanes_of_one = config.orchestrator.max_concurrent_prompts_per_server * config.rollout.group_size
    return lanes_of_one * config.cluster.inference_num_workers


def server_index(name: str) -> int:
    """`server-3` is server 3. Raises `ValueError` for a name without a number."""
    found = re.fullmatch(r"[a-z]+-(\d+)", name)
    if found is None:
        raise ValueError(f"--name {name} must end in the server's index, e.g. server-0")
    return int(found.group(1))


def device_of(config: RunConfig, environ: os._Environ[str] | dict[str, str]) -> Device:
    """The launcher shows a server its own GPU, and none where the run is on CPUs."""
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    return "gpu" if visible and config.cluster.device != "cpu" else "cpu"


def build_engine(config: RunConfig, directory: RunDirectory, device: Device) -> Engine:
    """The engine that `inference.engine` names, not started. For vLLM this sets the environment, so it goes before its import.

    Raises `ModelNotFound`.
    """
    folder = model_folder(config.model.name)
    run = read_identity(directory).run_id
    settings = config.inference
    if settings.engine == "fake":
        return FakeEngine(folder, SharedMemoryReader(run), max_model_len=settings.max_model_len, token_s=settings.fake_token_s)
    os.environ.update(vllm_environment(device, os.environ))
    from telescope.inference.vllm_engine import VllmEngine

    plan = ServerPlan(config.model, folder, settings, device, lanes(config), config.seed, run)
    return VllmEngine(plan, config.weight_sync)


def _http_wanted(config: RunConfig) -> bool:
    return config.inference.http and config.inference.engine == "vllm"


def _watch_signals() -> asyncio.Future[int]:
    """Ready with the first signal's number. The second one, whichever, kills: the default action is back by then."""
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        interrupted.set_result(number)
        for other in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(other)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return interrupted


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def leave(code: int) -> NoReturn:
    """Exit without the interpreter's farewell, in which threads of torch and vLLM have been seen to hang."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
