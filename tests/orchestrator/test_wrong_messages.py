"""A real orchestrator and hub, and valid peers that say well-formed nonsense: alerts are written, and the run goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from telescope.algorithms.rloo import RLOO
from telescope.backends.fake import Fake
from telescope.config.run import RunConfig
from telescope.config.sections import ClusterSettings, EnvironmentEntry, OrchestratorSettings, RolloutSettings
from telescope.flow.core import Core
from telescope.orchestrator.batch import Recipe
from telescope.orchestrator.loop import Orchestrator, RunOutcome
from telescope.orchestrator.main import make_flow_settings
from telescope.orchestrator.peers import FencedServers, Peers
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.weight_coordinator import UpdateRules
from telescope.records import EnvironmentCard, RolloutOrder, Sampling, WeightManifest
from telescope.runlog.journal import Journal
from telescope.runlog.layout import RunDirectory
from telescope.runlog.reader import rows
from telescope.runlog.writer import RunLog
from telescope.wire import messages as m
from telescope.wire.hub import Hub
from telescope.wire.link import Link, LinkLost
from telescope.wire.peer_events import Delivery
from telescope.wire.security import make_keys
from telescope.wire.supervisor_channel import SupervisorChannel

STEPS = 8
PROMPT = np.array([5, 6], np.int32)
WORKERS, SERVERS, TRAINER = ("worker-0", "worker-1"), ("server-0", "server-1"), "trainer-0"


def config() -> RunConfig:
    return RunConfig(
        environments={"task": EnvironmentEntry(name="countdown")},
        algorithm=RLOO(),
        backend=Fake(),
        orchestrator=OrchestratorSettings(prompts_batch_size_for_trainer=2, max_concurrent_prompts_per_server=1),
        rollout=RolloutSettings(group_size=4, max_attempts=20, retry_backoff_s=0),
        cluster=ClusterSettings(inference_num_workers=2, trainer_num_workers=1, env_num_workers=2),
        number_of_steps=STEPS,
    )


class Peer:
    """One process's end of the wire. `nonsense()` says whether to say something wrong now, `turn` which wrong thing: each
    in its turn, so that none is left out by chance. `playing` is shared by all peers: who plays which attempt just now."""

    def __init__(self, link: Link, seed: int, share: float, playing: dict[tuple[int, int], str]) -> None:
        self.link, self.random, self.share, self.playing = link, Random(seed), share, playing
        self.turns: Counter[str] = Counter()
        self.version = 0
        self.waiting: dict[str, tuple[Delivery, RolloutOrder]] = {}
        self.questions = count()

    def nonsense(self) -> bool:
        return self.random.random() < self.share

    def turn(self, kind: str, choices: Sequence[Any]) -> Any:
        self.turns[kind] += 1
        return choices[self.turns[kind] % len(choices)]

    async def live(self) -> None:
        try:
            while True:
                delivery = await self.link.received()
                if isinstance(delivery.body, m.Stop):
                    return
                self.take(delivery)
        except LinkLost:
            return

    def take(self, delivery: Delivery) -> None:
        match delivery.body:
            case m.RunRollout(order=order):
                self.ordered(delivery, order)
            case m.Completion() | m.GenerateFailed():
                self.sampled(delivery)
            case m.Generate():
                self.generate(delivery)
            case m.PrepareWeights(manifest=manifest):
                self.link.send(m.WeightsReady(self.version, manifest.version, "", 0.0), answers=delivery)
            case m.CommitWeights(version=version):
                self.version = version
                self.link.send(m.WeightsReady(version, None, "sum", 0.0), answers=delivery)
            case m.TrainStep(step=step):
                self.link.send(m.StepReport(step, {"loss": 0.5}, {}), answers=delivery)
            case m.PublishWeights(version=version):
                manifest = WeightManifest(version, "shared_memory", "nowhere", (), 0, "sum")
                self.link.send(m.WeightsPublished(version, manifest, 0.0), answers=delivery)

    # ---- a worker

    def ordered(self, delivery: Delivery, order: RolloutOrder) -> None:
        self.playing[order.rollout_id, order.attempt] = self.link.name
        if self.nonsense():
            self.misanswer(delivery, order)
            return
        name = f"{self.link.name}/{next(self.questions)}"
        self.waiting[name] = delivery, order
        ask = m.Generate(name, order.rollout_id, order.attempt, 0, Sampling(1.0, 2, 1))
        self.link.send(ask, (PROMPT,))
        if self.nonsense():
            self.misask(ask)

    def misask(self, ask: m.Generate) -> None:
        wrong = self.turn(
            "ask", [ask, msgspec.structs.replace(ask, rollout_id=10**9), msgspec.structs.replace(ask, request_id="x" * 10**6)]
        )
        self.link.send(wrong, (PROMPT,))
        self.link.send(msgspec.structs.replace(ask, request_id=ask.request_id + "b", rollout_id=ask.rollout_id ^ 1), (PROMPT,))
        self.link.send(m.Abort("never heard of"))
        self.link.send(m.GenerationEnded(10**9, 0))
        other = next(name for name in WORKERS if name != self.link.name)
        for theirs, attempt in [played for played, worker in self.playing.items() if worker == other]:
            self.link.send(m.GenerationEnded(theirs, attempt))
            stolen = msgspec.structs.replace(ask, request_id=f"{ask.request_id}/{theirs}", rollout_id=theirs, attempt=attempt)
            self.link.send(stolen, (PROMPT,))
        for number in range(int(ask.request_id.rpartition("/")[2]) + 8):  # some of these are in flight now
            self.link.send(m.Abort(f"{other}/{number}"))

    def misanswer(self, delivery: Delivery, order: RolloutOrder) -> None:
        self.playing.pop((order.rollout_id, order.attempt), None)
        if self.turn("misanswer", (False, True)):
            self.link.send(m.RolloutError(order.rollout_id ^ 1, order.attempt, "not mine"), answers=delivery)
            return
        change: dict[str, Any] = self.turn(
            "change",
            [
                {"rollout_id": order.rollout_id ^ 1}, {"rollout_id": 10**12}, {"attempt": 7}, {"reward": float("nan")}, {},
                {"prompt_tokens": 2**63}, {"completion_tokens": -1}, {"branch_lengths": ()}, {"branch_lengths": (3, 0)},
            ],
        )  # fmt: skip
        wrong = msgspec.structs.replace(done(order, self.version), **change)
        mask = 1 if change else 2
        self.link.send(wrong, trajectory(self.version, mask) if sum(wrong.branch_lengths) else EMPTY, delivery)

    def sampled(self, delivery: Delivery) -> None:
        asked = self.waiting.pop(delivery.body.request_id, None)
        if asked is None:
            return
        order = asked[1]
        self.playing.pop((order.rollout_id, order.attempt), None)
        if isinstance(delivery.body, m.GenerateFailed):
            self.link.send(m.RolloutError(order.rollout_id, order.attempt, "no tokens"), answers=asked[0])
        else:
            self.link.send(done(order, self.version), trajectory(self.version), asked[0])

    # ---- a server

    def generate(self, delivery: Delivery) -> None:
        good = m.Completion(delivery.body.request_id, "stop", 1, 0, 0.0, 0.1)
        arrays = np.array([7], np.int32), np.array([-0.5], np.float32), np.array([self.version], np.int32)
        if self.nonsense():
            self.link.send(
                m.EngineLoad(self.turn("load", [float("nan"), -0.1, 7.0, 0.99]), 1, self.random.randint(-1, 9), 2**62)
            )
            change = self.turn("completion", [{"request_id": "worker-0/1"}, {"request_id": "?"}, {"cached_tokens": 2**63}])
            self.link.send(msgspec.structs.replace(good, **change), arrays, delivery)
        else:
            self.link.send(good, arrays, delivery)


EMPTY = np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.float32), np.zeros(0, np.int32)


def trajectory(version: int, mask: int = 1) -> tuple[np.ndarray, ...]:
    return (
        np.array([5, 6, 7], np.int32), np.array([0, 0, mask], np.uint8),
        np.array([np.nan, np.nan, -0.5], np.float32), np.array([-1, -1, version], np.int32),
    )  # fmt: skip


def done(order: RolloutOrder, version: int) -> m.RolloutResult:
    return m.RolloutResult(
        rollout_id=order.rollout_id, attempt=order.attempt, reward=float(order.sample % 2), metrics={}, branch_lengths=(3,),
        prompt_tokens=2, completion_tokens=1, turns=1, finish_reason="stop", temperature=1.0, prompt_text="",
        completion_text="", golden_answers=(), started_ns=1, generated_ns=2, scored_ns=3,
    )  # fmt: skip


@asynccontextmanager
async def orchestrating(folder: Path) -> AsyncIterator[tuple[Orchestrator, RunDirectory]]:
    settings, run = config(), RunDirectory.create(folder / "run")
    make_keys(run, ("orchestrator", *WORKERS, *SERVERS, TRAINER))
    log, journal = RunLog(run, "orchestrator"), Journal(run.journal)
    recorder, peers = Recorder(run, log, None, STEPS), Peers.from_config(settings.cluster)
    hub = await Hub.open(run, run="r", attempt="a", config_hash="c")
    recipe = Recipe(settings.algorithm, settings.rollout.group_size, settings.rollout.max_tokens)
    orchestrator = Orchestrator(
        settings,
        hub=hub,
        core=Core(make_flow_settings(settings)),
        peers=peers,
        servers=FencedServers(SupervisorChannel(), hub, peers, 0),
        journal=journal,
        recorder=recorder,
        recipe=recipe,
        updates=UpdateRules(20.0, 1),
    )
    try:
        yield orchestrator, run
    finally:
        await hub.close("over", timeout_s=1.0)
        log.close()
        journal.close()


async def join(
    run: RunDirectory, name: str, seed: int, share: float, playing: dict[tuple[int, int], str], kind: type[Peer] = Peer
) -> Peer:
    return kind(await asyncio.to_thread(Link.connect, run, hello(name, name, 1), 20.0), seed, share, playing)


def hello(name: str, incarnation: str, pid: int) -> m.Hello:
    role: Any = name.rpartition("-")[0]
    return m.Hello(
        role=role, name=name, run="r", attempt="a", incarnation=incarnation, config_hash="c", pid=pid, host="here",
        capacity={"worker": 3, "server": 2, "trainer": 1}[role],
        environments=(EnvironmentCard("task", {"train": 100, "eval": 5}, "d"),) if role == "worker" else (),
    )  # fmt: skip


async def play(folder: Path, share: float, trainer: type[Peer] = Peer) -> tuple[RunOutcome, RunDirectory, Orchestrator]:
    async with orchestrating(folder) as (orchestrator, run):
        names = (*WORKERS, *SERVERS, TRAINER)
        playing: dict[tuple[int, int], str] = {}
        running = asyncio.create_task(orchestrator.run())
        kinds: Callable[[str], type[Peer]] = lambda name: trainer if name == TRAINER else Peer  # noqa: E731
        peers = [await join(run, name, seed, share, playing, kinds(name)) for seed, name in enumerate(names)]
        lives = [asyncio.create_task(peer.live()) for peer in peers]
        outcome = await asyncio.wait_for(running, 60)
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(peer.link.close) for peer in peers))
    return outcome, run, orchestrator


async def test_a_run_goes_on_through_a_flood_of_wrong_messages(tmp_path: Path):
    outcome, run, orchestrator = await play(tmp_path, share=0.5)
    assert outcome.reason == f"all {STEPS} steps are trained"
    alerts = [row["message"] for row in rows(run, "alerts")]
    for words in (
        "is in flight already", "plays on worker-", "more than 200 characters", "Abort was ignored",
        "with a RolloutResult of rollout",
        "with a RolloutError of rollout", "it names request ?", "cached tokens", "reward is nan", "mask", "no branch",
    ):  # fmt: skip
        assert any(words in alert for alert in alerts), words
    assert sum(orchestrator.violations.counts.values()) > 50


async def test_a_run_without_nonsense_has_no_alerts(tmp_path: Path):
    outcome, _, orchestrator = await play(tmp_path, share=0.0)
    assert outcome.ok
    assert not orchestrator.violations.counts


class Ahead(Peer):
    def take(self, delivery: Delivery) -> None:
        if isinstance(delivery.body, m.TrainStep):
            self.link.send(m.StepReport(9, {}, {}), answers=delivery)
        else:
            super().take(delivery)


async def test_a_trainer_that_reports_another_step_ends_the_run_with_a_sentence(tmp_path: Path):
    outcome, _, _ = await play(tmp_path, share=0.0, trainer=Ahead)
    assert outcome.reason == "trainer-0 says that step 9 is done, and step 1 is in training"
    assert outcome.exit_code == 70
