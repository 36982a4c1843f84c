"""A model whose files have changed since the run began is refused, whatever has changed; a copy of the same files is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from telescope.config.models import weight_files
from telescope.runlog.layout import RunDirectory
from telescope.runlog.model_files import ModelFilesChanged, check_model_files
from tests.inference.models import make_model


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", seed=1)


def check(run: RunDirectory, folder: Path, process: str = "server-0") -> None:
    check_model_files(run, process, "mine", folder, weight_files("mine", folder))


def weights(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def test_the_same_files_are_taken_again_and_so_is_a_copy_of_another_age(run: RunDirectory, folder: Path):
    check(run, folder)
    check(run, folder)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    check(run, copy, "server-1")
    assert run.model_json.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in run.path.glob("model.json*")) == ["model.json"]


def test_other_weights_of_the_same_names_shapes_and_sizes_are_refused_by_the_names_of_model_and_file(
    run: RunDirectory, folder: Path
):
    check(run, folder)
    size = weights(folder).stat().st_size
    other = make_model(folder.with_name("other"), seed=2)
    shutil.copyfile(weights(other), weights(folder))
    assert weights(folder).stat().st_size == size
    with pytest.raises(ModelFilesChanged) as refused:
        check(run, folder, "server-1")
    assert str(refused.value) == (
        f"model.name=mine: {weights(folder).name} in {folder} are not as server-0 read them when this run began, so that it "
        "would go on with another model; put the files back that were there, or begin a new run"
    )


def test_one_other_tensor_is_enough(run: RunDirectory, folder: Path):
    check(run, folder)
    tensors = load_file(weights(folder))
    for name in sorted(tensors):
        changed = tensors | {name: (tensors[name] * np.float32(1.5) + np.float32(0.25)).astype(tensors[name].dtype)}
        save_file(changed, weights(folder))
        with pytest.raises(ModelFilesChanged, match=weights(folder).name):
            check(run, folder)
    save_file(tensors, weights(folder))


def test_another_configuration_is_refused(run: RunDirectory, folder: Path):
    check(run, folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text + "\n")
    with pytest.raises(ModelFilesChanged, match=r"model\.name=mine: config\.json in "):
        check(run, folder)


def test_a_file_more_or_less_is_refused(run: RunDirectory, folder: Path):
    check(run, folder)
    shutil.copyfile(weights(folder), folder / "model-2.safetensors")
    with pytest.raises(ModelFilesChanged, match=r"model-2\.safetensors"):
        check(run, folder)


def test_where_links_can_not_be_made_the_note_is_there_all_the_same(run: RunDirectory, folder: Path, monkeypatch):
    def none(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", none)
    check(run, folder)
    check(run, folder)
    assert [path.name for path in run.path.glob("model.json*")] == ["model.json"]


def test_the_note_is_of_one_attempt(run: RunDirectory):
    """The next one loads all anew."""
    from telescope.runlog.attempts import KEPT

    assert run.model_json.name not in KEPT
