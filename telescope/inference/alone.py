"""A server without a run: `python -m telescope.inference.alone --run-dir DIR --name server-0`.

DIR is a short-lived folder that looks like a run's: its config.json, and `alone.json`, which says what is served. The engine is
that of a run's server; there is no orchestrator, no weight update and no rollout, and requests come over HTTP alone. Once it
listens, it says so on a descriptor of whoever started it. Exit codes as of `telescope.inference`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from telescope.config.secrets import reveal
from telescope.exit_codes import COMPONENT_FAILED
from telescope.inference.engine import Engine, EngineDead, EngineRefused
from telescope.inference.main import CLOSE_S, KNOWN, Deadline, build_engine, device_of, server_index
from telescope.inference.server import first_of
from telescope.inference.status import Status
from telescope.inference.vllm.http import bind, http_beside
from telescope.records import Record
from telescope.runlog.files import read_json
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.wire.process import Interrupted, ProcessContext, ProcessSignals, freeze_heap, leave, run_process

log = logging.getLogger(__name__)


class AloneServer(Record, frozen=True):
    """What a server without a run is told beside its configuration."""

    model: str
    """The name that clients ask for."""
    ready: int
    """The descriptor on which it says that it listens: one line of JSON, `{"url": "http://127.0.0.1:8100/v1"}`."""
    adapter: str = ""
    """The folder of the LoRA adapter that is served over the model; empty: the model alone."""


def alone_file(directory: RunDirectory) -> Path:
    return directory.path / "alone.json"


def write_alone(directory: RunDirectory, server: AloneServer) -> None:
    write_atomically(alone_file(directory), msgspec.json.encode(server).decode() + "\n", mode=0o600)


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Gives its exit code."""
    return run_process(live, prog="python -m telescope.inference.alone", known=KNOWN, arguments=arguments)


def live(place: ProcessContext, signals: ProcessSignals) -> int:
    return asyncio.run(_live(place, signals))


async def _live(place: ProcessContext, signals: ProcessSignals) -> int:
    """128 + n after a signal n; it ends for nothing else."""
    config, settings = place.config, place.config.inference
    told = read_json(alone_file(place.directory), AloneServer)
    listener = bind(settings.host, settings.base_port, server_index(place.name))
    key: str | None = reveal(settings.api_key)
    deadline = Deadline(place.directory, place.name)
    engine = build_engine(
        *(config, place.identity.run_id, device_of(config, os.environ), place.name, place.directory.scratch(place.name)),
        fixed=True,
    )
    code, why = 0, "it did not close within its deadline"
    try:
        with deadline(config.cluster.placement_timeout_s, "its engine did not start within cluster.placement_timeout_s"):
            await engine.start()
            await _serve_adapter(engine, told.adapter)
        signalled = signals.watch_on_loop()
        model = config.model.model_copy(update={"name": told.model})
        status = Status(place.name)
        async with http_beside(engine.client, listener, model, settings, key, status, alone=True) as url:
            freeze_heap()
            os.write(told.ready, json.dumps({"url": f"{url}/v1"}).encode() + b"\n")
            code = await _until_told(engine, signalled)
    except Interrupted as interrupted:
        code = 128 + interrupted.number
        raise
    except BaseException as raised:
        code, why = COMPONENT_FAILED, f"{str(raised) or type(raised).__name__}; beyond that, {why}"
        raise
    finally:
        with deadline(CLOSE_S, why, code=code):
            await engine.close()
    return code


async def _serve_adapter(engine: Engine, folder: str) -> None:
    from telescope.inference.vllm.lora_engine import LoraEngine

    if not folder:
        return
    if not isinstance(engine, LoraEngine):
        raise EngineRefused(f"the adapter in {folder} needs model.lora, which says its rank")
    await engine.serve_folder(Path(folder))


async def _until_told(engine: Engine, signalled: asyncio.Future[int]) -> int:
    """Raises `EngineDead` where the engine ends first."""
    dying = asyncio.create_task(engine.dead())
    try:
        await first_of(dying, signalled)
        if not signalled.done():
            raise EngineDead(dying.result())
    finally:
        dying.cancel()
    log.info("interrupted by %s", signal.Signals(signalled.result()).name)
    return 128 + signalled.result()


if __name__ == "__main__":
    leave(main())
