"""Bytes: golden ones for every message, and the promise that nothing but MalformedMessage comes of wrong ones."""

from __future__ import annotations

import contextlib
import typing

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.wire import codec
from telescope.wire import messages as m
from telescope.wire.codec import MalformedMessage, RawArrays, decode, encode
from tests.wire import make_golden
from tests.wire.samples import SAMPLES, SAMPLING, Sample, completion, trajectory

BY_NAME = {sample.name: sample for sample in SAMPLES}


def refusal(frames: list[bytes]) -> str:
    with pytest.raises(MalformedMessage) as caught:
        decode(frames)
    return caught.value.reason


def reheadered(frames: list[bytes], **changes: object) -> list[bytes]:
    header = msgspec.msgpack.decode(frames[1]) | changes
    return [frames[0], msgspec.msgpack.encode(header), *frames[2:]]


def test_every_message_has_a_sample_and_a_golden_file() -> None:
    kinds = {kind.__name__ for kind in typing.get_args(m.Body)}
    assert kinds <= set(BY_NAME)
    assert kinds == {name.partition("-")[0] for name in BY_NAME}
    assert len(BY_NAME) == len(SAMPLES)
    assert set(BY_NAME) == {path.stem for path in make_golden.FOLDER.glob("*.hex")}
    assert len(kinds) == 41


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_golden_bytes_are_what_is_sent_and_decode_to_the_message(sample: Sample) -> None:
    golden = make_golden.read(make_golden.path_of(sample))
    assert sample.frames() == golden
    packet = decode(golden)
    assert (packet.envelope.body, packet.envelope.seq, packet.envelope.answers) == (sample.body, sample.seq, sample.answers)
    arrays = packet.raw.views()
    assert len(arrays) == len(sample.arrays)
    for ours, sent in zip(arrays, sample.arrays, strict=True):
        assert ours.dtype == sent.dtype
        np.testing.assert_array_equal(ours, sent)


def test_arrays_travel_little_endian_and_arrive_read_only() -> None:
    big = np.array([1, 258], dtype=">i4")
    raw = RawArrays.of((big,))
    assert raw.buffers == (bytes([1, 0, 0, 0, 2, 1, 0, 0]),)
    (view,) = raw.views()
    assert view.tolist() == [1, 258]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5


def test_arrays_are_copied_so_that_their_owner_may_go_on_writing() -> None:
    ids = np.array([1, 2, 3], np.int32)
    raw = RawArrays.of((ids[::2],))
    ids[:] = 0
    assert raw.views()[0].tolist() == [1, 3]


def test_zmq_frames_decode_in_place() -> None:
    frames = [frames if index == 0 else zmq.Frame(frames) for index, frames in enumerate(BY_NAME["Completion"].frames())]
    packet = decode(frames)
    assert packet.raw.buffers[0] is frames[2]
    assert packet.raw.views()[2].tolist() == [7, 7, 7, 7, 7]


