"""What an inference server asks of its engine: token ids in; ids, processed log-probs and weight versions out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from telescope.records import FinishReason, Sampling, WeightGroup, WeightManifest


@dataclass(frozen=True)
class Generated:
    """The answer to one request; all arrays but `routed` have the length of the completion."""

    ids: np.ndarray  # [T] int32
    logprobs: np.ndarray  # [T] float32, after temperature, of the sampled tokens
    versions: np.ndarray  # [T] int32, weight version that sampled each token
    finish_reason: FinishReason
    cached_tokens: int
    queued_s: float
    generated_s: float
    routed: np.ndarray | None = None  # [P + T, L, K] uint8 or int16, of P prompt tokens too (maths/routing.py)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order in which a Completion carries them."""
        return (self.ids, self.logprobs, self.versions, *(() if self.routed is None else (self.routed,)))


@dataclass(frozen=True)
class WeightState:
    """What the engine holds after a weight operation; `checksum` is that of the served version's manifest."""

    version: int
    prepared: int | None
    checksum: str
    pause_s: float


@dataclass(frozen=True)
class LoadReport:
    """How much an engine has to do. `kv_used` is a share, `preemptions` counts since its start."""

    kv_used: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0


class EngineDead(RuntimeError):
    """The engine can serve nothing any more; the process must end with this message."""


class EngineRefused(ValueError):
    """The engine does not take the model or its settings; starting it again is no use."""


class RequestRefused(ValueError):
    """This request can't be served (too long a prompt, an unknown id); others can."""


class WeightsRefused(RuntimeError):
    """The version was not taken; the one served before is served still. `missing`: as of `TransferFailed`."""

    def __init__(self, sentence: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.missing = missing


class Engine(Protocol):
    @property
    def client(self) -> Any:
        """What an HTTP application is built around; None where the engine has none."""
        ...

    @property
    def load(self) -> LoadReport:
        """As of its latest step."""
        ...

    def on_step(self, stepped: Callable[[], None]) -> None:
        """Have `stepped` called on the event loop each time that tokens were sampled: the engine is at work."""
        ...

    async def start(self) -> None:
        """Load the model and be ready to generate. Raises with a whole sentence if it can't."""
        ...

    async def dead(self) -> str:
        """Return once the engine can serve nothing any more, with the sentence that says why. Never returns otherwise."""
        ...

    async def generate(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, priority: int) -> Generated:
        """Sample one completion; a smaller `priority` goes first. Ends with `finish_reason="abort"` and the tokens so far if
        aborted. Raises `RequestRefused`, or `EngineDead`."""
        ...

    async def abort(self, request_id: str) -> None:
        """Really stop the request in the engine, within one engine step. An unknown or finished one is not an error."""
        ...

    async def prepare(self, manifest: WeightManifest, group: WeightGroup | None = None) -> WeightState:
        """Stage the new weights and check them whole; generation goes on. `group`: with whom, if they are broadcast. Raises
        `WeightsRefused`, also when `discard` is called meanwhile."""
        ...

    async def commit(self, version: int) -> WeightState:
        """Serve the staged version: pause, load, resume. Tokens after it carry the new version. Raises `WeightsRefused` if the
        version is not staged, and `EngineDead` once anything was touched: there is no way back then."""
        ...

    async def discard(self, version: int) -> WeightState:
        """Forget the staged version, or break off its `prepare`; the old one stays served."""
        ...

    async def sleep(self) -> None:
        """Answer what is running, then give the memory back until the next `commit`, for which requests that come meanwhile
        wait. Weights may be prepared meanwhile. An engine that sleeps sleeps on. Raises `EngineDead` where it can't."""
        ...

    async def close(self) -> None:
        """End the engine and every process of it, within a deadline."""
        ...
