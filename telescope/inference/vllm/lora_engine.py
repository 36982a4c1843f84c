"""vLLM with LoRA adapters: a version is an adapter of its own, loaded beside those that requests still use.

Nothing pauses. A version is checked, written where vLLM can load it, loaded, and asked a probe: its log-probs must have moved.
From the commit on new requests use it; running ones keep the adapter that they began with, so all tokens of an answer are of
one version. Owns when adapters come and go; what they are is adapters.py's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import shutil
import tempfile
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from telescope.config.sections import LoraSettings, WeightSyncSettings
from telescope.inference.engine import EngineRefused, Generated, WeightsRefused, WeightState
from telescope.inference.vllm.adapters import (
    CalledOff,
    LoraAdapter,
    LoraAdapters,
    Proof,
    disagreements,
    expected_tensors,
    up_projections,
)
from telescope.inference.vllm.adapters import write_adapter as write
from telescope.inference.vllm.engine import BREAK_OFF_S, VllmEngine
from telescope.inference.vllm.engine_health import answer_within, raise_when_dead
from telescope.inference.vllm.model_tensors import checkpoint_tensors
from telescope.inference.vllm.options import ServerPlan, served_dtype
from telescope.records import Sampling, WeightGroup, WeightManifest
from telescope.weights.base import TransferFailed, TransportRefused, WeightReader, WeightsCorrupt
from telescope.weights.transport_choice import transport_named

PROBE_TOKENS, PROBE_WIDTH = 32, 16
FIRST = -(2**31)
"""Priority of the probe."""
OVER_HTTP = "http:"
"""Before the ids of requests that did not come over the link."""

log = logging.getLogger(__name__)


class LoraEngine(VllmEngine):
    """See `Engine`. `scratch` is a folder for adapters, made and removed here; null: below the system's temporary files."""

    def __init__(self, plan: ServerPlan, weight_sync: WeightSyncSettings, scratch: Path | None = None) -> None:
        super().__init__(plan, weight_sync)
        assert plan.model.lora is not None
        self._lora: LoraSettings = plan.model.lora
        self._adapters = LoraAdapters(scratch or Path(tempfile.mkdtemp(prefix="telescope-adapters-")))
        self._expected = expected_tensors(self._lora, checkpoint_tensors(plan.folder))
        self._proof: Proof | None = None
        self._probes = 0
        self._loading: asyncio.Task[LoraAdapter]
        self._broken_off = False
        """Whether it was `discard` that cancelled the loading."""
        self.moved = 0.0
        """How far the probe's log-probs moved at the last update, since those before that moved: the largest |difference| in
        nats."""

    async def _open(self) -> None:
        """The model's own weights never change: there is nothing to be found out."""

    def _update_bytes(self) -> int:
        """An adapter needs no staging buffer."""
        return 0

    @raise_when_dead
    async def serve_folder(self, folder: Path) -> None:
        """Load the adapter in `folder`, as peft writes it, and serve it from now on; the folder stays where it is. Raises
        `EngineRefused`."""
        adapter = self._adapters.adopt(folder, self._plan.version)
        try:
            await self._added(adapter)
        except WeightsRefused as error:
            raise EngineRefused(f"the adapter in {folder} can't be served: {error}") from error
        self._adapters.serving = adapter

    # ---- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, priority: int) -> Generated:
        self._check_request(request_id, prompt_ids, sampling)
        adapter = self._adapters.begin(request_id)
        try:
            answer = await super().generate(request_id, prompt_ids, sampling, priority)
        finally:
            adapter.requests.discard(request_id)
        return replace(answer, versions=np.full(len(answer.ids), adapter.version, np.int32))

    @property
    def client(self) -> Any:
        """vLLM's AsyncLLM, whose requests get the adapter that serves when they begin."""
        return None if self._llm is None else _Client(self._llm, self._adapters)

    def _adapter_of(self, request_id: str) -> Any:
        return _asked(self._adapters.used_by(request_id))

    # ---- weights ----------------------------------------------------------------------------------------------------

    @raise_when_dead
    async def prepare(self, manifest: WeightManifest, group: WeightGroup | None = None) -> WeightState:
        async with self._weights:
            await self._forget_staged()
            self._arriving = manifest.version
            self._loading = asyncio.create_task(self._load_beside(manifest))
            try:
                async with asyncio.timeout(self._sync.update_timeout_s):
                    self._adapters.staged = await self._loading
            except asyncio.CancelledError:
                if not self._broken_off:
                    raise
                raise WeightsRefused(f"the adapter of version {manifest.version} was broken off") from None
            except TimeoutError as error:
                raise WeightsRefused(
                    f"the adapter of version {manifest.version} was not loaded and probed within "
                    f"weight_sync.update_timeout_s={self._sync.update_timeout_s:g} s"
                ) from error
            finally:
                self._arriving, self._broken_off = None, False
            self._state = replace(self._state, prepared=manifest.version)
            return self._state

    @raise_when_dead
    async def commit(self, version: int) -> WeightState:
        async with self._weights:
            staged = self._adapters.staged
            if staged is None or staged.version != version:
                held = "nothing" if staged is None else f"version {staged.version}"
                raise WeightsRefused(f"weights version {version} can't be committed: {held} is staged")
            self._adapters.serve_staged()
            if self._sync.in_flight == "abort":
                for request_id in tuple(self._requests):
                    if self._adapters.used_by(request_id) is not self._adapters.serving:
                        await self.abort(request_id)
            self._state = WeightState(version=version, prepared=None, checksum=staged.checksum, pause_s=0.0)
            return self._state

    @raise_when_dead
    async def discard(self, version: int) -> WeightState:
        if self._arriving == version:  # whoever waits in `prepare` is told
            self._broken_off = True
            self._loading.cancel()
        async with self._weights:
            if self._adapters.staged is not None and self._adapters.staged.version == version:
                await self._forget_staged()
            return self._state

    async def _load_beside(self, manifest: WeightManifest) -> LoraAdapter:
        for adapter in self._adapters.unused():
            await self._unload(adapter)
            self._adapters.gone(adapter)
        adapter = await self._write_adapter(manifest)
        try:
            for request_id in self._adapters.in_the_way(self._plan.inference.max_loras):
                log.info("request %s is aborted: its adapter is the oldest of inference.max_loras", request_id)
                await self.abort(request_id)
                if request_id.startswith(OVER_HTTP):
                    await self._llm.abort(request_id.removeprefix(OVER_HTTP))
            await self._added(adapter)
            if self._proof is None:
                before = await self._probe(self._adapters.serving)
                self._proof = Proof(served_dtype(self._plan), before, self._adapters.serving.up)
            self._check_moved(adapter, await self._probe(adapter))
        except (WeightsRefused, asyncio.CancelledError):
            await asyncio.shield(self._unload(adapter))  # whoever breaks it off twice must not leave it there
            raise
        return adapter

    async def _added(self, adapter: LoraAdapter) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._llm.add_lora(_asked(adapter))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM's engine answers with a plain Exception
            raise WeightsRefused(f"vLLM does not load the adapter of version {adapter.version}: {error}") from error

    async def _write_adapter(self, manifest: WeightManifest) -> LoraAdapter:
        """The version checked and on disk."""
        if found := disagreements(manifest, self._expected):
            raise WeightsRefused(f"weights version {manifest.version} don't fit model.lora: {'; '.join(found)}")
        try:
            transport = transport_named(manifest.transport, self._plan.plugin_path, self._sync.transport_kwargs)
            reader = transport.reader(self._plan.run)
        except TransportRefused as error:
            raise WeightsRefused(str(error)) from error
        adapter = self._adapters.new(manifest)
        assert adapter.folder is not None
        called_off = threading.Event()
        writing = asyncio.ensure_future(asyncio.to_thread(_write, adapter.folder, self._lora, manifest, reader, called_off))
        try:
            adapter.up = await asyncio.shield(writing)
        except asyncio.CancelledError:  # the thread stops at the next tensor; what it had written is nobody's
            called_off.set()
            writing.add_done_callback(functools.partial(_remove, adapter.folder))
            raise
        except (WeightsCorrupt, TransferFailed) as error:
            raise WeightsRefused(str(error)) from error
        except OSError as error:
            raise WeightsRefused(f"the adapter of version {manifest.version} can't be written: {error}") from error
        return adapter

    def _check_moved(self, adapter: LoraAdapter, probe: dict[int, float]) -> None:
        """Raise `WeightsRefused` where other numbers were loaded and nothing moved: they did not reach the computation."""
        assert self._proof is not None
        assert adapter.up is not None
        if not all(map(math.isfinite, probe.values())):
            raise WeightsRefused(f"with the adapter of version {adapter.version} log-probs are not finite")
        try:
            changed, self.moved = self._proof.judge(adapter.up, probe)
        except ValueError as error:
            raise WeightsRefused(f"the adapter of version {adapter.version} was loaded and {error}") from error
        log.info("adapter %d: elements changed by %.2g, log-probs by %.2g nats", adapter.version, changed, self.moved)

    async def _probe(self, adapter: LoraAdapter) -> dict[int, float]:
        """Log-probs of the likeliest tokens after a fixed text under an adapter.

        Of one sampled place: asked for the log-probs of a prompt beside other requests, vLLM's engine dies with adapters on.
        """
        from vllm import SamplingParams

        ids = np.random.default_rng(0).integers(0, self._vocabulary, min(PROBE_TOKENS, self._max_model_len - 1)).tolist()
        self._probes += 1
        params = SamplingParams(max_tokens=1, logprobs=PROBE_WIDTH, detokenize=False, output_kind=self._final_only)
        prompt = self._tokens_input(prompt_token_ids=ids)
        name = f"probe-{self._probes}"
        asked = self._llm.generate(prompt, params, name, lora_request=_asked(adapter), priority=FIRST)
        (output,) = [output async for output in asked]
        (place,) = output.outputs[0].logprobs
        return {token: float(found.logprob) for token, found in place.items()}

    async def _forget_staged(self) -> None:
        staged, self._adapters.staged = self._adapters.staged, None
        self._state = replace(self._state, prepared=None)
        if staged is not None:
            await self._unload(staged)

    async def _unload(self, adapter: LoraAdapter) -> None:
        """Only where no request uses it any more: vLLM would look for its folder again."""
        assert adapter.folder is not None
        async with answer_within(BREAK_OFF_S, f"the order to unload the adapter of version {adapter.version}"):
            await self._llm.remove_lora(adapter.number)
        await asyncio.to_thread(shutil.rmtree, adapter.folder, True)

    async def close(self) -> None:
        await super().close()
        self._adapters.close()


