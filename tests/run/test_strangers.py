"""A run whose port strangers use up: they get no descriptor that the run needs, and no row of it is lost."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from telescope.exit_codes import STOPPED
from tests.run.conftest import Start

IDLE, A_SECOND, SECONDS = 3000, 100, 10


@pytest.fixture
def many_files() -> Iterator[None]:
    """For us to be 3,000 strangers; a run that is started before has the soft limit of a plain shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < IDLE + 2000:
        pytest.skip(f"the hard limit of open files is {hard} here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(180)
def test_idle_strangers_cost_no_row(start: Start, many_files: None) -> None:
    run = start("experiment=fake", "number_of_steps=100000", "backend.step_s=0.05", "cluster.device=cpu", "checkpoint.every=50")
    run.until_step(5)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    host, port = (
        json.loads((run.directory.path / "wire" / "hub.json").read_text())["endpoint"].removeprefix("tcp://").split(":")
    )
    with contextlib.ExitStack() as strangers:

        def come(number: int) -> None:
            for _ in range(number):
                with contextlib.suppress(OSError):
                    strangers.enter_context(socket.create_connection((host, int(port)), 1.0)).send(b"\xff")

        come(IDLE)
        before = run.status()["step"]
        for _ in range(SECONDS):
            until = time.monotonic() + 1
            come(A_SECOND)
            time.sleep(max(0.0, until - time.monotonic()))
        assert run.status()["step"] > before + 10
        run.find("server-0").kill()
        run.until(lambda: run.directory.log("server-0", 2).exists(), "a second server-0")
        run.until_step(run.status()["step"] + 10)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == STOPPED
    assert run.summary()["log"] == {"rows_dropped": 0, "rows_unlogged": 0}
    assert "cannot be written" not in run.directory.log("orchestrator").read_text()
