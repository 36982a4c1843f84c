"""Real sockets: a hub and links over CURVE on the loopback, in one process and in several."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from telescope.records import PromptRef, RolloutOrder
from telescope.runlog.layout import RunDirectory, write_atomically
from telescope.wire import messages as m
from telescope.wire.discovery import HubAddress
from telescope.wire.hub import BindFailed, Hub, PeerJoined, PeerLeft, PeerLost, PeerStuck
from telescope.wire.link import Link, LinkLost, WireRefused, WireTimeout
from telescope.wire.security import BadKeys, load_keys, make_keys
from tests.wire.conftest import DEADLINE_S, IDENTITY, delivered
from tests.wire.peer_process import result
from tests.wire.proxy import Proxy
from tests.wire.samples import ORDER, SAMPLES, SAMPLING, completion, hello, trajectory

IDS = np.arange(5, dtype=np.int32)


def order(rollout_id: int) -> m.RunRollout:
    return m.RunRollout(RolloutOrder(rollout_id, 1, 0, 0, PromptRef("countdown", "train", 1), 7))


async def test_a_link_that_is_slow_to_look_still_sees_its_connection(
    hub: Hub, connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that was preempted between connecting and watching missed the handshake, never said hello, and the run waited
    for it until placement_timeout_s."""
    watch = zmq.Socket.get_monitor_socket

    def late(self: zmq.Socket, *arguments: object) -> zmq.Socket:
        time.sleep(0.5)  # far longer than a handshake on the loopback
        return watch(self, *arguments)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", late)
    link = await connect("worker-0", deadline_s=5.0)
    assert link.name == "worker-0"


# ---- a defect of the hub itself ----------------------------------------------------------------------------------------


async def test_a_hub_whose_clock_fails_says_so_to_who_waits(hub: Hub, connect, monkeypatch: pytest.MonkeyPatch) -> None:
    await connect("worker-0", hub)

    def broken(now: float) -> None:
        raise ArithmeticError("the peers cannot be judged")

    monkeypatch.setattr(hub._session, "tick", broken)

    async def listen() -> None:
        while True:
            await hub.next(DEADLINE_S)

    with pytest.raises(ArithmeticError, match="the peers cannot be judged"):
        await listen()
    await asyncio.wait_for(hub.close("over"), DEADLINE_S)


# ---- messages --------------------------------------------------------------------------------------------------------


async def test_a_request_is_relayed_undecoded_and_its_answer_comes_back(hub: Hub, connect) -> None:
    worker, server = await connect("worker-0", hub), await connect("server-0", hub)
    worker.send(m.Generate("q", 1, 0, 0, SAMPLING), (IDS,))
    asked = await delivered(hub)
    hub.relay("server-0", msgspec.structs.replace(asked.body, priority=-3), asked)
    assert isinstance(asked.frames.buffers[0], zmq.Frame)
    assert "arrays" not in vars(asked)  # nobody has looked at them
    at_server = await server.received()
    assert at_server.body == m.Generate("q", 1, 0, 0, SAMPLING, -3)
    assert at_server.arrays[0].tolist() == [0, 1, 2, 3, 4]
    server.send(m.Completion("q", "stop", 6, 1, 0.5, 0.25), completion(6), answers=at_server)
    answer = await delivered(hub)
    hub.relay("worker-0", answer.body, answer.frames, answers=asked)
    at_worker = await asyncio.to_thread(worker.receive, DEADLINE_S)
    assert at_worker.answers == 1
    assert [array.tolist() for array in at_worker.arrays] == [array.tolist() for array in completion(6)]


async def test_a_hub_is_calm_where_no_message_waits_in_its_socket_either(hub: Hub, connect) -> None:
    worker = await connect("worker-0", hub)
    assert await hub.calm()
    worker.send(m.Generate("q", 1, 0, 0, SAMPLING), (IDS,))
    end = time.monotonic() + DEADLINE_S
    while await hub.calm() and time.monotonic() < end:
        pass
    assert not await hub.calm()
    assert (await delivered(hub)).body == m.Generate("q", 1, 0, 0, SAMPLING)
    assert await hub.calm()


async def test_who_asks_whether_a_hub_is_calm_leaves_the_event_loop_a_turn(hub: Hub) -> None:
    """Else acks, heartbeats and signals would wait for as long as each look finds another message."""
    turns: list[int] = []
    for number in (1, 2, 3):
        asyncio.get_running_loop().call_soon(turns.append, number)
        assert await hub.calm()
        assert turns[-1] == number


