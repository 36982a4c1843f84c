"""Our methods inside each vLLM worker process: stage a published version of the weights, check it whole, put it in place.

vLLM imports this module in the worker and adds `WeightExtension` to its worker class; `collective_rpc` calls the methods by
name. Arguments and answers are strings, numbers, bytes and lists of these, so that no pickle is needed. Owns what happens
inside the worker; refuses to decide when (engine.py does, and vLLM runs these methods between two engine steps).

Importing it is the only hook that vLLM gives before the model is loaded, so the repairs run at import.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from telescope.inference.vllm.copy_plan import BoundPlan, CopyPlan, Flat, NoPlan, copy_all, differences, record
from telescope.inference.vllm.experts import check_arranged, layers_with_experts, record_arranged
from telescope.inference.vllm.kept_copies import CannotKeep
from telescope.inference.vllm.kept_logprobs import KeptLogprobs, keep
from telescope.inference.vllm.model_tensors import (
    checkpoint_tensors,
    disagreements,
    is_tied,
    needed_tensors,
    read_tensors,
    version_bytes,
)
from telescope.inference.vllm.patches import repair, teach_core
from telescope.inference.vllm.staging import Arrival, Staging
from telescope.inference.vllm.worker_protocol import Comparison, StageState, UpdateSetup, UpdateSupport, notify
from telescope.records import TensorSpec, WeightGroup, WeightManifest
from telescope.weights.buckets import misplaced
from telescope.wire.process import freeze_heap

SHOWN = 3
REMEDY = "Serve it in the precision of its files (inference.quantization=null), or train a dense model"


class WeightExtension:
    """Added to vLLM's worker class: `model_runner`, `vllm_config`, `device` and `rank` are the worker's own."""

    model_runner: Any
    vllm_config: Any
    device: Any
    rank: int
    telescope_weights: Any  # Weights, once opened
    telescope_logprobs: KeptLogprobs | None = None

    def telescope_open(self, opening: str) -> str:
        """Get ready for updates (an UpdateSetup in JSON): the answer is an UpdateSupport in JSON."""
        reload = self.model_runner.reload_weights
        weights = Weights(self.model_runner.get_model(), self.vllm_config, torch.device(self.device or "cpu"), reload)
        self.telescope_weights = weights
        opened = weights.open(msgspec.json.decode(opening, type=UpdateSetup), self.rank)
        freeze_heap()  # vLLM has done so itself, before the plan of copies was there
        return msgspec.json.encode(opened).decode()

    def telescope_stage(self, manifest: str, group: str, order: int) -> None:
        """Begin to check and receive a version (a WeightManifest in JSON). A version staged before is forgotten. `order`: what
        the notice at its end names."""
        self.telescope_weights.stage(
            msgspec.json.decode(manifest, type=WeightManifest), msgspec.json.decode(group, type=WeightGroup | None), order
        )

    def telescope_stage_state(self, version: int) -> str:
        """How far the version is: a StageState in JSON."""
        arrival: Arrival | None = self.telescope_weights.staging.get(version)
        absent = StageState(True, f"weights version {version} is not staged here")
        state = absent if arrival is None else state_of(arrival)
        return msgspec.json.encode(state).decode()

    def telescope_load(self, version: int) -> float:
        """Put the staged version in place; seconds it took. Any error leaves the model unusable."""
        return float(self.telescope_weights.load(version))

    def telescope_compare(self, version: int) -> str:
        """How the parameters compare with the staged version: a Comparison in JSON."""
        return msgspec.json.encode(self.telescope_weights.compare(version)).decode()

    def telescope_forget(self, version: int) -> None:
        self.telescope_weights.staging.forget(version)

    def telescope_keep_logprobs(self) -> str:
        """Keep the log-probs of sampled tokens from now on. The answer: why not, or empty. One worker of several is enough."""
        if self.rank:
            return ""
        rows, positions = self.vllm_config.scheduler_config.max_num_seqs, self.vllm_config.model_config.max_model_len
        try:
            self.telescope_logprobs = keep(self.model_runner, rows, positions, torch.device(self.device or "cpu"))
        except CannotKeep as cause:
            return str(cause)
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as cause:  # another vLLM, or no memory
            return f"{type(cause).__name__}: {cause}"
        return ""

    def telescope_take_logprobs(self, wanted: list[tuple[str, int, int]]) -> bytes:
        """Of ended requests, by vLLM's names: the kept log-probs of so many tokens from a position on, float32, one request
        after another. NaN where none was kept."""
        if self.telescope_logprobs is None:
            return b""
        return b"".join(self.telescope_logprobs.take(*one).tobytes() for one in wanted)

    def telescope_drop_logprobs(self) -> None:
        if self.telescope_logprobs is not None:
            self.telescope_logprobs.undo()
            self.telescope_logprobs = None

    def telescope_running(self) -> dict[str, int]:
        """Sampled tokens of each request that the worker still holds, by vLLM's internal id."""
        return {name: len(state.output_token_ids) for name, state in self.model_runner.requests.items()}


