"""A whole run whose hub is flooded: it goes on, its own processes are heard, and its journal says the same again.

What each wrong frame is counted as, and what it costs in memory: tests/wire/test_fuzz.py, where a welcomed peer sends some too.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket

import msgspec
import psutil
import pytest
import zmq

from telescope.flow.replay import replay
from telescope.runlog.journal import journal_lines
from telescope.wire.discovery import HubAddress
from telescope.wire.security import load_keys
from tests.run.conftest import Start, WholeRun
from tests.wire.test_fuzz import MESSAGES, dealer, flood, mutated

GROWTH_BYTES = 16 * 2**20
"""Of the orchestrator over a flood and the steps that it trains meanwhile."""


def raw(run: WholeRun, rng: random.Random) -> None:
    """Noise from strangers: to the bare port, and by ZeroMQ without a key and with one that nobody knows."""
    address = msgspec.json.decode(run.directory.hub_json.read_bytes(), type=HubAddress)
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(MESSAGES // 50):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as stranger:
            for _ in range(50):
                stranger.sendall(rng.randbytes(rng.randrange(1, 200)))
    for keys in (None, zmq.curve_keypair()):
        other = dealer(run.directory, keys)
        with contextlib.suppress(zmq.Again):
            for _ in range(200):
                other.send_multipart(mutated(rng))
        other.close()


def with_a_valid_key(run: WholeRun, rng: random.Random) -> None:
    """From a second connection of the trainer's, which never says a hello that is right."""
    keys = load_keys(run.directory, "trainer-0")
    other = dealer(run.directory, (keys.public, keys.secret))
    flood(other, rng)
    other.close(linger=5000)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("attack", [raw, with_a_valid_key])
def test_a_run_goes_on_through_ten_thousand_wrong_frames(start: Start, attack):
    run = start("experiment=fake", "number_of_steps=1000000", "backend.step_s=0.05")
    run.until_step(2, limit_s=120)
    orchestrator = psutil.Process(run.find("orchestrator").pid)
    resident = []
    for seed in (1, 2):
        attack(run, random.Random(seed))
        run.until_step(run.status()["step"] + 3, limit_s=120)
        resident.append(orchestrator.memory_info().rss)
    assert resident[1] - resident[0] < GROWTH_BYTES
    assert "dropped as malformed" in run.directory.log("orchestrator").read_text()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.summary()["restarts"] == {}
    assert (run.summary()["rollouts"]["failed"], run.rows("alerts")) == (0, [])
    assert run.left_after(30) == []
    assert replay(journal_lines(run.directory.journal)).disagreement is None
