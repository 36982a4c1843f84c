"""What the orchestrator's thread does between a burst of answers and the last of the next requests that it places.

    python -m benchmarks.flow.burst [--requests 256] [--tokens 640] [--waves 10]

The real orchestrator (hub, core, journal, run directory) and one other process that plays worker, server and trainer: the
server answers when all requests of a wave are there, the worker at once. Prints one line of JSON: processor milliseconds of the
orchestrator's thread from the first answer of a wave until the last request of the next one is placed, and until all is done,
as medians over waves. It is the processor time of one thread, so that other work on the machine moves it little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.flow.hub_roundtrip import ATTEMPT, CONFIG, DEADLINE_S, RUN, hello
from telescope.compose.load import load_points, places_for
from telescope.config.run import RunConfig
from telescope.flow.core import Core
from telescope.orchestrator.batch import Recipe
from telescope.orchestrator.loop import Orchestrator
from telescope.orchestrator.main import make_flow_settings
from telescope.orchestrator.peers import FencedServers, Peers
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.relay import Relay
from telescope.orchestrator.weight_coordinator import UpdateRules
from telescope.records import EnvironmentCard, Sampling, WeightManifest
from telescope.runlog.journal import Journal
from telescope.runlog.layout import RunDirectory
from telescope.runlog.writer import RunLog
from telescope.wire import messages as m
from telescope.wire.hub import Hub
from telescope.wire.link import Link
from telescope.wire.security import make_keys
from telescope.wire.supervisor_channel import SupervisorChannel

NAMES = ("worker-0", "server-0", "trainer-0")
GROUP = 8
REST_S = 0.5


def config(requests: int, waves: int) -> RunConfig:
    groups = requests // GROUP
    overrides = [
        "experiment=fake", "cluster.device=cpu", "cluster.env_num_workers=1", f"number_of_steps={waves}",
        f"rollout.group_size={GROUP}", f"orchestrator.prompts_batch_size_for_trainer={groups}",
        f"orchestrator.max_concurrent_prompts_per_server={groups}", "orchestrator.max_async_rollout=2",
        "orchestrator.discard_group_zero_advantage=false", "trainer.seq_len=1024", "cluster.inference_num_workers=1",
    ]  # fmt: skip
    (point,) = load_points(overrides, places_for(None), {})
    assert point.config is not None, point.problems
    return point.config


# ---- the other process -----------------------------------------------------------------------------------------------


def others(folder: str, requests: int, tokens: int) -> None:
    asyncio.run(_others(RunDirectory(Path(folder)), requests, tokens))


async def _others(run: RunDirectory, requests: int, tokens: int) -> None:
    links = {}
    for name in NAMES:
        card = (EnvironmentCard("countdown", {"train": 10_000}, "d"),) if name == "worker-0" else ()
        greeting = msgspec.structs.replace(hello(name, 4 * requests), environments=card)
        links[name] = await asyncio.to_thread(Link.connect, run, greeting, DEADLINE_S)
    lives = [work(links["worker-0"], tokens), serve(links["server-0"], requests, tokens), train(links["trainer-0"])]
    await asyncio.gather(*lives)
    for link in links.values():
        await asyncio.to_thread(link.close)


async def work(link: Link, tokens: int) -> None:
    """Every order asks once, and is answered with what came."""
    prompt, orders = np.zeros(tokens // 5, np.int32), {}
    while not isinstance((delivery := await link.received()).body, m.Stop):
        match delivery.body:
            case m.RunRollout(order=order):
                request = f"w/{order.rollout_id}.{order.attempt}"
                orders[request] = order, delivery
                link.send(m.Generate(request, order.rollout_id, order.attempt, 0, Sampling(1.0, tokens, 0)), (prompt,))
            case m.Completion(request_id=request):
                order, asked = orders.pop(request)
                link.send(*done(order, prompt, delivery.arrays), answers=asked)


def done(order: Any, prompt: np.ndarray, sampled: Any) -> tuple[m.RolloutResult, tuple[np.ndarray, ...]]:
    before, length = len(prompt), len(prompt) + len(sampled[0])
    body = m.RolloutResult(
        rollout_id=order.rollout_id, attempt=order.attempt, reward=float(order.sample % 2), metrics={"exact": 1.0},
        branch_lengths=(length,), prompt_tokens=before, completion_tokens=len(sampled[0]), turns=1, finish_reason="length",
        temperature=1.0, prompt_text="p" * before, completion_text="a" * len(sampled[0]), golden_answers=("a",),
        started_ns=1, generated_ns=2, scored_ns=3,
    )  # fmt: skip
    mask = np.repeat(np.array([0, 1], np.uint8), (before, len(sampled[0])))
    ids, logprobs, versions = (
        np.concatenate([np.full(before, fill, array.dtype), array])
        for fill, array in zip((0, np.nan, -1), sampled, strict=True)
    )
    return body, (ids, mask, logprobs, versions)


async def serve(link: Link, requests: int, tokens: int) -> None:
    """All requests of a wave are answered together, once nothing has come for a while."""
    waiting: list[Any] = []
    version, checksum = 0, ""

    def answer() -> None:
        arrays = np.zeros(tokens, np.int32), np.full(tokens, -1.0, np.float32), np.full(tokens, version, np.int32)
        for asked in waiting:
            completion = m.Completion(asked.body.request_id, "length", tokens, 0, 0.0, 0.0)
            link.send(completion, arrays, answers=asked)
        waiting.clear()

    timer: asyncio.TimerHandle | None = None
    while not isinstance((delivery := await link.received()).body, m.Stop):
        match delivery.body:
            case m.Generate():
                waiting.append(delivery)
                if timer is not None:
                    timer.cancel()
                timer = asyncio.get_running_loop().call_later(REST_S, answer)
            case m.PrepareWeights(manifest=manifest):
                checksum = manifest.checksum
                link.send(m.WeightsReady(version, manifest.version, checksum, 0.0), answers=delivery)
            case m.CommitWeights(version=version):
                link.send(m.WeightsReady(version, None, checksum, 0.0), answers=delivery)


async def train(link: Link) -> None:
    while not isinstance((delivery := await link.received()).body, m.Stop):
        match delivery.body:
            case m.TrainStep(step=step):
                link.send(m.StepReport(step=step, metrics={"loss": 0.0}, timings={}), answers=delivery)
            case m.PublishWeights(version=version):
                manifest = WeightManifest(version, "shared_memory", "nowhere", (), 0, f"crc32:{version}")
                link.send(m.WeightsPublished(version, manifest, 0.0), answers=delivery)


# ---- the orchestrator ------------------------------------------------------------------------------------------------


class Watch:
    """The thread's processor time at the first answer and at the last placing of each wave."""

    def __init__(self, relay: Relay) -> None:
        self.waves: list[dict[str, float]] = []
        self._place, self._answer = relay.place, relay.answer
        relay.place, relay.answer = self.place, self.answer  # type: ignore[method-assign, assignment]
        self._at = 0.0

    def answer(self, *given: Any) -> Any:
        if time.monotonic() - self._at > REST_S * 0.8:
            now = time.thread_time()
            if self.waves:
                self.waves[-1]["all"] = now - self.waves[-1]["first"]
            self.waves.append({"first": now})
        return self._answer(*given)

    def place(self, *given: Any) -> Any:
        placed = self._place(*given)
        self._at = time.monotonic()
        if self.waves:
            self.waves[-1]["placed"] = time.thread_time() - self.waves[-1]["first"]
        return placed


