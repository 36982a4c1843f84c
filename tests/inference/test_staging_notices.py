"""Workers tell their server that a version is over: all of them, of this order, by the socket that only they inherited."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
from contextlib import contextmanager

from telescope.inference.vllm.worker_protocol import NotifySocket, StageState, StagingNotices, notify

LIMIT_S = 60.0
CAME, FAILED = StageState(True, "", "sample:1"), StageState(True, "trainer-0 went away", "", True)


@contextmanager
def opened():
    notices = StagingNotices()
    notices.open()
    try:
        yield notices, notices.workers_end
    finally:
        notices.close()


async def test_what_all_workers_said_is_given_by_rank_once_the_last_has_said_it():
    with opened() as (notices, end):
        order = notices.expect(2)
        notify(end, order, 1, FAILED)
        assert await notices.wait(0.05) is None
        worker = threading.Thread(target=notify, args=(end, order, 0, CAME))
        worker.start()
        assert await notices.wait(LIMIT_S) == [CAME, FAILED]
        worker.join()


async def test_a_forked_process_has_the_other_end():
    with opened() as (notices, end):
        order = notices.expect(1)
        worker = multiprocessing.get_context("fork").Process(target=notify, args=(end, order, 0, CAME))
        worker.start()
        assert await notices.wait(LIMIT_S) == [CAME]
        worker.join(LIMIT_S)


async def test_a_notice_given_before_anyone_waits_is_kept():
    with opened() as (notices, end):
        notify(end, notices.expect(1), 0, CAME)
        assert await notices.wait(LIMIT_S) == [CAME]
        assert await notices.wait(0.0) == [CAME]


async def test_the_order_before_is_not_taken_for_the_one_that_is_expected():
    with opened() as (notices, end):
        before = notices.expect(1)
        order = notices.expect(1)
        notify(end, before, 0, FAILED)  # its thread ended late
        notify(end, order, 0, CAME)
        assert await notices.wait(LIMIT_S) == [CAME]


async def test_noise_is_not_read_as_a_notice():
    loop, said = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: said.append(context))
    with opened() as (notices, end):
        order = notices.expect(1)
        for noise in (b"", b"{", b'{"order":"\xff"}'):
            os.write(end.descriptor, noise)
        notify(end, order, 0, FAILED)
        assert await notices.wait(LIMIT_S) == [FAILED]
    assert said == []


async def test_a_worker_that_did_not_inherit_it_writes_to_no_other_file():
    ours, theirs = socket.socketpair()
    with opened() as (notices, end), ours, theirs:
        ours.setblocking(False)
        notify(NotifySocket(theirs.fileno(), end.device, end.inode), notices.expect(1), 0, CAME)
        assert await notices.wait(0.0) is None
        assert unread(ours) == b""


def unread(end: socket.socket) -> bytes:
    try:
        return end.recv(1024)
    except BlockingIOError:
        return b""


async def test_a_server_that_has_gone_and_one_without_a_socket_are_no_trouble_to_a_worker():
    with opened() as (notices, end):
        notify(NotifySocket(), notices.expect(1), 0, CAME)
        assert await notices.wait(0.0) is None
    notify(end, 1, 0, CAME)
    notices.close()
    await asyncio.sleep(0)
