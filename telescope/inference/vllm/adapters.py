"""LoRA adapters on the server's side: is a published version the whole adapter, where it lies, and who still uses which.

Owns the folder that vLLM loads an adapter from, and the rule that a version leaves only when no request uses it. Needs neither
torch nor vLLM.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from telescope.config.sections import LoraSettings
from telescope.records import TensorSpec, WeightManifest

SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SHOWN = 3


def expected_tensors(lora: LoraSettings, checkpoint: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an adapter's tensors for a model: A is [rank, in], B is [out, rank] of each targeted matrix."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in checkpoint.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2 and module.rpartition(".")[2] in lora.target_modules:
            found[f"base_model.model.{module}.lora_A.weight"] = (lora.rank, shape[1])
            found[f"base_model.model.{module}.lora_B.weight"] = (shape[0], lora.rank)
    return found


def disagreements(manifest: WeightManifest, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What keeps a version from being the whole adapter, in sentences; empty if nothing does."""
    given = {spec.name: spec for spec in manifest.tensors}
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys())
    found = [f"{len(missing)} tensors are missing: {', '.join(missing[:SHOWN])}"] if missing else []
    found += [f"{len(unknown)} tensors are not the adapter's: {', '.join(unknown[:SHOWN])}"] if unknown else []
    for name, spec in given.items():
        if name in expected and tuple(spec.shape) != expected[name]:
            found.append(f"{name} has shape {list(spec.shape)} but the adapter's is {list(expected[name])}")
        elif spec.dtype not in SAFETENSORS:
            found.append(f"{name} has dtype {spec.dtype}, which is not a floating-point one")
    return found[: 2 * SHOWN]


Tensors = Iterable[tuple[TensorSpec, memoryview]]


class CalledOff(RuntimeError):
    """Nobody wants the adapter any more."""


