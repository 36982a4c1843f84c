"""Weights that are codes of other numbers are refused, whoever would train them, and not read as if they were weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from telescope.backends.common.models import UnfitModel, refuse_quantised
from telescope.backends.fsdp import loading
from telescope.config.sections import ModelSettings
from tests.backends.models import random_other

REMEDY = "dequantise it and save it with transformers' save_pretrained, or name the model's bfloat16 release"
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(random_other(tmp_path / "model", "llama"))


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_what_config_json_says_is_enough(folder, changes: dict[str, Any]):
    change_config(folder, changes)
    with pytest.raises(UnfitModel, match=r"\(quantization_config in its config\.json: fp8\)") as refused:
        loading.outline(ModelSettings(name=str(folder)), "sdpa", torch.float32)
    assert str(refused.value).endswith(REMEDY)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8"), (torch.int32, "I32")]
)
def test_files_that_say_nothing_are_known_by_their_types(folder, dtype: torch.dtype, name: str):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[WEIGHT] = tensors[WEIGHT].to(dtype)
    tensors[f"{WEIGHT}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnfitModel, match=rf"\({WEIGHT} is of type {name} in {file}\)") as refused:
        loading.outline(ModelSettings(name=str(folder)), "sdpa", torch.float32)
    assert str(refused.value).endswith(REMEDY)


def test_whole_numbers_that_are_no_weights_are_let_be(folder):
    file = folder / "model.safetensors"
    positions = {"model.position_ids": torch.arange(9), "model.layers.0.attn.bias": torch.ones(3, 3, dtype=torch.uint8)}
    save_file(load_file(file) | positions, file, metadata={"format": "pt"})
    refuse_quantised(str(folder), folder)
