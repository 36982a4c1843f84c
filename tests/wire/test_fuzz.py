"""Ten thousand wrong frames from a stranger, from a process that has not said hello, and from a welcomed peer: the hub lives,
its memory does not grow, and the run's own traffic goes on beside them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from telescope.inference.server import Server
from telescope.runlog.layout import RunDirectory
from telescope.wire import messages as m
from telescope.wire.codec import RawArrays, encode
from telescope.wire.discovery import HubAddress
from telescope.wire.hub import Delivery, Hub
from telescope.wire.hub_session import HubIdentity
from telescope.wire.link import Link
from telescope.wire.security import load_keys
from tests.inference.test_server import Wire, make
from tests.wire.conftest import DEADLINE_S, IDENTITY
from tests.wire.samples import SAMPLES, SAMPLING, Sample, completion, hello

pytestmark = pytest.mark.timeout(400)  # sender, receiver and traffic share one interpreter: on a busy machine it takes minutes

MESSAGES = 10_000
GROWTH_BYTES = 4 * 2**20
FLOODS = 4
"""After the first, at most."""
"""Resident memory may waver by this much between two floods. A leak of half a kilobyte a message would show."""


def dealer(
    run: RunDirectory, keys: tuple[bytes, bytes] | None, address: HubAddress | m.DirectAddress | None = None
) -> zmq.Socket[bytes]:
    address = address or msgspec.json.decode(run.hub_json.read_bytes(), type=HubAddress)
    other = zmq.Context.instance().socket(zmq.DEALER)
    if keys is not None:
        other.curve_serverkey = address.public_key.encode()
        other.curve_publickey, other.curve_secretkey = keys
    other.linger, other.sndtimeo, other.sndhwm = 0, 200, 100
    other.connect(address.endpoint)
    return other


STAYING = [sample for sample in SAMPLES if sample.name not in ("Hello", "Goodbye")]


def mutated(rng: random.Random, samples: Sequence[Sample] = SAMPLES) -> list[bytes]:
    """A message of the protocol with some of its bytes, lengths or frames changed; sometimes pure noise."""
    frames = [bytearray(frame) for frame in rng.choice(samples).frames()]
    if rng.random() < 0.1:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 12))]
    for _ in range(rng.randrange(1, 4)):
        frame = rng.choice(frames)
        match rng.randrange(5):
            case 0 if frame:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 1:
                del frame[rng.randrange(len(frame) + 1) :]
            case 2:
                frame += rng.randbytes(rng.randrange(1, 16))
            case 3:
                frames.append(bytearray(rng.randbytes(rng.randrange(64))))
            case _ if len(frames) > 1:
                del frames[rng.randrange(len(frames))]
    return [bytes(frame) for frame in frames]


def flood(other: zmq.Socket[bytes], rng: random.Random, samples: Sequence[Sample] = SAMPLES) -> None:
    for _ in range(MESSAGES):
        with contextlib.suppress(zmq.Again):
            other.send_multipart(mutated(rng, samples))


class Traffic:
    """A worker and a server that ask and answer all the time; `trips` counts what came back."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.trips = 0
        self.others: list[object] = []

    async def relay(self) -> None:
        asked: dict[str, Delivery] = {}
        while True:
            match await self.hub.next(DEADLINE_S):
                case Delivery(peer="worker-0", body=m.Generate()) as question:
                    asked[question.body.request_id] = question
                    self.hub.relay("server-0", question.body, question)
                case Delivery(peer="server-0", body=m.Completion(request_id=request_id) as body) as answer:
                    self.hub.relay("worker-0", body, answer, answers=asked.pop(request_id))
                case other:
                    self.others.append(other)

    async def work(self, worker, server) -> None:
        while True:
            worker.send(m.Generate(str(self.trips), 1, 0, 0, SAMPLING), (np.arange(4, dtype=np.int32),))
            question = await server.received()
            server.send(m.Completion(question.body.request_id, "stop", 4, 0, 0.0, 0.0), completion(4), answers=question)
            answer = await worker.received()
            assert answer.body.request_id == str(self.trips)
            self.trips += 1


