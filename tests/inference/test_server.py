"""The server's loop with a fake engine: every order gets its answer, and every end has its reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from telescope.config.models import EMBEDDED
from telescope.inference.engine import EngineDead, WeightState
from telescope.inference.fake import FakeEngine
from telescope.inference.server import Server
from telescope.inference.status import Status
from telescope.records import Sampling, WeightGroup, WeightManifest
from telescope.weights.base import TransferFailed
from telescope.weights.transports.shared_memory import SharedMemoryPublisher, SharedMemoryReader
from telescope.wire.codec import RawArrays
from telescope.wire.messages import (
    Abort,
    AbortWeights,
    Asleep,
    Body,
    CommitWeights,
    Completion,
    EngineLoad,
    Generate,
    GenerateFailed,
    PrepareWeights,
    Sleep,
    Stop,
    WeightsFailed,
    WeightsReady,
)
from telescope.wire.peer_events import Delivery

RUN = "server-tests"


class Wire:
    """An orchestrator's end in memory."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Delivery] = asyncio.Queue()
        self.answers: asyncio.Queue[tuple[int, Body, tuple[np.ndarray, ...]]] = asyncio.Queue()
        self.doing: list[str] = []
        self.loads: asyncio.Queue[tuple[float, EngineLoad]] = asyncio.Queue()
        self.seq = 0

    def order(self, body: Body, *arrays: np.ndarray) -> int:
        self.seq += 1
        self.inbox.put_nowait(Delivery("orchestrator", self.seq, body, RawArrays.of(arrays)))
        return self.seq

    async def answer(self) -> tuple[int, Body, tuple[np.ndarray, ...]]:
        async with asyncio.timeout(60):  # not wait_for, which on Python 3.11 may swallow a cancellation
            return await self.answers.get()

    async def received(self) -> Delivery:
        return await self.inbox.get()

    def send(self, body: Body, arrays: Sequence[np.ndarray] = (), answers: Delivery | None = None) -> int:
        if isinstance(body, EngineLoad):
            self.loads.put_nowait((asyncio.get_running_loop().time(), body))
            return 0
        assert answers is not None
        self.answers.put_nowait((answers.seq, body, tuple(arrays)))
        return 1

    def progress(self, doing: str) -> None:
        self.doing.append(doing)


class FailingLoad(FakeEngine):
    """Dies while it loads a version."""

    async def commit(self, version: int) -> WeightState:
        raise EngineDead(f"weights version {version} could not be loaded: half of them are in")


