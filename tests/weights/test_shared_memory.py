"""Weights through shared memory: they arrive whole or not at all, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from telescope.records import WeightManifest
from telescope.weights.base import NoRoomForWeights, WeightsCorrupt
from telescope.weights.host_memory import checksum
from telescope.weights.transports.shared_memory import SharedMemoryPublisher, SharedMemoryReader, run_prefix, sweep


def pair(folder: Path, run: str = "run-1") -> tuple[SharedMemoryPublisher, SharedMemoryReader]:
    return SharedMemoryPublisher(run, folder), SharedMemoryReader(run)


def small(version: int) -> list[tuple[str, np.ndarray]]:
    return [("a", np.full((2, 3), version, np.float32)), ("b", np.arange(5, dtype=np.int64))]


def test_tensors_of_numpy_and_torch_arrive_bit_for_bit(tmp_path):
    publisher, reader = pair(tmp_path)
    given = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "f32": torch.randn(7),
        "transposed": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "numpy": np.arange(6, dtype=np.float16).reshape(2, 3),
    }
    manifest = publisher.publish(3, given.items())
    manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest)  # as it travels
    assert [(s.name, s.dtype, s.shape) for s in manifest.tensors] == [
        ("bf16", "bfloat16", (3, 5)),
        ("f32", "float32", (7,)),
        ("transposed", "float32", (6, 4)),
        ("scalar", "float32", ()),
        ("empty", "float32", (0, 4)),
        ("numpy", "float16", (2, 3)),
    ]
    assert all(s.offset % 64 == 0 for s in manifest.tensors)
    for spec, view in reader.read(manifest):
        assert view.readonly
        expected = torch.as_tensor(given[spec.name])
        got = torch.frombuffer(bytearray(view), dtype=expected.dtype) if view.nbytes else torch.empty(0)
        assert torch.equal(got.reshape(spec.shape), expected)
    publisher.close()


def test_the_checksum_is_that_of_all_bytes_in_order(tmp_path):
    publisher, _ = pair(tmp_path)
    manifest = publisher.publish(0, small(0))
    content = Path(manifest.location).read_bytes()
    assert len(content) == manifest.nbytes == 64 + 64
    assert manifest.checksum == checksum(content)
    assert checksum(b"telescope") == "crc32:01ef321e"
    publisher.close()


def test_one_flipped_bit_is_noticed(tmp_path):
    publisher, reader = pair(tmp_path)
    manifest = publisher.publish(1, small(1))
    with open(manifest.location, "r+b") as file:
        file.seek(17)
        byte = file.read(1)[0]
        file.seek(17)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(WeightsCorrupt, match=r"version 1 .* have checksum crc32"):
        reader.read(manifest)
    publisher.close()


def test_a_short_segment_is_noticed_before_it_is_mapped(tmp_path):
    publisher, reader = pair(tmp_path)
    manifest = publisher.publish(1, small(1))
    os.truncate(manifest.location, 40)
    with pytest.raises(WeightsCorrupt, match="have 40 bytes, published were 128"):
        reader.read(manifest)
    publisher.close()


def test_a_tensor_described_past_the_end_is_refused(tmp_path):
    publisher, reader = pair(tmp_path)
    manifest = publisher.publish(1, small(1))
    beyond = msgspec.structs.replace(manifest.tensors[1], offset=96)
    forged = msgspec.structs.replace(manifest, tensors=(manifest.tensors[0], beyond))
    with pytest.raises(WeightsCorrupt, match="tensor b"):
        reader.read(forged)
    publisher.close()


def test_two_versions_exist_at_most_and_the_served_one_is_kept(tmp_path):
    publisher, reader = pair(tmp_path)
    manifests = []
    for version in (1, 2, 5, 6):
        manifests.append(publisher.publish(version, small(version)))
        assert len(list(tmp_path.iterdir())) == min(len(manifests), 2)
    assert [view.cast("f")[0] for spec, view in reader.read(manifests[2]) if spec.name == "a"] == [5.0]
    with pytest.raises(WeightsCorrupt, match="can't be opened"):
        reader.read(manifests[1])
    publisher.retire(6)
    assert [path.name for path in tmp_path.iterdir()] == [Path(manifests[2].location).name]
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_a_view_outlives_the_version_it_came_from(tmp_path):
    publisher, reader = pair(tmp_path)
    views = {spec.name: view for spec, view in reader.read(publisher.publish(4, small(4)))}
    publisher.close()
    reader.close()
    assert list(views["a"].cast("f")) == [4.0] * 6


def test_segments_are_private_and_another_runs_are_refused(tmp_path):
    publisher, reader = pair(tmp_path, "mine")
    theirs, _ = pair(tmp_path, "theirs")
    manifest = theirs.publish(1, small(1))
    assert os.stat(manifest.location).st_mode & 0o777 == 0o600
    with pytest.raises(WeightsCorrupt, match="not a shared-memory segment of this run"):
        reader.read(manifest)
    mine = publisher.publish(1, small(1))
    os.chmod(mine.location, 0o644)
    with pytest.raises(WeightsCorrupt, match="not a private file of this user"):
        reader.read(mine)
    publisher.close()
    theirs.close()


def test_a_link_in_place_of_a_segment_is_not_followed(tmp_path):
    publisher, reader = pair(tmp_path)
    manifest = publisher.publish(1, small(1))
    os.rename(manifest.location, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", manifest.location)
    with pytest.raises(WeightsCorrupt, match="can't be opened"):
        reader.read(manifest)
    publisher.close()


def test_a_failed_publication_leaves_nothing(tmp_path):
    publisher, _ = pair(tmp_path)
    publisher.publish(1, small(1))
    with pytest.raises(ValueError, match="tensor a is given twice"):
        publisher.publish(2, small(2) + small(2))
    with pytest.raises(ValueError, match="has dtype complex64"):
        publisher.publish(2, [("c", np.zeros(2, np.complex64))])
    assert len(list(tmp_path.iterdir())) == 1
    publisher.publish(2, small(2))
    with pytest.raises(ValueError, match="version 2 is published already"):
        publisher.publish(2, small(2))
    publisher.close()


FULL = """
import resource, signal, sys
import numpy as np
from pathlib import Path
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
publisher = SharedMemoryPublisher("full", Path(sys.argv[1]))
publisher.publish(1, [("a", np.zeros(2000, np.float32))])
"""


def test_a_folder_without_room_is_named_and_left_clean(tmp_path):
    """A limit on the size of files stands for a full file system: both end a write with an error number."""
    ended = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert f"{NoRoomForWeights.__name__}: {tmp_path} has no room for the weights" in ended.stderr
    assert "at least 3904 more are needed" in ended.stderr
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
publisher = SharedMemoryPublisher("dead", Path(sys.argv[1]))
publisher.publish(1, [("a", np.zeros(10, np.float32))])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_runs_segment_is_swept_and_a_living_runs_is_not(tmp_path):
    living, reader = pair(tmp_path, "living")
    manifest = living.publish(1, small(1))
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert sorted(p.name.startswith(run_prefix("dead")) for p in tmp_path.iterdir()) == [False, True]
    assert [name.startswith(run_prefix("dead")) for name in sweep(tmp_path)] == [True]
    assert sweep(tmp_path) == []
    assert len(list(reader.read(manifest))) == 2
    living.close()


def test_what_others_put_under_a_segments_name_is_passed_over(tmp_path):
    """In a folder with the sticky bit an ordinary user can't remove another's file: a sweep, and with it a run, ended there."""
    pipe, foreign = tmp_path / "telescope-weights-pipe", tmp_path / "telescope-weights-foreign"
    os.mkfifo(pipe)
    if os.getuid() == 0:
        foreign.touch()
        os.chown(foreign, 65534, 65534)
    assert sweep(tmp_path) == []
    assert pipe.exists()
    assert foreign.exists() == (os.getuid() == 0)
