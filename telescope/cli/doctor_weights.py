"""`python -m telescope doctor weights`: does a trained version arrive in a server's parameters, whole, and how fast?

Starts one server's engine and the trainer's ranks as configured (the ranks are the processes of a run, on a real wire), trains
one step on what the engine has sampled, and brings the new version to the engine by the configured transport. Every tensor is
compared at both ends of the way, and every element of the engine's parameters with what has arrived: before the commit, when
they must differ, and after it, when they must not. Owns the order of all that; what is compared is weights/'s and the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from telescope.records import Denominators, WeightGroup, WeightManifest
from telescope.runlog import temporary

if TYPE_CHECKING:
    from telescope._launch.process_plan import LaunchPlan
    from telescope.backends.base import TrainShard
    from telescope.config.run import RunConfig
    from telescope.inference.engine import WeightState
    from telescope.inference.vllm.engine import VllmEngine
    from telescope.inference.vllm.worker_protocol import Comparison
    from telescope.runlog.identity import RunIdentity
    from telescope.runlog.layout import RunDirectory
    from telescope.wire.hub import Hub
    from telescope.wire.messages import Body

VERSION = 1
LEARNING_RATE = 1e-2
"""So large that bfloat16 shows it in every tensor that has a gradient."""
MOST_TOKENS = 64
"""Of an answer that is trained on; what it says does not matter."""


class PairFailed(RuntimeError):
    """A process of the pair ended, or answered something else; the text says which and where its log is."""


@dataclass(frozen=True)
class WeightDelivery:
    """What one version's way was like. Seconds; `again_s` is the way once more, when both sides have met."""

    transport: str
    tensors: int
    nbytes: int
    publish_s: float
    first_s: float
    again_s: float
    commit: WeightState
    before: Comparison
    after: Comparison

    @property
    def agree(self) -> bool:
        """Every tensor of the way was compared before this was made; here the engine's parameters are judged."""
        return self.after.tensors > 0 and not self.after.other and bool(self.before.other)

    def report(self) -> str:
        if self.after.tensors:
            parameters = (
                f"{len(self.before.other)} of {self.after.tensors} tensors were other before the commit, "
                f"{len(self.after.other)} after it {', '.join(self.after.other[:3])}".rstrip()
            )
        else:
            parameters = "not compared: the engine loads this model by its own loader, or in place (weight_sync.staging=none)"
        verdict = "hold the same weights" if self.agree else "DO NOT hold the same weights"
        if not self.after.tensors:
            verdict = "are NOT KNOWN to hold the same weights"
        return (
            f"weights version {VERSION} by {self.transport}: {self.tensors} tensors, {self.nbytes / 1e6:.1f} MB, all compared\n"
            f"  published in            {self.publish_s:.4f} s\n"
            f"  arrived in              {self.again_s:.4f} s, {self.nbytes / self.again_s / 1e9:.2f} GB/s "
            f"(the first time {self.first_s:.4f} s)\n"
            f"  committed in            {self.commit.pause_s:.4f} s\n"
            f"  engine's parameters     {parameters}\n"
            f"  trainer and server {verdict}\n"
        )


def check_weights(config: RunConfig, shard: Callable[[VllmEngine, RunConfig], Any]) -> WeightDelivery:
    """`shard` has the started engine sample and gives the trajectories of a step, a coroutine. Raises `PairFailed`, and what
    engine, plan and wire raise."""
    from telescope._launch.process_plan import make_plan, write_plan
    from telescope._launch.this_host import inspect_this_host
    from telescope.config.run import config_hash, dump_run
    from telescope.runlog.identity import new_identity, write_identity
    from telescope.runlog.layout import RunDirectory

    config = as_pair(config)
    plan = make_plan(config, (inspect_this_host(),))
    with temporary.open_folder() as folder:
        directory = RunDirectory.create(folder / "pair")
        directory.config_json.write_text(dump_run(config))
        identity = new_identity("doctor", datetime.now(UTC), config_hash(config))
        write_identity(directory, identity)
        write_plan(plan, directory.plan_json)
        server = next(process for process in plan.processes if process.role == "server")
        os.environ.update(server.environment)
        return asyncio.run(_deliver(config, directory, identity, plan, shard))


