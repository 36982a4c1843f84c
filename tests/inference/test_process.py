"""A server as a real process on a real wire: it serves, stops, and says why when it can't."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from telescope.algorithms.grpo import GRPO
from telescope.backends.fake import Fake
from telescope.config.model_facts import read_model_facts
from telescope.config.models import EMBEDDED
from telescope.config.run import RunConfig, config_hash, dump_run
from telescope.config.sections import ClusterSettings, EnvironmentEntry, InferenceSettings, ModelSettings
from telescope.records import Sampling
from telescope.runlog.identity import new_identity, read_identity, write_identity
from telescope.runlog.layout import RunDirectory
from telescope.weights.transports.shared_memory import SharedMemoryPublisher
from telescope.wire.hub import Hub
from telescope.wire.messages import (
    Body,
    CommitWeights,
    Completion,
    EngineLoad,
    Generate,
    PrepareWeights,
    WeightsReady,
)
from telescope.wire.peer_events import Delivery, Happening, PeerJoined, PeerLeft, PeerLost
from telescope.wire.security import make_keys

PATIENCE_S = 300.0
"""This machine may be busy: imports alone then take half a minute."""
PROMPT = np.arange(20, 30, dtype=np.int32)


class Bench:
    """The orchestrator's side of one server."""

    def __init__(self, hub: Hub, directory: RunDirectory, process: asyncio.subprocess.Process) -> None:
        self.hub, self.directory, self.process = hub, directory, process

    async def joined(self) -> PeerJoined:
        peer = await self.hub.next(PATIENCE_S)
        assert isinstance(peer, PeerJoined), peer
        return peer

    async def next(self) -> Happening | None:
        """What happens next, reports of the engine's load aside: these come when they come."""
        while True:
            happening = await self.hub.next(PATIENCE_S)
            if not (isinstance(happening, Delivery) and isinstance(happening.body, EngineLoad)):
                return happening

    async def ask(self, order: Body, *arrays: np.ndarray) -> Delivery:
        number = self.hub.send("server-0", order, arrays)
        answer = await self.next()
        assert isinstance(answer, Delivery), answer
        assert answer.answers == number
        return answer

    async def ended(self) -> tuple[int, str]:
        """Exit code and last line on stderr."""
        _, errors = await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        return self.process.returncode or 0, errors.decode().strip().splitlines()[-1]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def failure(self) -> str:
        return self.directory.failure("server-0").read_text().strip()


def generate(name: str = "r1") -> Generate:
    return Generate(request_id=name, rollout_id=0, attempt=0, turn=0, sampling=Sampling(1.0, 20, 3))


