"""How to do what the core has decided: each command becomes messages to peers, and each answer an event for the core."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from telescope.flow import commands, events
from telescope.flow.snapshot import Snapshot
from telescope.maths.batching import ATTENTION_LENGTH
from telescope.orchestrator import saved
from telescope.orchestrator.batch import BatchUnusable, Recipe, cut
from telescope.orchestrator.checkpoints import CheckpointDesk, SaveRules
from telescope.orchestrator.complaints import Complaints
from telescope.orchestrator.record import Recorder
from telescope.orchestrator.relay import Relay
from telescope.orchestrator.roster import Roster
from telescope.orchestrator.shelf import Scored, Shelf, UnusableRollout, scored
from telescope.orchestrator.sleep import SleepDesk
from telescope.orchestrator.weights import UpdateRules, WeightDesk
from telescope.records import FailureKind, RolloutOrder
from telescope.runlog.lineage import Lineage
from telescope.wire import messages
from telescope.wire.happenings import Delivery
from telescope.wire.hub import Hub

log = logging.getLogger(__name__)

Events = Iterable[events.AnyEvent]
MAX_CAUSE_CHARACTERS = 10_000
SERVER_LATE_S, SERVER_GONE_S = 10.0, 30.0
"""A server that takes longer to end an aborted request is named. One engine step is what it needs."""


@dataclass(frozen=True)
class _Order:
    """One that is out. `number` is that of its message; the answer names it."""

    order: RolloutOrder
    worker: str
    number: int

    @property
    def key(self) -> tuple[int, int]:
        return self.order.rollout_id, self.order.attempt


@dataclass
class _Held:
    """An order's answer that the core hears of once no server has a request of its rollout any more."""

    event: events.RolloutDone | events.RolloutFailed
    since: float
    named: bool = False


