"""How to do what the core has decided: each command becomes messages to peers, and each answer an event for the core."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from telescope.flow import commands, events
from telescope.flow.snapshot import Snapshot
from telescope.maths.packing import ATTENTION_LENGTH
from telescope.orchestrator.batch import BatchUnusable, Recipe, make_batch
from telescope.orchestrator.checkpoints import CheckpointCoordinator
from telescope.orchestrator.peers import Peers, ProtocolViolations
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.relay import Relay
from telescope.orchestrator.rollout_store import Rollout, RolloutStore, UnusableRollout
from telescope.orchestrator.saved_state import OrchestratorState
from telescope.orchestrator.sleep import SleepCoordinator
from telescope.orchestrator.weight_coordinator import WeightCoordinator
from telescope.records import FailureKind, RolloutOrder
from telescope.runlog.attempts import Lineage
from telescope.wire import messages
from telescope.wire.hub import Hub
from telescope.wire.peer_events import Delivery

log = logging.getLogger(__name__)

Events = Iterable[events.AnyEvent]
MAX_CAUSE_CHARACTERS = 10_000
SERVER_LATE_S, SERVER_GONE_S = 10.0, 30.0
"""A server that takes longer to end an aborted request is named. One engine step is what it needs."""


class Executor:
    """Hands of the core: `execute` does a command, `hear_…` takes what peers say of rollouts. All that is known of a rollout in
    flight is in the store."""

    def __init__(
        self,
        hub: Hub,
        *,
        peers: Peers,
        recorder: Recorder,
        violations: ProtocolViolations,
        recipe: Recipe,
        store: RolloutStore,
        relay: Relay,
        weights: WeightCoordinator,
        sleep: SleepCoordinator,
        checkpoints: CheckpointCoordinator,
    ) -> None:
        self._hub, self._peers, self._recorder, self._violations = hub, peers, recorder, violations
        self._recipe, self._store, self._relay = recipe, store, relay
        self._weights, self._sleep, self._checkpoints = weights, sleep, checkpoints
        self._hanging: dict[str, str] = {}
        self._doing = "generating the first batch"
        self.step_in_training: int | None = None

    @property
    def doing(self) -> str:
        return self._weights.doing or self._sleep.doing or self._doing

    def execute(self, command: commands.AnyCommand) -> Events:
        """Do one command. Returns events that follow at once (usually none)."""
        match command:
            case commands.DispatchRollout(worker=worker, order=order):
                self._send_order(worker, order)
            case commands.CancelAttempt():
                self._cancel(command)
            case commands.AnnouncePrompts(prompts=prompts):
                for worker in self._peers.workers:
                    self._hub.send(worker, messages.PrefetchPrompts(prompts=prompts))
            case commands.PlaceRequest(request_id=request_id, server=server, priority=priority):
                return self._relay.place(request_id, server, priority)
            case commands.RefuseRequest(request_id=request_id, cause=cause):
                return self._relay.refuse(request_id, cause)
            case commands.RecordGroupState():
                self._recorder.record_group(command)
            case commands.BeginEval():
                self._recorder.evals.begin(command)
            case commands.EndEval(eval=name, step=step):
                score = self._recorder.end_eval(command)
                return () if score is None else (events.EvalScored(eval=name, step=step, score=score),)
            case commands.ForgetRollouts(rollout_ids=rollout_ids):
                self._store.forget(rollout_ids)
            case commands.TrainOnBatch():
                return self._train(command)
            case commands.HoldServers():
                self._recorder.evals.hold(command)
            case commands.ReleaseServers(servers=servers):
                self._recorder.evals.release(servers)
            case commands.UpdateWeights(version=version, held=held):
                self._doing = "generating"
                self._weights.begin(version, time.monotonic(), held)
            case commands.WarnUser(sentence=sentence):
                log.warning("%s", sentence)
                self._recorder.alert("warning", "core", sentence)
            case commands.IgnoreResult() | commands.EndRun() | commands.TakeCheckpoint():
                pass  # the loop's own
        return ()

    # ---- a rollout: sent, answered, taken by the core or given up

    def _send_order(self, worker: str, order: RolloutOrder) -> None:
        number = self._hub.send(worker, messages.RunRollout(order=order))  # 0: the worker has gone, which will be told next
        self._store.add(Rollout(order, worker, number))

    def _cancel(self, command: commands.CancelAttempt) -> None:
        rollout = self._store.find(command.rollout_id, command.attempt)
        if rollout is not None:
            self._relay.cancel(rollout)
            rollout.cancelled = rollout.answer is None  # else its answer is here, and is written down as what it was
        self._hub.send(
            command.worker,
            messages.CancelRollout(rollout_id=command.rollout_id, attempt=command.attempt, reason=command.reason),
        )

    def hear_generation_ended(self, delivery: Delivery, body: messages.GenerationEnded) -> Events:
        """A rollout asks for no more tokens. Nothing follows where it is not (or no longer) one of this worker's, or where a
        server has yet to say that it has ended: with a grant its worker has the tokens before that."""
        rollout = self._store.find(body.rollout_id, body.attempt)
        if rollout is None or rollout.answer is not None or rollout.worker != delivery.peer:
            return ()
        rollout.generation_ended = True
        return rollout.release()

    def hear_answer(self, delivery: Delivery, body: messages.RolloutResult | messages.RolloutError) -> Events:
        """An order has its answer. Nothing follows where no such order is out, or before the servers have ended what the
        rollout still had there.

        What counts is which order it answers; where it speaks of another one, or contradicts itself, that order has failed.
        """
        rollout = self._store.find_answered(delivery, body.rollout_id, body.attempt)
        if rollout is None:
            self._violations.note(delivery.peer, f"its {type(body).__name__} answers no order that is out; ignored")
            self._drop(delivery)
            return ()
        rollout.number, rollout.answered_s = 0, time.monotonic()
        self._relay.cancel(rollout)  # nobody waits for what it still generates
        if (body.rollout_id, body.attempt) != rollout.key:
            cause = (
                f"{delivery.peer} answered the order of rollout {rollout.key[0]} attempt {rollout.key[1]} with a "
                f"{type(body).__name__} of rollout {body.rollout_id} attempt {body.attempt}"
            )
            self._violations.note(delivery.peer, f"{cause}: the order counts as failed")
            self._fail(rollout, delivery, cause)
        elif isinstance(body, messages.RolloutError):
            self._fail(rollout, delivery, body.cause[:MAX_CAUSE_CHARACTERS], body.kind)
        else:
            self._score(rollout, delivery, body)
        return rollout.release()

    def _score(self, rollout: Rollout, delivery: Delivery, result: messages.RolloutResult) -> None:
        try:
            rollout.score(result, delivery.arrays, self._weights.newest)
        except UnusableRollout as error:
            self._violations.note(delivery.peer, f"{error}: the rollout counts as failed")
            self._fail(rollout, delivery, str(error))
            return
        if not rollout.order.eval:  # whose score is the environment's own
            self._recipe.shape_reward(rollout)
        rollout.delivery = delivery

    def _fail(self, rollout: Rollout, delivery: Delivery, cause: str, kind: FailureKind = "infrastructure") -> None:
        self._drop(delivery)
        rollout.fail(cause, kind)
        self._recorder.record_failure(rollout, cause, kind)

    def _drop(self, delivery: Delivery) -> None:
        """Nothing of it is kept, so its sender may forget it."""
        if isinstance(delivery.body, messages.RolloutResult):
            self._hub.acknowledge(delivery)

    def settle(self, event: events.RolloutDone | events.RolloutFailed, *, counts: bool) -> None:
        """The core has heard of the answer. What counts is kept for its batch, and written into the run directory when there is
        time: only then is it acknowledged."""
        rollout = self._store.find(event.rollout_id, event.attempt)
        assert rollout is not None  # the event came from there
        rollout.taken = counts and isinstance(event, events.RolloutDone)
        if not rollout.taken:
            self._store.remove(rollout)
        if isinstance(event, events.RolloutDone):
            delivery, rollout.delivery = rollout.delivery, None
            assert delivery is not None
            self._recorder.record_rollout(rollout, lambda: self._hub.acknowledge(delivery))

    # ---- servers that come to no end

    def lose_server(self, server: str, now: float) -> Events:
        """Gives what the core hears of rollouts that waited for it; the core hears of its loss first."""
        freed = self._relay.lose(server)
        self._weights.lose(server, now)
        self._sleep.lose(server)
        return freed

    def look_for_late_servers(self, now: float) -> None:
        """One that does not end what was aborted is named after a while, and then hangs. While it takes new weights it may have
        stopped for them, and the update's own deadline counts."""
        for rollout in self._store:
            if rollout.answer is None or rollout.told:
                continue
            if self._weights.doing:
                rollout.answered_s = now
            waited = now - rollout.answered_s
            for server in sorted(rollout.servers) if waited >= SERVER_LATE_S else ():
                late = f"it has not ended the aborted requests of rollout {rollout.order.rollout_id} within"
                if not rollout.late:
                    self._violations.note(server, f"{late} {SERVER_LATE_S:g} s")
                if waited >= SERVER_GONE_S:
                    self._hanging[server] = f"{late} {SERVER_GONE_S:g} s"
            rollout.late = rollout.late or waited >= SERVER_LATE_S

    def take_hanging(self) -> list[tuple[str, str]]:
        """Servers that must not run on, and why."""
        hanging, self._hanging = list(self._hanging.items()), {}
        return hanging

    # ---- a step, and its checkpoint

    def _train(self, command: commands.TrainOnBatch) -> Events:
        ranks = self._peers.ranks
        try:
            batch = make_batch(command, self._store, self._recipe, ranks=len(ranks), attention_length=self._attention_length)
        except BatchUnusable as error:
            if error.__cause__ is not None:
                log.error("the batch can't be trained on", exc_info=error)
            return (events.StopRequested(reason=str(error), ok=False),)
        self._recorder.record_batch(batch)
        self._doing = f"training step {command.step}"
        self.step_in_training = command.step

        def train() -> None:
            for rank, shard in zip(ranks, batch.shards, strict=True):
                self._hub.send(rank, shard.step, shard.arrays)

        self._sleep.begin(command.step, self._peers.present_servers, train, time.monotonic())
        return ()

    @property
    def _attention_length(self) -> float:
        """What the trainer says of its model."""
        hello = self._peers.present.get(self._peers.ranks[0])
        return hello.attention_length if hello is not None and hello.attention_length > 0 else ATTENTION_LENGTH

    def save(self, snapshot: Snapshot, lineage: Lineage) -> None:
        """Begin the checkpoint that the core has ordered."""
        rollouts = snapshot.rollout_ids
        rows = lineage.up_to(self._recorder.last_row, snapshot.step)
        state = OrchestratorState(snapshot, self._store.take(sorted(rollouts)), self._recorder.make_counters(), rows)
        self._checkpoints.begin(snapshot.step, state, time.monotonic())
