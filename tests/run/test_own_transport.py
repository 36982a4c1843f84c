"""A weight transport from outside the package takes part in a whole run, with its own settings from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.config.conftest import compose_one, sentences
from tests.run.conftest import Start

MAILBOX = '''
"""Weights as one file of raw bytes a version, in a folder that trainer and servers see."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from telescope.records import WeightManifest
from telescope.weights.base import Transport, TransportCost, TransferFailed, WeightsCorrupt
from telescope.weights.buckets import buckets, lay_out
from telescope.weights.host_memory import checksum, describe, refuse_to_send


class Mailbox(Transport):
    folder: str
    """Where versions lie."""
    keep: int = Field(default=2, ge=2, le=9)
    """So many of them."""
    cost: ClassVar[TransportCost] = TransportCost(fixed_s=0.5, bytes_s=2e9)

    def refusal(self, placement, sync, asked):
        return "weight_sync.transport=mailbox is for one host" if placement.other_hosts else ""

    def publisher(self, source, end):
        return Writer(self, source, end)

    def receiver(self, end):
        return Reader()


class Writer:
    card_bytes = 0

    def __init__(self, settings, source, end):
        self.settings, self.source, self.end, self.written = settings, source, end, []

    def publish(self, version):
        specs, nbytes = lay_out(self.source.layout(), self.end.dtype)
        whole = bytearray(nbytes)
        for spec, (name, tensor) in zip(specs, self.source.weights(self.end.dtype), strict=True):
            assert name == spec.name
            whole[spec.offset : spec.offset + spec.nbytes] = describe(tensor)[2]
        if self.end.rank:
            return None
        place = Path(self.settings.folder) / f"{version}.bin"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(whole)
        self.written.append(place)
        for old in self.written[: -self.settings.keep]:
            old.unlink(missing_ok=True)
        return WeightManifest(version, "mailbox", str(place), specs, nbytes, checksum(whole))

    def send(self, version, group):
        refuse_to_send(version)

    def abort(self, epoch): ...

    def close(self): ...


class Reader:
    def receive(self, manifest, group, staging, deadline_s):
        import torch

        whole = bytearray(self.read(manifest))
        staging[: manifest.nbytes].copy_(torch.frombuffer(whole, dtype=torch.uint8))
        return manifest.checksum

    def verify(self, manifest, deadline_s):
        self.read(manifest)

    def receive_buckets(self, manifest, group, load, deadline_s):
        import torch

        whole = bytearray(self.read(manifest))
        for bucket in buckets(manifest.tensors, 1 << 20):
            load(bucket, torch.frombuffer(whole, dtype=torch.uint8)[bucket.start : bucket.stop])
        return manifest.checksum

    def read(self, manifest):
        try:
            whole = Path(manifest.location).read_bytes()
        except OSError as error:
            raise TransferFailed(f"{manifest.location} is not there") from error
        if checksum(whole) != manifest.checksum:
            raise WeightsCorrupt(f"{manifest.location} is another version")
        return whole

    def cancel(self, epoch=None): ...

    def close(self): ...
'''
NAMED = ("experiment=fake", "weight_sync.transport=mailbox")
FOLDER = "weight_sync.transport_kwargs.folder"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "mine" / "plugins" / "transports"
    folder.mkdir(parents=True)
    (folder / "mailbox.py").write_text(MAILBOX)
    return tmp_path / "mine"


def test_weights_travel_by_a_transport_of_ones_own(start: Start, mine: Path, tmp_path: Path) -> None:
    box = tmp_path / "box"
    run = start("--config-dir", str(mine), *NAMED, f"{FOLDER}={box}", "number_of_steps=5", "cluster.inference_num_workers=2")
    assert run.wait() == 0, run.said()
    assert sorted(path.name for path in box.iterdir()) == ["4.bin", "5.bin"]  # the served and the one before
    assert len(run.rows("step_metrics")) == 5
    assert json.loads(run.directory.config_json.read_text())["weight_sync"]["transport_kwargs"] == {
        "folder": str(box), "keep": 2
    }  # fmt: skip
    assert "weights travel by mailbox" in "".join(path.read_text() for path in run.directory.path.rglob("trainer-0*.log"))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["weight_sync.transport=mailbax"],
            "weight_sync.transport: there is no weight transport 'mailbax'. Did you mean mailbox?",
        ),
        (["weight_sync.transport=ncll"], "weight_sync.transport: there is no weight transport 'ncll'. Did you mean nccl?"),
        (["weight_sync.transport=mailbox"], f"{FOLDER} must be given"),
        (
            ["weight_sync.transport=mailbox", f"{FOLDER}=/x", "weight_sync.transport_kwargs.kep=3"],
            "weight_sync.transport_kwargs.kep=3: there is no such setting. Did you mean weight_sync.transport_kwargs.keep?",
        ),
        (
            ["weight_sync.transport=mailbox", f"{FOLDER}=/x", "weight_sync.transport_kwargs.keep=1"],
            "weight_sync.transport_kwargs.keep=1 must be at least 2",
        ),
        (
            ["weight_sync.transport=mailbox", f"{FOLDER}=/x", "weight_sync.dir=/y"],
            "weight_sync.dir=/y does nothing with weight_sync.transport=mailbox: leave it out, or set "
            "weight_sync.transport=disk",
        ),
        (
            ["weight_sync.transport_kwargs.keep=3"],
            "weight_sync.transport_kwargs are settings of one transport, and weight_sync.transport=auto: name the transport, "
            "or leave them out",
        ),
        (
            ["weight_sync.transport=mailbox", f"{FOLDER}=/x", "model.lora={rank: 4}", "backend=fsdp"],
            "weight_sync.transport=mailbox fills the model's own parameters, and model.lora pushes adapters, which a server "
            "loads beside it: set weight_sync.transport=auto (shared memory), or disk for servers on other hosts",
        ),
    ],
)
def test_a_mistake_in_it_is_told_before_anything_starts(mine: Path, overrides: list[str], sentence: str) -> None:
    assert sentences(compose_one("experiment=fake", *overrides, config_dir=mine)) == sentence


def test_a_place_that_it_refuses_is_told_and_a_servers_worker_finds_its_end(mine: Path) -> None:
    from telescope.weights.base import RunPlacement, ServerEnd, TransportRefused
    from telescope.weights.transport_choice import choose, transport_named

    config = compose_one(*NAMED, f"{FOLDER}=/x", config_dir=mine).config
    assert choose(config, RunPlacement(on_gpu=False)).cost.fixed_s == 0.5
    with pytest.raises(TransportRefused, match="is for one host"):
        choose(config, RunPlacement(on_gpu=False, other_hosts=True))
    own = config.weight_sync.transport_kwargs
    receiver = transport_named("mailbox", config.plugin_path, own).receiver(ServerEnd("run", "server-0/0", "cpu", 1.0))
    assert type(receiver).__name__ == "Reader"