def as_pair(config: RunConfig) -> RunConfig:
    """The same with one server, and a step that changes every weight."""
    copies: dict[str, Any] = {
        "cluster": config.cluster.model_copy(update={"inference_num_workers": config.inference.tensor_parallel_size}),
        "trainer": config.trainer.model_copy(
            update={"learning_rate": LEARNING_RATE, "warmup_steps": 0, "number_of_minibatches": 1}
        ),
        "rollout": config.rollout.model_copy(update={"max_tokens": min(config.rollout.max_tokens, MOST_TOKENS)}),
        "weight_sync": config.weight_sync.model_copy(update={"compare": "all"}),
    }
    return config.model_copy(update=copies)


async def _deliver(
    config: RunConfig,
    directory: RunDirectory,
    identity: RunIdentity,
    plan: LaunchPlan,
    shard: Callable[[VllmEngine, RunConfig], Any],
) -> WeightDelivery:
    from telescope.inference.main import build_engine, device_of
    from telescope.inference.vllm.engine import VllmEngine

    engine = build_engine(config, identity.run_id, device_of(config, os.environ), "server-0", directory.path)
    assert isinstance(engine, VllmEngine)
    try:
        await engine.start()
        async with _ranks(config, directory, identity, plan) as ranks:
            await ranks.train(await shard(engine, config))
            return await _update(config, engine, ranks)
    finally:
        await engine.close()


async def _update(config: RunConfig, engine: VllmEngine, ranks: Ranks) -> WeightDelivery:
    from telescope.wire.messages import PublishWeights

    started = time.perf_counter()
    answers = await ranks.ask([PublishWeights(VERSION)] * ranks.count)
    publish_s = time.perf_counter() - started
    manifest = next(manifest for answer in answers if (manifest := getattr(answer, "manifest", None)) is not None)
    group = None
    if manifest.collective:
        workers = tuple(f"server-0/{worker}" for worker in range(config.inference.tensor_parallel_size))
        group = WeightGroup(1, ("trainer-0", *workers))
    staged = config.weight_sync.staging != "none" or not manifest.collective
    first_s = await _prepare(engine, ranks, manifest, group)
    before = await engine.compare(VERSION)
    commit = await engine.commit(VERSION)
    again_s, after = first_s, before
    if staged:
        again_s = await _prepare(engine, ranks, manifest, group)
        after = await engine.compare(VERSION)
        await engine.discard(VERSION)
    tensors = len(manifest.tensors)
    return WeightDelivery(manifest.transport, tensors, manifest.nbytes, publish_s, first_s, again_s, commit, before, after)


async def _prepare(engine: VllmEngine, ranks: Ranks, manifest: WeightManifest, group: WeightGroup | None) -> float:
    """Seconds until all has arrived and was compared."""
    from telescope.wire.messages import SendWeights

    started = time.perf_counter()
    if group is None:
        await engine.prepare(manifest)
    else:
        sending = ranks.ask([SendWeights(VERSION, group)] * ranks.count)
        await asyncio.gather(engine.prepare(manifest, group), sending)
    return time.perf_counter() - started


