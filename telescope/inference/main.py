"""A server's process: `python -m telescope.inference --run-dir DIR --name server-0`.

Starts the engine, opens HTTP beside it, says hello when it can serve, serves until told to stop. Exit codes: 0 done, 1 error,
2 usage, 70 the engine or the orchestrator is gone, 130 and 143 interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from telescope.config import vllm_arguments
from telescope.config.model_facts import read_model_facts
from telescope.config.models import ModelNotFound, check_weights, model_folder
from telescope.config.plugins import PluginError
from telescope.config.precision import unserved
from telescope.config.run import RunConfig, config_hash
from telescope.config.secrets import SecretMissing, reveal
from telescope.config.sections import InferenceSettings
from telescope.config.words import ConfigError
from telescope.exit_codes import COMPONENT_FAILED
from telescope.inference.engine import Engine, EngineDead, EngineRefused
from telescope.inference.fake import FakeEngine
from telescope.inference.server import Server, first_of
from telescope.inference.status import Status
from telescope.inference.vllm.engine_health import kill_tree
from telescope.inference.vllm.gpu_memory import card_bytes, free_on_cards, room_made
from telescope.inference.vllm.http import PortTaken, bind, http_beside, unknown_parsers
from telescope.inference.vllm.model_tensors import ModelFilesUnreadable
from telescope.inference.vllm.options import Device, ServerPlan, vllm_environment
from telescope.records import ModelFacts
from telescope.runlog import http_key, temporary
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.weights.base import Receiver, ServerEnd, Transport, TransportRefused
from telescope.weights.transport_choice import choose, read_placement, transport_named
from telescope.weights.transports.shared_memory import SharedMemoryReader
from telescope.wire.hub import BindFailed, Hub
from telescope.wire.hub_session import HubIdentity
from telescope.wire.link import Link, LinkLost, WireRefused, WireTimeout
from telescope.wire.process import (
    Interrupted,
    KnownErrors,
    ProcessContext,
    ProcessSignals,
    freeze_heap,
    leave,
    run_process,
    say_why,
)
from telescope.wire.security import BadKeys

log = logging.getLogger(__name__)

KNOWN = KnownErrors(
    errors=(
        *(
            PortTaken,
            ModelNotFound,
            ModelFilesUnreadable,
            EngineRefused,
            ConfigError,
            PluginError,
            SecretMissing,
        ),
        *(TransportRefused, WireRefused, WireTimeout, BadKeys, BindFailed),
    ),
    gone=(EngineDead, LinkLost),
)
DIRECT_CLOSE_S = 0.5
"""For the workers' goodbyes at a server's own port."""
ROOM_SHARE = 0.9
"""Of the time for the start: an engine still waits for room then, and says so before the start's own deadline speaks."""
CLOSE_S = 8.0
"""Closing the engine takes no longer than this, whatever it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The process. Gives its exit code."""
    return run_process(live, prog="python -m telescope.inference", known=KNOWN, arguments=arguments)


def live(place: ProcessContext, signals: ProcessSignals) -> int:
    return asyncio.run(_live(place, signals))


async def _live(place: ProcessContext, signals: ProcessSignals) -> int:
    """0 after the orchestrator's Stop, 128 + n after a signal n."""
    config = place.config
    settings = config.inference
    http = settings.http and settings.engine == "vllm"
    listener = bind(settings.host, settings.base_port, server_index(place.name)) if http else None
    key = http_api_key(settings, place.directory)  # a missing one is told now, not after the engine's start
    deadline = Deadline(place.directory, place.name)
    scratch = place.directory.scratch(place.name)
    device = device_of(config, os.environ)
    transport = choose(config, read_placement(place.directory.plan_json))
    engine = build_engine(config, place.identity.run_id, device, place.name, scratch, transport)
    code, why = 0, "it did not close within its deadline"
    try:
        with deadline(config.cluster.placement_timeout_s, "its engine did not start within cluster.placement_timeout_s"):
            await _room_made(config, device)
            await engine.start()
        weights = settings.engine != "fake"
        model = await asyncio.to_thread(read_model_facts, config.model, model_folder(config.model.name), weights=weights)
        signalled = signals.watch_on_loop()
        status = Status(place.name)
        async with (
            http_beside(engine.client, listener, config.model, settings, key, status) as url,
            _open_direct(place) as direct,
        ):
            freeze_heap()
            with _told(place, url):
                async with await asyncio.to_thread(_connect, place, direct, model) as link:
                    code = await _until_stopped(Server(link, engine, direct, status), signalled)
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