def write_adapter(folder: Path, lora: LoraSettings, tensors: Tensors, called_off: threading.Event | None = None) -> None:
    """An adapter in the layout that peft writes and vLLM loads: adapter_config.json and adapter_model.safetensors. Raises
    `CalledOff` in the middle once `called_off` is set."""
    folder.mkdir(parents=True, mode=0o700)
    pairs = list(tensors)
    header: dict[str, object] = {}
    offset = 0
    for spec, view in pairs:
        ends = [offset, offset + view.nbytes]
        header[spec.name] = {"dtype": SAFETENSORS[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
        offset += view.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, view in pairs:
            if called_off is not None and called_off.is_set():
                raise CalledOff(f"the adapter in {folder} was broken off")
            file.write(view)
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none"}
    config = facts | {"target_modules": list(lora.target_modules), "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def up_projections(tensors: Tensors) -> np.ndarray:
    """[all elements of the B matrices] float32, in order: with B = 0 an adapter does nothing."""
    flat = [_as_float32(view, spec.dtype) for spec, view in tensors if ".lora_B." in spec.name]
    return np.concatenate(flat) if flat else np.zeros(0, np.float32)


def largest_change(before: np.ndarray | None, after: np.ndarray) -> float:
    """Of any element; against nothing (the base model) it is the largest element."""
    if after.size == 0:
        return 0.0
    return float(np.abs(after if before is None else after - before).max())


SEEN = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-3}
"""A change of an adapter's elements beyond this shows in log-probs of a model served in this precision. In float32 any does. In
half precision single sums round a small change away, not thousands of them: 4e-6 was seen to move the log-probs of a model of
100 thousand parameters in bfloat16 each time (benchmarks/results/lora.md), and this is 250 times as much."""


def distance(before: dict[int, float], after: dict[int, float]) -> float:
    """The largest |difference| in nats over the tokens that both know; infinite where they share none."""
    return max((abs(after[token] - before[token]) for token in before.keys() & after.keys()), default=math.inf)


@dataclass
class Proof:
    """That adapters reach the computation: what was last seen to, and the log-probs of a fixed text under it. Small changes add
    up until they must have moved these."""

    dtype: str
    probe: dict[int, float]
    up: np.ndarray | None = None
    """None: the base model."""

    def judge(self, up: np.ndarray, probe: dict[int, float]) -> tuple[float, float]:
        """Largest change of an element and of a log-prob (nats) since the last one seen. Raises ValueError, with a sentence's
        end, where the first is too large for the second to be none."""
        changed, moved = largest_change(self.up, up), distance(self.probe, probe)
        if moved == 0.0 and changed > SEEN[self.dtype]:
            raise ValueError(
                f"differs by {changed:.2g} from the last one that was seen to act, but the log-probs of a probe did not move: "
                "it does not reach the model"
            )
        if moved:
            self.up, self.probe = up, probe
        return changed, moved


def _as_float32(view: memoryview, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(view, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(view, np.dtype(dtype)).astype(np.float32)


@dataclass(eq=False)
class LoraAdapter:
    """One version at this server. Version 0 is the base model: no number, no folder."""

    version: int
    number: int = 0
    """vLLM's id: never used twice, so that nothing cached under an older one is found."""
    folder: Path | None = None
    checksum: str = ""
    up: np.ndarray | None = None
    requests: set[str] = field(default_factory=set)
    """Requests that began with it and have not ended."""

    @property
    def name(self) -> str:
        return f"policy-{self.version}-{self.number}"


class LoraAdapters:
    """The versions at this server: one serves new requests, older ones finish what they began, one may be on its way."""

    def __init__(self, root: Path) -> None:
        """`root` is this server's alone: what lies there was left by a process of its name that was killed."""
        for left in root.glob("*"):
            shutil.rmtree(left)
        self._root = root
        self._numbers = 0
        self.serving = LoraAdapter(version=0)
        self.staged: LoraAdapter | None = None
        self._older: list[LoraAdapter] = []

    def new(self, manifest: WeightManifest) -> LoraAdapter:
        """A place for a version; nothing is staged by this."""
        self._numbers += 1
        return LoraAdapter(
            manifest.version, self._numbers, self._root / f"{self._numbers}-{manifest.version}", manifest.checksum
        )

    def adopt(self, folder: Path, version: int) -> LoraAdapter:
        """One that lies elsewhere and is not ours to remove."""
        self._numbers += 1
        return LoraAdapter(version, self._numbers, folder)

    def begin(self, request_id: str) -> LoraAdapter:
        self.serving.requests.add(request_id)
        return self.serving

    def used_by(self, request_id: str) -> LoraAdapter:
        """The version that a request began with. Raises `KeyError`."""
        for adapter in self._all():
            if request_id in adapter.requests:
                return adapter
        raise KeyError(request_id)

    def serve_staged(self) -> None:
        if self.staged is None:
            raise ValueError("no version is staged")
        self._older.append(self.serving)
        self.serving, self.staged = self.staged, None

    def unused(self) -> list[LoraAdapter]:
        """The versions that no request can use any more, to be unloaded; they stay here until they are `gone`."""
        self._older = [adapter for adapter in self._older if adapter.requests or adapter.folder is not None]
        return [adapter for adapter in self._older if not adapter.requests]

    def gone(self, adapter: LoraAdapter) -> None:
        """It is unloaded, and its folder removed."""
        self._older.remove(adapter)

    def in_the_way(self, slots: int) -> set[str]:
        """Requests of the oldest versions that must end so that one version more fits into `slots`."""
        using = [adapter for adapter in (*self._older, self.serving) if adapter.requests and adapter.folder is not None]
        excess = len(using) + 1 - slots
        return set().union(*(adapter.requests for adapter in using[: max(0, excess)]))

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def _all(self) -> Iterator[LoraAdapter]:
        yield from (self.serving, *self._older)


def vllm_rank(rank: int) -> int:
    """The smallest rank that vLLM knows and this one fits into, e.g. 16 for 12."""
    return next(known for known in (1, 8, 16, 32, 64, 128, 256, 320, 512) if known >= rank)
