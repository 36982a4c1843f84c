"""How many slow environments one worker process plays at once, and what its event loop feels of it.

    python benchmarks/environments/concurrency.py [--rollouts 1000] [--slow 1.0]

The worker's own service (orders in, answers out, real template and tokenizer of the embedded model) with a policy that answers
at once, so that all that takes time is the environments: a judge that is awaited, a dialogue with an awaited reply, a reward
function in a thread. Lag is how much later than asked a 10 ms timer on the same loop fires;
"own" is the CPU time that the loop's thread itself used between two firings, which other work on the machine does not lengthen.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from telescope.config.models import EMBEDDED
from telescope.config.sections import ModelSettings
from telescope.environments.base import Environment, LazyPrompts, Prompt, Reward, SingleTurn, Turn
from telescope.environments.multi_turn import MultiTurn
from telescope.environments.template import ChatTemplate
from telescope.records import PromptRef, RolloutOrder
from telescope.wire.codec import RawArrays, encode
from telescope.wire.messages import Completion, Generate, RolloutError, RolloutResult, RunRollout, Stop
from telescope.workers.loading import LoadedEnvironment, make_card
from telescope.workers.play import PlayLimits
from telescope.workers.service import WorkerService
from telescope.workers.tokenizer import load_template

TIMER_S = 0.01


class Asked(SingleTurn):
    """A right answer for 10,000 questions."""

    slow_s: float = 1.0

    def prompts(self, split: str) -> Sequence[Prompt]:
        return LazyPrompts(
            10_000, lambda index: Prompt(({"role": "user", "content": f"use {index} make {index}"},), str(index))
        )


class Judged(Asked):
    async def reward(self, prompt: Prompt, answer: str) -> Reward:
        await asyncio.sleep(self.slow_s)
        return Reward(float(answer == prompt.answer))


class Threaded(Asked):
    def reward(self, prompt: Prompt, answer: str) -> Reward:
        time.sleep(self.slow_s / 50)
        return Reward(float(answer == prompt.answer))


class Talking(MultiTurn):
    """Three answers, with an awaited reply of a third of the time after each."""

    slow_s: float = 1.0
    max_turns: int = 3

    def prompts(self, split: str) -> Sequence[Prompt]:
        return Asked().prompts(split)

    async def initial_state(self, prompt: Prompt) -> list[str]:
        return []

    async def reply(self, state: list[str], answer: str) -> Sequence[Turn]:
        await asyncio.sleep(self.slow_s / 3)
        state.append(answer)
        return [{"role": "user", "content": "again"}]

    async def is_done(self, state: list[str]) -> bool:
        return False

    async def reward(self, prompt: Prompt, state: list[str]) -> Reward:
        return Reward(float(len(state)))


@dataclass(frozen=True)
class Delivery:
    body: Any
    arrays: tuple[np.ndarray, ...] = ()


class InstantPolicy:
    """The worker's link: who asks for tokens is answered in the next turn of the loop; all is encoded as on a wire."""

    def __init__(self, template: ChatTemplate, rollouts: int) -> None:
        self._inbox: asyncio.Queue[Delivery] = asyncio.Queue()
        ids = np.array([*template.continuation("5"), 1], np.int32)
        self._answer = (ids, np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.int32))
        self._left = rollouts
        self.failed = 0
        self.done = asyncio.Event()

    def deliver(self, body: Any, *arrays: np.ndarray) -> None:
        self._inbox.put_nowait(Delivery(body, arrays))

    async def received(self) -> Delivery:
        return await self._inbox.get()

    def send(self, body: Any, arrays: Sequence[np.ndarray] = (), answers: Any = None) -> int:
        encode(body, raw=RawArrays.of(arrays))
        if isinstance(body, Generate):
            self.deliver(Completion(body.request_id, "stop", len(self._answer[0]), 0, 0.0, 0.0), *self._answer)
        elif isinstance(body, RolloutResult | RolloutError):
            self.failed += isinstance(body, RolloutError)
            self._left -= 1
            if not self._left:
                self.done.set()
        return 1

    def progress(self, doing: str) -> None:
        """Nobody listens."""


Lags = list[tuple[float, float]]
"""(late by, the loop's own CPU time meanwhile), both in seconds."""


async def feel(lags: Lags, stop: asyncio.Event) -> None:
    while not stop.is_set():
        asked, cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(TIMER_S)
        lags.append((time.perf_counter() - asked - TIMER_S, time.thread_time() - cpu))


async def run(environment: Environment, rollouts: int) -> tuple[float, Lags, float]:
    """(seconds, lags, CPU seconds) of that many rollouts, all ordered at once."""
    template = load_template(ModelSettings(), EMBEDDED / "tiny")
    prompts = {split: environment.prompts(split) for split in environment.splits}
    loaded = LoadedEnvironment("task", environment, prompts, make_card("task", environment, prompts))
    link = InstantPolicy(template, rollouts)
    service = WorkerService(link, "worker-0", {"task": loaded}, template, PlayLimits(1.0, 16, 200, 600.0))
    lags: Lags = []
    feeling = asyncio.create_task(feel(lags, link.done))
    running = asyncio.create_task(service.run())
    begun, cpu = time.perf_counter(), time.process_time()
    for number in range(rollouts):
        link.deliver(RunRollout(RolloutOrder(number, number, 0, 0, PromptRef("task", "train", number), number)))
    await link.done.wait()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    await feeling
    link.deliver(Stop("measured"))
    await running
    if link.failed:
        raise SystemExit(f"{link.failed} of {rollouts} rollouts failed")
    return seconds, lags, cpu


async def idle(seconds: float) -> Lags:
    lags: Lags = []
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    await feel(lags, stop)
    return lags


def row(name: str, seconds: float, rollouts: int, lags: Lags, cpu: float) -> str:
    shown = [1000 * float(np.quantile(part, share)) for part in zip(*lags, strict=True) for share in (0.5, 0.99, 1.0)]
    pace, each = (f"{rollouts / seconds:.0f}", f"{1000 * cpu / rollouts:.2f}") if rollouts else ("–", "–")
    return f"| {name} | {rollouts} | {seconds:.2f} | {pace} | {each} | {' | '.join(f'{value:.1f}' for value in shown)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--slow", type=float, default=1.0, help="seconds that an environment takes")
    asked = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}")
    print("| environment | at once | s | rollouts/s | CPU ms each | lag p50 ms | p99 | max | own p50 ms | p99 | max |")
    print(f"|{'---|' * 11}")
    print(row("none (an idle loop)", 2.0, 0, asyncio.run(idle(2.0)), 0.0))
    for name, environment in (
        (f"awaited judge of {asked.slow:g} s", Judged(slow_s=asked.slow)),
        (f"3 turns, awaited replies of {asked.slow / 3:.2g} s", Talking(slow_s=asked.slow)),
        (f"reward in a thread, {1000 * asked.slow / 50:g} ms (32 threads)", Threaded(slow_s=asked.slow)),
    ):
        seconds, lags, cpu = asyncio.run(run(environment, asked.rollouts))
        print(row(name, seconds, asked.rollouts, lags, cpu))


if __name__ == "__main__":
    main()
