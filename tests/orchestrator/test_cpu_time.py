"""Processor seconds of real processes, from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import msgspec

from telescope.orchestrator.cpu_time import CpuTime, find_descendants
from telescope.wire.messages import Hello
from tests.orchestrator.test_wrong_messages import hello

BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True)\ninput()"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"


def here(name: str, pid: int) -> Hello:
    return msgspec.structs.replace(hello(name, name, pid), host="this")


def test_a_servers_engine_is_told_apart_and_each_second_counts_once() -> None:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], **pipes) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()  # the child has had its 0.3 s
            processor = CpuTime("this")
            peers = [here("server-0", server.pid), here("trainer-0", server.pid)]
            first = processor.measure(peers)
            assert first["engines"] >= 0.25
            assert first["trainers"] >= first["engines"]  # the same processes, not divided
            assert first["workers"] == 0
            assert first["orchestrator"] > 0
            assert processor.measure(peers)["engines"] < 0.05  # it waits
            assert list(find_descendants(server.pid)) != []
        finally:
            server.communicate(b"\n", timeout=60)


def test_it_is_silent_where_a_peer_is_elsewhere() -> None:
    assert CpuTime("this").measure([here("worker-0", os.getpid()), hello("server-0", "s", os.getpid())]) == {}


def test_a_process_that_has_gone_counts_for_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(60)
    assert CpuTime("this").measure([here("worker-0", gone.pid)])["workers"] == 0


def test_what_this_process_works_is_the_orchestrators() -> None:
    processor = CpuTime("this")
    processor.measure([])
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert processor.measure([])["orchestrator"] >= 0.15