async def _room_made(config: RunConfig, device: Device) -> None:
    """A server that is started again while the trainer has the whole GPU waits for the end of its step."""
    inference = config.inference
    if inference.sleep_while_training == "off" or inference.engine == "fake" or device == "cpu":
        return
    needed = int(inference.gpu_memory_utilization * card_bytes())
    cards = inference.tensor_parallel_size
    await room_made(lambda: free_on_cards(cards), needed, ROOM_SHARE * config.cluster.placement_timeout_s)


def http_api_key(settings: InferenceSettings, run: RunDirectory) -> str | None:
    """What HTTP requests must bring: the user's key, or the run's own where other machines can reach it; None: nothing.

    Raises `SecretMissing`, `FileNotFoundError`."""
    if settings.makes_http_key:
        return http_key.read(run)
    found: str | None = reveal(settings.api_key)
    return found


@contextlib.asynccontextmanager
async def _open_direct(place: ProcessContext) -> AsyncIterator[Hub | None]:
    """The server's own port where `wire.direct=true`. Workers are told to stop when it closes; nobody waits for them long."""
    if not place.config.wire.direct:
        yield None
        return
    identity = HubIdentity(place.identity.run_id, place.identity.attempt, config_hash(place.config))
    silent_s = place.config.orchestrator.silent_s
    direct = await Hub.open_direct(place.directory, place.name, identity, interface=place.address, silent_s=silent_s)
    try:
        yield direct
    finally:
        await direct.close(f"{place.name} ends", timeout_s=DIRECT_CLOSE_S)


@contextlib.contextmanager
def _told(place: ProcessContext, url: str) -> Iterator[None]:
    """While the block runs, the run directory says where this server's HTTP is."""
    file = place.directory.server(place.name)
    if url:
        facts = {"url": f"{url}/v1", "metrics": f"{url}/metrics", "model": place.config.model.name}
        write_atomically(file, json.dumps(facts) + "\n", mode=0o600)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _connect(place: ProcessContext, direct: Hub | None, model: ModelFacts) -> Link:
    address = direct.address if direct is not None else None
    hello = place.make_hello(
        "server", capacity=lanes(place.config), version=place.config.first_version, direct_address=address, model=model
    )
    return Link.connect(place.directory, hello, deadline_s=place.config.cluster.placement_timeout_s)


async def _until_stopped(server: Server, signalled: asyncio.Future[int]) -> int:
    running = asyncio.create_task(server.run())
    await first_of(running, signalled)
    if not running.done():
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        log.info("interrupted by %s", signal.Signals(signalled.result()).name)
        return 128 + signalled.result()
    log.info("stopped: %s", running.result())
    return 0


def lanes(config: RunConfig) -> int:
    """Requests that the orchestrator may have in flight at one server."""
    return config.orchestrator.max_concurrent_prompts_per_server * config.rollout.group_size


def server_index(name: str) -> int:
    """`server-3` is server 3. Raises `ValueError` for a name without a number."""
    found = re.fullmatch(r"[a-z]+-(\d+)", name)
    if found is None:
        raise ValueError(f"--name {name} must end in the server's index, e.g. server-0")
    return int(found.group(1))


