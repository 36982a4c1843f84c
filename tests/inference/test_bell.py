"""Workers tell their server by a datagram that a version is over: all of them, of this order, with the right word."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager

import msgspec

from telescope.inference.bell import Bell, Rung, ring
from telescope.inference.opening import BellPlace, StageState

PATIENCE_S = 60.0
CAME, FAILED = StageState(True, "", "sample:1"), StageState(True, "trainer-0 went away", "", True)


@contextmanager
def hung():
    bell = Bell()
    try:
        yield bell, bell.hang()
    finally:
        bell.close()


def send(place: BellPlace, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto(data, bytes.fromhex(place.address))


async def test_what_all_workers_said_is_told_by_rank_once_the_last_has_said_it():
    with hung() as (bell, place):
        order = bell.expect(2)
        ring(place, order, 1, FAILED)
        assert await bell.told(0.05) is None
        worker = threading.Thread(target=ring, args=(place, order, 0, CAME))
        worker.start()
        assert await bell.told(PATIENCE_S) == [CAME, FAILED]
        worker.join()


async def test_a_bell_rung_before_anyone_listens_is_heard():
    with hung() as (bell, place):
        ring(place, bell.expect(1), 0, CAME)
        assert await bell.told(PATIENCE_S) == [CAME]
        assert await bell.told(0.0) == [CAME]


async def test_the_order_before_is_not_taken_for_the_one_that_is_expected():
    with hung() as (bell, place):
        before = bell.expect(1)
        order = bell.expect(1)
        ring(place, before, 0, FAILED)  # its thread ended late
        ring(place, order, 0, CAME)
        assert await bell.told(PATIENCE_S) == [CAME]


async def test_noise_and_whoever_does_not_know_the_word_are_not_heard():
    loop, said = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: said.append(context))
    with hung() as (bell, place):
        order = bell.expect(1)
        send(place, b"")
        send(place, b"{")
        send(place, b'{"word":"\xff"}')
        send(place, msgspec.json.encode(Rung("guessed", order, 0, CAME)))
        ring(place, order, 0, FAILED)
        assert await bell.told(PATIENCE_S) == [FAILED]
    assert said == []


async def test_a_server_that_has_gone_and_one_without_a_bell_are_no_trouble_to_a_worker():
    with hung() as (bell, place):
        ring(BellPlace(), bell.expect(1), 0, CAME)
        assert await bell.told(0.0) is None
    ring(place, 1, 0, CAME)
    bell.close()
    await asyncio.sleep(0)
