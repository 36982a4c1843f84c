"""What only real parts can show: the engine's own process dies, the port is somebody else's."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from telescope.inference.vllm.engine_health import SEGMENTS
from telescope.runlog import temporary
from tests.run.conftest import Start, WholeRun

LIMIT_S = 10.0


VICTIMS = ("orchestrator", "server-0", "engine", "trainer-0", "worker-0", "supervisor", "Ctrl-C")


def process_of(run: WholeRun, victim: str) -> psutil.Process:
    if victim in ("supervisor", "Ctrl-C"):
        return psutil.Process(run.process.pid)
    if victim != "engine":
        return run.find(victim)
    engines = [child for child in run.find("server-0").children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    assert engines, "the engine has no process of its own"
    return engines[0]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", VICTIMS)
def test_whatever_is_killed_a_run_with_real_parts_is_over_within_10_s_and_says_why(start: Start, victim: str):
    """vLLM and FSDP at work. Where a server is started again: test_recovery.py."""
    once = "cluster.max_server_restarts=0"
    run = start("experiment=reverse_letters", "inference.http=false", "number_of_steps=10000", once)
    run.until_step(2, limit_s=300)
    named = "server-0" if victim == "engine" else victim
    killed = process_of(run, victim)
    run.remember()
    begun = time.monotonic()
    killed.send_signal(signal.SIGINT if victim == "Ctrl-C" else signal.SIGKILL)
    code = run.wait()
    left = run.left_after(60)
    took = time.monotonic() - begun
    if victim == "supervisor":  # nobody is left to sweep the engine's folder of sockets: the next run does
        left = [each for each in left if not Path(each).name.startswith(temporary.PREFIX)]
    assert left == []
    assert took < LIMIT_S
    if victim in ("supervisor", "Ctrl-C"):
        assert code == (-signal.SIGKILL if victim == "supervisor" else 130)
        return
    assert code == 70
    said = run.said()
    log = run.directory.log(named)
    assert f"The run failed: {named}" in said
    assert "SIGKILL" in said
    assert str(log) in said
    assert all(line in said for line in log.read_text().splitlines()[-1:])  # a worker may have logged nothing
    if victim != "orchestrator":
        assert run.summary()["ok"] is False


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("when", ["serving", "starting"])
def test_a_killed_server_of_two_workers_leaves_no_shared_memory(start: Start, when: str):
    """By which vLLM's processes talk where a server has several cards; a signal leaves them no time to remove it."""
    before = shared_by_engines()
    two = ("cluster.inference_num_workers=2", "inference.tensor_parallel_size=2", "inference.http=false")
    run = start("experiment=reverse_letters", *two, "number_of_steps=4")
    run.until(lambda: bool(shared_by_engines() - before), "at the engine's start", limit_s=300)
    if when == "serving":
        run.until_step(1, limit_s=300)
        first = shared_by_engines() - before
        assert len(first) > 2
    process_of(run, "server-0").kill()
    code = run.wait(300)
    assert code == (0 if when == "serving" else 70), run.said()  # nothing is started again before all have been there
    if when == "serving":
        assert run.summary()["restarts"] == {"server-0": 1}
    left = shared_by_engines() - before
    if when == "starting":  # what vLLM's library for CPUs makes is seen once the engine is there
        left = {name for name in left if name.startswith("psm_")}
    assert not left


def shared_by_engines() -> set[str]:
    return {file.name for file in Path("/dev/shm").iterdir() if f"/dev/shm/{file.name}".startswith(SEGMENTS)}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_environments_of_other_temperatures_are_trained_as_exactly_as_one(start: Start):
    """Synchronous, so that each step trains what its own weights have sampled: in float32 both sides agree to 1e-6."""
    own = ("environments.countdown.temperature=0.6", "environments.countdown.max_tokens=8")
    two = ("experiment=reverse_letters", "env=[reverse_letters,countdown]", "orchestrator.max_async_rollout=0", *own)
    run = start(*two, "inference.http=false", "number_of_steps=3")
    assert run.wait(300) == 0, run.said()
    assert all(row["metrics"]["logprob_difference"] < 1e-5 for row in run.rows("step_metrics"))
    scored = [row for row in run.rows("rollouts") if row["status"] == "scored"]
    assert {(row["environment"], row["temperature"]) for row in scored} == {("reverse_letters", 1.0), ("countdown", 0.6)}
    assert longest_answer(scored, "countdown") == 8 < longest_answer(scored, "reverse_letters")


def longest_answer(scored: list[dict[str, Any]], label: str) -> int:
    return max(row["completion_tokens"] for row in scored if row["environment"] == label)


def test_a_taken_port_is_said_before_the_engine_starts(start: Start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run = start("experiment=reverse_letters", f"inference.base_port={port}")
        assert run.wait() == 70
    said = run.said()
    assert f"port {port} of 127.0.0.1 is taken: set inference.base_port={port} to a free one" in said
    assert run.left_after(30) == []
