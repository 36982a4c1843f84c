"""The orchestrator's one loop: a message becomes an event, the core answers with commands, each command is performed.

Decide, then do, then record. Owns no decision (flow.core does), no array maths (batch.py), no socket detail (wire).
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from telescope.config.run import RunConfig
from telescope.exit_codes import COMPONENT_FAILED, STOPPED, UNSAVED
from telescope.flow import commands, events
from telescope.flow.core import Core
from telescope.flow.replay import encode_line
from telescope.orchestrator.divergence import why_it_ends
from telescope.orchestrator.perform import Performer
from telescope.orchestrator.processor import Processor
from telescope.orchestrator.record import Recorder
from telescope.orchestrator.roster import NAMED, Roster, few
from telescope.orchestrator.servers import Servers
from telescope.runlog.journal import Journal
from telescope.runlog.lineage import Lineage
from telescope.wire import messages
from telescope.wire.happenings import Delivery, Happening, PeerJoined, PeerLeft, PeerLost, PeerStuck
from telescope.wire.hub import Hub

log = logging.getLogger(__name__)

TICK_S = 0.25
STATUS_S = 0.5
MAX_CAUSE_CHARACTERS = 2_000
WRITTEN_A_LOOK = 8
"""Scored rollouts written before the loop looks again whether a message has come: some milliseconds."""


@dataclass(frozen=True)
class Outcome:
    """How the run ended. `exit_code`: 0 done, 70 a component failed for good, 74 all steps are trained and the last checkpoint
    is lost, 75 stopped and saved, 128 + n interrupted by signal n."""

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
        performer: Performer,
        roster: Roster,
        servers: Servers,
        journal: Journal,
        recorder: Recorder,
        lineage: Lineage | None = None,
    ) -> None:
        """`lineage`: of this attempt; None: the first."""
        self._config, self._hub, self._core = config, hub, core
        self._performer, self._roster, self._servers = performer, roster, servers
        self._journal, self._recorder, self._lineage = journal, recorder, lineage or Lineage(1)
        self._started = time.monotonic()
        self._events: deque[events.AnyEvent] = deque()
        self._steps_done: dict[int, dict[str, messages.StepDone]] = {}
        self._next_tick = self._next_status = 0.0
        self._exit_code: int | None = None
        self._processor = Processor(socket.gethostname())
        self.outcome: Outcome | None = None

    # ---- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Until the core says Stop or a part of the run fails that nobody starts again."""
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
        self._recorder.status({**self._status(self.now), **last})
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
        if isinstance(event, events.RolloutDone):
            self._performer.settle(event, counts=not any(isinstance(command, commands.IgnoreResult) for command in ordered))
        for command in ordered:
            if isinstance(command, commands.TakeCheckpoint) and self._core.saved is not None:
                self._performer.save(self._core.saved, self._lineage)
            elif isinstance(command, commands.EndRun):
                self.outcome = self._ended(command)
            else:
                self._events.extend(self._performer.perform(command))

    def _ended(self, stop: commands.EndRun) -> Outcome:
        if stop.ok and (lost := self._core.lost_checkpoint):
            remedy = self._performer.checkpoints.remedy(lost, str(self._config.run_dir))
            return Outcome(False, f"{stop.reason}. {remedy}", self._exit_code or UNSAVED, lost)
        code = 0 if stop.ok else self._exit_code or COMPONENT_FAILED
        return Outcome(stop.ok, stop.reason, STOPPED if stop.checkpoint and code > 128 else code)

    @property
    def now(self) -> float:
        return time.monotonic() - self._started

    def _look_at_the_clock(self) -> None:
        now = self.now
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._recorder.catch_up()
            self._events.append(events.Tick())
            self._performer.tick(time.monotonic())
            for server, cause in self._performer.take_hanging():
                self._gone(server, f"{server} hangs: {cause}", cause)
            for server, how in self._servers.ended():
                self._give_up(server, how)
            if not self._servers.underway and now > self._config.cluster.placement_timeout_s:
                self.fault(
                    f"{', '.join(self._roster.missing)} did not say hello within cluster.placement_timeout_s="
                    f"{self._config.cluster.placement_timeout_s} s; their logs say why"
                )
        if now >= self._next_status:
            self._next_status = now + STATUS_S
            self._recorder.status(self._status(now))

    def _collect(self) -> None:
        """What became of weight updates: first the servers that did not follow, then the update's end."""
        weights, naps = self._performer.weights, self._performer.naps
        while fenced := [*weights.take_fenced(), *naps.take_fenced()]:
            for server, cause in fenced:
                self._gone(server, f"{server} is fenced: {cause}", cause)
        self._events.extend(weights.take_events())
        self._events.extend(self._performer.checkpoints.take_events())

    def _status(self, now: float) -> dict[str, Any]:
        counts = self._core.counts()
        missing, expected = self._roster.missing, self._roster.expected
        return {
            "state": "running" if self._servers.underway else "starting",
            "doing": f"waiting for {few(missing)}" if missing else self._performer.doing,
            "processes": 1 + len(expected),
            "ready": 1 + len(expected) - len(missing),
            "missing": missing[:NAMED],
            "elapsed_s": now,
            "eta_s": self._recorder.eta_s(),
            "in_flight": counts.rollouts_running,
            "queue": counts.rollouts_waiting,
            "version": counts.version,
            "restarts": dict(self._recorder.restarts),
            "counts": msgspec.structs.asdict(counts),
        }

    # ---- what peers say ----------------------------------------------------------------------------------------------

    def _take(self, happening: Happening) -> None:
        match happening:
            case Delivery():
                self._delivered(happening)
            case PeerJoined(peer=peer, hello=hello):
                self._joined(peer, hello)
            case PeerLeft(peer=peer):
                self._gone(peer, f"{peer} left before the run was over", "it left before the run was over")
            case PeerLost(peer=peer, cause=cause):
                self._gone(peer, f"{peer} was lost: {cause}", cause)
            case PeerStuck(peer=peer, doing=doing, seconds=seconds):
                why = f"has made no progress for {seconds:.0f} s (orchestrator.stuck_s) while doing: {doing}"
                self._gone(peer, f"{peer} {why}", f"it {why}")

    def _gone(self, peer: str, sentence: str, cause: str) -> None:
        """A server is started again, and the run goes on without it meanwhile; any other peer is the end of it."""
        if not self._servers.can_return(peer):
            self.fault(sentence)
        elif peer in self._roster.present:  # else it was given up before the hub said so
            self._give_up(peer, cause)

    def _give_up(self, server: str, cause: str) -> None:
        log.warning("%s is given up: %s", server, cause)
        self._recorder.alert("warning", server, f"{server} is given up and started again: {cause}", shown=False)
        self._servers.give_up(server, cause)
        answers = self._performer.server_lost(server, time.monotonic())
        self._events.append(events.ServerLost(server=server, cause=cause[:MAX_CAUSE_CHARACTERS]))
        self._events.extend(answers)

    def _joined(self, peer: str, hello: messages.Hello) -> None:
        log.info("%s is there (pid %d on %s)", peer, hello.pid, hello.host)
        again = peer in self._roster.present
        refusal = self._roster.admit(peer, hello)
        if hello.role == "server":
            self._performer.weights.joined(peer, hello.version)
        if refusal:
            self.fault(refusal)
        elif again:
            self.fault(f"{peer} was restarted in mid-run, and its work in hand is lost")
        elif self._servers.underway:
            self._recorder.restarts[peer] += 1
            self._events.append(events.ServerJoined(server=peer, version=hello.version, capacity=hello.capacity))
        elif hello.role == "trainer" and self._roster.all_ranks_present:
            self._events.append(events.TrainerReady(ranks=len(self._roster.ranks)))
        elif hello.role != "trainer" and self._roster.can_generate:
            self._recorder.generation_begins()
            self._recorder.environments(self._roster.present[self._roster.workers[0]].environments)
            self._events.extend(self._generators_joined())
        if not (self._roster.missing or self._servers.underway):
            log.info("all %d processes are there", len(self._roster.expected))
            self._servers.begin()

    def _generators_joined(self) -> Iterator[events.AnyEvent]:
        present = self._roster.present
        for name in self._roster.servers:
            yield events.ServerJoined(server=name, version=present[name].version, capacity=present[name].capacity)
        for name in self._roster.workers:
            hello = present[name]
            yield events.WorkerJoined(worker=name, capacity=hello.capacity, environments=hello.environments)

    def _delivered(self, delivery: Delivery) -> None:
        known = self._roster.present.get(delivery.peer)
        if known is None or known.incarnation != delivery.incarnation:
            return  # the last words of a process that was given up
        match delivery.body:
            case messages.Generate() | messages.AskPlace() as body:
                self._hear(self._performer.asked(delivery, body))
            case messages.Abort(request_id=request_id):
                self._performer.relay.abort(delivery.peer, request_id)
            case messages.Completion() | messages.GenerateFailed() | messages.Served() as body:
                self._answered(delivery, body)
            case messages.GenerationOver() as body:
                self._hear(self._performer.generated(delivery, body))
            case messages.EngineLoad() as body:
                self._hear(self._performer.load_of(delivery.peer, body))
            case messages.RolloutDone() | messages.RolloutFailed() as body:
                self._hear(self._performer.answered(delivery, body))
            case messages.StepDone() as body:
                self._step_done(delivery.peer, body)
            case (
                messages.WeightsPublished()
                | messages.WeightsSent()
                | messages.WeightsReady()
                | messages.WeightsFailed() as body
            ):
                self._performer.weights.answer(delivery, body, time.monotonic())
            case messages.Asleep() as body:
                self._performer.naps.answer(delivery, body)
            case messages.CheckpointStaged() | messages.CheckpointWritten() | messages.CheckpointFailed() as body:
                self._performer.checkpoints.answer(delivery, body)
                self._performer.checkpoints.tick(time.monotonic())
            case other:
                self._performer.complaints.note(delivery.peer, f"its {type(other).__name__} is nothing for the orchestrator")

    def _hear(self, event: events.AnyEvent | None) -> None:
        if event is not None:
            self._events.append(event)

    def _answered(self, delivery: Delivery, body: messages.Completion | messages.GenerateFailed | messages.Served) -> None:
        answered = self._performer.relay.answer(delivery, body)
        if answered is not None:
            event, row = answered
            self._events.append(event)
            self._events.extend(self._performer.freed())
            self._recorder.turn(row)

    def _step_done(self, rank: str, body: messages.StepDone) -> None:
        if body.step != self._performer.step_in_training:
            self.fault(f"{rank} says that step {body.step} is done, and step {self._performer.step_in_training} is in training")
            return
        done = self._steps_done.setdefault(body.step, {})
        done[rank] = body
        if len(done) < len(self._roster.ranks):
            return
        del self._steps_done[body.step]
        spent = self._processor.spent(self._roster.present.values())
        metrics = self._recorder.step(done[self._roster.ranks[0]], self._core.counts(), spent)
        reward = metrics.get("reward/mean")
        said = "no rollout scored since the last step" if reward is None else f"reward {reward:.3f}"
        loss = f"loss {metrics['loss']:.4f}" if "loss" in metrics else "no loss"
        log.info("step %d: %s, %s", body.step, said, loss)
        self._events.append(events.StepDone(step=body.step))
        if sentence := why_it_ends(self._recorder.history, self._config.trainer.max_broken_steps, body.step):
            self.fault(sentence)
