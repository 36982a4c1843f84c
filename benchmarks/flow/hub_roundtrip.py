"""How fast is the relay, and what does a message cost?

    python -m benchmarks.flow.hub_roundtrip [--trips 3000] [--window 32] [--tokens 3333] [--rounds 3]

Worker link -> hub -> server link -> hub -> worker link: a Generate and a Completion, four hops a trip, each process on its own,
CURVE throughout. Beside it, in the same run, a plain pyzmq ROUTER that echoes the same bytes, two hops a trip, CURVE too; and
the hub answering by itself, two hops as well. The payload is that of a completion of so many tokens (12 bytes each: 40 kB by
default). Prints one JSON line a measurement and the ratios. Other work on the machine moves all figures; the processor seconds
a message move least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import zmq

from telescope.records import Sampling
from telescope.runlog.layout import RunDirectory
from telescope.wire.hub import Delivery, Hub, PeerJoined
from telescope.wire.link import Link
from telescope.wire.messages import Completion, Generate, Hello
from telescope.wire.security import make_keys

RUN, ATTEMPT, CONFIG = "benchmark", "1", "0" * 64
DEADLINE_S = 120.0


def hello(name: str, capacity: int) -> Hello:
    role = name.rpartition("-")[0]
    return Hello(
        role=role,  # type: ignore[arg-type]
        name=name,
        run=RUN,
        attempt=ATTEMPT,
        incarnation=os.urandom(8).hex(),
        config_hash=CONFIG,
        capacity=capacity,
        pid=os.getpid(),
        host="localhost",
    )


def worker(run: str, trips: int, window: int, tokens: int, report: multiprocessing.SimpleQueue[dict[str, float]]) -> None:
    """Keep `window` requests of `tokens` ids under way until all have come back."""
    ids = np.zeros(3 * tokens, np.int32)  # as many bytes there as back
    with Link.connect(RunDirectory(Path(run)), hello("worker-0", 1), DEADLINE_S) as link:
        start, cpu = time.perf_counter(), time.process_time()
        for trip in range(trips + window):
            if trip >= window and link.receive(DEADLINE_S) is None:
                raise TimeoutError(f"no completion within {DEADLINE_S} s")
            if trip < trips:
                link.send(Generate(str(trip), 0, 0, 0, Sampling(1.0, tokens, 0)), (ids,))
        report.put({"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu})


def server(run: str, trips: int, window: int, tokens: int, report: multiprocessing.SimpleQueue[dict[str, float]]) -> None:
    arrays = (np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, np.int32))
    with Link.connect(RunDirectory(Path(run)), hello("server-0", window), DEADLINE_S) as link:
        cpu = time.process_time()
        for _ in range(trips):
            asked = link.receive(DEADLINE_S)
            if asked is None or not isinstance(asked.body, Generate):
                raise TimeoutError(f"no request within {DEADLINE_S} s")
            link.send(Completion(asked.body.request_id, "stop", tokens, 0, 0.0, 0.0), arrays, answers=asked)
        report.put({"cpu": time.process_time() - cpu})


async def answer(run_directory: RunDirectory, trips: int, window: int, tokens: int) -> dict[str, float]:
    """The hub answers by itself: two hops a trip, as the echo."""
    context = multiprocessing.get_context("spawn")
    reports: multiprocessing.SimpleQueue[dict[str, float]] = context.SimpleQueue()
    hub = await Hub.open(run_directory, run=RUN, attempt=ATTEMPT, config_hash=CONFIG)
    child = context.Process(target=worker, args=(str(run_directory.path), trips, window, tokens, reports), daemon=True)
    child.start()
    arrays = (np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, np.int32))
    done, cpu = 0, 0.0
    while done < trips:
        match await hub.next(DEADLINE_S):
            case PeerJoined():
                cpu = time.process_time()
            case Delivery(body=Generate(request_id=request_id)) as delivery:
                hub.send("worker-0", Completion(request_id, "stop", tokens, 0, 0.0, 0.0), arrays, answers=delivery)
                done += 1
            case other:
                raise RuntimeError(f"unexpected: {other}")
    cpu = time.process_time() - cpu
    await hub.close("measured")
    figures = reports.get()
    child.join(DEADLINE_S)
    return _row("hub answers", trips, figures["seconds"], cpu, figures["cpu"])


async def relay(run_directory: RunDirectory, trips: int, window: int, tokens: int) -> dict[str, float]:
    """One measurement through the hub; the processor seconds are those of this process alone."""
    context = multiprocessing.get_context("spawn")
    reports: multiprocessing.SimpleQueue[dict[str, float]] = context.SimpleQueue()
    hub = await Hub.open(run_directory, run=RUN, attempt=ATTEMPT, config_hash=CONFIG)
    arguments = (str(run_directory.path), trips, window, tokens, reports)
    children = [context.Process(target=target, args=arguments, daemon=True) for target in (worker, server)]
    for child in reversed(children):
        child.start()
    joined, waiting, asked, done, cpu = set[str](), list[Delivery](), dict[str, Delivery](), 0, 0.0
    while done < trips:
        match await hub.next(DEADLINE_S):
            case PeerJoined(peer=peer):
                joined.add(peer)
                cpu = time.process_time()
            case Delivery(body=Generate()) as delivery:
                waiting.append(delivery)
            case Delivery(body=Completion(request_id=request_id) as body) as delivery:
                hub.relay("worker-0", body, delivery, answers=asked.pop(request_id))
                done += 1
            case other:
                raise RuntimeError(f"unexpected: {other}")
        while waiting and "server-0" in joined:
            delivery = waiting.pop(0)
            asked[delivery.body.request_id] = delivery  # type: ignore[union-attr]
            hub.relay("server-0", delivery.body, delivery)
    cpu = time.process_time() - cpu
    await hub.close("measured")
    figures = [reports.get(), reports.get()]
    for child in children:
        child.join(DEADLINE_S)
    seconds = next(figure["seconds"] for figure in figures if "seconds" in figure)
    peers = sum(figure["cpu"] for figure in figures)
    return _row("hub", trips, seconds, cpu, peers)


def echo_client(
    port: int,
    keys: tuple[bytes, bytes, bytes],
    trips: int,
    window: int,
    tokens: int,
    report: multiprocessing.SimpleQueue[dict[str, float]],
) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys
    socket.connect(f"tcp://127.0.0.1:{port}")
    frames = [b"telescope/1", b"h" * 200, *(b"\0" * 4 * tokens for _ in range(3))]
    start, cpu = time.perf_counter(), time.process_time()
    for trip in range(trips + window):
        if trip >= window:
            socket.recv_multipart()
        if trip < trips:
            socket.send_multipart(frames)
    report.put({"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu})
    context.destroy(linger=0)


def echo(trips: int, window: int, tokens: int) -> dict[str, float]:
    """The plain ROUTER: nothing decoded, nothing counted."""
    processes = multiprocessing.get_context("spawn")
    report: multiprocessing.SimpleQueue[dict[str, float]] = processes.SimpleQueue()
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
    port = router.bind_to_random_port("tcp://127.0.0.1")
    client = processes.Process(
        target=echo_client, args=(port, (public, *zmq.curve_keypair()), trips, window, tokens, report), daemon=True
    )
    client.start()
    first, cpu = router.recv_multipart(), time.process_time()
    router.send_multipart(first)
    for _ in range(trips - 1):
        router.send_multipart(router.recv_multipart())
    cpu = time.process_time() - cpu
    figures = report.get()
    client.join(DEADLINE_S)
    context.destroy(linger=0)
    return _row("echo", trips, figures["seconds"], cpu, figures["cpu"])


def _row(what: str, trips: int, seconds: float, cpu: float, peers: float) -> dict[str, float]:
    """`cpu`: processor seconds of this process, `peers`: of the others; all of a trip together say how many trips a machine
    can make whose cores are all busy."""
    hops = 2 if what == "hub" else 1  # messages that this process takes in and puts out again, a trip
    row = {
        "trips_per_s": round(trips / seconds, 1),
        "cpu_us_per_message": round(cpu / trips / hops * 1e6, 1),
        "peers_cpu_us_per_trip": round(peers / trips * 1e6, 1),
        "all_cpu_us_per_trip": round((cpu + peers) / trips * 1e6, 1),
    }
    print(json.dumps({"what": what, **row}), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("trips", 3000), ("window", 32), ("tokens", 3333), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    ratios, answered, costs, wholes = [], [], [], []
    for index in range(options.rounds):
        plain = echo(options.trips, options.window, options.tokens)
        found = []
        for way in (answer, relay):
            with tempfile.TemporaryDirectory() as folder:
                run = RunDirectory.create(Path(folder) / f"run-{index}")
                make_keys(run, ("orchestrator", "worker-0", "server-0"))
                found.append(asyncio.run(way(run, options.trips, options.window, options.tokens)))
        alone, ours = found
        answered.append(alone["trips_per_s"] / plain["trips_per_s"])
        costs.append(plain["cpu_us_per_message"] / alone["cpu_us_per_message"])
        wholes.append(plain["all_cpu_us_per_trip"] / alone["all_cpu_us_per_trip"])
        ratios.append(ours["trips_per_s"] / plain["trips_per_s"])
    print(
        json.dumps(
            {
                "hub_answers_to_echo": [round(ratio, 3) for ratio in answered],
                "the_same_by_processor_time": [round(ratio, 3) for ratio in costs],
                "the_same_by_processor_time_of_all_processes": [round(ratio, 3) for ratio in wholes],
                "relay_to_echo": [round(ratio, 3) for ratio in ratios],
                "threads_left": threading.active_count() - 1,
            }
        )
    )


if __name__ == "__main__":
    main()
