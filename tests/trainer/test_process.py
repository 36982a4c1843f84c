"""A trainer rank as a real process on a real wire: it trains, publishes, stops, and says why when it can't."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest

from telescope.algorithms.grpo import GRPO
from telescope.backends.base import BackendSettings, TrainShard
from telescope.backends.fake import Fake
from telescope.backends.fsdp import FSDP
from telescope.config.model_facts import read_model_facts
from telescope.config.models import EMBEDDED
from telescope.config.run import RunConfig, config_hash, dump_run
from telescope.config.sections import ClusterSettings, EnvironmentEntry, ModelSettings, TrainerSettings
from telescope.runlog.checkpoints import Resume, trainer_part, write_resume
from telescope.runlog.identity import new_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.weights.transports.shared_memory import SharedMemoryReader, default_folder, run_prefix
from telescope.wire.hub import Hub
from telescope.wire.messages import (
    CheckpointError,
    CheckpointStaged,
    CheckpointWritten,
    Message,
    PublishWeights,
    RowsLost,
    SaveCheckpoint,
    StepReport,
    TrainStep,
    WeightsPublished,
)
from telescope.wire.peer_events import Delivery, PeerJoined, PeerLeft, PeerLost
from telescope.wire.security import make_keys
from tests.backends.shards import make_shard

PATIENCE_S = 90.0
"""This machine may be busy: imports of torch alone then take half a minute."""


class Bench:
    """The orchestrator's side of one trainer rank."""

    def __init__(self, hub: Hub, directory: RunDirectory, run_id: str, process: asyncio.subprocess.Process) -> None:
        self.hub, self.directory, self.run_id, self.process = hub, directory, run_id, process

    async def next(self) -> object:
        """What happens next; None once the process has ended and nothing more came of it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                dead = self.process.returncode is not None
                happened = await self.hub.next(0.5)
                if happened is not None or dead:
                    return happened

    async def ask(self, order: Message, arrays: tuple[np.ndarray, ...] = ()) -> Message:
        """Send an order and give its answer."""
        number = self.hub.send("trainer-0", order, arrays)
        answer = await self.next()
        assert isinstance(answer, Delivery), answer
        assert answer.answers == number
        return answer.body

    async def train(self, shard: TrainShard) -> Message:
        order = TrainStep(shard.step, shard.items, shard.denominators)
        return await self.ask(order, (shard.ids, shard.mask, shard.logprobs, shard.versions))

    async def ended(self) -> tuple[int, str]:
        """Exit code and last line on stderr."""
        _, errors = await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        return self.process.returncode or 0, errors.decode().strip().splitlines()[-1]

    def failure(self) -> str:
        return self.directory.failure("trainer-0").read_text().strip()

    def segments(self) -> list[Path]:
        return list(default_folder().glob(f"{run_prefix(self.run_id)}*"))


@asynccontextmanager
async def bench(
    folder: Path, backend: BackendSettings, resume: Resume | None = None, **changes: object
) -> AsyncIterator[Bench]:
    config = RunConfig(
        environments={"countdown": EnvironmentEntry(name="countdown")},
        algorithm=GRPO(),
        backend=backend,
        trainer=TrainerSettings(learning_rate=1e-3, seq_len=256),
        cluster=ClusterSettings(trainer_num_workers=1),
        **changes,
    )
    directory = RunDirectory.create(folder / f"run-{os.getpid()}-{folder.name}")
    directory.config_json.write_text(dump_run(config))
    if resume is not None:
        write_resume(directory, resume)
    identity = new_identity("test", datetime.now(UTC), config_hash(config))
    write_identity(directory, identity)
    make_keys(directory, ["orchestrator", "trainer-0"])
    hub = await Hub.open(directory, run=identity.run_id, attempt=identity.attempt, config_hash=identity.config_hash)
    arguments = ["-m", "telescope.trainer", "--run-dir", str(directory.path), "--name", "trainer-0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LD_PRELOAD": ""}  # vLLM sets one
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment, stderr=subprocess.PIPE)
    try:
        yield Bench(hub, directory, identity.run_id, process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await hub.close("the test is over", timeout_s=0)


async def joined(here: Bench) -> None:
    peer = await here.next()
    assert isinstance(peer, PeerJoined), peer
    assert (peer.hello.role, peer.hello.rank, peer.hello.capacity) == ("trainer", 0, 2)


@pytest.mark.timeout(300)
async def test_the_tiny_model_trains_publishes_and_stops(tmp_path):
    settings = FSDP(mixed_precision_dtype=None, gradient_checkpointing=False)
    async with bench(tmp_path, settings) as here:
        await joined(here)
        base = await here.ask(PublishWeights(0))
        done = await here.train(make_shard(1))
        assert isinstance(done, StepReport)
        assert done.metrics["trained_tokens"] == 111.0
        assert {"timing_forward_total", "timing_backward_total", "timing_step_active"} <= done.timings.keys()
        trained = await here.ask(PublishWeights(1))
        reader = SharedMemoryReader(here.run_id)
        tensors = []
        for published, version in ((base, 0), (trained, 1)):
            assert isinstance(published, WeightsPublished)
            assert published.manifest is not None
            assert (published.version, published.manifest.version, len(published.manifest.tensors)) == (version, version, 24)
            tensors.append({spec.name: bytes(view) for spec, view in reader.read(published.manifest)})
        assert tensors[0].keys() == tensors[1].keys()
        assert all(tensors[0][name] != tensors[1][name] for name in tensors[0])
        await here.hub.close("all steps are done")
        code, last = await here.ended()
        assert code == 0, last
        assert last.endswith("stopped: all steps are done")
        assert here.segments() == []
        spans = [(row["step"], row["name"]) for row in rows(here.directory, "spans")]
        assert {(0, "publish"), (1, "forward"), (1, "backward"), (1, "clip"), (1, "optimizer"), (1, "publish")} <= set(spans)
        assert {row["process"] for row in rows(here.directory, "memory")} == {"trainer-0"}


async def test_the_fake_backend_needs_no_torch_and_repeats_itself(tmp_path):
    async with bench(tmp_path, Fake(step_s=0.01), number_of_steps=3) as here:
        await joined(here)
        assert "torch" not in (Path("/proc") / str(here.process.pid) / "maps").read_text()
        for step in (1, 2, 3):
            done = await here.train(make_shard(step))
            assert isinstance(done, StepReport)
            assert done.metrics["grad_norm"] == pytest.approx(step**-0.5)
            assert done.timings["timing_step_active"] >= 0.01
            published = await here.ask(PublishWeights(step))
            assert isinstance(published, WeightsPublished)
            assert published.manifest is not None
            found = {spec.name: view for spec, view in SharedMemoryReader(here.run_id).read(published.manifest)}
            assert list(found["fake.version"].cast("f")) == [step, 0.0]
            expected = np.random.default_rng((0, step)).standard_normal((4, 8), np.float32)
            assert bytes(found["fake.embedding"]) == expected.tobytes()
        assert len(here.segments()) == 2


async def test_a_rank_says_before_it_leaves_how_many_of_its_rows_no_file_has(tmp_path):
    async with bench(tmp_path, Fake()) as here:
        await joined(here)
        here.directory.live("trainer-0", "spans", 0).mkdir(parents=True)  # in the way of the file
        await here.ask(PublishWeights(0))
        last = await here.hub.close("all steps are done", timeout_s=PATIENCE_S)
        assert [(one.peer, one.body) for one in last] == [("trainer-0", RowsLost(unlogged=1, dropped=0))]


async def save(here: Bench, step: int, folder: Path) -> Message:
    """What becomes of the save, after the word that training may go on."""
    number = here.hub.send("trainer-0", SaveCheckpoint(step, str(folder)))
    staged, ended = await here.next(), await here.next()
    assert isinstance(staged, Delivery)
    assert isinstance(ended, Delivery)
    assert isinstance(staged.body, CheckpointStaged)
    assert (staged.body.step, staged.answers, ended.answers) == (step, 0, number)
    return ended.body


async def test_a_rank_saves_and_another_process_begins_there(tmp_path):
    (tmp_path / "first").mkdir(), (tmp_path / "second").mkdir()
    folder = tmp_path / "step_00000001"
    async with bench(tmp_path / "first", Fake()) as here:
        await joined(here)
        await here.train(make_shard(1))
        written = await save(here, 1, folder)
        assert isinstance(written, CheckpointWritten)
        assert written.nbytes == (trainer_part(folder) / "rank-0.json").stat().st_size
        (tmp_path / "a file").write_text("")
        failed = await save(here, 1, tmp_path / "a file")
        assert isinstance(failed, CheckpointError)
        assert "can't be written" in failed.cause
        assert isinstance(await here.train(make_shard(2)), StepReport)
    async with bench(tmp_path / "second", Fake(), Resume(1, 1, str(folder))) as here:
        await joined(here)
        published = await here.ask(PublishWeights(1))
        assert isinstance(published, WeightsPublished)
        found = {spec.name: view for spec, view in SharedMemoryReader(here.run_id).read(published.manifest)}
        assert list(found["fake.version"].cast("f")) == [1.0, 0.0]
        assert isinstance(await here.train(make_shard(2)), StepReport)


async def test_a_rank_whose_checkpoint_is_gone_says_so_with_the_remedy(tmp_path):
    async with bench(tmp_path, Fake(), Resume(1, 1, str(tmp_path / "gone"))) as here:
        code, last = await here.ended()
        assert code == 1
        assert f"the checkpoint {tmp_path}/gone/trainer can't be read" in last
        assert last.endswith("resume from an earlier step")


async def test_a_step_out_of_order_ends_the_rank_with_a_sentence(tmp_path):
    async with bench(tmp_path, Fake()) as here:
        await joined(here)
        await here.train(make_shard(1))
        here.hub.send(
            "trainer-0", TrainStep(3, (), make_shard().denominators), tuple(np.zeros(0, t) for t in ("i4", "u1", "f4", "i4"))
        )
        lost = await here.next()
        sentence = "told to train step 3 when step 1 was the last: a step was lost or repeated"
        assert isinstance(lost, PeerLost)
        assert sentence in lost.cause
        assert await here.ended() == (1, f"trainer-0: {sentence}")
        assert here.failure() == f"trainer-0: {sentence}"


async def test_a_version_that_was_not_trained_is_not_published(tmp_path):
    async with bench(tmp_path, Fake()) as here:
        await joined(here)
        here.hub.send("trainer-0", PublishWeights(2))
        assert isinstance(await here.next(), PeerLost)
        code, last = await here.ended()
        assert (code, last) == (1, "trainer-0: told to publish version 2, but the weights here are version 0")


async def test_a_missing_logprob_ends_the_rank_with_the_rollout_named(tmp_path):
    async with bench(tmp_path, Fake()) as here:
        await joined(here)
        shard = make_shard(1)
        shard.logprobs[np.flatnonzero(shard.mask)[0]] = np.nan
        order = TrainStep(1, shard.items, shard.denominators)
        here.hub.send("trainer-0", order, (shard.ids, shard.mask, shard.logprobs, shard.versions))
        lost = await here.next()
        assert isinstance(lost, PeerLost)
        assert "rollout 100 lacks the sampling log-prob of 1 trained tokens" in lost.cause


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_signal_ends_the_rank_and_leaves_no_segment(tmp_path, number, code):
    async with bench(tmp_path, Fake()) as here:
        await joined(here)
        await here.ask(PublishWeights(0))
        assert len(here.segments()) == 1
        here.process.send_signal(number)
        assert (await here.ended())[0] == code
        assert here.segments() == []
        assert isinstance(await here.next(), PeerLost | PeerLeft)


async def test_a_missing_model_is_a_sentence_before_any_hello(tmp_path):
    async with bench(tmp_path, FSDP(), model=ModelSettings(name="/nowhere")) as here:
        code, last = await here.ended()
        assert (code, last) == (1, "trainer-0: model.name='/nowhere': there is no such folder")
        assert here.failure() == last


async def test_a_rank_tells_what_it_has_read_of_its_model(tmp_path):
    async with bench(tmp_path, FSDP(), model=ModelSettings(name="tiny")) as here:
        joined = await here.next()
    assert isinstance(joined, PeerJoined), joined
    assert joined.hello.model == read_model_facts(ModelSettings(name="tiny"), EMBEDDED / "tiny", weights=True)


async def test_ranks_that_disagree_with_the_configuration_are_refused(tmp_path):
    async with bench(tmp_path, Fake()) as here:
        environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
        arguments = ["-m", "telescope.trainer", "--run-dir", str(here.directory.path), "--name", "trainer-1"]
        second = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment, stderr=subprocess.PIPE)
        _, errors = await asyncio.wait_for(second.communicate(), PATIENCE_S)
        assert second.returncode == 1
        assert "rank 1 of 2 by RANK and WORLD_SIZE, but cluster.trainer_num_workers=1" in errors.decode()


def test_messages_of_the_trainer_travel_as_they_are():
    from telescope.wire.messages import Envelope

    body = StepReport(3, {"loss": 0.5, "grad_norm": float("inf")}, {"timing_step_active": 0.25})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Envelope(body)), type=Envelope).body == body
