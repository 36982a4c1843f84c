"""Weights broadcast into the real engine: staged beside generation, broken off in the middle, received in place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch

from telescope.config.sections import WeightSyncSettings
from telescope.inference.engine import EngineDead, WeightsRefused
from telescope.inference.vllm.worker_protocol import UpdateSetup, UpdateSupport
from telescope.records import WeightGroup, WeightManifest
from telescope.weights.base import TrainerEnd, TransferFailed
from telescope.weights.buckets import Bucket, ModelTensor
from telescope.weights.transport_choice import transport_named
from tests.inference.conftest import RUN, Served
from tests.inference.test_vllm_engine import COLD, long_request, prompt, until_running

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

SYNC = WeightSyncSettings(init_timeout_s=30.0, update_timeout_s=30.0, mode="per_tensor")


class Source:
    """A trained model whose packing can be held up after some buckets."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.stop_after = 10**6
        self.go, self.reached = threading.Event(), threading.Event()

    def layout(self) -> Sequence[ModelTensor]:
        return [ModelTensor(name, "float32", tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def pack(self, bucket: Bucket, out: torch.Tensor | None) -> None:
        if self.stop_after == 0:
            self.reached.set()
            self.go.wait(60)
        self.stop_after -= 1
        for spec in bucket.specs if out is not None else ():
            out[spec.offset - bucket.start :][: spec.nbytes].view(torch.float32).copy_(self.tensors[spec.name].reshape(-1))

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors.items())


class Sender:
    """Trainer rank 0 in this process; each update in an epoch of its own, its version."""

    def __init__(self, served: Served, source: Source, folder: Path) -> None:
        self.served, self.source = served, source
        source.tensors = dict(served.tensors("old"))
        self.publisher = transport_named("gloo").publisher(source, TrainerEnd(RUN, folder, "cpu", SYNC))

    def begin(self, which: str) -> tuple[WeightManifest, WeightGroup, asyncio.Task[str]]:
        self.source.tensors = dict(self.served.tensors(which))
        self.served.version += 1
        manifest = self.publisher.publish(self.served.version)
        group = WeightGroup(manifest.version, ("trainer-0", "server-0/0"))
        return manifest, group, asyncio.create_task(asyncio.to_thread(self.publisher.send, manifest.version, group))

    async def serve(self, which: str) -> None:
        manifest, group, sending = self.begin(which)
        await self.served.engine.prepare(manifest, group)
        await self.served.engine.commit(manifest.version)
        await sending
        self.served.holds, self.served.serving = which, manifest.version


@pytest_asyncio.fixture(loop_scope="session")
async def sender(served: Served, tmp_path: Path) -> AsyncIterator[Sender]:
    made = Sender(served, Source(), tmp_path)
    yield made
    made.publisher.close()


@pytest_asyncio.fixture(loop_scope="session")
async def unstaged(served: Served) -> AsyncIterator[None]:
    """The engine's worker opened anew with `weight_sync.staging=none`."""
    kept = served.engine._sync
    await served.serve("old")  # a worker compares its plan with the checkpoint that it has loaded
    for place in ("none", kept.staging):
        opening = UpdateSetup(RUN, "server-0", place, 30.0, 30.0)
        (answer,) = await served.engine._rpc("telescope_open", msgspec.json.encode(opening).decode())
        assert msgspec.json.decode(answer, type=UpdateSupport).no_plan == ""
        served.engine._sync = kept.model_copy(update={"staging": place})
        if place == "none":
            yield
            await served.serve("old")


async def test_a_broadcast_version_arrives_while_requests_run_and_is_served_after_its_commit(sender: Sender):
    served = sender.served
    task = asyncio.create_task(long_request(served, "streamed", prompt(10)))
    await until_running(served, "streamed", 10)
    before = {served.serving: served.holds}
    manifest, group, sending = sender.begin("new")
    state = await served.engine.prepare(manifest, group)
    assert (state.version, state.prepared) == (served.serving, manifest.version)
    told = await sending
    state = await served.engine.commit(manifest.version)
    assert (state.version, state.checksum) == (manifest.version, told)
    served.holds, served.serving = "new", manifest.version
    answer = await asyncio.wait_for(task, 60)
    which = before | {manifest.version: "new"}
    assert set(answer.versions.tolist()) == set(which)
    expected = served.reference_over_kept_cache(prompt(10), answer, which, COLD)
    assert np.abs(answer.logprobs - expected).max() < 1e-3
    await served.assert_serves("new")


async def test_a_broadcast_that_is_called_off_in_the_middle_leaves_the_old_version_and_the_next_epoch_works(sender: Sender):
    served = sender.served
    await sender.serve("old")
    sender.source.stop_after = 5
    manifest, group, sending = sender.begin("new")
    preparing = asyncio.create_task(served.engine.prepare(manifest, group))
    assert await asyncio.to_thread(sender.source.reached.wait, 30)
    state = await asyncio.wait_for(served.engine.discard(manifest.version), 60)
    assert (state.version, state.prepared) == (served.serving, None)
    with pytest.raises(WeightsRefused, match=f"weights version {manifest.version} were broken off"):
        await preparing
    sender.publisher.abort(group.epoch)
    sender.source.go.set()
    with pytest.raises(TransferFailed):
        await sending
    await served.assert_serves("old")
    sender.source.stop_after = 10**6
    await sender.serve("third")
    await served.assert_serves("third")


async def test_a_broadcast_that_is_called_off_before_it_began_is_not_waited_for(sender: Sender, unstaged: None):
    """While generation is being paused for it: the order to forget it reaches the worker before the one to receive it. Nobody
    ever sends."""
    served = sender.served
    await sender.serve("old")
    served.version += 1
    manifest = sender.publisher.publish(served.version)
    group = WeightGroup(manifest.version, ("trainer-0", "server-0/0"))
    preparing = asyncio.create_task(served.engine.prepare(manifest, group))
    while served.engine._arriving is None:
        await asyncio.sleep(0)
    state = await served.engine.discard(manifest.version)
    assert (state.version, state.prepared) == (served.serving, None)
    with pytest.raises(WeightsRefused, match=f"weights version {manifest.version} were broken off"):
        await preparing
    await sender.serve("new")
    await served.assert_serves("new")


async def test_who_is_missed_by_the_engines_worker_is_told_when_the_broadcast_is_called_off(sender: Sender):
    served = sender.served
    await sender.serve("old")
    served.version += 1
    manifest = sender.publisher.publish(served.version)
    group = WeightGroup(manifest.version, ("trainer-0", "server-0/0", "server-1/0"))
    sending = asyncio.create_task(asyncio.to_thread(sender.publisher.send, manifest.version, group))
    preparing = asyncio.create_task(served.engine.prepare(manifest, group))
    here = sender.publisher._rendezvous.below(group)
    async with asyncio.timeout(30):
        while not here.check([f"here/{member}" for member in group.members[:2]]):
            await asyncio.sleep(0.01)
    await served.engine.discard(manifest.version)
    sender.publisher.abort(group.epoch)
    with pytest.raises(WeightsRefused) as refused:
        await preparing
    with pytest.raises(TransferFailed) as failed:
        await sending
    assert refused.value.missing == failed.value.missing == ("server-1/0",)
    await sender.serve("new")
    await served.assert_serves("new")


async def test_received_in_place_nothing_is_sampled_between_the_first_bucket_and_the_commit(sender: Sender, unstaged: None):
    served = sender.served
    task = asyncio.create_task(long_request(served, "held", prompt(10)))
    await until_running(served, "held", 10)
    before = {served.serving: served.holds}
    manifest, group, sending = sender.begin("new")
    await served.engine.prepare(manifest, group)
    await sending
    counts = [dict(await served.engine.running()) for _ in range(3)]
    assert counts[0] == counts[1] == counts[2]
    await served.engine.commit(manifest.version)
    served.holds, served.serving = "new", manifest.version
    answer = await asyncio.wait_for(task, 60)
    expected = served.reference_over_kept_cache(prompt(10), answer, before | {manifest.version: "new"}, COLD)
    assert np.abs(answer.logprobs - expected).max() < 1e-3
    await served.assert_serves("new")


async def test_received_in_place_and_called_off_there_is_no_way_back(sender: Sender, unstaged: None):
    served = sender.served
    manifest, group, sending = sender.begin("old")
    await served.engine.prepare(manifest, group)
    await sending
    with pytest.raises(EngineDead, match=r"were received in place \(weight_sync.staging=none\): no way back"):
        await served.engine.discard(manifest.version)
    await served.engine.commit(manifest.version)  # the test's engine is not thrown away
    served.holds, served.serving = "old", manifest.version
    await served.assert_serves("old")


@pytest.mark.parametrize("ends", ["it is called off", "its time is up"])
async def test_half_received_in_place_nothing_is_sampled_any_more_however_it_ends(sender: Sender, unstaged: None, ends: str):
    served, engine = sender.served, sender.served.engine
    kept = engine._sync
    sender.source.stop_after = 5
    manifest, group, sending = sender.begin("new")
    if ends == "its time is up":
        engine._sync = kept.model_copy(update={"update_timeout_s": 2.0})
    preparing = asyncio.create_task(engine.prepare(manifest, group))
    assert await asyncio.to_thread(sender.source.reached.wait, 30)
    asked = asyncio.create_task(engine.discard(manifest.version)) if ends == "it is called off" else None
    with pytest.raises(EngineDead, match=r"weight_sync\.staging=none has no way back"):
        await asyncio.wait_for(preparing, 60)
    if asked is not None:
        await asked
    task = asyncio.create_task(served.generate(prompt(10), 5))  # to a server that is about to end
    await asyncio.sleep(0.5)
    assert not task.done()
    engine._sync = kept
    sender.publisher.abort(group.epoch)
    sender.source.go.set()
    with pytest.raises(TransferFailed):
        await sending
    sender.source.stop_after = 10**6
    await sender.serve("old")  # the test's engine is not thrown away
    await asyncio.wait_for(task, 60)
    await served.assert_serves("old")


async def test_a_member_that_never_comes_is_refused_by_name_within_the_deadline(sender: Sender):
    served = sender.served
    sender.served.version += 1
    manifest = sender.publisher.publish(sender.served.version)
    group = WeightGroup(manifest.version, ("trainer-0", "server-0/0"))
    kept = served.engine._sync
    served.engine._sync = kept.model_copy(update={"update_timeout_s": 1.0})
    try:
        with pytest.raises(WeightsRefused, match=r"did not arrive within weight_sync.update_timeout_s=1 s"):
            await served.engine.prepare(manifest, group)
    finally:
        served.engine._sync = kept
    await sender.serve("new")
    await served.assert_serves("new")
