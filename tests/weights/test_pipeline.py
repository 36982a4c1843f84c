"""The order of packing, sending and looking, with a wire that does each thing as late as it may: as NCCL does on a GPU, where
nothing is over before somebody waits for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from telescope.backends.fsdp.gather import Packer, layout
from telescope.records import WeightGroup
from telescope.weights.base import ServerEnd, TrainerEnd, WeightsCorrupt
from telescope.weights.broadcast.publisher import BroadcastPublisher
from telescope.weights.broadcast.receiver import BroadcastReceiver
from telescope.weights.transports.gloo import GlooCommunicator
from tests.weights.member import SmallBuckets

GROUP = WeightGroup(0, ("trainer-0", "server-0/0"))
TENSORS, WIDTH = 24, 40


class LateBroadcast:
    """Reads or writes its piece, and those before it, when it is waited for and no sooner."""

    def __init__(self, wire: Wire, piece: torch.Tensor) -> None:
        self._wire, self.piece = wire, piece

    def wait_on_stream(self) -> None:
        self._wire.move_until(self)

    wait = wait_on_stream


class Wire:
    """A communicator without own buffers. A sender's puts what has left into `pieces`; a receiver's takes what comes from
    there."""

    own_buffers = False

    def __init__(self, pieces: list[torch.Tensor] | None = None) -> None:
        self._arriving = None if pieces is None else iter(pieces)
        self.pieces: list[torch.Tensor] = [] if pieces is None else pieces
        self._flying: list[LateBroadcast] = []
        self.most = 0

    def broadcast(self, data: torch.Tensor) -> LateBroadcast:
        self._flying.append(LateBroadcast(self, data))
        self.most = max(self.most, len(self._flying))
        return self._flying[-1]

    def move_until(self, late: LateBroadcast) -> None:
        while late in self._flying:
            piece = self._flying.pop(0).piece
            if self._arriving is None:
                self.pieces.append(piece.clone())
            else:
                piece.copy_(next(self._arriving))

    # ---- of what keeps communicators from epoch to epoch ----

    def of_group(self, *_: object) -> Wire:
        return self

    def abort(self, epoch: int | None = None) -> None:
        raise AssertionError("nothing failed")

    def close(self) -> None: ...


class Model:
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.parameters = {f"t{i}": torch.randn(1 + i % 5, WIDTH, generator=random) for i in range(TENSORS)}
        self._packer = Packer(lambda: self.parameters, 0, 1)

    def layout(self):
        return layout(self.parameters)

    def pack(self, bucket, out) -> None:
        self._packer.pack(bucket, out)


def sent(bucket_bytes: int, version: int, *, compare_all: bool = False, model: Model | None = None):
    """The model, the manifest, what went over the wire and the checksum."""
    model, wire = model or Model(), Wire()
    sync = SmallBuckets(most_bytes=bucket_bytes, compare="all" if compare_all else "sample")
    publisher = BroadcastPublisher(
        "gloo", GlooCommunicator, model, TrainerEnd("run", Path("/nowhere"), "cpu", sync, "bfloat16")
    )
    publisher._group = wire
    manifest = publisher.publish(version)
    return model, manifest, wire, publisher.send(version, GROUP)


def received(manifest, pieces: list[torch.Tensor]) -> tuple[torch.Tensor, str, Wire]:
    receiver = BroadcastReceiver("gloo", GlooCommunicator, ServerEnd("run", "server-0/0", "cpu", 60.0))
    wire = Wire(pieces)
    receiver._group, staging = wire, torch.zeros(manifest.nbytes, dtype=torch.uint8)
    receiver._rendezvous = SimpleNamespace(location=manifest.location)  # where nobody has to be met
    return staging, receiver.receive(manifest, GROUP, staging, 60.0), wire


@pytest.mark.parametrize("compare_all", [False, True])
@pytest.mark.parametrize(("bucket_bytes", "pieces"), [(0, 24), (600, 14), (2000, 4), (1 << 20, 1)])
def test_what_leaves_and_arrives_as_late_as_it_may_is_whole(bucket_bytes, pieces, compare_all):
    model, manifest, out, checksum = sent(bucket_bytes, 3, compare_all=compare_all)
    staging, arrived, into = received(manifest, out.pieces)
    assert len(out.pieces) == pieces + 1  # the digests
    assert arrived == checksum
    assert out.most <= 3  # two buffers in turn, and the digests
    assert into.most == min(pieces + 1, 4)
    for spec in manifest.tensors:
        found = staging[spec.offset :][: spec.nbytes].view(torch.bfloat16).view(spec.shape)
        assert torch.equal(found, model.parameters[spec.name].bfloat16())


@pytest.mark.parametrize("piece", [0, 2, 3])
def test_a_changed_byte_of_a_compared_tensor_is_found_and_named(piece):
    _, manifest, wire, _ = sent(2000, 3, compare_all=True)
    wire.pieces[piece][-70] ^= 1
    with pytest.raises(
        WeightsCorrupt, match=r"weights version 3: 1 of 24 compared tensors did not arrive as they were sent \(t"
    ):
        received(manifest, wire.pieces)


@pytest.mark.parametrize("bucket_bytes", [0, 600, 1 << 20])
def test_empty_tensors_keep_nobody_waiting_wherever_they_are(bucket_bytes):
    """At the end of the layout one lies in no piece, and has no digest on either side."""
    empty = {name: torch.zeros(0, WIDTH) for name in ("first", "last")}
    model = Model()
    model.parameters = {"first": empty["first"], **model.parameters, "last": empty["last"]}
    _, manifest, out, checksum = sent(bucket_bytes, 3, compare_all=True, model=model)
    assert out.pieces[-1].numel() == 8 * TENSORS
    assert received(manifest, out.pieces)[1] == checksum


def test_a_changed_digest_is_found():
    _, manifest, wire, _ = sent(2000, 3)
    wire.pieces[-1][9] ^= 1
    with pytest.raises(WeightsCorrupt, match="1 of 16 compared tensors"):
        received(manifest, wire.pieces)
