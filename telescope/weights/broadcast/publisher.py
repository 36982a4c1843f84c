"""The sending side of weights by broadcast: trainer rank 0 sends a version once to every worker of every server.

Owns the pipeline (a bucket is packed while the one before is on the wire) and what is told behind the last bucket: the digests
of a sample of tensors, by which a receiver knows that it holds the same. Refuses to decide who is in a group. Imports torch.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from telescope.records import WeightGroup, WeightManifest
from telescope.weights.base import TrainerEnd, TransferFailed, WeightSource
from telescope.weights.broadcast.communicator import BufferPair, Communicator, Connect, GroupCommunicator, PendingBroadcast
from telescope.weights.broadcast.rendezvous import Rendezvous
from telescope.weights.buckets import IN_TURN, Bucket, buckets, largest, lay_out
from telescope.weights.device_streams import new_stream, on_stream, wait_for_device
from telescope.weights.sampled_digest import SampledDigest


class BroadcastPublisher:
    """See `telescope.weights.base.Publisher`. On rank 0 it sends; on the other ranks it helps to gather."""

    def __init__(self, transport: str, connect: Connect, source: WeightSource, end: TrainerEnd) -> None:
        """With `weight_sync.cpu_staging` a version is gathered into host memory when it is published, and sent from there;
        without, it is sent from the live parameters."""
        sync = end.sync
        self._transport, self._source, self._rank = transport, source, end.rank
        self._device = torch.device(end.device)
        self._specs, self._nbytes = lay_out(source.layout(), end.dtype)
        self._bucket_bytes, self._update_timeout_s = sync.bucket_bytes, sync.update_timeout_s
        self._cut = buckets(self._specs, sync.bucket_bytes)
        self._staged, self._pinned, self._compare_all = sync.cpu_staging, sync.pin_memory, sync.compare == "all"
        self._host: tuple[int, Tensor] | None = None
        self._buffers = BufferPair(self._device)
        self._rendezvous = Rendezvous.open(end.address) if end.rank == 0 else None
        self._group = GroupCommunicator(connect, "trainer-0", self._device, sync.init_timeout_s)
        self._stream = new_stream(self._device)

    @property
    def card_bytes(self) -> int:
        return 0

    def publish(self, version: int) -> WeightManifest | None:
        if self._staged:
            self._gather_to_host(version)
        if self._rendezvous is None:
            return None
        return WeightManifest(
            version=version,
            transport=self._transport,
            location=self._rendezvous.location,
            tensors=self._specs,
            nbytes=self._nbytes,
            checksum="",
            bucket_bytes=self._bucket_bytes,
            compare_all=self._compare_all,
        )

    def send(self, version: int, group: WeightGroup) -> str:
        with on_stream(self._device, self._stream):
            if self._rendezvous is None:
                if not self._staged:
                    for bucket in self._cut:
                        self._source.pack(bucket, None)
                return ""
            return self._send(version, group, self._rendezvous)

    def abort(self, epoch: int) -> None:
        self._group.abort(epoch)

    def close(self) -> None:
        self._group.close()

    def _send(self, version: int, group: WeightGroup, rendezvous: Rendezvous) -> str:
        """Every bucket is packed even when the group has failed: the other ranks wait for this one in each of them."""
        self._buffers.prepare(largest(self._cut))
        outgoing = _Outgoing(SampledDigest(self._specs, version, everything=self._compare_all, device=self._device))
        outgoing.attempt(lambda: outgoing.open(self._group.of_group(group, rendezvous, self._update_timeout_s)))
        for number, bucket in enumerate(self._cut):
            buffer = self._buffers.get(number, bucket.nbytes)
            outgoing.attempt(outgoing.make_room)
            if not self._staged or outgoing.failed is None:
                self._fill(version, bucket, buffer)
            outgoing.attempt(functools.partial(outgoing.send, bucket, buffer))
        outgoing.attempt(outgoing.finish)
        if outgoing.failed is not None:
            self._group.abort(group.epoch)
            raise outgoing.failed
        return outgoing.checksum

    def _fill(self, version: int, bucket: Bucket, buffer: Tensor) -> None:
        if not self._staged:
            self._source.pack(bucket, buffer)
            return
        if self._host is None or self._host[0] != version:
            raise ValueError(f"told to send version {version}, which is not the one that was published last")
        buffer.copy_(self._host[1][bucket.start : bucket.stop], non_blocking=True)

    def _gather_to_host(self, version: int) -> None:
        """The trainer's parameters are free to change when this returns."""
        with on_stream(self._device, self._stream):
            if self._rank != 0:
                for bucket in self._cut:
                    self._source.pack(bucket, None)
                return
            place = self._host[1] if self._host is not None else _host_memory(self._nbytes, self._pinned)
            self._host = None
            self._buffers.prepare(largest(self._cut))
            for number, bucket in enumerate(self._cut):
                buffer = self._buffers.get(number, bucket.nbytes)
                self._source.pack(bucket, buffer)
                place[bucket.start : bucket.stop].copy_(buffer, non_blocking=True)
            wait_for_device(self._device)
            self._host = version, place


class _Outgoing:
    """One version on its way. After its first failure nothing more is tried."""

    def __init__(self, sample: SampledDigest) -> None:
        self.failed: TransferFailed | None = None
        self.checksum = ""
        self._sample = sample
        self._communicator: Communicator
        self._pending: deque[PendingBroadcast] = deque()
        self._unseen: tuple[Tensor, int] | None = None

    def attempt(self, step: Callable[[], None]) -> None:
        if self.failed is None:
            try:
                step()
            except TransferFailed as error:
                self.failed = error

    def open(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def make_room(self) -> None:
        """The buffer whose turn it is may be filled again."""
        while len(self._pending) >= IN_TURN:
            self._pending.popleft().wait_on_stream()

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        self._pending.append(self._communicator.broadcast(buffer))
        self._look()
        self._unseen = buffer, bucket.start

    def _look(self) -> None:
        """At the piece before the last: only now, so that the last one did not have to wait for it. Its buffer has its next
        turn after the last one's."""
        if self._unseen is not None:
            self._sample.add(*self._unseen)
            self._unseen = None

    def finish(self) -> None:
        """Tell the digests, and wait until all has left."""
        self._look()
        found = self._sample.sums
        if found.numel():
            self._pending.append(self._communicator.broadcast(found.view(torch.uint8)))
        for piece in reversed(self._pending):  # where pieces leave in order, one wait is enough for all
            piece.wait()
        self.checksum = self._sample.text(found.cpu())


def _host_memory(nbytes: int, pinned: bool) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
