"""A thousand slow environments on one real worker process, over its real socket: what a quick rollout beside them feels.

    python benchmarks/environments/worker_process.py [--rollouts 1000] [--slow 5.0]

This process is the hub: it orders all slow rollouts at once, answers each question of the worker at once, and once all of them
wait in their environment (an awaited judge of `--slow` seconds) it sends one quick rollout after another and times each, from
the order to its score. Last it tells what the thousand took beyond their own wait.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from telescope.config.run import RunConfig, config_hash, dump_run
from telescope.records import PromptRef, RolloutOrder
from telescope.runlog.identity import new_identity, read_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.wire.hub import Hub
from telescope.wire.messages import Completion, Generate, GenerationEnded, RolloutError, RolloutResult, RunRollout
from telescope.wire.peer_events import Delivery, PeerJoined, PeerLeft
from telescope.wire.security import make_keys

ROOT = Path(__file__).resolve().parents[2]
WORKER = "worker-0"
QUICK_PAUSE_S = 0.05
JUDGED = """
import asyncio
from telescope.environments.base import Prompt, Reward, SingleTurn

class Judged(SingleTurn):
    slow_s: float = 0.0

    def prompts(self, split):
        return [Prompt(({"role": "user", "content": f"use {n} 2 make 9"},), answer=str(n)) for n in range(1000)]

    async def reward(self, prompt, answer):
        await asyncio.sleep(self.slow_s)
        return Reward(float(answer == prompt.answer))
"""


@dataclass
class Seen:
    """When each rollout began to wait in its environment and when it was scored, by its number."""

    waiting: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, done: bool, numbers: set[int]) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: numbers <= set(self.done if done else self.waiting))


def a_run(folder: Path, slow_s: float, rollouts: int) -> tuple[RunDirectory, RunConfig]:
    plugins = folder / "plugins" / "environments"
    plugins.mkdir(parents=True)
    (plugins / "judged.py").write_text(JUDGED)
    directory = RunDirectory.create(folder / "run")
    values = {
        "plugin_path": (str(plugins.parent),),
        "environments": {"slow": {"name": "judged", "kwargs": {"slow_s": slow_s}}, "quick": {"name": "judged"}},
        "algorithm": {"name": "grpo"},
        "backend": {"name": "fsdp"},
        "model": {"name": "tiny"},
        "inference": {"max_model_len": 256},
        "rollout": {"max_tokens": 12, "timeout_s": 600.0},
        "cluster": {"rollouts_per_env_worker": rollouts + 24},
    }
    config = RunConfig.model_validate(values, context={"resolved": True})
    directory.config_json.write_text(dump_run(config))
    write_identity(directory, new_identity("benchmark", datetime.now(UTC), config_hash(config)))
    make_keys(directory, ["orchestrator", WORKER])
    return directory, config


async def serve(hub: Hub, seen: Seen) -> None:
    """Answer each question at once, and note what comes."""
    ids = np.array([27, 17, 1], np.int32)
    arrays = (ids, np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32))
    while True:
        happening = await hub.next(600.0)
        if isinstance(happening, PeerLeft):
            raise SystemExit(f"the worker is gone: {happening}")
        if not isinstance(happening, Delivery):
            continue
        body, now = happening.body, time.perf_counter()
        if isinstance(body, Generate):
            hub.send(WORKER, Completion(body.request_id, "stop", len(ids), 0, 0.0, 0.0), arrays, answers=happening)
        elif isinstance(body, GenerationEnded):
            seen.waiting[body.rollout_id] = now
        elif isinstance(body, RolloutResult):
            hub.acknowledge(happening)
            seen.done[body.rollout_id] = now
        elif isinstance(body, RolloutError):
            raise SystemExit(f"a rollout failed: {body.cause}")
        async with seen.changed:
            seen.changed.notify_all()


def order(hub: Hub, label: str, number: int) -> float:
    hub.send(WORKER, RunRollout(RolloutOrder(number, number, 0, 0, PromptRef(label, "train", number % 1000), number)))
    return time.perf_counter()


async def measured(hub: Hub, seen: Seen, rollouts: int) -> tuple[list[float], list[float], int, float]:
    """Seconds of quick rollouts alone and beside the slow ones; how many of those the worker held; seconds of all slow ones."""
    number = rollouts

    async def quick() -> float:
        nonlocal number
        number += 1
        begun = order(hub, "quick", number)
        await seen.until(done=True, numbers={number})
        return seen.done[number] - begun

    alone = [await quick() for _ in range(60)]
    slow = set(range(rollouts))
    begun = [order(hub, "slow", each) for each in sorted(slow)]
    await seen.until(done=False, numbers=slow)
    held, beside = rollouts - len(slow & set(seen.done)), []
    while not slow & set(seen.done):  # all of them wait; where a thousand begin or end at once is another matter
        beside.append(await quick())
        await asyncio.sleep(QUICK_PAUSE_S)
    await seen.until(done=True, numbers=slow)
    return alone, beside, held, max(seen.done[each] for each in slow) - begun[0]


async def benchmark(folder: Path, rollouts: int, slow_s: float) -> None:
    directory, config = a_run(folder, slow_s, rollouts)
    identity = read_identity(directory)
    hub = await Hub.open(directory, run=identity.run_id, attempt=identity.attempt, config_hash=config_hash(config))
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "telescope.workers", "--run-dir", str(directory.path), "--name", WORKER),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    seen = Seen()
    try:
        async with asyncio.timeout(120):
            while not isinstance(await hub.next(1.0), PeerJoined):
                pass
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(serve(hub, seen))
            alone, beside, held, seconds = await measured(hub, seen, rollouts)
            serving.cancel()
        await hub.close("measured")
        await worker.wait()
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    print("| quick rollouts | how many | p50 ms | p99 ms | max ms |\n|---|---|---|---|---|")
    for name, times in (("alone", alone), (f"beside {held} slow ones", beside)):
        shown = [1000 * float(np.quantile(times, share)) for share in (0.5, 0.99, 1.0)] if times else [float("nan")] * 3
        print(f"| {name} | {len(times)} | {' | '.join(f'{value:.1f}' for value in shown)} |")
    print(f"\n{rollouts} rollouts whose environment waits {slow_s:g} s were over after {seconds:.2f} s.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--slow", type=float, default=5.0, help="seconds that an environment waits")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="telescope-") as folder:
        asyncio.run(benchmark(Path(folder), asked.rollouts, asked.slow))


if __name__ == "__main__":
    main()
