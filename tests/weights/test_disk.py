"""Weights as safetensors files of a shared folder: whole or not there, checked, readable by other tools, removed in time."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from telescope.records import WeightManifest
from telescope.weights.base import NoRoomForWeights, TransferFailed, WeightsCorrupt
from telescope.weights.buckets import Bucket, ModelTensor
from telescope.weights.host_memory import HostReceiver
from telescope.weights.transports.disk import DiskPublisher, DiskReader
from telescope.weights.transports.shared_memory import SharedMemoryPublisher, SharedMemoryReader

KINDS = (
    ModelTensor("w", "float32", (3, 5)),
    ModelTensor("half", "bfloat16", (7,)),
    ModelTensor("none", "float32", (0,)),
    ModelTensor("s", "float32", ()),
)


def tensors(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(version)
    for kind in KINDS:
        yield kind.name, torch.randn(kind.shape, generator=random).to(getattr(torch, kind.dtype))


def publisher(folder: Path) -> DiskPublisher:
    return DiskPublisher(folder, lambda: KINDS)


def placed(manifest: WeightManifest, receiver: HostReceiver) -> dict[str, torch.Tensor]:
    flat = torch.full((manifest.nbytes,), 9, dtype=torch.uint8)
    assert receiver.receive(manifest, None, flat, 10.0) == manifest.checksum
    return {
        spec.name: flat[spec.offset :][: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in manifest.tensors
    }


def same(found: dict[str, torch.Tensor], version: int) -> bool:
    wanted = dict(tensors(version))
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_version_arrives_bit_by_bit_and_any_reader_of_safetensors_has_it_too(tmp_path):
    manifest = publisher(tmp_path / "weights").publish(1, tensors(1))
    assert same(placed(manifest, HostReceiver(DiskReader())), 1)
    assert same(dict(sorted(load_file(manifest.location).items(), key=lambda item: [k.name for k in KINDS].index(item[0]))), 1)
    assert os.stat(tmp_path / "weights").st_mode & 0o077 == 0


@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_buckets_come_in_order_and_are_the_same_bytes(tmp_path, transport):
    disk = transport == "disk"
    writer = publisher(tmp_path) if disk else SharedMemoryPublisher("run", tmp_path)
    manifest = writer.publish(4, tensors(4))
    flat = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    starts = []

    def load(bucket: Bucket, data: torch.Tensor) -> None:
        starts.append(bucket.start)
        flat[bucket.start : bucket.stop].copy_(data)

    receiver = HostReceiver(DiskReader() if disk else SharedMemoryReader("run"))
    assert receiver.receive_buckets(manifest, None, load, 10.0) == manifest.checksum
    whole = torch.zeros_like(flat)
    receiver.receive(manifest, None, whole, 10.0)
    assert torch.equal(flat, whole)
    assert starts == [0]
    writer.close()


def test_two_versions_are_kept_and_a_retired_one_is_gone(tmp_path):
    writer = publisher(tmp_path)
    manifests = [writer.publish(version, tensors(version)) for version in (1, 2, 3)]
    assert [Path(manifest.location).exists() for manifest in manifests] == [False, True, True]
    with pytest.raises(WeightsCorrupt, match=r"can't be read at .*version-1.safetensors: No such file"):
        placed(manifests[0], HostReceiver(DiskReader()))
    writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda raw: raw[:-1], "ends within tensor s"),
        (lambda raw: raw + b"x", "has more bytes"),
        (lambda raw: raw[:20] + b"?" + raw[21:], "does not begin as"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "have checksum crc32:.*, published was crc32:"),
    ],
)
def test_a_file_that_is_not_what_was_published_is_refused(tmp_path, harm, sentence):
    manifest = publisher(tmp_path).publish(1, tensors(1))
    path = Path(manifest.location)
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(WeightsCorrupt, match=sentence):
        placed(manifest, HostReceiver(DiskReader()))


def test_a_full_disk_leaves_nothing_behind_and_says_what_to_do(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoRoomForWeights, match=r"has no room for the 192 bytes of weights version 1.*weight_sync.dir"):
        publisher(tmp_path).publish(1, tensors(1))
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_are_not_those_of_the_layout_are_refused(tmp_path):
    with pytest.raises(ValueError, match="tensor half of the layout did not come"):
        publisher(tmp_path).publish(1, list(tensors(1))[:1])
    with pytest.raises(ValueError, match=r"tensor half \(bfloat16\[7\]\) came where the layout has"):
        publisher(tmp_path).publish(1, list(tensors(1))[1:])
    assert list(tmp_path.iterdir()) == []


def test_a_reading_that_was_cancelled_or_is_late_fails_and_the_next_one_works(tmp_path):
    manifest = publisher(tmp_path).publish(1, tensors(1))
    receiver = HostReceiver(DiskReader())
    with pytest.raises(TransferFailed, match=r"was not over within weight_sync\.update_timeout_s=-1 s"):
        receiver.receive(manifest, None, torch.zeros(manifest.nbytes, dtype=torch.uint8), -1.0)

    def cancelling(bucket: Bucket, data: torch.Tensor) -> None:
        receiver.cancel()

    two = publisher(tmp_path / "two")
    second = two.publish(2, tensors(2))
    receiver.receive_buckets(second, None, cancelling, 10.0)  # all had been read by then
    assert same(placed(second, receiver), 2)


def test_a_place_that_is_too_small_is_refused(tmp_path):
    manifest = publisher(tmp_path).publish(1, tensors(1))
    with pytest.raises(WeightsCorrupt, match="192 bytes of weights version 1 don't fit into 10"):
        HostReceiver(DiskReader()).receive(manifest, None, torch.zeros(10, dtype=torch.uint8), 10.0)


@pytest.mark.parametrize("transport", ["disk", "shared_memory"])
def test_a_version_is_verified_whole_without_being_received(tmp_path, transport):
    disk = transport == "disk"
    writer = publisher(tmp_path) if disk else SharedMemoryPublisher("run", tmp_path)
    manifest = writer.publish(4, tensors(4))
    receiver = HostReceiver(DiskReader() if disk else SharedMemoryReader("run"))
    receiver.verify(manifest, 10.0)
    with pytest.raises(TransferFailed, match=r"was not over within weight_sync\.update_timeout_s=-1 s"):
        receiver.verify(manifest, -1.0)
    path = Path(manifest.location)
    raw = bytearray(path.read_bytes())
    raw[-70] ^= 1
    path.write_bytes(raw)
    with pytest.raises(WeightsCorrupt):
        receiver.verify(manifest, 10.0)
    writer.close()
