"""The files of a checkpoint: what safetensors and torch make of them, their digests, and errors of any of the threads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from telescope.backends.common import saving
from telescope.backends.common.saving import TYPES, TensorFile, write
from telescope.runlog.digests import of_file


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits, broken numbers among them."""
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8).view(dtype)


def test_every_type_comes_back_to_the_bit_from_a_place_that_is_a_multiple_of_its_width(tmp_path: Path) -> None:
    tensors = {f"{number}.{name}": drawn(dtype, 3, 5) for number, (dtype, name) in enumerate(reversed(TYPES.items()))}
    tensors |= {"empty": torch.empty(0, 4), "across": drawn(torch.float32, 4, 6).T, "alone": torch.ones(1)}
    path = tmp_path / "a.safetensors"
    digests = write({path: {name: TensorFile(tensor, (7,) * tensor.ndim) for name, tensor in tensors.items()}})
    assert digests == {"a.safetensors": of_file(path)}
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"])["empty"] == {"saved_offsets": [7, 7]}
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_a_tensor_longer_than_a_piece_and_writes_that_take_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal or a full quota cuts them short."""
    monkeypatch.setattr(saving, "PIECE_BYTES", 1000)
    write_all = saving.os.write
    monkeypatch.setattr(saving.os, "write", lambda file, piece: write_all(file, piece[:333]))
    tensor = drawn(torch.float32, 1234)
    digests = write({tmp_path / "b": {"x": TensorFile(tensor, (0,))}})
    assert digests == {"b": of_file(tmp_path / "b")}
    with safe_open(tmp_path / "b", framework="pt") as file:
        assert torch.equal(file.get_tensor("x").view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("broken", range(6))
def test_an_error_of_any_file_is_raised(tmp_path: Path, broken: int) -> None:
    """torch's own threads swallow it, and the save counts as written."""
    parts = {"x": TensorFile(torch.ones(3), (0,))}
    files = {tmp_path / ("none" if number == broken else "") / f"{number}": parts for number in range(6)}
    with pytest.raises(FileNotFoundError, match=f"none/{broken}"):
        write(files)
    odd: dict[Path, Any] = {tmp_path / str(number): parts for number in range(6)}
    odd[tmp_path / str(broken)] = {"y": TensorFile(torch.ones(3, dtype=torch.complex64), (0,))}
    with pytest.raises(TypeError, match=r"y is of torch.complex64, which a checkpoint's files have no name for"):
        write(odd)


def test_files_are_written_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them wait for each other before they are forced to the disk."""
    together, sync = threading.Barrier(4, timeout=30), saving.os.fsync

    def meet(file: int) -> None:
        together.wait()
        sync(file)

    monkeypatch.setattr(saving.os, "fsync", meet)
    assert len(write({tmp_path / str(number): {"x": TensorFile(torch.ones(3), (0,))} for number in range(4)})) == 4