def device_of(config: RunConfig, environ: Mapping[str, str]) -> Device:
    """The launcher shows a server its own GPU, and none where the run is on CPUs."""
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.strip()]
    return "gpu" if visible and config.cluster.device != "cpu" else "cpu"


def fake_receivers(config: RunConfig, run: str, name: str) -> Callable[[str], Receiver]:
    """The fake engine's ends of transports, one for the life of the server; a broadcast has it as `server-0/0`."""
    sync = config.weight_sync
    end = ServerEnd(run, f"{name}/0", "cpu", sync.init_timeout_s)
    return functools.cache(
        lambda transport: transport_named(transport, config.plugin_path, sync.transport_kwargs).receiver(end)
    )


def build_engine(
    config: RunConfig,
    run: str,
    device: Device,
    name: str = "server-0",
    scratch: Path | None = None,
    transport: Transport | None = None,
    *,
    fixed: bool = False,
) -> Engine:
    """The engine that `inference.engine` names, not started. For vLLM this sets the environment, so it goes before its import.

    `run` is the run's id, under which its weights lie in shared memory; `scratch` a folder of the server's own, for adapters;
    `transport` by which its versions come, where that is known. `fixed`: none will come, and nothing is kept ready for it.
    Raises `ModelNotFound`, `EngineRefused`.
    """
    folder = model_folder(config.model.name)
    settings = config.inference
    if settings.engine == "fake":
        reader = SharedMemoryReader(run)
        return FakeEngine(
            folder,
            reader,
            max_model_len=settings.max_model_len,
            token_s=settings.fake_token_s,
            kv_tokens=settings.fake_kv_tokens,
            weights_s=settings.fake_weights_s,
            receivers=fake_receivers(config, run, name),
            deadline_s=config.weight_sync.update_timeout_s,
            version=config.first_version,
        )
    if sentence := unserved(config, device):
        raise EngineRefused(sentence)
    check_weights(config.model.name, folder)
    os.environ.update(vllm_environment(device, os.environ))
    if "VLLM_RPC_BASE_PATH" not in os.environ:  # the folder of its sockets, which it leaves behind where it is killed
        os.environ["VLLM_RPC_BASE_PATH"] = str(temporary.make())
    if sentence := unknown_parsers(settings):
        raise EngineRefused(sentence)
    if refused := [sentence for _, sentence in vllm_arguments.refusals(settings.vllm)]:  # the head may have had no vLLM to ask
        raise EngineRefused("; ".join(refused))
    plan = ServerPlan(
        *(config.model, folder, settings, device, lanes(config), config.seed, run, name, transport, config.plugin_path),
        version=config.first_version,
        router_replay=config.trainer.router_replay and not fixed,
    )
    if config.model.lora is not None:
        from telescope.inference.vllm.lora_engine import LoraEngine

        return LoraEngine(plan, config.weight_sync, scratch)
    if fixed:
        from telescope.inference.vllm.fixed_engine import FixedEngine

        return FixedEngine(plan, config.weight_sync)
    from telescope.inference.vllm.engine import VllmEngine

    return VllmEngine(plan, config.weight_sync)


class Deadline:
    """The last resort of a process whose library may hang: say why, end all children, leave, from a thread of its own.

    `with deadline(900, "its engine did not start within …"): …` ends the process where the block takes longer.

    With `code=70` the sentence is the process's failure; with another (done, interrupted) it is a warning in the log.
    """

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self._directory = directory
        self._name = name

    @contextmanager
    def __call__(self, limit_s: float, sentence: str, code: int = COMPONENT_FAILED) -> Iterator[None]:
        timer = threading.Timer(limit_s, self._end, (f"{self._name}: {sentence}={limit_s:g} s", code))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self, sentence: str, code: int) -> None:
        for child in psutil.Process().children():
            kill_tree(child.pid)
        if code == COMPONENT_FAILED:
            say_why(self._directory, self._name, sentence, code)
        else:
            log.warning("%s", sentence)
        leave(code)
