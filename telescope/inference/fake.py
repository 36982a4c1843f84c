"""An engine without a model: answers follow from prompt, seed and version alone. For tests of everything around an engine.

Answers are made of pieces of the prompt so that the embedded tasks reward some of them: the prompt's numbers joined by + and -,
its last word backwards, or a jumble. Its weights are checked like real ones and change nothing but the answers' seed. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from telescope.config.models import end_ids
from telescope.inference.engine import EngineDead, Generated, LoadReport, RequestRefused, WeightsRefused, WeightState
from telescope.records import FinishReason, Sampling, WeightGroup, WeightManifest
from telescope.weights.base import Receiver, TransferFailed, WeightReader, WeightsCorrupt
from telescope.weights.transports.shared_memory import TRANSPORT as SHARED_MEMORY

JUMBLE_TOKENS = 8


class Characters:
    """The one-character tokens of a model folder's tokenizer.json; empty where it has none to read."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        model = json.loads(file.read_text(encoding="utf-8")).get("model", {}) if file.is_file() else {}
        vocabulary = model.get("vocab", {}) if isinstance(model, dict) else {}
        self._ids: dict[str, int] = {}
        if isinstance(vocabulary, dict):
            self._ids = {text: index for text, index in vocabulary.items() if len(text) == 1 and isinstance(index, int)}
        self._texts = {index: text for text, index in self._ids.items()}

    def text(self, ids: np.ndarray) -> str:
        """Tokens that are not a single character become newlines, so that they part words."""
        return "".join(self._texts.get(int(index), "\n") for index in ids)

    def until(self, ids: list[int], stop: tuple[str, ...]) -> int:
        """Tokens up to and with the first of these texts; all where none is there."""
        ends = [text.index(mark) + len(mark) for text in (self.text(np.asarray(ids)),) for mark in stop if mark in text]
        return min(ends, default=len(ids))

    def ids(self, text: str) -> list[int]:
        return [self._ids[character] for character in text if character in self._ids]


def made_up(prompt_ids: np.ndarray, sampling: Sampling, version: int, characters: Characters) -> list[int]:
    """The answer without its end token; may be empty."""
    key = hashlib.blake2b(np.asarray(prompt_ids, "<i4").tobytes(), digest_size=8)
    key.update(f"{sampling.seed} {version}".encode())
    random = np.random.default_rng(int.from_bytes(key.digest(), "little"))
    text = characters.text(prompt_ids)
    numbers = re.findall(r"\d+", text)[:-1]  # the last one is what is to be made
    words = re.findall(r"[a-z]+", text)
    draw = random.random()
    if draw < 0.75 and len(numbers) > 1:
        signs = random.choice(["+", "-"], len(numbers) - 1).tolist()
        order = random.permutation(numbers).tolist()
        return characters.ids("".join(a + b for a, b in zip(order, [*signs, ""], strict=True)))
    if draw < 0.5 and words and not numbers:
        return characters.ids(words[-1][::-1])
    pool = np.asarray(characters.ids(re.sub(r"\s", "", text)) or prompt_ids)
    return [int(index) for index in random.choice(pool, int(random.integers(1, JUMBLE_TOKENS + 1)))]