class Performer:
    """Hands of the core: holds the shelf, the relay, the desk of weight updates and the orders that are out."""

    def __init__(
        self,
        hub: Hub,
        *,
        roster: Roster,
        recorder: Recorder,
        recipe: Recipe,
        updates: UpdateRules,
        saves: SaveRules | None = None,
        dying: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """`dying`: where servers sleep while a step is trained, those given up that have not ended yet (`SleepDesk`)."""
        self._hub, self._roster, self._recorder, self._recipe = hub, roster, recorder, recipe
        self.complaints = Complaints(recorder)
        checkpoints = self.checkpoints = CheckpointDesk(hub, recorder, self.complaints, roster.ranks, saves)
        self.weights = WeightDesk(hub, recorder, self.complaints, roster.ranks, updates, saving=lambda: checkpoints.stalled)
        self.naps = SleepDesk(hub, self.complaints, updates.timeout_s, dying or tuple)
        self._sleeps = dying is not None
        self.relay = Relay(hub, self.complaints)
        self.shelf = Shelf()
        self._orders: dict[tuple[int, int], _Order] = {}
        self._numbers: dict[tuple[str, int], _Order] = {}
        self.step_in_training: int | None = None
        self._held: dict[tuple[int, int], _Held] = {}
        self._over: dict[tuple[int, int], events.GenerationOver] = {}
        self._hanging: dict[str, str] = {}
        self._arrived: dict[tuple[int, int], tuple[Scored, Delivery]] = {}
        self._doing = "generating the first batch"

    @property
    def doing(self) -> str:
        return self.weights.doing or self.naps.doing or self._doing

    def perform(self, command: commands.AnyCommand) -> Events:
        """Do one command. Returns events that follow at once (usually none)."""
        match command:
            case commands.DispatchRollout(worker=worker, order=order):
                self._run(worker, order)
            case commands.CancelAttempt():
                self._cancel(command)
            case commands.AnnouncePrompts(prompts=prompts):
                for worker in self._roster.workers:
                    self._hub.send(worker, messages.PrefetchPrompts(prompts=prompts))
            case commands.PlaceRequest(request_id=request_id, server=server, priority=priority):
                return (*self.relay.place(request_id, server, priority), *self.freed())
            case commands.RefuseRequest(request_id=request_id, cause=cause):
                self.relay.refuse(request_id, cause)
                return self.freed()
            case commands.RecordGroupState():
                self._recorder.group(command)
            case commands.ForgetRollouts(rollout_ids=rollout_ids):
                self.shelf.forget(rollout_ids)
            case commands.TrainOnBatch():
                return self._train(command)
            case commands.UpdateWeights(version=version):
                self._doing = "generating"
                self.weights.begin(version, time.monotonic())
            case commands.WarnUser(sentence=sentence):
                log.warning("%s", sentence)
                self._recorder.alert("warning", "core", sentence)
            case commands.IgnoreResult() | commands.EndRun() | commands.TakeCheckpoint():
                pass  # the loop's own
        return ()

    def tick(self, now: float) -> None:
        """Look at the deadline of the update under way, and at servers that don't end what was aborted."""
        self.weights.tick(now)
        self.naps.tick(now)
        self.checkpoints.tick(now)
        self._look_for_late_servers(now)

    def server_lost(self, server: str, now: float) -> Events:
        """Gives the answers that were held for it; the core hears of its loss first."""
        self.relay.lost(server)
        self.weights.lost(server, now)
        self.naps.lost(server)
        return self.freed()

    def save(self, snapshot: Snapshot, lineage: Lineage) -> None:
        """Begin the checkpoint that the core has ordered."""
        shelf = snapshot.rollout_ids
        rows = lineage.up_to(self._recorder.last_row, snapshot.step)
        part = saved.Part(snapshot, self.shelf.of(shelf), self._recorder.counters(shelf), rows)
        self.checkpoints.begin(snapshot.step, part, time.monotonic())

    # ---- what workers ask

    def asked(self, delivery: Delivery, body: messages.Generate | messages.AskPlace) -> events.TurnStarted | None:
        """A rollout wants tokens. None: its worker has no business with it, and was told so."""
        out = self._orders.get((body.rollout_id, body.attempt))
        if out is not None and out.worker != delivery.peer:
            self.relay.turn_away(delivery, body, f"rollout {body.rollout_id} attempt {body.attempt} plays on {out.worker}")
            return None
        return self.relay.ask(delivery, body)

    def generated(self, delivery: Delivery, body: messages.GenerationOver) -> events.GenerationOver | None:
        """A rollout asks for no more tokens. None: it is not (or no longer) one of this worker's, or the core hears of it from
        `freed`, when its server has said that it has ended."""
        out = self._orders.get((body.rollout_id, body.attempt))
        if out is None or out.worker != delivery.peer:
            return None
        event = events.GenerationOver(rollout_id=body.rollout_id, attempt=body.attempt)
        if not self.relay.servers_of(*out.key):
            return event
        self._over[out.key] = event  # with a ticket its worker has the tokens before the orchestrator has heard of their end
        return None

    def load_of(self, server: str, body: messages.EngineLoad) -> events.ServerLoad | None:
        """What a server's engine reports. None: it is no measure."""
        try:
            return events.ServerLoad(server, body.kv_used, body.running, body.waiting, body.preemptions)
        except ValueError as error:
            self.complaints.note(server, f"its EngineLoad was ignored: {error}")
            return None

    # ---- rollouts that come back

    def answered(
        self, delivery: Delivery, body: messages.RolloutDone | messages.RolloutFailed
    ) -> events.RolloutDone | events.RolloutFailed | None:
        """An order has its answer. None: it is none, or the core hears of it from `freed`, when the servers have ended what the
        rollout still had there. So a cancelled rollout keeps its lane until its tokens have really stopped."""
        event = self._judged(delivery, body)
        key = (event.rollout_id, event.attempt) if event is not None else None
        if event is None or key is None or not self.relay.servers_of(*key):
            return event
        self._held[key] = _Held(event, time.monotonic())
        return None

    def freed(self) -> Events:
        """Answers, and ends of generation, held until now. Asked for whenever a request has ended."""
        if not (self._held or self._over):
            return ()
        over = [key for key in self._over if not self.relay.servers_of(*key)]
        free = [key for key in self._held if not self.relay.servers_of(*key)]
        return [*(self._over.pop(key) for key in over), *(self._held.pop(key).event for key in free)]

    def _look_for_late_servers(self, now: float) -> None:
        """One that does not end what was aborted is named after a while, and then hangs. While it takes new weights it may have
        stopped for them, and the update's own deadline counts."""
        for (rollout_id, attempt), held in self._held.items():
            if self.weights.doing:
                held.since = now
            waited = now - held.since
            for server in sorted(self.relay.servers_of(rollout_id, attempt)) if waited >= SERVER_LATE_S else ():
                late = f"it has not ended the aborted requests of rollout {rollout_id} within"
                if not held.named:
                    self.complaints.note(server, f"{late} {SERVER_LATE_S:g} s")
                if waited >= SERVER_GONE_S:
                    self._hanging[server] = f"{late} {SERVER_GONE_S:g} s"
            held.named = held.named or waited >= SERVER_LATE_S

    def take_hanging(self) -> list[tuple[str, str]]:
        """Servers that must not run on, and why."""
        hanging, self._hanging = list(self._hanging.items()), {}
        return hanging

    def _judged(
        self, delivery: Delivery, body: messages.RolloutDone | messages.RolloutFailed
    ) -> events.RolloutDone | events.RolloutFailed | None:
        """A scored rollout is kept until the core has said whether it counts.

        What counts is which order it answers; where it speaks of another one, or contradicts itself, that order has failed.
        """
        out = self._numbers.pop((delivery.peer, delivery.answers), None)
        if out is None:
            self.complaints.note(delivery.peer, f"its {type(body).__name__} answers no order that is out; ignored")
            self._drop(delivery)
            return None
        del self._orders[out.key]
        self.relay.cancel(*out.key)  # nobody waits for what it still generates
        if (body.rollout_id, body.attempt) != out.key:
            cause = (
                f"{delivery.peer} answered the order of rollout {out.key[0]} attempt {out.key[1]} with a "
                f"{type(body).__name__} of rollout {body.rollout_id} attempt {body.attempt}"
            )
            self.complaints.note(delivery.peer, f"{cause}: the order counts as failed")
            return self._failed(delivery, out, cause)
        if isinstance(body, messages.RolloutFailed):
            return self._failed(delivery, out, body.cause[:MAX_CAUSE_CHARACTERS], body.kind)
        try:
            rollout = self._recipe.shaped(scored(out.order, body, delivery.arrays, self.weights.newest))
        except UnusableRollout as error:
            self.complaints.note(delivery.peer, f"{error}: the rollout counts as failed")
            return self._failed(delivery, out, str(error))
        self._arrived[out.key] = rollout, delivery
        return events.RolloutDone(
            rollout_id=body.rollout_id,
            attempt=body.attempt,
            reward=rollout.reward,
            prompt_tokens=body.prompt_tokens,
            completion_tokens=body.completion_tokens,
        )

    def settle(self, event: events.RolloutDone, *, counts: bool) -> None:
        """Onto the shelf with what counts, and into the run directory when there is time: only then is it acknowledged."""
        rollout, delivery = self._arrived.pop((event.rollout_id, event.attempt))
        if counts:
            self.shelf.put(rollout)
        self._recorder.scored(rollout, delivery.peer, lambda: self._hub.acknowledge(delivery), counts=counts)

    def _failed(
        self, delivery: Delivery, out: _Order, cause: str, kind: FailureKind = "infrastructure"
    ) -> events.RolloutFailed:
        self._drop(delivery)
        self._recorder.failed(out.order, delivery.peer, cause, kind)
        return events.RolloutFailed(rollout_id=out.order.rollout_id, attempt=out.order.attempt, cause=cause, kind=kind)

    def _drop(self, delivery: Delivery) -> None:
        """Nothing of it is kept, so its sender may forget it."""
        if isinstance(delivery.body, messages.RolloutDone):
            self._hub.acknowledge(delivery)

    def _run(self, worker: str, order: RolloutOrder) -> None:
        out = _Order(order, worker, self._hub.send(worker, messages.RunRollout(order=order)))
        self._orders[out.key] = out
        if out.number:  # else the worker has gone, which will be told next
            self._numbers[worker, out.number] = out

    def _cancel(self, command: commands.CancelAttempt) -> None:
        self.relay.cancel(command.rollout_id, command.attempt)
        if (command.rollout_id, command.attempt) in self._orders:  # else its answer is here, and is written down as what it was
            self._recorder.cancelled(command.rollout_id, command.attempt)
        self._hub.send(
            command.worker,
            messages.CancelRollout(rollout_id=command.rollout_id, attempt=command.attempt, reason=command.reason),
        )

    @property
    def _attention_length(self) -> float:
        """What the trainer says of its model."""
        hello = self._roster.present.get(self._roster.ranks[0])
        return hello.attention_length if hello is not None and hello.attention_length > 0 else ATTENTION_LENGTH

    def _train(self, command: commands.TrainOnBatch) -> Events:
        ranks = self._roster.ranks
        try:
            batch = cut(command, self.shelf, self._recipe, ranks=len(ranks), attention_length=self._attention_length)
        except BatchUnusable as error:
            if error.__cause__ is not None:
                log.error("the batch can't be trained on", exc_info=error)
            return (events.StopRequested(reason=str(error), ok=False),)
        self._recorder.batch(batch)
        self._doing = f"training step {command.step}"
        self.step_in_training = command.step

        def train() -> None:
            for rank, shard in zip(ranks, batch.shards, strict=True):
                self._hub.send(rank, shard.step, shard.arrays)

        servers = [name for name in self._roster.servers if name in self._roster.present] if self._sleeps else []
        self.naps.begin(command.step, servers, train, time.monotonic())
        return ()
