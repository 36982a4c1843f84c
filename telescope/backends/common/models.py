"""A model's own files: which tensor is where, rows of it without reading the rest, and the model's outline without weights.

Owns the sentence that a model can't be trained (`UnfitModel`). Who reads which rows is each backend's affair.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from telescope.config.models import read_json_object, weight_files


class UnfitModel(ValueError):
    """This model can't be trained here; the message says why."""


@dataclass(frozen=True)
class ModelCheckpoint:
    """Which file of a folder has which tensor."""

    name: str
    """model.name, for sentences."""
    files: Mapping[str, Path]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made in here have parameters with a shape and no memory; their buffers are real, computed as always."""

    def bare(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # one that is shared with another module stays one
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(bare)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


class TensorFiles:
    """Tensors of files that are mapped and not read. To be used as a context."""

    def __init__(self, checkpoint: ModelCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def of(self, name: str, shape: Sequence[int]) -> Any:
        """safetensors' slice of one tensor, which gives rows and columns by its index. Raises `UnfitModel` where it is not of
        the shape that the configuration says."""
        found = self._file(name).get_slice(name)
        if list(found.get_shape()) != list(shape):
            raise UnfitModel(
                f"model.name={self._checkpoint.name}: {name} has the shape {list(found.get_shape())} in "
                f"{self._checkpoint.files[name]}, and {list(shape)} by its config.json: the files do not belong together"
            )
        return found

    def whole(self, name: str) -> Tensor:
        """Also of a tensor without a dimension, which has no rows."""
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        file = self._checkpoint.files[name]
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt")
        return self._open[file]


NARROW = ("F8", "F6", "F4")
"""How safetensors' names of floats of a byte or less begin."""


def refuse_quantised(name: str, folder: Path) -> None:
    """Raise `UnfitModel` where weights are codes of other numbers: read as they are, they would be trained as noise."""
    remedy = "dequantise it and save it with transformers' save_pretrained, or name the model's bfloat16 release"
    config = read_json_object(name, folder / "config.json")
    for part in (config, config.get("text_config") or {}):
        if given := part.get("quantization_config"):
            method = given.get("quant_method", "") if isinstance(given, dict) else ""
            raise UnfitModel(
                f"model.name={name}: its weights are quantised (quantization_config in its config.json"
                f"{f': {method}' if method else ''}), and can't be trained: {remedy}"
            )
    for file in weight_files(name, folder):
        for tensor, dtype in _types(file):
            whole_numbers = dtype.startswith(("I", "U")) and tensor.endswith("weight")
            if whole_numbers or dtype.startswith(NARROW):
                raise UnfitModel(
                    f"model.name={name}: its weights are quantised ({tensor} is of type {dtype} in {file}), and can't be "
                    f"trained: {remedy}"
                )


def _types(file: Path) -> Iterator[tuple[str, str]]:
    """Names of tensors, and what safetensors calls their dtypes."""
    yield from ((name, facts["dtype"]) for name, facts in _header(file).items() if name != "__metadata__")


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return header


def model_files(folder: Path) -> dict[str, Path]:
    """Every tensor of the folder's model.safetensors, one file or several; empty where it has none."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / part for name, part in listed.items()}
    if not single.is_file():
        return {}
    return {name: single for name in _header(single) if name != "__metadata__"}
