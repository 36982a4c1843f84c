"""Model folders with broken files: a sentence that names `model.name` and the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from telescope.config.models import EMBEDDED, JSON_FILES, ModelBroken, check_weights, model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED / "tiny", tmp_path / "mine"))


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_broken_json_file_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelBroken) as caught:
        model_folder(str(folder))
    assert str(caught.value).startswith(f"model.name={folder}: {folder / name} ")


@pytest.mark.parametrize("given", ["x", [1, "x"], {}])
def test_end_tokens_that_are_no_ids_are_named(folder: Path, given: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given or {"a": 1}}))
    with pytest.raises(ModelBroken, match=r"eos_token_id=.*generation_config\.json is neither"):
        model_folder(str(folder))


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_weights_that_were_cut_off_are_named(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    check_weights("mine", folder)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelBroken, match=rf"model\.name=mine: the weights in {file} can't be read: it has \d+ bytes"):
        check_weights("mine", folder)


def test_a_shard_that_the_index_lists_and_nobody_has_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part-2.safetensors"}}))
    with pytest.raises(ModelBroken, match=r"the weights in .*part-2\.safetensors can't be read"):
        check_weights("mine", folder)


@pytest.mark.parametrize("other", ["zz_old.safetensors", "adapter_model.safetensors"])
def test_weights_beside_the_models_own_are_refused_by_name(folder: Path, other: str) -> None:
    """A server loaded them over the model's, and the trainer did not."""
    shutil.copy(folder / "model.safetensors", folder / other)
    with pytest.raises(ModelBroken, match=rf"{other} lies beside model\.safetensors, and a server would load both: move it"):
        check_weights("mine", folder)
    index = {"weight_map": {"w": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights("mine", folder)  # with an index both take what it lists
