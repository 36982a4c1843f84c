"""What a checkpoint holds, and which versions do not match it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from telescope.config.models import EMBEDDED, end_ids
from telescope.inference.vllm.model_tensors import (
    ModelFilesUnreadable,
    checkpoint_tensors,
    disagreements,
    is_tied,
    version_bytes,
)
from telescope.records import TensorSpec, WeightManifest

CHECKPOINT = {"embed.weight": (8, 4), "q_proj.weight": (4, 4), "k_proj.weight": (2, 4), "lm_head.weight": (8, 4)}


def manifest(tensors: dict[str, tuple[int, ...]], dtype: str = "float32") -> WeightManifest:
    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=shape, offset=0, nbytes=0) for name, shape in tensors.items())
    return WeightManifest(version=1, transport="t", location="l", tensors=specs, nbytes=0, checksum="c")


def less(name: str) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in CHECKPOINT.items() if key != name}


def test_the_embedded_models_output_is_its_embedding():
    tensors = checkpoint_tensors(EMBEDDED / "tiny_reverse")
    assert tensors["model.norm.weight"] == (64,)
    assert tensors["model.embed_tokens.weight"] == (128, 64)
    assert is_tied(EMBEDDED / "tiny_reverse")
    assert "lm_head.weight" not in tensors
    assert end_ids(EMBEDDED / "tiny_reverse") == (1,)


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path):
    for number, name in ((1, "a"), (2, "b")):
        fact = {"dtype": "F32", "shape": [number], "data_offsets": [0, 4 * number]}
        header = json.dumps({name: fact, "__metadata__": {}}).encode()
        (tmp_path / f"{number}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * number))
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_tensors(tmp_path) == {"a": (1,), "b": (2,)}


def test_a_folder_without_safetensors_and_a_file_that_is_none_are_named(tmp_path: Path):
    with pytest.raises(ModelFilesUnreadable, match=r"has no \*.safetensors file"):
        checkpoint_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not at all a checkpoint")
    with pytest.raises(ModelFilesUnreadable, match=r"model.safetensors is not a safetensors file|can't be read"):
        checkpoint_tensors(tmp_path)


def test_a_whole_version_agrees_tied_or_not():
    assert disagreements(manifest(CHECKPOINT), CHECKPOINT, tied=False) == []
    assert disagreements(manifest(less("lm_head.weight")), CHECKPOINT, tied=True) == []


def test_an_untied_output_layer_may_not_be_left_out():
    assert disagreements(manifest(less("lm_head.weight")), CHECKPOINT, tied=False) == ["1 tensors are missing: lm_head.weight"]


def test_a_part_of_a_fused_layer_is_missed():
    assert disagreements(manifest(less("k_proj.weight")), CHECKPOINT, tied=False) == ["1 tensors are missing: k_proj.weight"]


def test_strangers_shapes_and_dtypes_are_told():
    given = {**CHECKPOINT, "stranger": (1,), "q_proj.weight": (2, 8)}
    assert disagreements(manifest(given), CHECKPOINT, tied=False) == [
        "1 tensors are not the model's: stranger",
        "q_proj.weight has shape [2, 8] but the model's is [4, 4]",
    ]
    assert disagreements(manifest(CHECKPOINT, "int8"), CHECKPOINT, tied=False)[0].startswith("embed.weight has dtype int8")


def test_what_the_engine_computes_nothing_with_may_be_left_out_and_may_not_be_trained():
    """Heads for several tokens at once that a trainer leaves alone; a bias that an engine has no place for."""
    idle = frozenset({"k_proj.weight"})
    assert disagreements(manifest(less("k_proj.weight")), CHECKPOINT, tied=False, idle=idle) == []
    assert disagreements(manifest(CHECKPOINT), CHECKPOINT, tied=False, idle=idle) == [
        "the engine computes nothing with 1 tensors, so what is trained is not what samples: k_proj.weight"
    ]


def test_room_for_a_version_is_kept_for_vectors_in_float32():
    """4 rows of 32 in bfloat16 (256 bytes), and a vector of 40 that a router adds to scores, which is not rounded (192)."""
    assert version_bytes({"a.weight": (4, 32), "b": (40,)}, tied=False, dtype="bfloat16") == 256 + 192
    assert version_bytes({"a.weight": (4, 32), "b": (40,)}, tied=False, dtype="float32") == 512 + 192