def test_empty_arrays_travel() -> None:
    body = m.Completion("x", "abort", 0, 0, 0.0, 0.0)
    packet = decode(encode(body, 1, 1, RawArrays.of(completion(0))))
    assert [array.shape for array in packet.raw.views()] == [(0,), (0,), (0,)]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ((np.zeros(3, np.int64),), "cannot be sent: convert it to int32"),
        ((np.zeros(3, object),), "cannot be sent"),
        ((np.zeros(3, np.float32),), "Generate carries ids <i4"),
        ((np.zeros((3, 1), np.int32),), "one axis"),
        ((), "Generate carries ids <i4"),
    ],
)
def test_wrong_arrays_are_refused_before_they_are_sent(arrays: tuple[np.ndarray, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode(m.Generate("x", 1, 0, 0, SAMPLING), 1, 0, RawArrays.of(arrays))


def test_turns_travel_and_cost_nothing_where_there_are_none() -> None:
    sample = BY_NAME["RolloutResult"]
    body = msgspec.structs.replace(sample.body, turns=2, turn_rewards=(0.25, 0.75), branch_turns=(((0, 2),), ((1, 1),)))
    told = decode(encode(body, 2, 1, RawArrays.of(sample.arrays)))
    assert told.envelope.body == body
    plain = BY_NAME["TrainStep"]
    items = tuple(msgspec.structs.replace(item, turns=((1, 0.5), (1, -2.0))) for item in plain.body.items)  # type: ignore[union-attr]
    step = msgspec.structs.replace(plain.body, items=items)
    assert decode(encode(step, 8, 0, RawArrays.of(plain.arrays))).envelope.body == step
    for each in (sample, plain):
        header = each.frames()[1]
        assert b"turn_rewards" not in header
        assert b"branch_turns" not in header
    assert b"turns" not in plain.frames()[1]


def test_each_kind_of_damage_has_its_own_reason() -> None:
    done = BY_NAME["RolloutResult"].frames()
    ping = BY_NAME["Heartbeat"].frames()
    specs = msgspec.msgpack.decode(done[1])["arrays"]
    assert refusal([]) == "frame count"
    assert refusal(ping[:1]) == "frame count"
    assert refusal([*done, b"", b""]) == "frame count"
    assert refusal([*ping, b"x"]) == "frame count"
    assert refusal(done[:-1]) == "frame count"
    assert refusal([b"telescope/2", ping[1]]) == "protocol"
    assert refusal([b"x" * 10_000, ping[1]]) == "protocol"
    assert refusal([ping[0], b""]) == "header"
    assert refusal([ping[0], ping[1] + b"\0"]) == "header"
    assert refusal([ping[0], b"\x91" * 100_000]) == "header"  # nested far deeper than any parser's stack
    assert refusal([ping[0], b"\xdf\xff\xff\xff\xff"]) == "header"  # a map that claims 4 billion entries
    assert refusal([ping[0], b"\x81\xa4body\xdb\xff\xff\xff\xffx"]) == "header"
    assert refusal(reheadered(ping, seq=-1)) == "header"
    assert refusal(reheadered(ping, seq=2**63)) == "header"
    assert refusal(reheadered(ping, more=1)) == "header"
    assert refusal(reheadered(ping, body={"type": "Heartbeat", "progress": "3", "doing": ""})) == "header"
    assert refusal(reheadered(ping, body={"type": "Heartbeat", "progress": 3, "doing": b"\xff"})) == "header"
    assert refusal(reheadered(ping, body={"type": "Nothing"})) == "header"
    assert refusal([done[0], b"\0" * (codec.MAX_HEADER_BYTES + 1), *done[2:]]) == "header size"
    for dtype in ("|O", "<f8", "i4", ">i4", "<U9", "|V4", "x" * 1000):
        assert refusal(reheadered(done, arrays=[[dtype, [6]], *specs[1:]])) == "dtype"
    for shape in ([], [6, 1], [-6], [2**62]):
        assert refusal(reheadered(done, arrays=[["<i4", shape], *specs[1:]])) == "shape"
    assert refusal([*done[:2], done[2] + b"\0", *done[3:]]) == "frame size"
    assert refusal(reheadered(done, arrays=[["<i4", [7]], *specs[1:]])) == "frame size"
    assert refusal([*reheadered(ping, arrays=[["<i4", [1]]]), b"abcd"]) == "layout"


def test_lengths_that_the_body_names_must_add_up() -> None:
    done = BY_NAME["RolloutResult"].frames()
    body = msgspec.msgpack.decode(done[1])["body"]
    for lengths in ([4, 1], [7, -1], [6, 2**40]):
        assert refusal(reheadered(done, body=body | {"branch_lengths": lengths})) == "layout"
    with pytest.raises(MalformedMessage, match="names 7 tokens, its arrays have 6"):
        encode(BY_NAME["TrainStep"].body, 1, 0, RawArrays.of(trajectory(6)))


def test_arrays_of_one_message_have_one_length() -> None:
    ids, logprobs, versions = completion(3)
    with pytest.raises(MalformedMessage, match="one length each"):
        encode(m.Completion("x", "stop", 3, 0, 0.0, 0.0), 1, 1, RawArrays.of((ids, logprobs, versions[:2])))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_a_trajectory_may_bring_its_recorded_routing(dtype: type[np.generic]) -> None:
    sample, routed = BY_NAME["RolloutResult"], np.arange(6 * 3 * 2, dtype=dtype).reshape(6, 3, 2)
    packet = decode(encode(sample.body, 1, 0, RawArrays.of((*sample.arrays, routed))))
    *others, found = packet.raw.views()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, routed)
    assert [len(array) for array in others] == [6] * 4


@pytest.mark.parametrize(
    ("routed", "says"),
    [
        (np.zeros((5, 3, 2), np.uint8), "routing of 5 tokens beside"),
        (np.zeros((6, 0, 2), np.uint8), "routing of three axes"),
        (np.zeros((6, 3, 2), np.int32), "routing of three axes and 1 or 2 bytes"),
        (np.zeros(6, np.uint8), "routing of three axes"),
    ],
)
def test_routing_that_does_not_go_with_its_tokens_is_malformed(routed: np.ndarray, says: str) -> None:
    sample = BY_NAME["RolloutResult"]
    with pytest.raises(MalformedMessage, match=says):
        encode(sample.body, 1, 0, RawArrays.of((*sample.arrays, routed)))


def test_a_completion_may_bring_routing_of_its_prompt_too() -> None:
    sample, routed = BY_NAME["Completion"], np.arange(9 * 3 * 2, dtype=np.uint8).reshape(9, 3, 2)
    packet = decode(encode(sample.body, 1, 1, RawArrays.of((*sample.arrays, routed))))
    *others, found = packet.raw.views()
    np.testing.assert_array_equal(found, routed)
    assert {len(array) for array in others} == {len(sample.arrays[0])}
    with pytest.raises(MalformedMessage, match="Completion: routing of 1 tokens beside"):
        encode(sample.body, 1, 1, RawArrays.of((*sample.arrays, routed[:1])))


def test_a_message_of_a_prompt_alone_brings_no_routing() -> None:
    sample = BY_NAME["Generate"]
    with pytest.raises(MalformedMessage, match="Generate carries ids <i4"):
        encode(sample.body, 1, 1, RawArrays.of((*sample.arrays, np.zeros((5, 3, 2), np.uint8))))


@given(st.lists(st.binary(max_size=200), max_size=9))
@settings(max_examples=150, deadline=None)
def test_random_frames_give_malformed_and_nothing_else(frames: list[bytes]) -> None:
    for candidate in (frames, [m.PROTOCOL, *frames]):
        with contextlib.suppress(MalformedMessage):
            decode(candidate)


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_messages_decode_whole_or_give_malformed(sample: Sample, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in sample.frames()]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        if frame and data.draw(st.booleans()):
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
        elif data.draw(st.booleans()):
            del frame[data.draw(st.integers(0, len(frame))) :]
        else:
            frame += data.draw(st.binary(max_size=8))
    try:
        packet = decode([bytes(frame) for frame in frames])
    except MalformedMessage:
        return
    assert [array.nbytes for array in packet.raw.views()] == [len(buffer) for buffer in packet.raw.buffers]


@given(st.binary(max_size=64), st.integers(0, 2**53), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
@settings(max_examples=100, deadline=None)
def test_whatever_is_encoded_is_decoded(text: bytes, seq: int, ids: list[int]) -> None:
    body = m.Generate(text.hex(), -seq, 0, 1, SAMPLING, 3)
    packet = decode(encode(body, seq, 0, RawArrays.of((np.array(ids, np.int32),))))
    assert packet.envelope.body == body
    assert packet.envelope.seq == seq
    assert packet.raw.views()[0].tolist() == ids
