"""The shape of a model by its name, without a network: from the config.json of an embedded or local one, or from a table."""

from __future__ import annotations

import json

from telescope.config.models import model_path
from telescope.maths.memory import ModelShape, shape_from


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **other: int | bool) -> ModelShape:
    return _shape(hidden, intermediate, layers, heads, kv_heads, head_dim=hidden // heads, qkv_bias=True, **other)


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **other: int | bool) -> ModelShape:
    return _shape(hidden, intermediate, layers, heads, kv_heads, head_dim=128, qk_norm=True, **other)


def _shape(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, head_dim: int, **other: int | bool
) -> ModelShape:
    numbers = {"vocabulary": 151_936, "tied": True, **other}
    return ModelShape(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=int(numbers["vocabulary"]),
        tied=bool(numbers["tied"]),
        qkv_bias=bool(numbers.get("qkv_bias")),
        qk_norm=bool(numbers.get("qk_norm")),
    )


COUNTED = ("llama", "qwen2", "qwen3")
"""Values of `model_type` whose layers `maths.memory` counts tensor by tensor, compiled and not; others it takes to be alike."""
KNOWN = {
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-3B": _qwen2(2048, 11_008, 36, 16, 2),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 18_944, 28, 28, 4, vocabulary=152_064, tied=False),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, 8, tied=False),
    "HuggingFaceTB/SmolLM2-135M": _shape(576, 1536, 30, 9, 3, head_dim=64, vocabulary=49_152),
}
"""By hub id; `-Instruct` and `-Base` variants have the shape of their model."""


class ShapeUnknown(ValueError):
    """Nothing here tells the model's size; the message says what would."""


def is_counted(name: str) -> bool:
    """Whether the layers of the model `model.name`, whose shape is known, are of a kind in COUNTED."""
    folder = model_path(name)
    if folder is None:
        return True  # all of KNOWN are
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") in COUNTED


def shape_of(name: str) -> ModelShape:
    """The shape of the model `model.name`. Raises `ShapeUnknown`."""
    folder = model_path(name)
    if folder is not None:
        try:
            return shape_from(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ShapeUnknown(f"model.name={name}: its size can't be read from its config.json: {error}") from error
    known = KNOWN.get(name.removesuffix("-Instruct").removesuffix("-Base"))
    if known is None:
        raise ShapeUnknown(
            f"model.name={name}: its size is not known here. Known are {', '.join(KNOWN)}, and any "
            "local folder with a config.json"
        )
    return known