class EndingEngine(FakeEngine):
    """Dies when told to."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.blow = asyncio.Event()

    async def dead(self) -> str:
        await self.blow.wait()
        return "the engine's process (pid 5) was killed by SIGKILL"


def make(kind: type[FakeEngine] = FakeEngine, token_s: float = 0.0, **more) -> FakeEngine:
    return kind(EMBEDDED / "tiny", SharedMemoryReader(RUN), max_model_len=64, token_s=token_s, **more)


def generate(name: str, seed: int = 0) -> Generate:
    return Generate(request_id=name, rollout_id=0, attempt=0, turn=0, sampling=Sampling(1.0, 20, seed))


PROMPT = np.arange(20, 30, dtype=np.int32)


@pytest.fixture
def publisher(tmp_path: Path):
    made = SharedMemoryPublisher(RUN, tmp_path)
    yield made
    made.close()


async def test_a_request_is_answered_with_three_arrays_and_stop_ends_the_loop():
    wire = Wire()
    running = asyncio.create_task(Server(wire, make()).run())
    seq = wire.order(generate("r1"), PROMPT)
    answered, body, arrays = await wire.answer()
    assert isinstance(body, Completion)
    assert (answered, body.request_id, body.finish_reason) == (seq, "r1", "stop")
    assert [array.dtype.str for array in arrays] == ["<i4", "<f4", "<i4"]
    assert {len(array) for array in arrays} == {body.tokens}
    wire.order(Stop(reason="all steps are trained"))
    assert await asyncio.wait_for(running, 60) == "all steps are trained"
    assert wire.doing[-1] == "serving version 0: 0 requests running, 1 answered"


async def test_a_request_that_can_not_be_served_fails_with_its_cause_and_the_others_go_on():
    wire = Wire()
    running = asyncio.create_task(Server(wire, make()).run())
    wire.order(generate("long"), np.zeros(64, np.int32))
    wire.order(generate("short"), PROMPT)
    bodies = [(await wire.answer())[1] for _ in range(2)]
    assert isinstance(bodies[0], GenerateFailed)
    assert "inference.max_model_len=64" in bodies[0].cause
    assert isinstance(bodies[1], Completion)
    running.cancel()


async def test_an_abort_ends_its_request_and_is_not_answered_itself():
    wire = Wire()
    running = asyncio.create_task(Server(wire, make(token_s=30.0)).run())
    wire.order(generate("r1"), PROMPT)
    wire.order(Abort(request_id="r1"))
    _, body, arrays = await wire.answer()
    assert isinstance(body, Completion)
    assert (body.finish_reason, body.tokens, len(arrays[0])) == ("abort", 0, 0)
    assert wire.answers.empty()
    running.cancel()


async def test_prepare_and_commit_are_answered_with_what_is_held_and_served(publisher: SharedMemoryPublisher):
    wire = Wire()
    running = asyncio.create_task(Server(wire, make()).run())
    manifest = publisher.publish(1, [("w", np.ones(4, np.float32))])
    wire.order(PrepareWeights(manifest=manifest))
    wire.order(CommitWeights(version=1))
    wire.order(generate("r1"), PROMPT)
    ready = [body for _, body, _ in [await wire.answer() for _ in range(3)] if isinstance(body, WeightsReady)]
    assert [(answer.version, answer.prepared) for answer in ready] == [(0, 1), (1, None)]
    assert ready[1].checksum == manifest.checksum
    running.cancel()


async def test_a_version_that_was_called_off_can_not_be_committed(publisher: SharedMemoryPublisher):
    wire = Wire()
    running = asyncio.create_task(Server(wire, make()).run())
    wire.order(PrepareWeights(manifest=publisher.publish(1, [("w", np.ones(4, np.float32))])))
    wire.order(AbortWeights(version=1, reason="another server failed"))
    wire.order(CommitWeights(version=1))
    bodies = [(await wire.answer())[1] for _ in range(3)]
    assert (bodies[1].version, bodies[1].prepared) == (0, None)
    assert isinstance(bodies[2], WeightsFailed)
    assert (bodies[2].version, bodies[2].fatal) == (1, False)
    assert not running.done()
    running.cancel()


@pytest.mark.parametrize("weights_s", [0.0, 0.2])
@pytest.mark.parametrize("turns", range(6))
async def test_an_abort_close_behind_its_prepare_is_not_lost(turns: int, weights_s: float):
    """A member of the group was dead before the sending began. `turns` of the event loop lie between the two orders."""
    wire, receiver = Wire(), Endless()
    running = asyncio.create_task(Server(wire, make(receivers=lambda transport: receiver, weights_s=weights_s)).run())
    group = WeightGroup(7, ("trainer-0", "server-0/0", "server-1/0"))
    manifest = WeightManifest(1, "gloo", "tcp://127.0.0.1:1/x", (), 0, "")
    prepared = wire.order(PrepareWeights(manifest=manifest, group=group))
    for _ in range(turns):
        await asyncio.sleep(0)
    called_off = wire.order(AbortWeights(version=1, reason="trainer-0 could not send"))
    answers = [await wire.answer() for _ in range(2)]
    assert [(seq, type(body)) for seq, body, _ in answers] == [(prepared, WeightsFailed), (called_off, WeightsReady)]
    assert "broken off" in answers[0][1].cause
    again = wire.order(PrepareWeights(manifest=manifest, group=WeightGroup(8, ("trainer-0", "server-0/0"))))
    receiver.cancelled.clear()
    receiver.arrives.set()
    seq, body, _ = await wire.answer()  # the next round is not taken for the one that was called off
    assert (seq, body.prepared) == (again, 1)
    running.cancel()


class Endless:
    """A receiver whose bytes never come, until it is broken off."""

    def __init__(self) -> None:
        self.cancelled, self.arrives = threading.Event(), threading.Event()
        self.epochs: list[int | None] = []

    def receive(self, manifest, group, staging, deadline_s) -> str:
        if self.arrives.is_set():
            return "all"
        self.cancelled.wait(deadline_s)
        raise TransferFailed("the broadcast was broken off", ("server-1/0",))

    def cancel(self, epoch=None) -> None:
        self.epochs.append(epoch)
        self.cancelled.set()


async def test_an_abort_breaks_off_a_prepare_under_way_and_both_are_answered():
    wire, receiver = Wire(), Endless()
    engine = make(receivers=lambda transport: receiver)
    running = asyncio.create_task(Server(wire, engine).run())
    manifest = WeightManifest(1, "gloo", "tcp://127.0.0.1:1/x", (), 0, "")
    group = WeightGroup(7, ("trainer-0", "server-0/0"))
    prepared = wire.order(PrepareWeights(manifest=manifest, group=group))
    while engine._arriving is None:
        await asyncio.sleep(0.01)
    called_off = wire.order(AbortWeights(version=1, reason="server-1 died"))
    answers = [await wire.answer() for _ in range(2)]
    assert [seq for seq, _, _ in answers] == [prepared, called_off]
    assert isinstance(answers[0][1], WeightsFailed)
    assert (answers[0][1].cause, answers[0][1].fatal) == ("the broadcast was broken off", False)
    assert answers[0][1].missing == ("server-1/0",)
    assert isinstance(answers[1][1], WeightsReady)
    assert (answers[1][1].version, answers[1][1].prepared) == (0, None)
    assert receiver.epochs == [7]
    running.cancel()


async def test_a_failed_load_is_told_as_fatal_and_ends_the_server(publisher: SharedMemoryPublisher):
    wire = Wire()
    running = asyncio.create_task(Server(wire, make(FailingLoad)).run())
    wire.order(PrepareWeights(manifest=publisher.publish(1, [("w", np.ones(4, np.float32))])))
    wire.order(CommitWeights(version=1))
    with pytest.raises(EngineDead, match="half of them are in"):
        await asyncio.wait_for(running, 60)
    bodies = [(await wire.answer())[1] for _ in range(2)]
    assert isinstance(bodies[1], WeightsFailed)
    assert bodies[1].fatal


async def test_a_dead_engine_ends_the_server_with_its_cause():
    wire, engine = Wire(), make(EndingEngine)
    running = asyncio.create_task(Server(wire, engine).run())
    await asyncio.sleep(0)
    engine.blow.set()
    with pytest.raises(EngineDead, match="was killed by SIGKILL"):
        await asyncio.wait_for(running, 60)


async def test_running_requests_are_aborted_when_the_run_stops():
    wire = Wire()
    running = asyncio.create_task(Server(wire, make(token_s=30.0)).run())
    wire.order(generate("r1"), PROMPT)
    wire.order(Stop(reason="done"))
    assert await asyncio.wait_for(running, 60) == "done"
    _, body, _ = await wire.answer()
    assert isinstance(body, Completion)
    assert body.finish_reason == "abort"


async def test_500_requests_at_once_are_all_answered_once():
    wire = Wire()
    running = asyncio.create_task(Server(wire, make(token_s=0.001)).run())
    seqs = [wire.order(generate(f"r{index}", index), PROMPT) for index in range(500)]
    answered = [(await wire.answer())[0] for _ in seqs]
    assert sorted(answered) == seqs
    running.cancel()


async def test_a_long_answer_is_seen_to_make_progress_before_it_is_finished():
    wire = Wire()
    running = asyncio.create_task(Server(wire, make(token_s=0.01)).run())
    wire.order(generate("r1"), PROMPT)
    await wire.answer()
    moved = wire.doing.index("serving version 0: 0 requests running, 1 answered")
    assert wire.doing[0] == "waiting for orders"
    assert moved > 1
    assert set(wire.doing[1:moved]) == {"serving version 0: 1 requests running, 0 answered"}
    running.cancel()


async def test_an_engine_that_samples_nothing_makes_no_progress():
    wire = Wire()
    running = asyncio.create_task(Server(wire, make(token_s=30.0)).run())
    wire.order(generate("r1"), PROMPT)
    await asyncio.sleep(0.1)
    assert wire.doing == ["waiting for orders"]
    running.cancel()


async def test_the_engines_load_is_told_when_it_has_changed_and_four_times_a_second_at_most():
    wire = Wire()
    engine = FakeEngine(EMBEDDED / "tiny", SharedMemoryReader(RUN), max_model_len=64, token_s=0.1, kv_tokens=42)
    running = asyncio.create_task(Server(wire, engine).run())
    for name in ("r1", "r2"):
        wire.order(generate(name), PROMPT)
    for _ in range(2):
        await wire.answer()
    await asyncio.sleep(0.3)  # the last change may have to wait for its turn
    told = [wire.loads.get_nowait() for _ in range(wire.loads.qsize())]
    assert told[0][1] == EngineLoad(kv_used=0.5, running=2, waiting=0, preemptions=0)  # 2 x 10 and a first token, of 42
    times = [at for at, _ in told]
    assert min(later - earlier for earlier, later in pairwise(times)) >= 0.24
    assert all(later != earlier for (_, earlier), (_, later) in pairwise(told))
    assert told[-1][1] == EngineLoad(kv_used=0.0, running=0, waiting=0, preemptions=0)
    running.cancel()


async def test_a_server_sleeps_when_what_runs_is_answered_and_wakes_with_the_next_version(publisher: SharedMemoryPublisher):
    wire, status = Wire(), Status("server-0")
    running = asyncio.create_task(Server(wire, make(token_s=0.01), status=status).run())
    first = wire.order(generate("before"), PROMPT)
    slept = wire.order(Sleep(1))
    late = wire.order(generate("late"), PROMPT)
    cut = wire.order(generate("cut"), PROMPT)
    assert [(await wire.answer())[:1] for _ in range(2)] == [(first,), (slept,)]
    assert status.doing().startswith("asleep, serving version 0: ")
    assert status.facts()["doing"] == "asleep"
    wire.order(Abort("cut"))
    answered, body, _ = await wire.answer()
    assert (answered, body.finish_reason, body.tokens) == (cut, "abort", 0)
    again = wire.order(Sleep(1))
    answered, body, _ = await wire.answer()
    assert (answered, type(body), body.step) == (again, Asleep, 1)
    manifest = publisher.publish(1, [("w", np.ones(4, np.float32))])
    prepared, committed = wire.order(PrepareWeights(manifest)), wire.order(CommitWeights(1))
    assert [(await wire.answer())[0] for _ in range(2)] == [prepared, committed]
    answered, body, arrays = await wire.answer()
    assert (answered, body.finish_reason) == (late, "stop")
    assert set(arrays[2].tolist()) == {1}
    assert status.facts()["doing"] == "serving"
    wire.order(Stop("done"))
    assert await running == "done"


async def test_an_engine_that_can_not_fall_asleep_ends_the_server():
    wire = Wire()
    running = asyncio.create_task(Server(wire, make(token_s=1.0, deadline_s=0.05)).run())
    wire.order(generate("long"), PROMPT)
    wire.order(Sleep(1))
    with pytest.raises(EngineDead, match=r"running requests did not end within 0\.05 s, so that it can't sleep"):
        await running
