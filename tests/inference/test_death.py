"""Whatever is asked of an engine whose process was killed says how it ended."""

from __future__ import annotations

import asyncio
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from telescope.inference import children, death
from telescope.inference.children import REAPED_S, Children
from telescope.inference.death import tells_its_death
from telescope.inference.engine import EngineDead, WeightsRefused


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_each_call_to_a_killed_engine_tells_the_signal(vllm_folders: dict[str, Path], tmp_path: Path) -> None:
    """In a process of its own: vLLM's metrics are its process's, and other tests read those of the shared engine."""
    command = [sys.executable, "-m", "tests.inference.killed_engine", str(vllm_folders["old"]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    dead = told.pop("dead")
    assert "was killed by SIGKILL" in dead
    assert len(told) == 7
    assert told == dict.fromkeys(told, f"EngineDead: {dead}")


def hang() -> None:
    signal.pause()


@pytest.mark.asyncio
async def test_an_exit_code_that_another_thread_is_slow_to_write_down_is_waited_for() -> None:
    watcher = Children()
    process = multiprocessing.get_context("fork").Process(target=hang)
    process.start()
    watcher.watch_new()
    popen = process._popen  # type: ignore[attr-defined]
    poll, looks = popen.poll, []

    def late(flag: int = os.WNOHANG) -> int | None:  # what Popen.poll answers while another thread holds the status
        looks.append(flag)
        return None if len(looks) < 12 else poll(flag)

    popen.poll = late
    process.kill()
    async with asyncio.timeout(REAPED_S + 30):
        assert "was killed by SIGKILL" in await watcher.first_end()
    assert len(looks) >= 12
    watcher.stop_watching()
    watcher.end_all(5)


def engine_with_worker(ready: Connection, follows: bool) -> None:
    """A process with one of its own, called as vLLM's; it ends with it, as vLLM does, or lives on."""
    worker = os.fork()
    if not worker:
        Path("/proc/self/comm").write_text("VLLM::Worker_0")
        ready.send(os.getpid())
        signal.pause()
    if follows:
        os.waitpid(worker, 0)
        os._exit(3)
    signal.pause()


@pytest.mark.asyncio
@pytest.mark.parametrize("follows", [True, False])
async def test_a_worker_that_was_lost_is_named(monkeypatch: pytest.MonkeyPatch, follows: bool) -> None:
    """vLLM's own words of it are `Call to collective_rpc method failed: cancelled`."""
    monkeypatch.setattr(children, "ALONE_S", 60.0 if follows else 0.1)
    watcher, (here, there) = Children(), multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=engine_with_worker, args=(there, follows))
    process.start()
    worker = here.recv()
    watcher.watch_new()
    os.kill(worker, signal.SIGKILL)
    name = f"VLLM::Worker_0 (pid {worker})"
    async with asyncio.timeout(60):
        said = await watcher.first_end()
    if follows:
        assert f"(pid {process.pid}) ended with exit code 3, its worker {name} before it: " in said
    else:
        assert said == f"the engine's worker {name} ended; nothing can be served any more"
    watcher.stop_watching()
    watcher.end_all(0.1)


@pytest.mark.asyncio
@pytest.mark.parametrize("follows", [True, False])
async def test_the_workers_of_a_killed_engine_are_no_news(follows: bool) -> None:
    """Whichever of them is seen to end first."""
    watcher, (here, there) = Children(), multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=engine_with_worker, args=(there, follows))
    process.start()
    worker = here.recv()
    watcher.watch_new()
    process.kill()
    os.kill(worker, signal.SIGKILL)
    async with asyncio.timeout(60):
        said = await watcher.first_end()
    assert said == f"the engine's process (pid {process.pid}) was killed by SIGKILL; nothing can be served any more"
    watcher.stop_watching()
    watcher.end_all(5)


def engine_with_segment(ready: Connection) -> None:
    file, name = tempfile.mkstemp(prefix="psm_", dir="/dev/shm")
    os.truncate(file, 64)
    with mmap.mmap(file, 64):
        ready.send(name)
        signal.pause()


@pytest.mark.asyncio
async def test_shared_memory_of_a_killed_engine_is_removed() -> None:
    watcher, (here, there) = Children(), multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=engine_with_segment, args=(there,))
    process.start()
    segment = Path(here.recv())
    watcher.watch_new()
    process.kill()
    async with asyncio.timeout(60):
        await watcher.first_end()
    assert segment.exists()
    watcher.stop_watching()
    watcher.end_all(5)
    assert not segment.exists()


class Ends:
    """An engine that is asked for what its worker did not live to do."""

    def __init__(self, error: Exception, dead: str) -> None:
        self._error, self._dead = error, dead

    async def dead(self) -> str:
        await asyncio.sleep(0.05 if self._dead else 60)
        return self._dead

    @tells_its_death
    async def ask(self) -> None:
        raise self._error


@pytest.mark.vllm
@pytest.mark.asyncio
async def test_an_order_that_fails_for_the_engines_end_tells_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Exception("Call to collective_rpc method failed: cancelled")
    with pytest.raises(EngineDead, match=r"^it ended \(Call to collective_rpc method failed: cancelled\)$"):
        await Ends(failed, "it ended").ask()
    monkeypatch.setattr(death, "TOLD_S", 0.05)
    with pytest.raises(Exception, match="cancelled") as raised:
        await Ends(failed, "").ask()
    assert raised.value is failed
    with pytest.raises(WeightsRefused):  # a sentence of ours is passed on at once
        await Ends(WeightsRefused("no"), "it ended").ask()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_an_engine_that_hangs_in_prepare_abort_sleep_or_commit_is_given_up_at_its_deadline(
    vllm_folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its process is stopped, not killed: nothing says that it is gone, and nobody waits for it longer than promised."""
    command = [sys.executable, "-m", "tests.inference.hung_engine", str(vllm_folders["old"]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert {name: said for name, (said, _) in told.items()} == {
        "prepare": "EngineDead: the engine's workers have not answered for 7 s (weights 1)",  # 3 s, and twice 2 to break off
        "discard": "EngineDead: the engine has not answered the order to forget weights 1 within 2 s: it hangs",
        "sleep": "EngineDead: the engine did not fall asleep within weight_sync.update_timeout_s=3 s: a request runs longer, "
        "or the engine hangs",
        "commit": "EngineDead: weights version 2 could not be loaded (TimeoutError): the engine may hold a mixture and must "
        "end",
    }
    waited = [seconds for _, seconds in told.values()]
    assert all(seconds >= limit for seconds, limit in zip(waited, (7.0, 2.0, 3.0, 3.0), strict=True))