class _Client:
    """AsyncLLM for the HTTP application: it knows no adapters, so its requests are given one here, and counted as its users."""

    def __init__(self, llm: Any, adapters: LoraAdapters) -> None:
        self._llm = llm
        self._adapters = adapters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **more: Any) -> AsyncGenerator[Any, None]:
        adapter = self._adapters.begin(f"{OVER_HTTP}{request_id}")
        try:
            more |= {"lora_request": _asked(adapter)}
            async for output in self._llm.generate(prompt, sampling_params, request_id, **more):
                yield output
        finally:
            adapter.requests.discard(f"{OVER_HTTP}{request_id}")


def _asked(adapter: LoraAdapter) -> Any:
    """vLLM's name for an adapter; None for the base model."""
    from vllm.lora.request import LoRARequest

    return None if adapter.folder is None else LoRARequest(adapter.name, adapter.number, str(adapter.folder))


def _write(
    folder: Path, lora: LoraSettings, manifest: WeightManifest, reader: WeightReader, called_off: threading.Event
) -> np.ndarray:
    tensors = [(spec, memoryview(bytes(data))) for spec, data in reader.read(manifest)]  # small, and free of the transport
    try:
        write(folder, lora, tensors, called_off)
    except (OSError, CalledOff):  # half an adapter on a full disk leaves no room for the next
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return up_projections(tensors)


def _remove(folder: Path, written: asyncio.Future[np.ndarray]) -> None:
    written.cancelled() or written.exception()  # asked for, so that asyncio does not log it as lost
    shutil.rmtree(folder, ignore_errors=True)
