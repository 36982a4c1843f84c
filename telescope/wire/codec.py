"""Frames on the socket: `["telescope/1", msgpack header, raw little-endian array]*`, behind the routing id.

Owns the bounds: sizes, counts, dtypes, and which arrays belong to which message. Whatever arrives, `decode` gives a whole
`Packet` or raises `MalformedMessage`, nothing else. Arrays stay raw buffers until someone asks for their views, so that a relay
passes them on untouched. Refuses sockets, retries and the question whether a message is allowed now (session.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from telescope.wire.messages import (
    PROTOCOL,
    ArraySpec,
    Body,
    Completion,
    Envelope,
    Generate,
    Message,
    RolloutResult,
    TrainStep,
)

if TYPE_CHECKING:
    import zmq

    Buffer = bytes | zmq.Frame

MAX_HEADER_BYTES = 16 * 2**20
"""A RolloutResult of a million characters and a TrainStep of 50,000 items both fit."""
MAX_FRAME_BYTES = 256 * 2**20
"""One array: 64 million int32 tokens. Also the socket's MAXMSGSIZE, so that nothing larger is even allocated."""
MAX_ARRAYS = 5
MAX_FRAMES = 2 + MAX_ARRAYS
MAX_PROTOCOL_BYTES = 64
MAX_SEQ = 2**53

ITEM_BYTES = {"<i4": 4, "|u1": 1, "<f4": 4, "<i2": 2}
"""Every dtype that may travel, and the bytes of one element."""

TRAJECTORY = (("ids", "<i4"), ("mask", "|u1"), ("logprobs", "<f4"), ("versions", "<i4"))
LAYOUTS: dict[type[Message], tuple[tuple[str, str], ...]] = {
    Generate: (("ids", "<i4"),),
    Completion: (("ids", "<i4"), ("logprobs", "<f4"), ("versions", "<i4")),
    RolloutResult: TRAJECTORY,
    TrainStep: TRAJECTORY,
}
"""Arrays of each message, in order; all have one axis of one common length. A message not named here carries none."""
ROUTED = ("|u1", "<i2")
"""Dtypes of recorded routing, which a trajectory's messages and a Completion may carry behind their other arrays: three axes
(maths/routing.py). The first is of the common length; a Completion's is longer by its prompt."""
DTYPES = {kind: tuple(dtype for _, dtype in layout) for kind, layout in LAYOUTS.items()}


class MalformedMessage(ValueError):
    """A message breaks the protocol. `reason` is one of a small fixed set of words (it is counted by); the text says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RawArrays:
    """Arrays as they lie on the socket: what they are, and their bytes, undecoded."""

    specs: tuple[ArraySpec, ...] = ()
    buffers: tuple[Buffer, ...] = ()

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> RawArrays:
        """Copies each array, so that the caller may reuse its memory. Raises `ValueError` on a dtype that may not travel."""
        specs, buffers = [], []
        for array in arrays:
            dtype = array.dtype.newbyteorder("<").str
            if dtype not in ITEM_BYTES:
                raise ValueError(f"an array of dtype {array.dtype} cannot be sent: convert it to int32, uint8 or float32")
            specs.append(ArraySpec(dtype, array.shape))
            buffers.append(array.astype(dtype, copy=False).tobytes())
        return cls(tuple(specs), tuple(buffers))

    def views(self) -> tuple[np.ndarray, ...]:
        """Read-only arrays over the buffers, without a copy unless a buffer is unaligned for its dtype."""
        return tuple(_view(spec, buffer) for spec, buffer in zip(self.specs, self.buffers, strict=True))


NO_ARRAYS = RawArrays()


def memory(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, in place."""
    return memoryview(buffer) if isinstance(buffer, bytes) else buffer.buffer


@dataclass(frozen=True, slots=True)
class Packet:
    """One decoded message: its header, and its arrays still raw."""

    envelope: Envelope
    raw: RawArrays


def encode(body: Body, seq: int = 0, answers: int = 0, raw: RawArrays = NO_ARRAYS) -> list[Buffer]:
    """Frames of one message. Raises `ValueError` if its arrays are not those of its layout or a bound is passed."""
    _check_layout(body, raw.specs)
    header = msgspec.msgpack.encode(Envelope(body, seq, answers, raw.specs))
    if len(header) > MAX_HEADER_BYTES:
        raise MalformedMessage(
            "header size",
            f"the header of a {type(body).__name__} has {len(header)} bytes, at most {MAX_HEADER_BYTES} may travel",
        )
    for buffer in raw.buffers:
        if len(buffer) > MAX_FRAME_BYTES:
            raise MalformedMessage(
                "frame size", f"an array of {type(body).__name__} has {len(buffer)} bytes, at most {MAX_FRAME_BYTES} may travel"
            )
    return [PROTOCOL, header, *raw.buffers]


_DECODER = msgspec.msgpack.Decoder(Envelope, strict=True)