async def test_every_message_of_the_protocol_passes_in_its_direction(hub: Hub, connect) -> None:
    body = {sample.name: sample for sample in SAMPLES}
    worker, server, trainer = [await connect(name, hub) for name in ("worker-0", "server-0", "trainer-0")]
    exchanges = [
        (worker, "RunRollout", "RolloutResult"),
        (worker, "RunRollout", "RolloutError"),
        (server, "Generate", "Completion"),
        (server, "Generate", "GenerateFailed"),
        (server, "PrepareWeights", "WeightsReady"),
        (server, "CommitWeights", "WeightsReady"),
        (server, "AbortWeights", "WeightsFailed"),
        (server, "Sleep", "Asleep"),
        (trainer, "TrainStep", "StepReport"),
        (trainer, "PublishWeights", "WeightsPublished"),
    ]
    for link, asks, answers in exchanges:
        name = link.name
        number = hub.send(name, body[asks].body, body[asks].arrays)
        there = await link.received()
        assert there.body == body[asks].body
        link.send(body[answers].body, body[answers].arrays, answers=there)
        back = await delivered(hub)
        assert (back.peer, back.answers, back.body) == (name, number, body[answers].body)
        hub.acknowledge(back)
        assert hub.credits(name) == 4
    hub.send("worker-0", body["CancelRollout"].body)
    hub.send("server-0", body["Abort"].body)
    hub.send("trainer-0", body["Stop"].body)
    assert (await worker.received()).body == body["CancelRollout"].body
    assert (await server.received()).body == body["Abort"].body
    assert (await trainer.received()).body == body["Stop"].body
    worker.send(body["Abort"].body)
    assert (await delivered(hub)).body == body["Abort"].body
    assert hub.malformed == {}


