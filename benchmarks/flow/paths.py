"""The relay against the direct path: round trips a second and the orchestrator's processor time, W workers and S servers.

    python -m benchmarks.flow.paths [--trips 4000] [--window 64] [--tokens 3333] [--rounds 3] [--shapes 1x1 2x4]

Every process on its own, and the real parts: hub, relay, links, servers with their own ports, workers' links to them. Only what
decides and what generates is put aside: requests go to the servers in turn, and an engine answers at once with arrays of
`tokens` (12 bytes a token: 40 kB by default; the prompt has as many bytes). `window`: requests under way in each worker. Prints
one JSON line a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from benchmarks.flow.hub_roundtrip import ATTEMPT, CONFIG, DEADLINE_S, RUN, hello
from telescope.config.models import EMBEDDED
from telescope.inference.engine import Generated
from telescope.inference.fake import FakeEngine
from telescope.inference.server import Server
from telescope.orchestrator.peers import ProtocolViolations
from telescope.orchestrator.relay import Relay
from telescope.orchestrator.rollout_store import RolloutStore
from telescope.records import Sampling
from telescope.runlog.layout import RunDirectory
from telescope.weights.transports.shared_memory import SharedMemoryReader
from telescope.wire.direct import DirectClient
from telescope.wire.hub import Delivery, Hub, PeerJoined
from telescope.wire.hub_session import HubIdentity
from telescope.wire.link import Link
from telescope.wire.messages import Completion, Generate, GenerateFailed, Grant, RequestGrant, Served, Stop
from telescope.wire.security import make_keys

Reports: TypeAlias = "multiprocessing.SimpleQueue[dict[str, float]]"


class Instant(FakeEngine):
    """Answers at once, always with the same arrays."""

    def __init__(self, tokens: int) -> None:
        super().__init__(EMBEDDED / "tiny", SharedMemoryReader(RUN), max_model_len=10 * tokens)
        zeros = np.zeros(tokens, np.int32)
        self._same = Generated(zeros, np.zeros(tokens, np.float32), zeros, "stop", 0, 0.0, 0.0)

    async def generate(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, priority: int) -> Generated:
        return self._same


def server(folder: str, name: str, direct: bool, capacity: int, tokens: int) -> None:
    asyncio.run(_serve(RunDirectory(Path(folder)), name, direct, capacity, tokens))


async def _serve(run: RunDirectory, name: str, direct: bool, capacity: int, tokens: int) -> None:
    identity = HubIdentity(RUN, ATTEMPT, CONFIG)
    port = await Hub.open_direct(run, name, identity, silent_s=15.0) if direct else None
    greeting = structs.replace(hello(name, capacity), direct_address=port.address if port else None)
    async with await asyncio.to_thread(Link.connect, run, greeting, DEADLINE_S) as link:
        await Server(link, Instant(tokens), port).run()
    if port is not None:
        await port.close("measured", timeout_s=0.5)


def worker(folder: str, name: str, direct: bool, trips: int, window: int, tokens: int, reports: Reports) -> None:
    asyncio.run(_work(RunDirectory(Path(folder)), name, direct, trips, window, tokens, reports))


async def _work(run: RunDirectory, name: str, direct: bool, trips: int, window: int, tokens: int, reports: Reports) -> None:
    """Ask `trips` times, `window` at once; report when the first was asked and the last answered."""
    ids = np.zeros(3 * tokens, np.int32)
    waiting: dict[str, asyncio.Future[Completion]] = {}
    numbers = iter(range(trips))
    async with await asyncio.to_thread(Link.connect, run, hello(name, 1), DEADLINE_S) as link:
        client = DirectClient(link, run, lambda: hello(name, 0)) if direct else None

        async def one(number: int) -> None:
            request = Generate(f"{name}/{number}", 0, 0, 0, Sampling(1.0, tokens, 0))
            if client is not None:
                await client.generate(request, ids)
                return
            answer = waiting[request.request_id] = asyncio.get_running_loop().create_future()
            link.send(request, (ids,))
            await answer

        async def many() -> None:
            for number in numbers:
                await one(number)

        async def hear() -> None:
            while not isinstance((delivery := await link.received()).body, Stop):
                body = delivery.body
                if isinstance(body, GenerateFailed):
                    raise RuntimeError(body.cause)
                if isinstance(body, Grant) and client is not None:
                    client.hear(body)
                    continue
                assert isinstance(body, Completion), body
                waiting.pop(body.request_id).set_result(body)

        hearing = asyncio.create_task(hear())
        started, cpu = time.time(), time.process_time()
        await asyncio.gather(*(many() for _ in range(window)))
        reports.put({"started": started, "ended": time.time(), "cpu": time.process_time() - cpu})
        await hearing
        if client is not None:
            await client.close()


class Unread:
    """In the recorder's place."""

    def record_turn(self, row: Mapping[str, Any]) -> None: ...

    def alert(self, level: str, source: str, message: str) -> None:
        raise RuntimeError(f"{source}: {message}")