async def orchestrate(folder: Path, given: argparse.Namespace) -> list[dict[str, float]]:
    settings, run = config(given.requests, given.waves), RunDirectory.create(folder / "run")
    make_keys(run, ("orchestrator", *NAMES))
    log, journal = RunLog(run, "orchestrator"), Journal(run.journal)
    recorder, peers = Recorder(run, log, None, given.waves), Peers.from_config(settings.cluster)
    hub = await Hub.open(run, run=RUN, attempt=ATTEMPT, config_hash=CONFIG)
    recipe = Recipe(settings.algorithm, GROUP, given.tokens, seq_len=settings.trainer.row_tokens)
    orchestrator = Orchestrator(
        settings, hub=hub, core=Core(make_flow_settings(settings)), peers=peers,
        servers=FencedServers(SupervisorChannel(), hub, peers, 0), journal=journal, recorder=recorder,
        recipe=recipe, updates=UpdateRules(DEADLINE_S, 1),
    )  # fmt: skip
    watch = Watch(orchestrator.relay)
    child = multiprocessing.get_context("spawn").Process(target=others, args=(str(run.path), given.requests, given.tokens))
    child.start()
    try:
        outcome = await orchestrator.run()
        if not outcome.ok:
            raise SystemExit(outcome.reason)
    finally:
        await hub.close("measured", timeout_s=5.0)
        log.close()
        journal.close()
        child.join(DEADLINE_S)
    return [wave for wave in watch.waves[1:] if len(wave) == 3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 256), ("tokens", 640), ("waves", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        waves = asyncio.run(orchestrate(Path(folder), given))
    medians = {name: round(statistics.median(wave[name] * 1e3 for wave in waves), 1) for name in ("placed", "all")}
    print(json.dumps({"waves": len(waves), "until_last_placed_ms": medians["placed"], "until_all_done_ms": medians["all"]}))


if __name__ == "__main__":
    main()
