"""A server process for benchmarks/flow/refill.py: an engine whose requests all end at the same moment, wave after wave.

As `python -m telescope.inference` otherwise. The environment variable `WAVES` is a JSON object: `requests` of a wave, `tokens`
of an answer, `rest_s` between the last arrival of a wave and its end, and the file `out`, to which a line of JSON is added for
each wave: when the first and the last request of the next one were here, in milliseconds from the release, and the processor
milliseconds that each process of the run has spent from the release until then, and until all had come to rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from telescope.config.models import model_folder
from telescope.inference import main as serving
from telescope.inference.engine import Engine, Generated
from telescope.inference.fake import FakeEngine
from telescope.records import Sampling
from telescope.weights.transports.shared_memory import SharedMemoryReader
from telescope.wire.process import leave


class Waves(FakeEngine):
    def __init__(self, folder: Path, run: str, *, requests: int, tokens: int, rest_s: float, out: str) -> None:
        super().__init__(folder, SharedMemoryReader(run), max_model_len=100_000)
        self._size, self._tokens, self._rest_s, self._out = requests, tokens, rest_s, Path(out)
        self._waiting: list[asyncio.Future[None]] = []
        self._ending: asyncio.TimerHandle | None = None
        self._released = self._first = self._last = 0.0
        self._spent: tuple[dict[str, float], ...] = ()

    async def generate(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, priority: int) -> Generated:
        came = asyncio.get_running_loop().create_future()
        self._arrived(came)
        await came
        ids = np.random.default_rng(sampling.seed).integers(2, 250, self._tokens, dtype=np.int32)
        versions = np.full(self._tokens, self._state.version, np.int32)
        return Generated(ids, np.full(self._tokens, -1.0, np.float32), versions, "length", 0, 0.0, 0.0)

    def _arrived(self, came: asyncio.Future[None]) -> None:
        self._last = time.perf_counter()
        self._first = self._first if self._waiting else self._last
        self._waiting.append(came)
        if len(self._waiting) == self._size:
            self._spent += (processor_s(),)
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.get_running_loop().call_later(self._rest_s, self._release)

    def _release(self) -> None:
        """A wave that is not whole has no figures."""
        wave, self._waiting, spent = self._waiting, [], (*self._spent, processor_s())
        if self._released and len(wave) == self._size and len(spent) == 3:
            self._write(spent)
        self._spent = (processor_s(),)
        self._released = time.perf_counter()
        for came in wave:
            if not came.done():
                came.set_result(None)

    def _write(self, spent: tuple[dict[str, float], ...]) -> None:
        before, refilled, rested = spent
        row = {
            "requests": self._size,
            "first_ms": (self._first - self._released) * 1e3,
            "last_ms": (self._last - self._released) * 1e3,
            "cpu_until_last_ms": {name: (refilled[name] - value) * 1e3 for name, value in before.items()},
            "cpu_until_rest_ms": {name: (rested[name] - value) * 1e3 for name, value in before.items()},
        }
        with self._out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def processor_s() -> dict[str, float]:
    """Of each process of this run, by its role."""
    spent: dict[str, float] = {}
    above = [process for process in psutil.Process().parents() if "--start" in process.cmdline()]
    for process in above[-1].children(recursive=True):
        try:
            line = process.cmdline()
            if line[1:2] == ["-m"] and "--name" in line:
                spent[line[2].rpartition(".")[2]] = sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return spent


def build(config: Any, run: str, *_: Any) -> Engine:
    return Waves(model_folder(config.model.name), run, **json.loads(os.environ["WAVES"]))


if __name__ == "__main__":
    serving.build_engine = build  # type: ignore[assignment]
    leave(serving.main())
