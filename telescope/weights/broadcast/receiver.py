"""The receiving side of weights by broadcast, one a server worker: into a place for the whole, or bucket by bucket.

Owns the order in which pieces are taken, and the comparison with the sender's digests. Refuses to know where the bytes go then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from telescope.records import TensorSpec, WeightGroup, WeightManifest
from telescope.weights.base import Load, ServerEnd, TransferFailed, WeightsCorrupt
from telescope.weights.broadcast.communicator import BufferPair, Communicator, Connect, GroupCommunicator, PendingBroadcast
from telescope.weights.broadcast.rendezvous import Rendezvous
from telescope.weights.buckets import IN_TURN, Bucket, buckets, largest
from telescope.weights.device_streams import new_stream, on_stream
from telescope.weights.sampled_digest import SampledDigest

AHEAD = 4
"""Pieces that are asked for before the first of them is looked at."""


class BroadcastReceiver:
    """See `telescope.weights.base.Receiver`."""

    def __init__(self, transport: str, connect: Connect, end: ServerEnd) -> None:
        self._transport, self._device = transport, torch.device(end.device)
        self._init_timeout_s = end.init_timeout_s
        self._group = GroupCommunicator(connect, end.member, self._device, end.init_timeout_s)
        self._buffers = BufferPair(self._device)
        self._rendezvous: Rendezvous | None = None
        self._stream = new_stream(self._device)
        self._known: tuple[tuple[tuple[TensorSpec, ...], int, int], tuple[Bucket, ...]] | None = None

    def receive(self, manifest: WeightManifest, group: WeightGroup | None, staging: Tensor, deadline_s: float) -> str:
        if staging.numel() < manifest.nbytes:
            raise WeightsCorrupt(
                f"weights version {manifest.version} have {manifest.nbytes} bytes, and there is room for {staging.numel()}"
            )
        with self._taking(group):
            communicator = self._communicator(manifest, group, deadline_s)
            if communicator.own_buffers or staging.device != self._device:
                return self._in_turn(manifest, communicator, lambda bucket, data: _put(staging, bucket, data))
            return self._in_place(manifest, communicator, staging)

    def verify(self, manifest: WeightManifest, deadline_s: float) -> None:
        """Nothing has come yet."""

    def receive_buckets(self, manifest: WeightManifest, group: WeightGroup | None, load: Load, deadline_s: float) -> str:
        with self._taking(group):
            return self._in_turn(manifest, self._communicator(manifest, group, deadline_s), load)

    def cancel(self, epoch: int | None = None) -> None:
        self._group.abort(epoch)

    def close(self) -> None:
        self._group.close()

    @contextmanager
    def _taking(self, group: WeightGroup | None) -> Iterator[None]:
        """On this receiver's stream. A group that has failed once is done with: its members no longer agree where they are."""
        try:
            with on_stream(self._device, self._stream):
                yield
        except TransferFailed:
            if group is not None:
                self._group.abort(group.epoch)
            raise

    def _communicator(self, manifest: WeightManifest, group: WeightGroup | None, deadline_s: float) -> Communicator:
        if group is None or manifest.transport != self._transport:
            raise TransferFailed(
                f"weights version {manifest.version} by {manifest.transport} come without a group, or to a server that expects "
                f"{self._transport}"
            )
        if self._rendezvous is None or self._rendezvous.location != manifest.location:
            self._group.close()
            self._rendezvous = Rendezvous.join(manifest.location, min(self._init_timeout_s, deadline_s))
        return self._group.of_group(group, self._rendezvous, deadline_s)

    def _in_place(self, manifest: WeightManifest, communicator: Communicator, staging: Tensor) -> str:
        """Straight to where it stays. The device looks at what has come while the next pieces come."""
        cut, sample = self._cut(manifest), self._sample(manifest)
        told = self._told(sample)
        pieces = [staging[bucket.start : bucket.stop] for bucket in cut]
        coming = [*pieces, *_as_bytes(told)]  # the digests, too, are asked for before there is anything to compare
        pending: list[PendingBroadcast] = []
        for number, bucket in enumerate(cut):
            pending += [communicator.broadcast(piece) for piece in coming[len(pending) : number + AHEAD]]
            pending[number].wait_on_stream()
            sample.add(pieces[number], bucket.start)
        pending += [communicator.broadcast(piece) for piece in coming[len(pending) :]]
        return self._compare(manifest, pending[len(cut) - 1 :], sample, told)

    def _cut(self, manifest: WeightManifest) -> tuple[Bucket, ...]:
        """Kept as long as the layout is the same, as it is from version to version."""
        layout = manifest.tensors, manifest.nbytes, manifest.bucket_bytes
        if self._known is None or self._known[0] != layout:
            cut = buckets(manifest.tensors, manifest.bucket_bytes)
            _check(manifest, cut)
            self._known = layout, cut
        return self._known[1]

    def _sample(self, manifest: WeightManifest) -> SampledDigest:
        return SampledDigest(manifest.tensors, manifest.version, everything=manifest.compare_all, device=self._device)

    def _in_turn(self, manifest: WeightManifest, communicator: Communicator, load: Load) -> str:
        cut, sample = self._cut(manifest), self._sample(manifest)
        if communicator.own_buffers:
            self._buffers.drop()  # those of an aborted epoch may still be written to
        self._buffers.prepare(largest(cut))
        pending: list[PendingBroadcast] = []
        for number, bucket in enumerate(cut):
            for ahead in range(len(pending), min(number + IN_TURN, len(cut))):
                pending.append(communicator.broadcast(self._buffers.get(ahead, cut[ahead].nbytes)))
            pending[number].wait_on_stream()
            data = self._buffers.get(number, bucket.nbytes)
            sample.add(data, bucket.start)
            load(bucket, data)
        told = self._told(sample)
        last = [communicator.broadcast(piece) for piece in _as_bytes(told)]
        return self._compare(manifest, (*pending[-IN_TURN:], *last), sample, told)

    def _told(self, sample: SampledDigest) -> Tensor:
        """[n] int64: where the sender's digests come to."""
        return torch.zeros(len(sample.specs), dtype=torch.int64, device=self._device)

    def _compare(
        self, manifest: WeightManifest, pending: Sequence[PendingBroadcast], sample: SampledDigest, told: Tensor
    ) -> str:
        """Wait for the last of what came, the sender's digests behind it."""
        mine = sample.sums
        for piece in reversed(pending):  # where pieces come in order, one wait is enough for all
            piece.wait()
        here, there = torch.stack((mine, told)).cpu()
        if not torch.equal(here, there):
            wrong = [spec.name for spec, a, b in zip(sample.specs, here.tolist(), there.tolist(), strict=True) if a != b]
            raise WeightsCorrupt(
                f"weights version {manifest.version}: {len(wrong)} of {len(sample.specs)} compared tensors did not arrive as "
                f"they were sent ({', '.join(wrong[:3])})"
            )
        return sample.text(here)


def _as_bytes(digests: Tensor) -> list[Tensor]:
    """As one piece; none where there is nothing to tell."""
    return [digests.view(torch.uint8)] if digests.numel() else []


def _check(manifest: WeightManifest, cut: Sequence[Bucket]) -> None:
    """The buckets are the whole layout, one after another: a sender that cuts otherwise would be waited for in vain."""
    ends = [0, *(bucket.stop for bucket in cut)]
    if [bucket.start for bucket in cut] != ends[:-1] or ends[-1] != manifest.nbytes:
        raise WeightsCorrupt(
            f"weights version {manifest.version} are laid out with gaps or beyond their {manifest.nbytes} bytes"
        )


def _put(staging: Tensor, bucket: Bucket, data: Tensor) -> None:
    staging[bucket.start : bucket.stop].copy_(data, non_blocking=True)