def decode(frames: Sequence[Buffer]) -> Packet:
    """The message in these frames (routing id taken off). Raises `MalformedMessage`, and nothing else for any bytes."""
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise MalformedMessage("frame count", f"{len(frames)} frames, expected 2 to {MAX_FRAMES}")
    if frames[0] != PROTOCOL:
        check_protocol(frames[0])
    envelope = _decode_header(frames[1])
    buffers = tuple(frames[2:])
    if len(envelope.arrays) != len(buffers):
        raise MalformedMessage("frame count", f"the header names {len(envelope.arrays)} arrays, {len(buffers)} came")
    for spec, buffer in zip(envelope.arrays, buffers, strict=True):
        _check_frame(spec, buffer)
    _check_layout(envelope.body, envelope.arrays)
    return Packet(envelope, RawArrays(envelope.arrays, buffers) if buffers else NO_ARRAYS)


def check_protocol(frame: Buffer) -> None:
    """Raises `MalformedMessage` unless the first frame is our protocol; its text says what the other side speaks."""
    theirs = bytes(memory(frame)[:MAX_PROTOCOL_BYTES])
    if theirs != PROTOCOL:
        raise MalformedMessage("protocol", f"the first frame is {theirs!r}, this side speaks {PROTOCOL.decode()}")


def _decode_header(header: Buffer) -> Envelope:
    if len(header) > MAX_HEADER_BYTES:
        raise MalformedMessage("header size", f"{len(header)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        envelope = _DECODER.decode(memory(header))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage("header", str(error)[:200]) from error
    if not (0 <= envelope.seq <= MAX_SEQ and 0 <= envelope.answers <= MAX_SEQ):
        raise MalformedMessage("header", f"seq={envelope.seq} and answers={envelope.answers} must be 0 to {MAX_SEQ}")
    return envelope


def _check_frame(spec: ArraySpec, buffer: Buffer) -> None:
    item = ITEM_BYTES.get(spec.dtype)
    if item is None:
        raise MalformedMessage("dtype", f"{spec.dtype[:16]!r} is none of {', '.join(ITEM_BYTES)}")
    if len(spec.shape) not in (1, 3) or not all(0 <= length <= MAX_FRAME_BYTES for length in spec.shape):
        raise MalformedMessage(
            "shape", f"expected one axis of at most {MAX_FRAME_BYTES} elements, or three, got {str(spec.shape)[:64]}"
        )
    nbytes = math.prod(spec.shape) * item
    if nbytes != len(buffer):
        raise MalformedMessage("frame size", f"shape {spec.shape} of {spec.dtype} needs {nbytes} bytes, {len(buffer)} came")


def _check_layout(body: Body, specs: Sequence[ArraySpec]) -> None:
    """The arrays are those of the message, of one length, and the lengths that the body names add up to it."""
    kind = type(body)
    dtypes = DTYPES.get(kind, ())
    if not dtypes and not specs:
        return
    routed = specs[len(dtypes) :] if LAYOUTS.get(kind) is TRAJECTORY or kind is Completion else ()
    if len(routed) == 1:
        specs = specs[:-1]
        if routed[0].dtype not in ROUTED or len(routed[0].shape) != 3 or 0 in routed[0].shape[1:]:
            raise MalformedMessage("layout", f"{kind.__name__}: routing of three axes and 1 or 2 bytes, got {routed[0]}"[:200])
        tokens = routed[0].shape[0]
        if specs and specs[0].shape and (tokens < specs[0].shape[0] if kind is Completion else tokens != specs[0].shape[0]):
            raise MalformedMessage("layout", f"{kind.__name__}: routing of {tokens} tokens beside {specs[0].shape}")
    if tuple([spec.dtype for spec in specs]) != dtypes:
        expected = ", ".join(f"{name} {dtype}" for name, dtype in LAYOUTS.get(kind, ())) or "no arrays"
        raise MalformedMessage("layout", f"{kind.__name__} carries {expected}; got {[spec.dtype[:16] for spec in specs]}")
    shape = specs[0].shape
    if len(shape) != 1 or len({spec.shape for spec in specs}) != 1:
        raise MalformedMessage("layout", f"{kind.__name__}: one axis of one length each, got {[spec.shape for spec in specs]}")
    _check_total(body, shape[0])


def _check_total(body: Body, tokens: int) -> None:
    kind = type(body)
    if kind is Generate:
        return
    if isinstance(body, Completion):
        lengths: Sequence[int] = (body.tokens,)
    elif isinstance(body, RolloutResult):
        lengths = body.branch_lengths
    else:
        assert isinstance(body, TrainStep)
        lengths = [item.length for item in body.items]
    if sum(lengths) != tokens or (lengths and min(lengths) < 0):
        raise MalformedMessage("layout", f"{kind.__name__} names {sum(lengths)} tokens, its arrays have {tokens}")


def _view(spec: ArraySpec, buffer: Buffer) -> np.ndarray:
    if 0 in spec.shape:
        empty = np.empty(spec.shape, spec.dtype)
        empty.flags.writeable = False
        return empty
    array = np.frombuffer(memory(buffer), dtype=spec.dtype).reshape(spec.shape)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array
