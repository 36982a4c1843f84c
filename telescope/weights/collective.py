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
from telescope.weights.base import Source, TransferFailed
from telescope.weights.buckets import IN_TURN, Bucket, buckets, largest, lay_out
from telescope.weights.channel import Channel, Flight
from telescope.weights.digest import Sample
from telescope.weights.epochs import Epochs, Turns, new_stream, on_stream, wait_for_device
from telescope.weights.rendezvous import Meeting


class CollectivePublisher:
    """See `telescope.weights.base.Publisher`. On rank 0 it sends; on the other ranks it helps to gather."""

    def __init__(
        self,
        transport: str,
        source: Source,
        *,
        rank: int,
        device: str,
        address: str,
        dtype: str | None,
        bucket_bytes: int,
        init_timeout_s: float,
        update_timeout_s: float,
        compare_all: bool = False,
        staging: str | None = None,
    ) -> None:
        """`address`: this host's, where the members of a group meet (rank 0). `staging`: `pinned` or `pageable` host memory
        into which a version is gathered when it is published, and from which it is then sent; None: it is sent from the live
        parameters."""
        self._transport, self._source, self._rank = transport, source, rank
        self._device = torch.device(device)
        self._specs, self._nbytes = lay_out(source.layout(), dtype)
        self._bucket_bytes, self._update_timeout_s = bucket_bytes, update_timeout_s
        self._cut = buckets(self._specs, bucket_bytes)
        self._staging, self._compare_all = staging, compare_all
        self._host: tuple[int, Tensor] | None = None
        self._turns = Turns(self._device)
        self._meeting = Meeting.open(address, init_timeout_s) if rank == 0 else None
        self._epochs = Epochs(transport, "trainer-0", self._device, init_timeout_s)
        self._stream = new_stream(self._device)

    @property
    def card_bytes(self) -> int:
        return 0

    def publish(self, version: int) -> WeightManifest | None:
        if self._staging is not None:
            self._gather_to_host(version)
        if self._meeting is None:
            return None
        return WeightManifest(
            version=version,
            transport=self._transport,
            location=self._meeting.location,
            tensors=self._specs,
            nbytes=self._nbytes,
            checksum="",
            bucket_bytes=self._bucket_bytes,
            compare_all=self._compare_all,
        )

    def send(self, version: int, group: WeightGroup) -> str:
        with torch.no_grad(), on_stream(self._device, self._stream):
            if self._meeting is None:
                if self._staging is None:
                    for bucket in self._cut:
                        self._source.pack(bucket, None)
                return ""
            return self._send(version, group, self._meeting)

    def abort(self, epoch: int) -> None:
        self._epochs.abort(epoch)

    def close(self) -> None:
        self._epochs.close()

    def _send(self, version: int, group: WeightGroup, meeting: Meeting) -> str:
        """Every bucket is packed even when the group has failed: the other ranks wait for this one in each of them."""
        self._turns.prepare(largest(self._cut))
        outgoing = _Outgoing(Sample(self._specs, version, everything=self._compare_all, device=self._device))
        outgoing.attempt(lambda: outgoing.open(self._epochs.channel(group, meeting, self._update_timeout_s)))
        for number, bucket in enumerate(self._cut):
            buffer = self._turns.get(number, bucket.nbytes)
            outgoing.attempt(outgoing.make_room)
            if self._staging is None or outgoing.failed is None:
                self._fill(version, bucket, buffer)
            outgoing.attempt(functools.partial(outgoing.send, bucket, buffer))
        outgoing.attempt(outgoing.finish)
        if outgoing.failed is not None:
            self._epochs.abort(group.epoch)
            raise outgoing.failed
        return outgoing.checksum

    def _fill(self, version: int, bucket: Bucket, buffer: Tensor) -> None:
        if self._staging is None:
            self._source.pack(bucket, buffer)
            return
        if self._host is None or self._host[0] != version:
            raise ValueError(f"told to send version {version}, which is not the one that was published last")
        buffer.copy_(self._host[1][bucket.start : bucket.stop], non_blocking=True)

    def _gather_to_host(self, version: int) -> None:
        """The trainer's parameters are free to change when this returns."""
        with torch.no_grad(), on_stream(self._device, self._stream):
            if self._rank != 0:
                for bucket in self._cut:
                    self._source.pack(bucket, None)
                return
            place = self._host[1] if self._host is not None else _host_memory(self._nbytes, self._staging == "pinned")
            self._host = None
            self._turns.prepare(largest(self._cut))
            for number, bucket in enumerate(self._cut):
                buffer = self._turns.get(number, bucket.nbytes)
                self._source.pack(bucket, buffer)
                place[bucket.start : bucket.stop].copy_(buffer, non_blocking=True)
            wait_for_device(self._device)
            self._host = version, place


class _Outgoing:
    """One version on its way. After its first failure nothing more is tried."""

    def __init__(self, sample: Sample) -> None:
        self.failed: TransferFailed | None = None
        self.checksum = ""
        self._sample = sample
        self._channel: Channel
        self._flights: deque[Flight] = deque()
        self._unseen: tuple[Tensor, int] | None = None

    def attempt(self, step: Callable[[], None]) -> None:
        if self.failed is None:
            try:
                step()
            except TransferFailed as error:
                self.failed = error

    def open(self, channel: Channel) -> None:
        self._channel = channel

    def make_room(self) -> None:
        """The buffer whose turn it is may be filled again."""
        while len(self._flights) >= IN_TURN:
            self._flights.popleft().order()

    def send(self, bucket: Bucket, buffer: Tensor) -> None:
        self._flights.append(self._channel.broadcast(buffer))
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
            self._flights.append(self._channel.broadcast(found.view(torch.uint8)))
        for flight in reversed(self._flights):  # where pieces leave in order, one wait is enough for all
            flight.land()
        self.checksum = self._sample.text(found.cpu())


def _host_memory(nbytes: int, pinned: bool) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