async def test_a_large_train_step_arrives_whole(hub: Hub, connect) -> None:
    trainer = await connect("trainer-0", hub)
    tokens = 4_000_000
    items = (m.TrainItem(1, 1, 0, tokens, 0.5, tokens // 2, 1.0),)
    arrays = trajectory(tokens)
    hub.send("trainer-0", m.TrainStep(1, items, (m.Denominators(tokens // 2, 1, 1),)), arrays)
    there = await trainer.received()
    assert sum(array.nbytes for array in there.arrays) == 13 * tokens
    for got, sent in zip(there.arrays, arrays, strict=True):
        np.testing.assert_array_equal(got, sent)


async def test_send_may_be_called_from_many_threads(hub: Hub, connect) -> None:
    worker = await connect("worker-0", hub)

    def ask(thread: int) -> None:
        for index in range(50):
            worker.send(m.Generate(f"{thread}.{index}", 1, 0, 0, SAMPLING), (IDS,))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    names = Counter([(await delivered(hub)).body.request_id for _ in range(400)])
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(names) == 400


async def test_a_cancelled_wait_loses_no_message(hub: Hub, connect) -> None:
    worker = await connect("worker-0", hub)
    for _ in range(3):
        waiter = asyncio.create_task(worker.received())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
    both = [asyncio.create_task(worker.received()) for _ in range(2)]
    hub.send("worker-0", order(1))
    hub.send("worker-0", order(2))
    assert sorted([(await task).seq for task in both]) == [1, 2]
    assert await asyncio.to_thread(worker.receive, 0.05) is None


async def test_nothing_happens_within_the_timeout(hub: Hub) -> None:
    start = time.monotonic()
    assert await hub.next(0.05) is None
    assert await hub.next(0.0) is None
    assert time.monotonic() - start < DEADLINE_S


# ---- coming and going ------------------------------------------------------------------------------------------------


async def test_leaving_cleanly_and_leaving_with_an_error(hub: Hub, connect) -> None:
    worker, server = await connect("worker-0", hub), await connect("server-0", hub)
    await asyncio.to_thread(worker.close)
    assert await hub.next(DEADLINE_S) == PeerLeft("worker-0", 0)
    await asyncio.to_thread(server.close, "the GPU has fallen off the bus")
    assert await hub.next(DEADLINE_S) == PeerLost("server-0", "the GPU has fallen off the bus")
    assert hub.peers == {}
    with pytest.raises(LinkLost, match="the link is closed"):
        worker.send(m.Abort("x"))
    worker.close()


async def test_close_tells_everyone_to_stop_and_waits_for_their_goodbyes(hub: Hub, connect) -> None:
    links = [await connect(name, hub) for name in ("worker-0", "server-0")]

    async def obey(link: Link) -> str:
        stop = await link.received()
        await asyncio.to_thread(link.close)
        return stop.body.reason

    obeying = [asyncio.create_task(obey(link)) for link in links]
    await hub.close("60 steps are done", timeout_s=DEADLINE_S)
    assert [await task for task in obeying] == ["60 steps are done"] * 2
    assert hub.peers == {}


async def test_close_waits_no_longer_than_its_timeout(hub: Hub, connect) -> None:
    await connect("worker-0", hub)
    start = time.monotonic()
    await hub.close("done", timeout_s=0.3)
    assert 0.25 < time.monotonic() - start < DEADLINE_S
    assert hub.send("worker-0", m.CancelRollout(1, 0, "late")) == 0


async def test_a_link_that_closes_first_hands_over_what_it_has_sent(hub: Hub, connect) -> None:
    worker = await connect("worker-0", hub)
    hub.send("worker-0", m.RunRollout(ORDER))
    there = await worker.received()
    worker.send(result(ORDER), trajectory(6), answers=there)
    closing = asyncio.create_task(asyncio.to_thread(worker.close))
    done = await delivered(hub)
    await asyncio.sleep(0.2)
    assert not closing.done()  # not yet safe
    hub.acknowledge(done)
    await closing
    assert isinstance(await hub.next(DEADLINE_S), PeerLeft)


@pytest.mark.parametrize(("error", "said"), [
    (ValueError("no such sandbox"), "no such sandbox"),
    (LinkLost("the hub is gone"), "the hub is gone"),  # ours
    (KeyError("step"), "KeyError: 'step'"),
    (SystemExit(0), "SystemExit: 0"),
    (AssertionError(), "AssertionError"),
])  # fmt: skip
async def test_the_context_manager_says_why_it_ends(hub: Hub, connect, error: BaseException, said: str) -> None:
    def fail(link: Link) -> None:
        with contextlib.suppress(type(error)), link:
            raise error

    worker = await connect("worker-0", hub)
    await asyncio.to_thread(fail, worker)
    assert await hub.next(DEADLINE_S) == PeerLost("worker-0", said)


# ---- who may come ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": "run-0"}, "worker-0 belongs to run 'run-0', this is the hub of run 'run-1'"),
        ({"config_hash": "beef"}, "start both from the same config.json"),
        ({"role": "trainer"}, "a trainer is named trainer-<index>"),
    ],
)
async def test_a_wrong_hello_is_refused_with_the_reason(hub: Hub, connect, changes: dict[str, str], says: str) -> None:
    with pytest.raises(WireRefused, match=says):
        await connect("worker-0", **changes)
    assert hub.peers == {}


async def test_another_attempts_address_is_skipped(hub: Hub, connect) -> None:
    with pytest.raises(WireTimeout, match=r"no hub of attempt attempt-2 after 0.3 s: .*hub.json is of attempt attempt-1"):
        await connect("worker-0", attempt="attempt-2", deadline_s=0.3)


async def test_the_link_waits_for_a_hub_that_comes_later(open_hub, connect) -> None:
    waiting = asyncio.create_task(connect("worker-0"))
    await asyncio.sleep(0.2)
    hub = await open_hub()
    await waiting
    assert isinstance(await hub.next(DEADLINE_S), PeerJoined)


async def test_without_a_hub_the_link_says_what_it_looked_for(connect) -> None:
    with pytest.raises(
        WireTimeout, match=r"worker-0: no hub of attempt attempt-1 after 0\.2 s: .*did the orchestrator start\?"
    ):
        await connect("worker-0", deadline_s=0.2)


async def test_a_hub_that_is_gone_does_not_answer_in_time(hub: Hub, connect) -> None:
    await hub.close("gone", timeout_s=0.0)
    with pytest.raises(WireTimeout, match=r"the hub at tcp://127.0.0.1:\d+ did not answer within 0.5 s"):
        await connect("worker-0", deadline_s=0.5)


async def test_a_key_that_is_not_on_the_list_is_refused(hub: Hub, run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory.create(tmp_path / "other")
    make_keys(other, ("worker-0",))
    write_atomically(other.hub_json, run.hub_json.read_text(), 0o600)
    with pytest.raises((WireRefused, WireTimeout), match="refused this process's key"):
        await asyncio.to_thread(Link.connect, other, hello("worker-0"), 5.0)
    assert hub.malformed == {("(unknown)", "refused key"): 1}


async def test_a_hub_with_another_key_than_hub_json_names_is_not_trusted(hub: Hub, run: RunDirectory, connect) -> None:
    address = msgspec.json.decode(run.hub_json.read_bytes(), type=HubAddress)
    public, _ = zmq.curve_keypair()
    forged = msgspec.structs.replace(address, public_key=public.decode())
    write_atomically(run.hub_json, msgspec.json.encode(forged).decode(), 0o600)
    with pytest.raises(WireTimeout, match="or does not hold the key that hub"):
        await connect("worker-0", deadline_s=1.0)
    assert hub.peers == {}


async def test_one_process_cannot_speak_as_another(hub: Hub, run: RunDirectory, connect) -> None:
    victim = await connect("worker-0", hub)
    for path in (run.secret_key, run.public_key):
        path("worker-0").write_bytes(path("worker-1").read_bytes())
    with pytest.raises(WireRefused, match="says it is 'worker-0', but its key belongs to 'worker-1'"):
        await connect("worker-0")
    hub.send("worker-0", order(1))
    assert (await victim.received()).seq == 1


async def test_hub_json_is_for_its_owner_only_and_tells_where_the_hub_is(hub: Hub, run: RunDirectory) -> None:
    assert stat.S_IMODE(run.hub_json.stat().st_mode) == 0o600
    address = json.loads(run.hub_json.read_text())
    assert (address["attempt"], address["pid"], address["endpoint"]) == ("attempt-1", os.getpid(), hub.endpoint)
    assert address["public_key"].encode() == run.public_key("orchestrator").read_bytes()


async def test_the_hub_binds_one_interface_or_says_why_not(run: RunDirectory) -> None:
    for interface, says in (("no-such-nic", "cannot bind a port on interface=no-such-nic"), ("0.0.0.0", "means all of them")):
        with pytest.raises(BindFailed, match=says):
            await Hub.open(run, interface=interface, **IDENTITY)
    assert not run.hub_json.exists()
    async with await Hub.open(run, interface="lo", **IDENTITY) as hub:
        assert hub.endpoint.startswith("tcp://127.0.0.1:")


async def test_keys_stay_secret(run: RunDirectory, caplog: pytest.LogCaptureFixture, open_hub, connect) -> None:
    assert stat.S_IMODE(run.hub_json.parent.stat().st_mode) == 0o700
    secrets = [path.read_text() for path in run.hub_json.parent.glob("*.key_secret")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in run.hub_json.parent.iterdir()] == [0o600] * 10
    with caplog.at_level(logging.DEBUG):
        hub = await open_hub()
        worker = await connect("worker-0", hub)
        shown = (
            repr(load_keys(run, "worker-0"))
            + repr(worker)
            + repr(hub)
            + str(vars(hub))
            + caplog.text
            + run.hub_json.read_text()
        )
    assert not [secret for secret in secrets if secret in shown]
    with pytest.raises(FileExistsError):
        make_keys(run, ("worker-0",))
    run.secret_key("worker-1").chmod(0o640)
    with pytest.raises(BadKeys, match="is open to others"):
        await connect("worker-1")
    run.secret_key("worker-1").unlink()
    with pytest.raises(BadKeys, match="worker-1 has no key"):
        await connect("worker-1")


# ---- trouble ---------------------------------------------------------------------------------------------------------


async def test_broken_connections_lose_nothing_and_repeat_nothing(run: RunDirectory, hub: Hub, connect) -> None:
    proxy = await Proxy.before(run)
    worker = await connect("worker-0", hub, capacity=16)
    performed: Counter[int] = Counter()
    total = 400

    def play() -> None:
        while performed.total() < total:
            there = worker.receive(DEADLINE_S)
            assert there is not None, performed.total()
            performed[there.body.order.rollout_id] += 1
            worker.send(result(there.body.order), trajectory(6), answers=there)

    playing = asyncio.create_task(asyncio.to_thread(play))
    sent, results = 0, Counter[int]()
    while results.total() < total:
        while sent < total and hub.credits("worker-0"):
            sent += 1
            hub.send("worker-0", order(sent))
        done = await delivered(hub)
        results[done.body.rollout_id] += 1
        hub.acknowledge(done)
        if results.total() % 60 == 0:
            proxy.cut()
    await playing
    assert set(performed) == set(results) == set(range(1, total + 1))
    assert set(performed.values()) == set(results.values()) == {1}
    assert proxy.connections >= 5
    assert {reason for _, reason in hub.malformed} <= {"no hello"}
    await asyncio.to_thread(worker.close)
    assert await hub.next(DEADLINE_S) == PeerLeft("worker-0", 0)
    await proxy.close()


async def test_a_silent_hub_ends_the_link_with_a_sentence(open_hub, connect) -> None:
    hub = await open_hub(silent_s=0.6)
    worker = await connect("worker-0", hub)
    await hub.close("killed", timeout_s=0.0)
    with pytest.raises(LinkLost, match=r"worker-0: the orchestrator was not heard for \d+\.\d s \(limit silent_s=0.6\)"):
        await asyncio.wait_for(worker.received(), DEADLINE_S)
    with pytest.raises(LinkLost):
        worker.receive(0.0)
    with pytest.raises(LinkLost):
        worker.send(m.Abort("x"))


async def test_a_busy_main_thread_is_still_heard(open_hub, connect) -> None:
    hub = await open_hub(silent_s=2.5)  # less would be the machine's own pauses, where it has much to do
    worker = await connect("worker-0", hub)

    def compute(seconds: float) -> int:
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            count += 1
        return count

    busy = asyncio.create_task(asyncio.to_thread(compute, 3.0))
    assert await busy
    assert await hub.next(0.2) is None
    assert list(hub.peers) == ["worker-0"]
    await asyncio.to_thread(worker.close)


async def test_beats_without_progress_are_told_as_stuck(open_hub, connect) -> None:
    hub = await open_hub(silent_s=1.0, stuck_s=0.5)
    worker = await connect("worker-0", hub)
    worker.progress("compiling")
    hub.send("worker-0", order(1))
    stuck = await hub.next(DEADLINE_S)
    assert isinstance(stuck, PeerStuck)
    assert (stuck.peer, stuck.doing) == ("worker-0", "compiling")
    assert stuck.seconds > 0.5


async def start_peer(run: RunDirectory, name: str) -> asyncio.subprocess.Process:
    arguments = ("-m", "tests.wire.peer_process", str(run.path), name)
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.PIPE)


async def test_a_killed_process_is_lost_and_a_new_one_takes_its_name(open_hub, run: RunDirectory) -> None:
    hub = await open_hub(silent_s=3.0)
    first = await start_peer(run, "worker-0")
    joined = await hub.next(DEADLINE_S)
    assert isinstance(joined, PeerJoined)
    hub.send("worker-0", order(1))
    assert (await delivered(hub)).body.rollout_id == 1
    assert await hub.next(1.3) is None  # two heartbeats, with the news of what it does
    first.kill()
    await first.communicate()
    hub.send("worker-0", order(2))
    lost = await hub.next(DEADLINE_S)
    assert isinstance(lost, PeerLost)
    assert lost.cause.startswith(f"worker-0 (pid {first.pid} on node-7) was not heard for ")
    assert lost.cause.endswith("it was last doing: rollout 1")
    second = await start_peer(run, "worker-0")
    assert isinstance(await hub.next(DEADLINE_S), PeerJoined)
    assert hub.credits("worker-0") == 64
    hub.send("worker-0", order(3))
    done = await delivered(hub)
    assert done.body.rollout_id == 3
    hub.acknowledge(done)
    await hub.close("done", timeout_s=DEADLINE_S)
    await second.communicate()
    assert second.returncode == 0


async def test_a_process_stopped_too_long_is_lost_and_ends_itself_when_it_wakes(open_hub, run: RunDirectory) -> None:
    hub = await open_hub(silent_s=3.0)
    process = await start_peer(run, "worker-0")
    assert isinstance(await hub.next(DEADLINE_S), PeerJoined)
    process.send_signal(signal.SIGSTOP)
    try:
        assert isinstance(await hub.next(DEADLINE_S), PeerLost)
    finally:
        process.send_signal(signal.SIGCONT)
    _, said = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 70
    assert b"was not heard for " in said
    assert await hub.next(0.1) is None