async def orchestrate(run: RunDirectory, direct: bool, shape: tuple[int, int], options: argparse.Namespace) -> dict[str, float]:
    """One measurement; the processor seconds are those of this process alone, from the first request to the last answer."""
    context = multiprocessing.get_context("spawn")
    reports = context.SimpleQueue()
    workers = [f"worker-{index}" for index in range(shape[0])]
    servers = [f"server-{index}" for index in range(shape[1])]
    make_keys(run, ("orchestrator", *workers, *servers))
    capacity = 100 * options.window * shape[0]  # with a grant, the worker has its answer and may ask on before we hear of it
    folder, tokens = str(run.path), options.tokens
    hub = await Hub.open(run, run=RUN, attempt=ATTEMPT, config_hash=CONFIG)
    children = [context.Process(target=server, args=(folder, name, direct, capacity, tokens), daemon=True) for name in servers]
    children += [
        context.Process(target=worker, args=(folder, name, direct, options.trips, options.window, tokens, reports), daemon=True)
        for name in workers
    ]
    for child in children:
        child.start()
    seconds = await _pass_on(hub, servers, shape[0] * options.trips)
    figures = [await asyncio.to_thread(reports.get) for _ in workers]
    await hub.close("measured", timeout_s=5.0)
    for child in children:
        child.join(DEADLINE_S)
    trips, wall = shape[0] * options.trips, max(f["ended"] for f in figures) - min(f["started"] for f in figures)
    return {
        "trips_per_s": round(trips / wall, 1),
        "orchestrator_cpu_us_per_trip": round(seconds / trips * 1e6, 1),
        "worker_cpu_us_per_trip": round(sum(f["cpu"] for f in figures) / trips * 1e6, 1),
    }


async def _pass_on(hub: Hub, servers: list[str], trips: int) -> float:
    """Be the orchestrator for so many requests. Gives its processor seconds."""
    recorder = Unread()
    relay = Relay(hub, RolloutStore(), recorder, ProtocolViolations(recorder))
    joined, early, done, cpu = set[str](), list[Delivery](), 0, 0.0
    turn = itertools.cycle(servers)
    while done < trips:
        match await hub.next(DEADLINE_S):
            case PeerJoined(peer=peer):
                joined.add(peer)
            case Delivery(body=Generate() | RequestGrant()) as asked:
                early.append(asked)
            case Delivery(body=Completion() | Served() as body) as answer:
                relay.answer(answer, body)
                done += 1
            case other:
                raise RuntimeError(f"unexpected: {other}")
        if early and joined >= set(servers):
            cpu = cpu or time.process_time()
            for asked in early:
                _place(relay, asked, next(turn))
            early.clear()
    return time.process_time() - cpu


def _place(relay: Relay, asked: Delivery, server_name: str) -> None:
    assert isinstance(asked.body, Generate | RequestGrant), asked.body
    relay.ask(asked, asked.body)
    relay.place(asked.body.request_id, server_name, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("trips", 4000), ("window", 64), ("tokens", 3333), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shapes", nargs="+", default=["1x1", "2x4"], help="workers x servers")
    options = parser.parse_args()
    for shape in options.shapes:
        workers, servers = map(int, shape.split("x"))
        for direct in [False, True] * options.rounds:
            with tempfile.TemporaryDirectory() as folder:
                run = RunDirectory.create(Path(folder) / "run")
                row = asyncio.run(orchestrate(run, direct, (workers, servers), options))
            print(json.dumps({"path": "direct" if direct else "relay", "shape": shape, **row}), flush=True)


if __name__ == "__main__":
    main()