class Ranks:
    """The trainer's side of the pair: its processes, as the orchestrator sees them."""

    def __init__(self, hub: Hub, names: Sequence[str], deadline_s: float, logs: Path) -> None:
        self._hub, self._names, self._deadline_s, self._logs = hub, names, deadline_s, logs

    @property
    def count(self) -> int:
        return len(self._names)

    async def wait_for_ranks(self, deadline_s: float) -> None:
        from telescope.wire.peer_events import PeerJoined

        missing = set(self._names)
        while missing:
            happened = await self._next(deadline_s)
            if isinstance(happened, PeerJoined):
                missing.discard(happened.peer)

    async def train(self, shard: TrainShard) -> None:
        """One step of all ranks on `shard`."""
        from telescope.wire.messages import TrainStep

        parts = spread(shard, self.count)
        orders = [TrainStep(part.step, part.items, part.denominators) for part in parts]
        await self.ask(orders, [(part.ids, part.mask, part.logprobs, part.versions) for part in parts])

    async def ask(self, orders: Sequence[Body], arrays: Sequence[tuple[np.ndarray, ...]] = ()) -> list[Body]:
        """One order to each rank, and their answers. Raises `PairFailed`."""
        from telescope.wire.messages import WeightsFailed
        from telescope.wire.peer_events import Delivery

        for place, (name, order) in enumerate(zip(self._names, orders, strict=True)):
            self._hub.send(name, order, arrays[place] if arrays else ())
        answers: dict[str, Body] = {}
        while len(answers) < self.count:
            happened = await self._next(self._deadline_s)
            if isinstance(happened, Delivery):
                answers[happened.peer] = happened.body
                if isinstance(happened.body, WeightsFailed):
                    raise PairFailed(f"{happened.peer}: {happened.body.cause}")
        return [answers[name] for name in self._names]

    async def _next(self, deadline_s: float) -> object:
        from telescope.wire.peer_events import PeerLeft, PeerLost, PeerStuck

        happened = await self._hub.next(deadline_s)
        if happened is None or isinstance(happened, PeerLost | PeerLeft | PeerStuck):
            said = "nothing came in time" if happened is None else f"{happened.peer}: {getattr(happened, 'cause', 'it left')}"
            raise PairFailed(f"the trainer's side failed: {said}\n{last_words(self._logs)}")
        return happened


@contextlib.asynccontextmanager
async def _ranks(config: RunConfig, directory: RunDirectory, identity: RunIdentity, plan: LaunchPlan) -> AsyncIterator[Ranks]:
    """The trainer's processes, met; they have ended after the block."""
    from telescope._launch.meeting_place import open_meeting_place
    from telescope._launch.process_environment import make_child_environment
    from telescope.wire.hub import Hub
    from telescope.wire.security import make_keys

    processes = [process for process in plan.processes if process.role == "trainer"]
    names = [process.name for process in processes]
    make_keys(directory, ["orchestrator", *names])
    async with contextlib.AsyncExitStack() as stack:
        meeting = stack.enter_context(open_meeting_place(plan))
        opened = await Hub.open(directory, run=identity.run_id, attempt=identity.attempt, config_hash=identity.config_hash)
        hub = await stack.enter_async_context(opened)
        for process in processes:
            log = stack.enter_context(directory.path.joinpath(f"{process.name}.log").open("wb"))
            arguments = [*process.program, "--run-dir", str(directory.path), "--name", process.name]
            environment = make_child_environment(process.environment | meeting)
            child = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment, stdout=log, stderr=log)
            stack.push_async_callback(_end, child)
        ranks = Ranks(hub, names, config.weight_sync.update_timeout_s, directory.path)
        await ranks.wait_for_ranks(config.cluster.placement_timeout_s)
        yield ranks
        await hub.close("the doctor has seen enough")


async def _end(child: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(5.0):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


def last_words(folder: Path) -> str:
    """The end of each rank's log."""
    logs = sorted(folder.glob("trainer-*.log"))
    return "\n".join(
        f"{log.stem}: {(log.read_text(errors='replace').strip().splitlines() or ['says nothing'])[-1]}" for log in logs
    )


def spread(shard: TrainShard, ranks: int) -> list[TrainShard]:
    """The trajectories dealt out to ranks, with advantages of 1 and -1 in turn, so that there is a gradient."""
    from telescope.backends.base import TrainShard

    ends = np.cumsum([item.length for item in shard.items])
    pieces = [slice(end - item.length, end) for end, item in zip(ends, shard.items, strict=True)]
    items = [msgspec.structs.replace(item, advantage=1.0 - 2.0 * (index % 2)) for index, item in enumerate(shard.items)]
    counts = (Denominators(int(shard.mask.sum()), len(items), len(items)),)

    def part(rank: int) -> TrainShard:
        mine = pieces[rank::ranks]
        arrays = (shard.ids, shard.mask, shard.logprobs, shard.versions)
        ids, mask, logprobs, versions = (np.concatenate([array[piece] for piece in mine]) for array in arrays)
        return TrainShard(shard.step, tuple(items[rank::ranks]), ids, mask, logprobs, versions, counts)

    return [part(rank) for rank in range(ranks)]
