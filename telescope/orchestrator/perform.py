"""How to do what the core has decided: each command becomes messages to peers, and each answer an event for the core."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from telescope.flow import commands, events
from telescope.orchestrator.batch import Recipe, cut
from telescope.orchestrator.record import Recorder
from telescope.orchestrator.relay import Relay
from telescope.orchestrator.roster import Roster
from telescope.orchestrator.shelf import Scored, Shelf, scored
from telescope.orchestrator.updates import Phase, WeightUpdate
from telescope.records import RolloutOrder
from telescope.wire import messages
from telescope.wire.happenings import Delivery
from telescope.wire.hub import Hub

log = logging.getLogger(__name__)

Events = Iterable[events.AnyEvent]


class Performer:
    """Hands of the core: holds the shelf, the relay, the orders that are out and the weight update under way."""

    def __init__(
        self,
        hub: Hub,
        *,
        roster: Roster,
        recorder: Recorder,
        recipe: Recipe,
        update_timeout_s: float,
    ) -> None:
        self._hub, self._roster, self._recorder = hub, roster, recorder
        self._recipe, self._update_timeout_s = recipe, update_timeout_s
        self._update: WeightUpdate | None = None
        self.relay = Relay(hub)
        self.shelf = Shelf()
        self._orders: dict[tuple[int, int], RolloutOrder] = {}
        self._arrived: dict[tuple[int, int], tuple[Scored, Delivery]] = {}
        self.doing = "generating the first batch"

    def perform(self, command: commands.AnyCommand) -> Events:
        """Do one command. Returns events that follow at once (usually none)."""
        match command:
            case commands.Run(worker=worker, order=order):
                self._orders[order.rollout_id, order.attempt] = order
                self._hub.send(worker, messages.RunRollout(order=order))
            case commands.Cancel():
                self._cancel(command)
            case commands.Place(request_id=request_id, server=server, priority=priority):
                self.relay.place(request_id, server, priority)
            case commands.Refuse(request_id=request_id, cause=cause):
                self.relay.refuse(request_id, cause)
            case commands.GroupState():
                self._recorder.group(command)
            case commands.Forget(rollout_ids=rollout_ids):
                self.shelf.forget(rollout_ids)
            case commands.Train():
                self._train(command)
            case commands.Update(version=version):
                self._begin_update(version)
            case commands.Warn(sentence=sentence):
                log.warning("%s", sentence)
                self._recorder.alert("warning", "core", sentence)
            case commands.Ignore() | commands.Stop():
                pass  # the loop's own
        return ()

    # ---- rollouts that come back

    def arrived(self, delivery: Delivery, body: messages.RolloutDone) -> Scored | None:
        """Hold a scored rollout until the core has said whether it counts. None: nobody ordered it. Raises UnusableRollout."""
        key = body.rollout_id, body.attempt
        order = self._orders.get(key)
        if order is None:
            self._hub.acknowledge(delivery)
            return None
        rollout = self._recipe.shaped(scored(order, body, delivery.arrays))
        self._arrived[key] = rollout, delivery
        del self._orders[key]
        return rollout

    def settle(self, event: events.RolloutDone, *, counts: bool) -> None:
        """Onto the shelf with what counts, and into the run directory: only then is it acknowledged."""
        rollout, delivery = self._arrived.pop((event.rollout_id, event.attempt))
        if counts:
            self.shelf.put(rollout)
        self._recorder.scored(rollout, delivery.peer, lambda: self._hub.acknowledge(delivery), counts=counts)

    def failed(self, delivery: Delivery, rollout_id: int, attempt: int, cause: str) -> bool:
        """Note a failed attempt. False: nobody ordered it."""
        order = self._orders.pop((rollout_id, attempt), None)
        if isinstance(delivery.body, messages.RolloutDone):
            self._hub.acknowledge(delivery)
        if order is not None:
            self._recorder.failed(order, delivery.peer, cause)
        return order is not None

    # ---- weight updates

    def tick(self) -> Events:
        """Look at the deadline of the update under way."""
        if self._update is None:
            return ()
        self._update.tick(time.monotonic())
        return self._advance(self._update.phase)

    def weights_answer(
        self, peer: str, body: messages.WeightsPublished | messages.WeightsReady | messages.WeightsFailed
    ) -> Events:
        update = self._update
        if update is None:
            return ()
        now, before = time.monotonic(), update.phase
        match body:
            case messages.WeightsPublished(version=update.version, manifest=manifest):
                update.published(peer, manifest, now)
            case messages.WeightsReady(prepared=update.version) if before is Phase.PREPARE:
                update.prepared(peer, now)
                self._recorder.weights(update, "prepared", peer)
            case messages.WeightsReady(version=update.version, checksum=checksum, pause_s=pause_s) if before is Phase.COMMIT:
                update.committed(peer, checksum, now)
                self._recorder.weights(update, "committed", peer, pause_s)
            case messages.WeightsFailed(version=update.version, cause=cause):
                update.fail(f"{peer} could not take weights of version {update.version}: {cause}")
            case _:
                log.warning("%s answered %s to an update it is not in", peer, body)
        return self._advance(before)

    def _cancel(self, command: commands.Cancel) -> None:
        self.relay.cancel(command.rollout_id, command.attempt)
        self._recorder.cancelled(command.rollout_id, command.attempt)
        self._hub.send(
            command.worker,
            messages.CancelRollout(rollout_id=command.rollout_id, attempt=command.attempt, reason=command.reason),
        )

    def _train(self, command: commands.Train) -> None:
        ranks = self._roster.ranks
        batch = cut(command, self.shelf, self._recipe, ranks=len(ranks))
        self._recorder.batch(batch)
        self.doing = f"training step {command.step}"
        for rank, shard in zip(ranks, batch.shards, strict=True):
            self._hub.send(rank, shard.step, shard.arrays)

    def _begin_update(self, version: int) -> None:
        self._update = WeightUpdate(version, self._roster.ranks, self._roster.servers, self._update_timeout_s, time.monotonic())
        self.doing = f"weights of version {version}: being published"
        for rank in self._roster.ranks:
            self._hub.send(rank, messages.PublishWeights(version=version))

    def _advance(self, before: Phase) -> Events:
        """Send what the update's new phase asks for; report its end to the core."""
        update = self._update
        if update is None or (update.phase is before and update.phase is not Phase.FAILED):
            return ()
        self.doing = f"weights of version {update.version}: being {update.phase.value}"
        match update.phase:
            case Phase.PREPARE if update.manifest is not None:
                self._recorder.weights(update, "published")
                for server in update.servers:
                    self._hub.send(server, messages.PrepareWeights(manifest=update.manifest))
            case Phase.COMMIT:
                for server in update.servers:
                    self._hub.send(server, messages.CommitWeights(version=update.version))
            case Phase.DONE:
                self._update = None
                self.doing = "generating"
                return (events.UpdateDone(version=update.version),)
            case Phase.FAILED:
                return self._give_up(update)
        return ()

    def _give_up(self, update: WeightUpdate) -> Events:
        self._update = None
        self._recorder.weights(update, "failed")
        for server in update.servers:
            self._hub.send(server, messages.AbortWeights(version=update.version, reason=update.cause))
        return (events.UpdateFailed(version=update.version, cause=update.cause),)
