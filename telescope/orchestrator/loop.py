"""The orchestrator's one loop: a message becomes an event, the core answers with commands, each command is executed.

Decide, then do, then record. Owns no decision (flow.core does), no array maths (batch.py), no socket detail (wire).
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from telescope.config.run import RunConfig
from telescope.exit_codes import COMPONENT_FAILED, ERROR, STOPPED
from telescope.flow import commands, events
from telescope.flow.core import Core
from telescope.flow.replay import encode_line
from telescope.orchestrator.batch import Recipe
from telescope.orchestrator.checkpoints import CheckpointCoordinator, SaveRules
from telescope.orchestrator.cpu_time import CpuTime
from telescope.orchestrator.executor import Executor
from telescope.orchestrator.peers import NAMED, FencedServers, Peers, ProtocolViolations, name_few
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.relay import Relay
from telescope.orchestrator.rollout_store import Rollout, RolloutStore
from telescope.orchestrator.sleep import SleepCoordinator
from telescope.orchestrator.training_health import find_end_reason
from telescope.orchestrator.weight_coordinator import UpdateRules, WeightCoordinator
from telescope.runlog.attempts import Lineage
from telescope.runlog.journal import Journal
from telescope.wire import messages
from telescope.wire.hub import Hub
from telescope.wire.peer_events import Delivery, Happening, PeerJoined, PeerLeft, PeerLost, PeerStuck

log = logging.getLogger(__name__)

TICK_S = 0.25
STATUS_S = 0.5
MAX_CAUSE_CHARACTERS = 2_000
REMOTE = "remote"
"""What a server is called that somebody else runs."""
WRITTEN_A_LOOK = 8
"""Scored rollouts written before the loop looks again whether a message has come: some milliseconds."""


@dataclass(frozen=True)
class RunOutcome:
    """How the run ended. `exit_code`: 0 done, 1 all steps are trained and the last checkpoint is lost, 70 a component failed
    for good, 75 stopped and saved, 128 + n interrupted by signal n."""

    ok: bool
    reason: str
    exit_code: int
    lost_checkpoint: int = 0
    """The last step, where all are trained and its checkpoint could not be written."""


class Orchestrator:
    def __init__(
        self,
        config: RunConfig,
        *,
        hub: Hub,
        core: Core,
        peers: Peers,
        servers: FencedServers,
        journal: Journal,
        recorder: Recorder,
        recipe: Recipe,
        updates: UpdateRules,
        saves: SaveRules | None = None,
        lineage: Lineage | None = None,
        rollouts: Iterable[Rollout] = (),
    ) -> None:
        """`lineage`: of this attempt; None: the first. `rollouts`: those that a checkpoint has kept."""
        self._config, self._hub, self._core = config, hub, core
        self._peers, self._servers = peers, servers
        self._journal, self._recorder, self._lineage = journal, recorder, lineage or Lineage(1)
        violations = self.violations = ProtocolViolations(recorder)
        store = self.store = RolloutStore()
        for rollout in rollouts:
            store.add(rollout)
        checkpoints = self.checkpoints = CheckpointCoordinator(
            hub,
            recorder,
            violations,
            peers.ranks,
            saves,
            find_last=lambda: core.last_step,
            find_leaving=lambda: core.leaving,
            find_time_left=lambda: core.give_up_at - self.now,
        )
        self.weights = WeightCoordinator(hub, recorder, violations, peers.ranks, updates, saving=lambda: checkpoints.stalled)
        dying = servers.find_dying if config.inference.sleep_while_training != "off" else None
        self.sleep = SleepCoordinator(hub, violations, updates.timeout_s, dying)
        self.relay = Relay(hub, store, recorder, violations)
        self.executor = Executor(
            hub,
            peers=peers,
            recorder=recorder,
            violations=violations,
            recipe=recipe,
            store=store,
            relay=self.relay,
            weights=self.weights,
            sleep=self.sleep,
            checkpoints=checkpoints,
        )
        self._started = time.monotonic()
        self._events: deque[events.AnyEvent] = deque()
        self._steps_done: dict[int, dict[str, messages.StepReport]] = {}
        self._next_tick = self._next_status = 0.0
        self._exit_code: int | None = None
        self._cpu_time = CpuTime(socket.gethostname())
        self.outcome: RunOutcome | None = None

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> RunOutcome:
        """Until the core says EndRun or a part of the run fails that nobody starts again."""
        try:
            while self.outcome is None:
                happening = await self._next()
                if happening is not None:
                    self._take(happening)
                self._look_at_the_clock()
                self._collect()
                while self._events and self.outcome is None:
                    self._handle(self._events.popleft())
                    self._collect()
            self._recorder.catch_up()
        finally:
            self._servers.end()
        last = {"state": "done" if self.outcome.ok else "failed", "doing": self.outcome.reason}
        self._recorder.write_status({**self._make_status(self.now), **last})
        return self.outcome

    async def _next(self) -> Happening | None:
        """What has happened next. While nothing has, scored rollouts are written that were put off: where the answers of many
        lanes come at once, the next requests go first."""
        while self._recorder.behind and await self._hub.calm():
            self._recorder.catch_up(WRITTEN_A_LOOK)
        return await self._hub.next(TICK_S)

    def interrupt(self, number: int, reason: str = "") -> None:
        """A signal asks for the end, and leaves time to save the step under way; called on the event loop. `reason`: in other
        words than the signal's."""
        self._exit_code = 128 + number
        reason = reason or f"interrupted by {signal.Signals(number).name}"
        self._events.append(events.StopRequested(reason=reason, ok=False, save=True))

    def fault(self, sentence: str) -> None:
        """A part of the run has failed for good."""
        if self.outcome is None:
            log.error("%s", sentence)
            self._recorder.alert("error", "orchestrator", sentence, shown=False)
            self._exit_code = COMPONENT_FAILED
            self._events.append(events.StopRequested(reason=sentence, ok=False))

    def _handle(self, event: events.AnyEvent) -> None:
        now = self.now
        ordered = self._core.handle(event, now)
        self._journal.append(encode_line(now, event, ordered))
        if isinstance(event, events.RolloutDone | events.RolloutFailed):
            self.executor.settle(event, counts=not any(isinstance(command, commands.IgnoreResult) for command in ordered))
        scored: deque[events.AnyEvent] = deque()
        for command in ordered:
            if isinstance(command, commands.TakeCheckpoint) and self._core.saved is not None:
                self.executor.save(self._core.saved, self._lineage)
            elif isinstance(command, commands.EndRun):
                self.outcome = self._end(command)
            else:
                for following in self.executor.execute(command):
                    (scored if isinstance(following, events.EvalScored) else self._events).append(following)
        # before all that waits: a checkpoint ordered by that would hold an eval's end and not its score
        self._events.extendleft(reversed(scored))

    def _end(self, stop: commands.EndRun) -> RunOutcome:
        if stop.ok and (lost := self._core.lost_checkpoint):
            remedy = self.checkpoints.describe_remedy(lost, str(self._config.run_dir))
            return RunOutcome(False, f"{stop.reason}. {remedy}", self._exit_code or ERROR, lost)
        code = 0 if stop.ok else self._exit_code or COMPONENT_FAILED
        goes_on = bool(stop.checkpoint) and self.checkpoints.can_go_on(stop.checkpoint)
        return RunOutcome(stop.ok, stop.reason, STOPPED if goes_on and code > 128 else code)

    @property
    def now(self) -> float:
        return time.monotonic() - self._started

    def _look_at_the_clock(self) -> None:
        now = self.now
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._recorder.catch_up()
            self._events.append(events.Tick())
            self._tick(time.monotonic())
            for server, cause in self.executor.take_hanging():
                self._lose(server, f"{server} hangs: {cause}", cause)
            for server, how in self._servers.find_ended():
                self._give_up(server, how)
            if not self._servers.underway and now > self._config.cluster.placement_timeout_s:
                self.fault(
                    f"{', '.join(self._peers.missing)} did not say hello within cluster.placement_timeout_s="
                    f"{self._config.cluster.placement_timeout_s} s; their logs say why"
                )
        if now >= self._next_status:
            self._next_status = now + STATUS_S
            self._recorder.write_status(self._make_status(now))

    def _tick(self, now: float) -> None:
        """Deadlines of what is under way: an update, servers that fall asleep, a checkpoint, what was aborted."""
        self.weights.tick(now)
        self.sleep.tick(now)
        self.checkpoints.tick(now)
        self.executor.look_for_late_servers(now)

    def _collect(self) -> None:
        """What became of weight updates: first the servers that did not follow, then the update's end."""
        while fenced := [*self.weights.take_fenced(), *self.sleep.take_fenced()]:
            for server, cause in fenced:
                self._lose(server, f"{server} is fenced: {cause}", cause)
        self._events.extend(self.weights.take_events())
        self._events.extend(self.checkpoints.take_events())

    def _make_status(self, now: float) -> dict[str, Any]:
        counts = self._core.counts()
        missing, expected = self._peers.missing, self._peers.expected
        return {
            "state": "running" if self._servers.underway else "starting",
            "doing": f"waiting for {name_few(missing)}" if missing else self._doing,
            "processes": 1 + len(expected),
            "ready": 1 + len(expected) - len(missing),
            "missing": missing[:NAMED],
            "elapsed_s": now,
            "eta_s": self._recorder.estimate_eta_s(),
            "in_flight": counts.rollouts_running,
            "queue": counts.rollouts_waiting,
            "version": counts.version,
            "restarts": dict(self._recorder.restarts),
            "counts": counts.as_fields(),
            **({} if self._config.trains else {"step": counts.version, "steps": self._config.number_of_steps}),
        }

    @property
    def _doing(self) -> str:
        evaluating = self._recorder.evals.described
        if not self._config.trains:
            return evaluating or "playing evals"
        return f"{self.executor.doing} · {evaluating}" if evaluating else self.executor.doing

    # ---- what peers say ----------------------------------------------------------------------------------------------

    def _take(self, happening: Happening) -> None:
        match happening:
            case Delivery():
                self._hear(happening)
            case PeerJoined(peer=peer, hello=hello):
                self._join(peer, hello)
            case PeerLeft(peer=peer):
                self._lose(peer, f"{peer} left before the run was over", "it left before the run was over")
            case PeerLost(peer=peer, cause=cause):
                self._lose(peer, f"{peer} was lost: {cause}", cause)
            case PeerStuck(peer=peer, doing=doing, seconds=seconds):
                why = f"has made no progress for {seconds:.0f} s (orchestrator.stuck_s) while doing: {doing}"
                self._lose(peer, f"{peer} {why}", f"it {why}")

    def _lose(self, peer: str, sentence: str, cause: str) -> None:
        """A server is started again, and the run goes on without it meanwhile; any other peer is the end of it."""
        if not self._servers.can_return(peer):
            self.fault(sentence)
        elif peer in self._peers.present:  # else it was given up before the hub said so
            self._give_up(peer, cause)

    def _give_up(self, server: str, cause: str) -> None:
        log.warning("%s is given up: %s", server, cause)
        self._recorder.alert("warning", server, f"{server} is given up and started again: {cause}", shown=False)
        self._servers.give_up(server, cause)
        released = self.executor.lose_server(server, time.monotonic())
        self._events.append(events.ServerLost(server=server, cause=cause[:MAX_CAUSE_CHARACTERS]))
        self._events.extend(released)

    def _join(self, peer: str, hello: messages.Hello) -> None:
        log.info("%s is there (pid %d on %s)", peer, hello.pid, hello.host)
        again = peer in self._peers.present
        refusal = self._peers.admit(peer, hello)
        if hello.role == "server":
            self.weights.join(peer, hello.version)
        if refusal:
            self.fault(refusal)
        elif again:
            self.fault(f"{peer} was restarted in mid-run, and its work in hand is lost")
        elif self._servers.underway:
            self._recorder.restarts[peer] += 1
            self._events.append(events.ServerJoined(server=peer, version=hello.version, capacity=hello.capacity))
        elif hello.role == "trainer" and self._peers.all_ranks_present:
            self._events.append(events.TrainerReady(ranks=len(self._peers.ranks)))
        elif hello.role != "trainer" and self._peers.can_generate:
            self._recorder.start_clock()
            self._recorder.record_environments(self._peers.present[self._peers.workers[0]].environments)
            self._events.extend(self._announce_generators())
        if not (self._peers.missing or self._servers.underway):
            log.info("all %d processes are there", len(self._peers.expected))
            self._servers.begin()

    def _announce_generators(self) -> Iterator[events.AnyEvent]:
        present = self._peers.present
        for name in self._peers.servers:
            yield events.ServerJoined(server=name, version=present[name].version, capacity=present[name].capacity)
        if self._config.inference.remote is not None:  # no process of ours: workers ask it themselves
            lanes = self._config.orchestrator.max_concurrent_prompts_per_server * self._config.rollout.group_size
            yield events.ServerJoined(server=REMOTE, version=self._config.first_version, capacity=lanes)
        for name in self._peers.workers:
            hello = present[name]
            yield events.WorkerJoined(worker=name, capacity=hello.capacity, environments=hello.environments)

    def _hear(self, delivery: Delivery) -> None:
        known = self._peers.present.get(delivery.peer)
        if known is None or known.incarnation != delivery.incarnation:
            return  # the last words of a process that was given up
        match delivery.body:
            case messages.Generate() | messages.RequestGrant() as body:
                if (started := self.relay.ask(delivery, body)) is not None:
                    self._events.append(started)
            case messages.Abort(request_id=request_id):
                self.relay.abort(delivery.peer, request_id)
            case messages.Completion() | messages.GenerateFailed() | messages.Served() as body:
                self._events.extend(self.relay.answer(delivery, body))
            case messages.GenerationEnded() as body:
                self._events.extend(self.executor.hear_generation_ended(delivery, body))
            case messages.RolloutResult() | messages.RolloutError() as body:
                self._events.extend(self.executor.hear_answer(delivery, body))
            case messages.EngineLoad() as body:
                self._hear_load(delivery.peer, body)
            case messages.StepReport() as body:
                self._hear_step(delivery.peer, body)
            case messages.RowsLost() as body:
                self._recorder.note_lost_rows(delivery.peer, body)
            case (
                messages.WeightsPublished()
                | messages.WeightsSent()
                | messages.WeightsReady()
                | messages.WeightsFailed() as body
            ):
                self.weights.hear(delivery, body, time.monotonic())
            case messages.Asleep() as body:
                self.sleep.hear(delivery, body)
            case messages.CheckpointStaged() | messages.CheckpointWritten() | messages.CheckpointError() as body:
                self.checkpoints.hear(delivery, body)
                self.checkpoints.tick(time.monotonic())
            case other:
                self.violations.note(delivery.peer, f"its {type(other).__name__} is nothing for the orchestrator")

    def _hear_load(self, server: str, body: messages.EngineLoad) -> None:
        try:
            load = events.ServerLoad(server, body.kv_used, body.running, body.waiting, body.preemptions)
        except ValueError as error:
            self.violations.note(server, f"its EngineLoad was ignored: {error}")
        else:
            self._events.append(load)

    def _hear_step(self, rank: str, body: messages.StepReport) -> None:
        if body.step != self.executor.step_in_training:
            self.fault(f"{rank} says that step {body.step} is done, and step {self.executor.step_in_training} is in training")
            return
        done = self._steps_done.setdefault(body.step, {})
        done[rank] = body
        if len(done) < len(self._peers.ranks):
            return
        del self._steps_done[body.step]
        spent = self._cpu_time.measure(self._peers.present.values())
        metrics = self._recorder.record_step(done[self._peers.ranks[0]], self._core.counts(), spent)
        reward, version = metrics.get("reward/policy"), metrics.get("reward/policy/version")
        said = "no version's rollouts have all ended" if reward is None else f"reward {reward:.3f} of version {version:.0f}"
        loss = f"loss {metrics['loss']:.4f}" if "loss" in metrics else "no loss"
        log.info("step %d: %s, %s", body.step, said, loss)
        self._events.append(events.StepDone(step=body.step))
        if sentence := find_end_reason(self._recorder.history, self._config.trainer.max_broken_steps, body.step):
            self.fault(sentence)