class Weights:
    """The parameters of one worker and the version that waits beside them."""

    staging: Staging

    def __init__(self, model: Any, vllm_config: Any, device: torch.device, reload: Callable[..., None]) -> None:
        """`reload`: the runner's, which computes anew whatever vLLM derives from weights at load, in its old place."""
        self._model = model
        self._reload = reload
        self._config = vllm_config.model_config
        self._device = device
        self._folder = Path(vllm_config.model_config.model)
        self._plan: CopyPlan | None = None
        self._idle: frozenset[str] = frozenset()
        """The checkpoint's tensors of which the plan copies nothing anywhere."""
        self._bound: tuple[tuple[TensorSpec, ...], int, BoundPlan] | None = None
        self._fits: tuple[tuple[TensorSpec, ...], int] | None = None
        """The layout that was found to fit the model."""

    def open(self, opening: UpdateSetup, rank: int) -> UpdateSupport:
        started = time.perf_counter()
        if refused := self._cannot_update():
            return UpdateSupport(refused=refused)
        self._checkpoint = checkpoint_tensors(self._folder)
        self._tied = is_tied(self._folder)
        self._deadline_s, self._notify, self._rank = opening.deadline_s, opening.notify, rank
        self.staging = Staging(opening.place, self._device, opening.run, receivers(opening, rank, self._device))
        no_plan = ""
        try:
            self._plan = self._make_plan()
            self._idle = frozenset(needed_tensors(self._checkpoint, self._tied)) - self._plan.sources
        except NoPlan as reason:
            no_plan = str(reason)
            if layers_with_experts(self._model):
                return UpdateSupport(
                    refused=f"the model has experts, and no way to update them is proven here: {no_plan}. {REMEDY}"
                )
        reserved = 0
        if self._device.type == "cuda":
            reserved = version_bytes(self._checkpoint, self._tied, str(self._config.dtype).removeprefix("torch."))
            self.staging.reserve(reserved)
            self._warm()
        copies, arranged, nbytes = (self._plan.count, len(self._plan.arranged), self._plan.nbytes) if self._plan else (0, 0, 0)
        seconds = time.perf_counter() - started
        return UpdateSupport(
            "", no_plan, copies, arranged, nbytes, self.staging.buffer.numel(), seconds, tuple(sorted(self._idle))
        )

    def _warm(self) -> None:
        """The first copy of a kind loads its kernels, for tens of milliseconds: not at the first update."""
        if self._plan is not None:
            some = [copy.target for copy in self._plan.copies[:SHOWN]]
            with torch.inference_mode():
                copy_all(some, [target.clone() for target in some])

    def stage(self, manifest: WeightManifest, group: WeightGroup | None, order: int = 0) -> None:
        def check() -> str:
            layout = manifest.tensors, manifest.nbytes
            if self._fits != layout:
                misfits = disagreements(manifest, self._checkpoint, self._tied, self._idle)
                if found := misfits or misplaced(manifest.tensors, manifest.nbytes)[:SHOWN]:
                    return f"weights version {manifest.version} don't fit the model: {'; '.join(found)}"
                self._fits = layout
            self._bind(manifest)
            return ""

        def ended(arrival: Arrival) -> None:
            notify(self._notify, order, self._rank, state_of(arrival))

        self.staging.begin(manifest, group, check, self._put, self._deadline_s, ended)

    def load(self, version: int) -> float:
        started = time.perf_counter()
        arrival = self._arrived(version)
        self.staging.joined()
        if not self.staging.unstaged(arrival.manifest):
            with torch.inference_mode():
                self._put_staged(arrival)
        elif not arrival.manifest.collective:
            arrival.put_buckets()
        self.staging.done()
        return time.perf_counter() - started

    def compare(self, version: int) -> Comparison:
        """Every element of every parameter against the staged version, by the copies that an update makes."""
        arrival = self._arrived(version)
        if self._plan is None or self.staging.unstaged(arrival.manifest):
            return Comparison(0, ())
        self.staging.joined()
        return Comparison(len(self._plan.sources), self._plan.differing(arrival.flat))

    def _arrived(self, version: int) -> Arrival:
        arrival = self.staging.get(version)
        if arrival is None or not arrival.over or arrival.cause:
            why = arrival.cause if arrival is not None and arrival.cause else "nothing has arrived"
            raise RuntimeError(f"weights version {version} is not staged and checked in this worker: {why}")
        return arrival

    def _put_staged(self, arrival: Arrival) -> None:
        specs = arrival.manifest.tensors
        if not self._planned(specs):
            self._load_by_vllm(arrival.flat, specs)
        elif self._bound is not None and not self.staging.in_place(arrival.manifest):
            self._bound[2].apply()
        elif self._plan is not None:
            self._plan.apply(arrival.flat)

    def _planned(self, specs: tuple[TensorSpec, ...]) -> bool:
        return self._plan is not None and self._plan.sources <= {spec.name for spec in specs}

    def _bind(self, manifest: WeightManifest) -> None:
        """In the receiving thread: look up the slices of the staging buffer, once for the whole run as long as neither it nor
        the layout changes, so that a commit has nothing left to do but to copy."""
        staging, specs = self.staging, manifest.tensors
        if self._plan is None or not self._planned(specs) or staging.in_place(manifest) or staging.unstaged(manifest):
            return
        staging.reserve(manifest.nbytes)
        address = staging.buffer.data_ptr()
        if self._bound is None or self._bound[:2] != (specs, address):
            named = {spec.name: spec for spec in specs}
            self._bound = (specs, address, self._plan.bound(lambda name: staging.row(named[name])))

    def _put(self, flat: Flat, specs: tuple[TensorSpec, ...]) -> None:
        """Some tensors of a version. Without a plan vLLM's loader takes them, part by part."""
        if self._plan is not None:
            self._plan.apply(flat, frozenset(spec.name for spec in specs))
        else:
            self._model.load_weights((spec.name, flat(spec.name).reshape(spec.shape)) for spec in specs)

    def _load_by_vllm(self, flat: Flat, specs: tuple[TensorSpec, ...]) -> None:
        tensors = ((spec.name, flat(spec.name).reshape(spec.shape)) for spec in specs)
        if self._config.quantization is not None:
            self._reload(weights_iterator=tensors)
            return
        loaded = self._model.load_weights(tensors)
        missed = {name for name, _ in self._model.named_parameters()} - loaded if loaded is not None else set()
        if missed:
            raise RuntimeError(f"vLLM left {len(missed)} parameters as they were: {', '.join(sorted(missed)[:SHOWN])}")

    def _make_plan(self) -> CopyPlan:
        """The loader's copies, tried on the checkpoint that it has loaded itself. Raises `NoPlan`."""
        if self._config.quantization is not None:
            raise NoPlan(f"the model is served in {self._config.quantization}, so each version is quantised anew")
        shapes = needed_tensors(self._checkpoint, self._tied)
        try:
            return self._proven(
                record(dict(self._model.named_parameters()), self._model.load_weights, shapes, self._config.dtype)
            )
        except NoPlan:
            if not layers_with_experts(self._model):
                raise
        return self._proven(record_arranged(self._model, self._model.load_weights, shapes, self._config.dtype))

    def _proven(self, plan: CopyPlan) -> CopyPlan:
        with read_tensors(self._folder) as tensor:
            wrong = differences(plan, tensor)
            if wrong:
                raise NoPlan(
                    f"{len(wrong)} loaded tensors are not plain copies of the checkpoint's: {', '.join(sorted(wrong)[:SHOWN])}"
                )
            if plan.arranged:
                with torch.inference_mode():
                    check_arranged(plan, tensor)
        return plan

    def _cannot_update(self) -> str:
        """A sentence if the loaded model could not take new weights in place; else empty."""
        packed = [name for name, tensor in self._model.named_parameters() if tensor.numel() == 0]
        if packed:
            return f"vLLM repacked {len(packed)} weights at load ({packed[0]}, …), so that they can't be updated in place"
        absorbed = [name for name, module in self._model.named_modules() if hasattr(module, "W_UK_T")]
        if absorbed:
            return (
                f"vLLM keeps matrices computed from weights at load ({absorbed[0]}.W_UK_T, …): an update would leave them stale"
            )
        return ""


def state_of(arrival: Arrival) -> StageState:
    return StageState(arrival.over, arrival.cause, arrival.checksum, arrival.touched, arrival.missing)


def receivers(opening: UpdateSetup, rank: int, device: torch.device) -> Callable[[str], Any]:
    """How a worker gets its receiver of a transport; its name in a weight group is e.g. `server-0/1`."""

    def make(transport: str) -> Any:
        from telescope.weights.base import ServerEnd
        from telescope.weights.transport_choice import transport_named

        end = ServerEnd(opening.run, f"{opening.server}/{rank}", str(device), opening.init_timeout_s)
        return transport_named(transport, opening.plugin_path, opening.transport_kwargs).receiver(end)

    return make


teach_core()
repair()
