"""What only real parts can show: the engine's own process dies, the port is somebody else's."""

from __future__ import annotations

import socket
import time

import psutil
import pytest

from tests.run.conftest import Start

LIMIT_S = 10.0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_kill_9_of_the_engine_ends_the_run_with_its_servers_name(start: Start):
    """Where servers are not started again; where they are: test_recovery.py. The two halves are fast: an engine's death ends
    its server with that word (tests/inference/test_process.py), and a server's death the run (test_recovery.py)."""
    once = "cluster.max_server_restarts=0"
    run = start("experiment=reverse_letters", "inference.http=false", "number_of_steps=10000", once)
    run.until_step(1, limit_s=200)
    engines = [child for child in run.find("server-0").children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    assert engines, "the engine has no process of its own"
    run.remember()
    engines[0].kill()
    begun = time.monotonic()
    assert run.wait() == 70
    assert run.left_after(60) == []
    assert time.monotonic() - begun < LIMIT_S + 5
    said = run.said()
    assert "server-0" in said
    assert "SIGKILL" in said
    assert str(run.directory.log("server-0")) in said
    assert run.summary()["ok"] is False


def test_a_taken_port_is_said_before_the_engine_starts(start: Start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = start("experiment=reverse_letters", f"inference.base_port={port}")
        assert run.wait() == 70
    said = run.said()
    assert f"port {port} of 127.0.0.1 is taken: set inference.base_port={port} to a free one" in said
    assert run.left_after(30) == []
