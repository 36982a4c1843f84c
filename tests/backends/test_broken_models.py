"""The trainer's own look at a broken model folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from telescope.backends.fsdp.policy import UnfitModel, load
from telescope.config.models import EMBEDDED, ModelBroken
from telescope.config.sections import ModelSettings


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(EMBEDDED / "tiny", tmp_path / "mine"))
    (folder / name).write_bytes((folder / name).read_bytes()[:-20])
    with pytest.raises(ModelBroken, match=rf"model\.name={folder}: .*{name} can't be read"):
        load(ModelSettings(name=str(folder)), "sdpa", torch.float32)


def test_a_model_that_transformers_does_not_know_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(UnfitModel, match=rf"model\.name={tmp_path}: it can't be loaded: "):
        load(ModelSettings(name=str(tmp_path)), "sdpa", torch.float32)
