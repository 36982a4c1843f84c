"""Which tensors a model folder holds, read from its safetensors headers, and whether a published version matches them.

An engine that is handed a part of a fused layer, or a tensor it does not know, may load it half; so a version is compared with
the checkpoint before anything is touched. Names and shapes only, without torch; `read_tensors` alone reads bytes, with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from telescope.records import WeightManifest
from telescope.weights.buckets import IN_TURN, ModelTensor, buckets, largest, lay_out

LOADABLE = frozenset({"float64", "float32", "float16", "bfloat16"})
HEADER_LIMIT = 100 * 1024 * 1024
SHOWN = 3


class ModelFilesUnreadable(ValueError):
    """The model folder's safetensors files are missing or no such files."""


def checkpoint_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of the checkpoint, e.g. `{"model.norm.weight": (64,)}`."""
    tensors: dict[str, tuple[int, ...]] = {}
    for file in _files(folder):
        tensors |= {name: tuple(fact["shape"]) for name, fact in _header(file).items() if name != "__metadata__"}
    return tensors


def needed_tensors(checkpoint: dict[str, tuple[int, ...]], tied: bool) -> dict[str, tuple[int, ...]]:
    """Those of a checkpoint's tensors that every version has."""
    return {name: shape for name, shape in checkpoint.items() if not _may_be_left_out(name, tied)}


def version_bytes(checkpoint: dict[str, tuple[int, ...]], tied: bool, dtype: str) -> int:
    """Bytes of a version of this checkpoint on its way and in a staging buffer, at most, e.g. with `dtype` bfloat16: some
    vectors keep float32 (`Policy.kept`)."""
    vectors = "float32" if dtype in ("bfloat16", "float16") else dtype
    needed = needed_tensors(checkpoint, tied).items()
    _, nbytes = lay_out(ModelTensor(name, vectors if len(shape) == 1 else dtype, shape) for name, shape in needed)
    return nbytes


def turn_bytes(checkpoint: dict[str, tuple[int, ...]], tied: bool, dtype: str, bucket_bytes: int) -> int:
    """Bytes of the buffers through which a broadcast comes that has no place of its own on the device: two buckets of at most
    `bucket_bytes` (0: of one tensor), or of the largest tensor."""
    specs, _ = lay_out(ModelTensor(name, dtype, shape) for name, shape in needed_tensors(checkpoint, tied).items())
    return IN_TURN * largest(buckets(specs, bucket_bytes))


@contextmanager
def read_tensors(folder: Path) -> Iterator[Callable[[str], Any]]:
    """The checkpoint's tensors by name, as torch tensors on the CPU, read when asked for."""
    from safetensors import safe_open

    with ExitStack() as opened:
        handles = [opened.enter_context(safe_open(file, framework="pt")) for file in _files(folder)]
        where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 - no mapping
        yield lambda name: where[name].get_tensor(name)


def is_tied(folder: Path) -> bool:
    """Whether the output layer is the embedding, so that a version carries it once."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def disagreements(
    manifest: WeightManifest, checkpoint: dict[str, tuple[int, ...]], tied: bool, idle: Collection[str] = ()
) -> list[str]:
    """What keeps a version from being loaded whole, in sentences; empty if nothing does. `idle`: the checkpoint's tensors that
    the engine is known to compute nothing with: a version may lack them, and one that has them trains what is not served."""
    given = {spec.name: spec for spec in manifest.tensors}
    missing = [name for name in checkpoint if name not in given and name not in idle and not _may_be_left_out(name, tied)]
    unknown = [name for name in given if name not in checkpoint]
    shapes = [
        f"{name} has shape {list(spec.shape)} but the model's is {list(checkpoint[name])}"
        for name, spec in given.items()
        if name in checkpoint and tuple(spec.shape) != checkpoint[name]
    ]
    dtypes = [
        f"{name} has dtype {spec.dtype}, which is not a floating-point one"
        for name, spec in given.items()
        if spec.dtype not in LOADABLE
    ]
    found = [f"{len(missing)} tensors are missing: {_some(missing)}"] if missing else []
    found += [f"{len(unknown)} tensors are not the model's: {_some(unknown)}"] if unknown else []
    if vain := [name for name in given if name in idle]:
        found.append(
            f"the engine computes nothing with {len(vain)} tensors, so what is trained is not what samples: {_some(vain)}"
        )
    return found + shapes[:SHOWN] + dtypes[:SHOWN]


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = sorted(folder / name for name in names)
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFilesUnreadable(f"{folder} has no *.safetensors file; convert the model to safetensors first")
    return files


def _may_be_left_out(name: str, tied: bool) -> bool:
    """The tied output layer; and the rotary tables that old checkpoints carry and nobody loads."""
    return (tied and name.endswith("lm_head.weight")) or name.endswith("rotary_emb.inv_freq")


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _header(file: Path) -> dict[str, dict[str, list[int]]]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length < HEADER_LIMIT:
                raise ModelFilesUnreadable(f"{file} is not a safetensors file: its header would have {length} bytes")
            header: dict[str, dict[str, list[int]]] = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise ModelFilesUnreadable(f"{file} can't be read as a safetensors file: {error}") from error
    return header