class _Bed:
    """Whether requests may run, and how many do: the engine sleeps once none does."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._asleep = False
        self._running = 0

    @contextlib.asynccontextmanager
    async def out_of(self, aborted: asyncio.Event) -> AsyncIterator[None]:
        """A request runs within; before it begins it waits until the engine is awake, or until it is aborted."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._asleep or aborted.is_set())
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            await self.stir()

    async def sleep(self) -> None:
        async with self._changed:
            self._asleep = True
            await self._changed.wait_for(lambda: not self._running)

    async def wake(self) -> None:
        self._asleep = False
        await self.stir()

    async def stir(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class FakeEngine:
    """See `Engine`. `token_s` is the time that each token takes, `weights_s` that of a version; 0 answers at once. `kv_tokens`
    is what its cache is said to hold (it never really fills up); None: no end of it. One event loop."""

    def __init__(
        self,
        folder: Path,
        reader: WeightReader,
        *,
        max_model_len: int,
        token_s: float = 0.0,
        weights_s: float = 0.0,
        kv_tokens: int | None = None,
        receivers: Callable[[str], Receiver] | None = None,
        deadline_s: float = 60.0,
        version: int = 0,
    ) -> None:
        """`receivers` gives the worker's end of a transport other than shared memory; without it they are refused. `version`:
        of the weights that it begins with."""
        self._characters = Characters(folder)
        self._end = next(iter(end_ids(folder)), None)
        self._reader = reader
        self._max_model_len = max_model_len
        self._token_s = token_s
        self._kv_tokens = kv_tokens
        self._held = 0  # tokens of all requests that run, prompts included
        self._weights_s = weights_s
        self._aborts: dict[str, asyncio.Event] = {}
        self._state = WeightState(version=version, prepared=None, checksum="", pause_s=0.0)
        self._staged: WeightManifest | None = None
        self._stepped: Callable[[], None] = lambda: None
        self._receivers, self._deadline_s = receivers, deadline_s
        self._weights = asyncio.Lock()
        self._bed = _Bed()
        self._arriving: tuple[int, Receiver, WeightGroup | None] | None = None
        self._preparing: int | None = None
        self._called_off = False

    @property
    def client(self) -> None:
        return None

    def on_step(self, stepped: Callable[[], None]) -> None:
        self._stepped = stepped

    @property
    def load(self) -> LoadReport:
        used = min(1.0, self._held / self._kv_tokens) if self._kv_tokens else 0.0
        return LoadReport(kv_used=used, running=len(self._aborts), waiting=0, preemptions=0)

    async def start(self) -> None: ...

    async def dead(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def generate(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, priority: int) -> Generated:
        if request_id in self._aborts:
            raise RequestRefused(f"request {request_id} is being served already")
        if not 0 < len(prompt_ids) < self._max_model_len or sampling.max_tokens < 1:
            raise RequestRefused(
                f"a prompt of {len(prompt_ids)} tokens and max_tokens={sampling.max_tokens} don't fit "
                f"inference.max_model_len={self._max_model_len}"
            )
        started = time.monotonic()
        aborted = self._aborts[request_id] = asyncio.Event()
        self._held += len(prompt_ids)
        ids: list[int] = []
        try:
            async with self._bed.out_of(aborted):
                versions, reason = await self._sample(prompt_ids, sampling, aborted, ids)
        finally:
            del self._aborts[request_id]
            self._held -= len(prompt_ids) + len(ids)
        return Generated(
            ids=np.asarray(ids, np.int32),
            logprobs=_logprobs(ids, sampling.temperature),
            versions=np.asarray(versions, np.int32),
            finish_reason=reason,
            cached_tokens=0,
            queued_s=0.0,
            generated_s=time.monotonic() - started,
        )

    async def _sample(
        self, prompt_ids: np.ndarray, sampling: Sampling, aborted: asyncio.Event, ids: list[int]
    ) -> tuple[list[int], FinishReason]:
        """Token by token into `ids`; each carries the version served when its time was up."""
        answer = made_up(prompt_ids, sampling, self._state.version, self._characters)
        whole = answer if self._end is None else [*answer, self._end]
        whole = whole[: self._characters.until(whole, sampling.stop)]
        room = min(sampling.max_tokens, self._max_model_len - len(prompt_ids))
        versions: list[int] = []
        for token in whole[:room]:
            if await self._interrupted(aborted):
                return versions, "abort"
            ids.append(token)
            self._held += 1
            versions.append(self._state.version)
            self._stepped()
        return versions, "stop" if len(ids) == len(whole) else "length"

    async def _interrupted(self, aborted: asyncio.Event) -> bool:
        if self._token_s:
            try:
                async with asyncio.timeout(self._token_s):
                    await aborted.wait()
            except TimeoutError:
                return False
        return aborted.is_set()

    async def abort(self, request_id: str) -> None:
        if request_id in self._aborts:
            self._aborts[request_id].set()
            await self._bed.stir()

    async def sleep(self) -> None:
        try:
            async with self._weights, asyncio.timeout(self._deadline_s):
                await self._bed.sleep()
        except TimeoutError as error:
            raise EngineDead(f"running requests did not end within {self._deadline_s:g} s, so that it can't sleep") from error

    async def prepare(self, manifest: WeightManifest, group: WeightGroup | None = None) -> WeightState:
        async with self._weights:
            self._staged = None
            self._state = replace(self._state, prepared=None)
            self._preparing, self._called_off = manifest.version, False
            try:
                await asyncio.sleep(self._weights_s)  # stands for the work itself
                checksum = await self._receive(manifest, group)
            except (WeightsCorrupt, TransferFailed) as error:
                missing = error.missing if isinstance(error, TransferFailed) else ()
                raise WeightsRefused(str(error), missing) from error
            finally:
                self._preparing = None
            self._staged = msgspec.structs.replace(manifest, checksum=checksum)
            self._state = replace(self._state, prepared=manifest.version)
            return self._state

    async def _receive(self, manifest: WeightManifest, group: WeightGroup | None) -> str:
        """All of it, checked; its checksum."""
        if self._receivers is None or manifest.transport == SHARED_MEMORY:
            for _ in self._reader.read(manifest):
                pass
            return manifest.checksum
        import torch  # whoever receives otherwise has it

        receiver = await asyncio.to_thread(self._receivers, manifest.transport)
        self._arriving = (manifest.version, receiver, group)
        place = torch.empty(manifest.nbytes, dtype=torch.uint8)
        try:
            if self._called_off:
                raise TransferFailed(f"weights version {manifest.version} were broken off")
            return await asyncio.to_thread(receiver.receive, manifest, group, place, self._deadline_s)
        finally:
            self._arriving = None

    async def commit(self, version: int) -> WeightState:
        async with self._weights:
            if self._staged is None or self._staged.version != version:
                held = "nothing" if self._staged is None else f"version {self._staged.version}"
                raise WeightsRefused(f"weights version {version} can't be committed: {held} is staged")
            self._state = WeightState(version=version, prepared=None, checksum=self._staged.checksum, pause_s=0.0)
            self._staged = None
            await self._bed.wake()
            return self._state

    async def discard(self, version: int) -> WeightState:
        self._called_off |= self._preparing == version
        if self._arriving is not None and self._arriving[0] == version:
            _, receiver, group = self._arriving
            receiver.cancel(None if group is None else group.epoch)
        async with self._weights:
            if self._staged is not None and self._staged.version == version:
                self._staged = None
                self._state = replace(self._state, prepared=None)
            return self._state

    async def close(self) -> None: ...


def _logprobs(ids: list[int], temperature: float) -> np.ndarray:
    """Some log-prob for each token, between -2 and 0: it follows from token, place and temperature."""
    places = np.arange(1, len(ids) + 1)
    spread = (np.asarray(ids, np.int64) * 31 + places * 17) % 97 / 97
    return (-2.0 * spread / max(temperature, 1.0)).astype(np.float32)