@asynccontextmanager
async def bench(
    folder: Path, program: tuple[str, ...] = ("-m", "telescope.inference"), **changes: object
) -> AsyncIterator[Bench]:
    settings = {"inference": InferenceSettings(engine="fake", http=False, max_model_len=64)} | changes
    config = RunConfig(
        environments={"countdown": EnvironmentEntry(name="countdown")}, algorithm=GRPO(), backend=Fake(), **settings
    )
    directory = RunDirectory.create(folder / "run")
    directory.config_json.write_text(dump_run(config))
    write_identity(directory, new_identity("server-test", datetime.now().astimezone(), config_hash(config)))
    identity = read_identity(directory)
    make_keys(directory, ["orchestrator", "server-0"])
    hub = await Hub.open(directory, run=identity.run_id, attempt=identity.attempt, config_hash=config_hash(config))
    arguments = [*program, "--run-dir", str(directory.path), "--name", "server-0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=environment, stderr=subprocess.PIPE)
    try:
        yield Bench(hub, directory, process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await hub.close("the test is over", timeout_s=0)


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


async def test_it_says_hello_serves_and_ends_on_stop(tmp_path: Path):
    async with bench(tmp_path) as here:
        hello = (await here.joined()).hello
        assert (hello.role, hello.name, hello.version, hello.capacity) == ("server", "server-0", 0, 32 * 8)
        assert hello.model == read_model_facts(
            ModelSettings(name="tiny"), EMBEDDED / "tiny", weights=False
        )  # a fake engine loads none
        answer = await here.ask(generate(), PROMPT)
        assert isinstance(answer.body, Completion)
        assert {len(array) for array in answer.arrays} == {answer.body.tokens}
        publisher = SharedMemoryPublisher(read_identity(here.directory).run_id)
        try:
            manifest = publisher.publish(1, [("w", np.ones(4, np.float32))])
            assert (await here.ask(PrepareWeights(manifest=manifest))).body.prepared == 1
            committed = (await here.ask(CommitWeights(version=1))).body
        finally:
            publisher.close()
        assert isinstance(committed, WeightsReady)
        assert (committed.version, committed.checksum) == (1, manifest.checksum)
        stopping = asyncio.create_task(here.hub.close("all steps are trained", timeout_s=5))
        code, _ = await here.ended()
        await stopping
        assert code == 0
        assert not here.directory.failure("server-0").exists()


async def test_sigterm_ends_it_with_143_and_a_goodbye(tmp_path: Path):
    async with bench(tmp_path) as here:
        await here.joined()
        here.process.send_signal(signal.SIGTERM)
        left = await here.next()
        assert isinstance(left, PeerLost | PeerLeft)
        code, said = await here.ended()
        assert code == 143
        assert said.endswith("interrupted by SIGTERM")


HANGS_IN_CLOSE = """
import asyncio, sys
from telescope.inference import main
from telescope.inference.fake import FakeEngine

class Hanging(FakeEngine):
    async def close(self):
        await asyncio.Event().wait()

main.FakeEngine, main.CLOSE_S = Hanging, 0.5
sys.exit(main.main())
"""


async def test_an_interrupted_server_that_closes_late_is_still_interrupted(tmp_path: Path):
    async with bench(tmp_path, ("-c", HANGS_IN_CLOSE)) as here:
        await here.joined()
        here.process.send_signal(signal.SIGTERM)
        code, said = await here.ended()
        assert code == 143
        assert said.endswith("server-0: it did not close within its deadline=0.5 s")
        assert not here.directory.failure("server-0").exists()


async def test_a_taken_port_is_told_in_words_before_anything_is_loaded(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        async with bench(tmp_path, inference=InferenceSettings(base_port=port)) as here:
            code, said = await here.ended()
            assert code == 1
            assert said == here.failure()
            assert said.startswith(f"server-0: port {port} of 127.0.0.1 is taken: set inference.base_port={port} to a free one")


async def test_a_missing_model_is_told_in_words(tmp_path: Path):
    async with bench(tmp_path, model=ModelSettings(name=str(tmp_path / "nowhere"))) as here:
        code, said = await here.ended()
        assert code == 1
        assert said == here.failure()
        assert "model.name=" in said
        assert "nowhere" in said


async def test_an_engine_that_does_not_start_in_time_ends_with_a_sentence_and_no_child(tmp_path: Path):
    """vLLM takes more than a second to be imported anywhere."""
    inference = InferenceSettings(http=False, max_model_len=64, cpu_kv_cache_mb=16)
    async with bench(tmp_path, inference=inference, cluster=ClusterSettings(placement_timeout_s=1)) as here:
        code, said = await here.ended()
        assert code == 70
        assert said == here.failure()
        assert said == "server-0: its engine did not start within cluster.placement_timeout_s=1 s"


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_a_killed_engine_ends_the_server_with_its_name_and_leaves_nothing(tmp_path: Path):
    inference = InferenceSettings(base_port=0, max_model_len=64, cpu_kv_cache_mb=16)
    async with bench(tmp_path, inference=inference) as here:
        await here.joined()
        answer = await here.ask(generate(), PROMPT)
        assert isinstance(answer.body, Completion)
        assert np.isfinite(answer.arrays[1]).all()
        await the_http_beside_it_answers(here)
        engines = [child for child in here.children() if child.status() != psutil.STATUS_ZOMBIE]
        assert len(engines) == 1
        engines[0].kill()
        lost = await here.next()
        assert isinstance(lost, PeerLost)
        code, said = await here.ended()
        assert code == 70
        assert said == here.failure()
        how = f"server-0: the engine's process (pid {engines[0].pid}) was killed by SIGKILL"
        assert said == f"{how}; nothing can be served any more"
        assert gone(engines, PATIENCE_S)


async def the_http_beside_it_answers(here: Bench) -> None:
    told = json.loads(here.directory.server("server-0").read_text())
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        models = await client.get(f"{told['url']}/models")
        assert models.json()["data"][0]["id"] == told["model"] == "tiny"
        assert "vllm:num_requests_running" in (await client.get(told["metrics"])).text


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_a_killed_server_takes_its_engine_along(tmp_path: Path):
    inference = InferenceSettings(http=False, max_model_len=64, cpu_kv_cache_mb=16)
    async with bench(tmp_path, inference=inference) as here:
        await here.joined()
        engines = here.children()
        assert engines
        here.process.kill()
        assert gone(engines, PATIENCE_S)