@pytest.fixture
async def traffic(hub: Hub, connect) -> AsyncIterator[Traffic]:
    worker, server = await connect("worker-0", hub), await connect("server-0", hub)
    going = Traffic(hub)
    tasks = [asyncio.create_task(going.relay()), asyncio.create_task(going.work(worker, server))]
    yield going
    for task in tasks:
        assert not task.done() or task.exception() is None
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def survives(traffic: Traffic | DirectTraffic, attack: Callable[[random.Random], None]) -> int:
    """Run the attack again and again; one that is not the first must leave the memory where it found it, and traffic must go
    on. Gives the growth in bytes. What is kept of each attack is kept of all of them; what an allocator of a process that has
    run other tests takes once is not."""
    growths: list[int] = []
    resident = await _flooded(traffic, attack, 1)
    for seed in range(2, 2 + FLOODS):
        found = await _flooded(traffic, attack, seed)
        growths.append(found - resident)
        resident = found
        if growths[-1] < GROWTH_BYTES:
            break
    told = ", ".join(f"{growth / 2**20:+.2f}" for growth in growths)
    print(f"resident memory {resident / 2**20:.1f} MiB; by each further flood {told}")
    assert growths[-1] < GROWTH_BYTES, growths
    return growths[-1]


async def _flooded(traffic: Traffic | DirectTraffic, attack: Callable[[random.Random], None], seed: int) -> int:
    """Bytes of memory in use after one attack."""
    before = traffic.trips
    await asyncio.to_thread(attack, random.Random(seed))
    after = traffic.trips
    assert after > before  # during the flood, though its author shares this process's interpreter lock
    async with asyncio.timeout(DEADLINE_S):
        while traffic.trips < after + 20:
            await asyncio.sleep(0.01)
    gc.collect()
    return int(psutil.Process().memory_info().rss)


async def test_strangers_without_a_valid_key(hub: Hub, traffic: Traffic, run: RunDirectory) -> None:
    host, _, port = hub.endpoint.removeprefix("tcp://").rpartition(":")

    def attack(rng: random.Random) -> None:
        for _ in range(200):  # raw TCP, 50 chunks each
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as stranger:
                if rng.random() < 0.5:
                    stranger.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + bytes(15 + 32))  # a ZMTP greeting, then noise
                for _ in range(50):
                    stranger.sendall(rng.randbytes(rng.randrange(1, 200)))
        for keys in (None, zmq.curve_keypair()):
            stranger = dealer(run, keys)
            with contextlib.suppress(zmq.Again):
                for _ in range(200):
                    stranger.send_multipart(mutated(rng))
            stranger.close()

    await survives(traffic, attack)
    assert traffic.others == []
    assert {name for name, _ in hub.malformed} <= {"(unknown)"}


