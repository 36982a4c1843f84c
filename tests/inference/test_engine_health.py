"""Whatever is asked of an engine whose process was killed says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from telescope.inference.engine import EngineDead, WeightsRefused
from telescope.inference.vllm import engine_health
from telescope.inference.vllm.engine_health import REAPED_S, EngineProcesses, raise_when_dead
from telescope.runlog import temporary


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
    watcher = EngineProcesses()
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
    monkeypatch.setattr(engine_health, "ALONE_S", 60.0 if follows else 0.1)
    watcher, (here, there) = EngineProcesses(), multiprocessing.Pipe()
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
    watcher, (here, there) = EngineProcesses(), multiprocessing.Pipe()
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


def engine_with_segments(ready: Connection) -> None:
    """One that Python makes, as vLLM does for its queues, and one by a library, mapped."""
    python = SharedMemory(create=True, size=64)
    file, library = tempfile.mkstemp(prefix="vllm_dist_", dir="/dev/shm")
    os.truncate(file, 64)
    with mmap.mmap(file, 64):
        ready.send(["/dev/shm/" + python.name, library])
        signal.pause()


@pytest.mark.asyncio
@pytest.mark.parametrize("watched", [True, False])
async def test_shared_memory_of_a_killed_engine_is_removed(watched: bool) -> None:
    """Of one that was killed in its start, too: what Python made was noted when it was made."""
    resource_tracker.ensure_running()  # ours, and none of the engine's, which would remove what Python made in its own time
    register = resource_tracker.register
    watcher, (here, there) = EngineProcesses(), multiprocessing.Pipe()
    watcher.expect_new()
    process = multiprocessing.get_context("fork").Process(target=engine_with_segments, args=(there,))
    process.start()
    python, library = map(Path, here.recv())
    others = None
    if watched:
        watcher.watch_new()
        assert resource_tracker.register is register
        others = Path("/dev/shm", SharedMemory(create=True, size=64).name)  # of this process, once the engine is there
    process.kill()
    process.join()
    if watched:
        watcher.stop_watching()
    assert python.exists()
    watcher.end_all(5)
    assert not python.exists()
    assert library.exists() != watched
    if others is not None:
        assert others.exists()
        others.unlink()
    assert resource_tracker.register is register
    library.unlink(missing_ok=True)


SERVER = """
import multiprocessing, os, signal, sys
from telescope.inference.vllm.engine_health import EngineProcesses
from telescope.inference.vllm.patches import die_with_parent
from tests.inference.test_engine_health import engine_with_segments

def engine(ready):
    die_with_parent()
    engine_with_segments(ready)

watcher, (here, there) = EngineProcesses(), multiprocessing.Pipe()
watcher.expect_new()
process = multiprocessing.get_context("fork").Process(target=engine, args=(there,))
process.start()
print(*here.recv(), flush=True)
for child in multiprocessing.active_children():
    watcher._segments.note_of(child.pid)
print("noted", flush=True)
signal.pause()
"""


def test_shared_memory_of_a_killed_server_goes_with_the_next_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The launcher sweeps when the run ends, and each new server before it starts."""
    base = Path(tempfile.mkdtemp(prefix="t-"))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(base)}, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        segments = [Path(name) for name in server.stdout.readline().split()]
        assert server.stdout.readline() == "noted\n"
        engines = psutil.Process(server.pid).children(recursive=True)
        temporary.sweep()
        assert all(segment.exists() for segment in segments)
        server.kill()
        for engine in engines:  # Python's tracker of its segments among them, as the launcher ends it
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()
        psutil.wait_procs(engines, timeout=30)
    assert any(segment.exists() for segment in segments)
    temporary.sweep()
    assert not [segment for segment in segments if segment.exists()]
    assert list(base.iterdir()) == []
    shutil.rmtree(base)


class Ends:
    """An engine that is asked for what its worker did not live to do."""

    def __init__(self, error: Exception, dead: str) -> None:
        self._error, self._dead = error, dead

    async def dead(self) -> str:
        await asyncio.sleep(0.05 if self._dead else 60)
        return self._dead

    @raise_when_dead
    async def ask(self) -> None:
        raise self._error


@pytest.mark.vllm
@pytest.mark.asyncio
async def test_an_order_that_fails_for_the_engines_end_tells_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Exception("Call to collective_rpc method failed: cancelled")
    with pytest.raises(EngineDead, match=r"^it ended \(Call to collective_rpc method failed: cancelled\)$"):
        await Ends(failed, "it ended").ask()
    monkeypatch.setattr(engine_health, "TOLD_S", 0.05)
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
        "prepare": "EngineDead: the engine's workers have not answered for 7 s (weights 1; weight_sync.update_timeout_s=3 s "
        "and 4 s to break off): they hang",
        "discard": "EngineDead: the engine has not answered the order to forget weights 1 within 2 s: it hangs",
        "sleep": "EngineDead: the engine did not fall asleep within weight_sync.update_timeout_s=3 s: a request runs longer, "
        "or the engine hangs",
        "commit": "EngineDead: weights version 2 could not be loaded (not within weight_sync.update_timeout_s=3 s): the "
        "engine may hold a mixture and must end",
    }
    waited = [seconds for _, seconds in told.values()]
    assert all(seconds >= limit for seconds, limit in zip(waited, (7.0, 2.0, 3.0, 3.0), strict=True))
