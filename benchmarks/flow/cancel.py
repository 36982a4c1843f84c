"""How soon does a cancelled request really stop in vLLM?

    python -m benchmarks.flow.cancel [model] [--aborts 40] [--others 16] [--max-tokens 400]

Long generations run side by side and one of them is aborted. The engine's worker is asked, between its steps, which requests it
holds and how many tokens it has sampled for each. A request that is not aborted gets one token a step: it is the clock. The
question goes down the same pipe as the abort, behind it, so its first answer stands for the moment of the abort's arrival.
Prints one JSON line: tokens that the aborted request still got after that, engine steps after which the worker held it, and
milliseconds from the call until its answer is there and until the worker is seen without it. `model`: a folder whose model
generates long answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from telescope.config.models import model_folder
from telescope.config.sections import InferenceSettings, ModelSettings, WeightSyncSettings
from telescope.inference.vllm.engine import VllmEngine
from telescope.inference.vllm.options import ServerPlan, vllm_environment
from telescope.records import Sampling
from tests.inference.models import make_model

COLD = 0.3
"""A temperature at which the small test models hardly end an answer by themselves."""
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Stopped:
    """One abort. `late_tokens`: sampled for the request after the abort's arrival; `held_steps`: engine steps since then after
    which the worker was still seen to hold it."""

    late_tokens: int
    held_steps: int
    tokens: int
    answer_ms: float
    dropped_ms: float


class Look:
    """Sampled tokens of the requests that the worker holds, by our names."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    async def __call__(self) -> dict[str, int]:
        held = await self._engine.running()
        return {name.rpartition("-")[0]: tokens for name, tokens in held.items()}

    async def until(self, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        async with asyncio.timeout(DEADLINE_S):
            while not condition(held := await self()):
                pass  # each look waits for a step of the engine
            return held


async def one_abort(engine: VllmEngine, name: str, *, others: int, max_tokens: int, prompt_tokens: int = 8) -> Stopped:
    """Start `others` + 1 long generations, abort one, and see when it stops. The clock must outlive the abort."""
    random = np.random.default_rng(len(name))
    names = [f"{name}.{index}" for index in range(others)]
    clock, doomed = names[0], f"{name}.doomed"
    tasks = {
        each: asyncio.create_task(
            engine.generate(each, random.integers(2, 90, prompt_tokens).astype(np.int32), Sampling(COLD, max_tokens, index), 0)
        )
        for index, each in enumerate([*names, doomed])
    }
    look = Look(engine)
    await look.until(lambda held: min(held.get(clock, 0), held.get(doomed, 0)) >= 5)
    began = time.perf_counter()
    await engine.abort(doomed)
    arrived = await look()
    answer_at: list[float] = []
    tasks[doomed].add_done_callback(lambda _: answer_at.append(time.perf_counter()))
    held = last = arrived
    while doomed in held:
        last, held = held, await look()
    dropped = time.perf_counter()
    answer = await asyncio.wait_for(tasks[doomed], DEADLINE_S)
    assert answer.finish_reason == "abort"
    for each in names:
        await engine.abort(each)
    await asyncio.gather(*tasks.values())
    return Stopped(
        late_tokens=last[doomed] - arrived[doomed] if doomed in arrived else 0,
        held_steps=last[clock] - arrived[clock],
        tokens=len(answer.ids),
        answer_ms=((answer_at[0] if answer_at else dropped) - began) * 1000,
        dropped_ms=(dropped - began) * 1000,
    )


async def measure(model: str, aborts: int, others: int, max_tokens: int) -> None:
    settings = InferenceSettings(http=False, max_model_len=max_tokens + 64)
    plan = ServerPlan(ModelSettings(name=model), model_folder(model), settings, "cpu", others + 1, 0, "cancel")
    engine = VllmEngine(plan, WeightSyncSettings())
    await engine.start()
    try:
        await one_abort(engine, "warm", others=others, max_tokens=max_tokens)
        stops = [await one_abort(engine, f"a{index}", others=others, max_tokens=max_tokens) for index in range(aborts)]
    finally:
        await engine.close()
    milliseconds = [stop.dropped_ms for stop in stops]
    answers = [stop.answer_ms for stop in stops]
    print(
        json.dumps(
            {
                "model": model,
                "aborts": aborts,
                "others": others,
                "late_tokens_max": max(stop.late_tokens for stop in stops),
                "held_steps_max": max(stop.held_steps for stop in stops),
                "answer_ms_median_max": [round(float(np.median(answers)), 2), round(max(answers), 2)],
                "dropped_ms_median_max": [round(float(np.median(milliseconds)), 2), round(max(milliseconds), 2)],
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: a random two-layer model whose answers never end")
    for name, default in (("aborts", 40), ("others", 16), ("max-tokens", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    os.environ.update(vllm_environment("cpu", os.environ))
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_model(Path(folder) / "endless", seed=0))
        asyncio.run(measure(model, options.aborts, options.others, options.max_tokens))


if __name__ == "__main__":
    main()