async def test_a_valid_key_without_a_hello(
    hub: Hub, traffic: Traffic, run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    keys = load_keys(run, "worker-1")

    def attack(rng: random.Random) -> None:
        other = dealer(run, (keys.public, keys.secret))
        flood(other, rng)
        other.close()

    await survives(traffic, attack)
    assert traffic.others == []
    assert len([record for record in caplog.records if "dropped as malformed" in record.message]) <= 2  # at most one in 10 s
    assert {name for name, _ in hub.malformed} == {"worker-1"}
    counts = {reason: count for (_, reason), count in hub.malformed.items()}
    assert sum(counts.values()) > MESSAGES
    assert set(counts) >= {"header", "frame count", "frame size", "protocol", "no hello", "refused hello"}


async def test_malformed_messages_of_a_welcomed_peer(hub: Hub, traffic: Traffic, run: RunDirectory) -> None:
    keys = load_keys(run, "worker-1")
    rounds = itertools.count()

    def attack(rng: random.Random) -> None:
        other = dealer(run, (keys.public, keys.secret))
        other.send_multipart(encode(hello("worker-1", incarnation=f"round-{next(rounds)}")))
        assert other.poll(DEADLINE_S * 1000)
        flood(other, rng, STAYING)
        seq = 60_000  # far ahead, repeated, backwards
        for answers in (0, 1, 2**40):
            for number in (seq, seq, 1, 2**50):
                other.send_multipart(
                    encode(m.Generate("x", 1, 0, 0, SAMPLING), number, 0, RawArrays.of((np.zeros(1, np.int32),)))
                )
                other.send_multipart(encode(m.RolloutError(1, 0, "x"), number, answers))
        other.close(linger=5000)

    await survives(traffic, attack)
    counts = {reason: count for (name, reason), count in hub.malformed.items() if name == "worker-1"}
    assert sum(counts.values()) > MESSAGES
    assert set(counts) >= {"header", "frame count", "frame size", "direction", "answers", "seq"}
    assert "worker-0" in hub.peers
    assert "server-0" in hub.peers


class DirectTraffic:
    """A server's real port with a fake engine, and a worker that brings requests with good grants all the time."""

    def __init__(self, orders: Wire) -> None:
        self.orders = orders
        self.trips = 0

    async def work(self, worker: Link) -> None:
        ids = np.arange(4, dtype=np.int32)
        while True:
            name = f"good {self.trips}"
            self.orders.order(m.ExpectRequest(name, "worker-0", 4, "secret", 0, 30.0))
            worker.send(m.Generate(name, 1, 0, 0, SAMPLING, grant="secret"), (ids,))
            answer = await worker.received()
            assert isinstance(answer.body, m.Completion)
            assert answer.body.request_id == name
            await self.orders.answer()
            self.trips += 1


async def test_a_servers_port_lives_through_the_same_flood(run: RunDirectory) -> None:
    port = await Hub.open_direct(run, "server-0", HubIdentity(**IDENTITY), silent_s=15.0)
    orders = Wire()
    serving = asyncio.create_task(Server(orders, make(), port).run())
    worker = await asyncio.to_thread(Link.connect_direct, run, hello("worker-0"), "server-0", port.address, DEADLINE_S)
    traffic = DirectTraffic(orders)
    working = asyncio.create_task(traffic.work(worker))
    keys = load_keys(run, "worker-1")
    rounds = itertools.count()

    def attack(rng: random.Random) -> None:
        for strange in (None, zmq.curve_keypair()):
            stranger = dealer(run, strange, port.address)
            with contextlib.suppress(zmq.Again):
                for _ in range(200):
                    stranger.send_multipart(mutated(rng))
            stranger.close()
        other = dealer(run, (keys.public, keys.secret), port.address)
        other.send_multipart(encode(hello("worker-1", incarnation=f"round-{next(rounds)}")))
        assert other.poll(DEADLINE_S * 1000)
        flood(other, rng, STAYING)
        for number in range(1, 2000):  # well formed, and without a grant
            ids = RawArrays.of((np.zeros(1, np.int32),))
            other.send_multipart(encode(m.Generate(f"good {number}", 1, 0, 0, SAMPLING), number, 0, ids))
        other.close(linger=5000)

    try:
        await survives(traffic, attack)
        assert not serving.done()
        assert not working.done()
        reasons = {reason for (name, reason) in port.malformed if name == "worker-1"}
        assert reasons >= {"header", "frame count", "frame size", "direction"}
        assert {name for name, _ in port.malformed} <= {"worker-1", "(unknown)"}
        assert next(iter(port.peers)) == "worker-0"
    finally:  # sockets that stay open would keep this process from ending
        for task in (working, serving):
            task.cancel()
        await asyncio.gather(working, serving, return_exceptions=True)
        await port.close("the test has ended", timeout_s=0.0)
        await asyncio.to_thread(worker.close, "the test has ended")
