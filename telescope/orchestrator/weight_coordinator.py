"""The weight update under way, and what is known of the last one: which messages it costs, and which events it gives.

Owns who serves which version, the numbers of weight orders, and the broadcast groups; weight_update.py decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from telescope.flow import events
from telescope.orchestrator.peers import ProtocolViolations
from telescope.orchestrator.recorder import Recorder
from telescope.orchestrator.update_times import SECTION as UPDATE_TIMES
from telescope.orchestrator.update_times import UpdateTimes
from telescope.orchestrator.weight_update import GroupEpochs, UpdatePhase, WeightAnswer, WeightOrder, WeightUpdate
from telescope.records import WeightGroup, WeightManifest
from telescope.wire.hub import Hub, NoCredit
from telescope.wire.messages import WeightsFailed, WeightsReady, WeightsSent
from telescope.wire.peer_events import Delivery

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateRules:
    """What the configuration says about updates."""

    timeout_s: float
    max_retries: int
    workers_per_server: int = 1
    """Processes of one server that take part in a broadcast, each as a member of its own."""


class WeightCoordinator:
    """Drives one update at a time. `fenced` and `events` are for the loop, which empties them, `fenced` first."""

    def __init__(
        self,
        hub: Hub,
        recorder: Recorder,
        violations: ProtocolViolations,
        ranks: tuple[str, ...],
        rules: UpdateRules,
        saving: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`saving`: see `WeightUpdate`."""
        self._hub, self._recorder, self._violations = hub, recorder, violations
        self._ranks, self._rules, self._saving = ranks, rules, saving
        self._served: dict[str, int] = {}
        self._update: WeightUpdate | None = None
        self._times: UpdateTimes | None = None
        """Of the update under way where it brings a new version; one for servers that came late is no step's."""
        self._orders: dict[tuple[str, int], WeightOrder] = {}
        self._manifest: WeightManifest | None = None
        self._epochs = GroupEpochs()
        self._reported = UpdatePhase.PUBLISH
        self._events: list[events.AnyEvent] = []
        self._fenced: list[tuple[str, str]] = []
        self.newest = 0
        """The version that a server may serve by now."""

    @property
    def doing(self) -> str:
        """What is waited for; empty where no update is under way."""
        update = self._update
        return f"weights of version {update.version}: being {update.phase.value}" if update is not None else ""

    def join(self, server: str, version: int) -> None:
        self._served[server] = version
        self.newest = max(self.newest, version)

    def lose(self, server: str, now: float) -> None:
        """The server is gone, with what it was asked."""
        self._served.pop(server, None)
        self._epochs.break_up(server)
        self._orders = {key: order for key, order in self._orders.items() if key[0] != server}
        if self._update is not None:
            self._update.lose(server, now)
            self._follow(now)

    def begin(self, version: int, now: float, held: Collection[str] = ()) -> None:
        """Bring all servers that are behind to the version, but for those held for evals, which have no part in its broadcast
        either; a version published before is not published again."""
        self.newest = max(self.newest, version)
        known = self._manifest is not None and self._manifest.version == version
        self._update = WeightUpdate(
            version=version,
            ranks=self._ranks,
            servers=tuple(server for server, served in self._served.items() if served != version and server not in held),
            timeout_s=self._rules.timeout_s,
            max_retries=self._rules.max_retries,
            now=now,
            make_group=self._make_group,
            break_up=self._epochs.break_up,
            saving=self._saving,
            manifest=self._manifest if known else None,
            served_elsewhere=version in self._served.values(),
            others_held=bool(held),
        )
        self._times = None if known else UpdateTimes(version, now)
        self._reported = UpdatePhase.PREPARE if known else UpdatePhase.PUBLISH
        self._follow(now)

    def tick(self, now: float) -> None:
        if self._update is not None:
            self._update.tick(now)
            self._follow(now)

    def hear(self, delivery: Delivery, body: WeightAnswer, now: float) -> None:
        """A peer's answer to a weight order. What counts is which order it answers."""
        order = self._orders.pop((delivery.peer, delivery.answers), None)
        update = self._update
        if order is None:
            self._violations.note(delivery.peer, f"its {type(body).__name__} answers no weight order; ignored")
            return
        if isinstance(body, WeightsReady) and order.peer in self._served:
            self._served[order.peer] = body.version
        if update is None:
            return
        current = order.phase is update.phase and order.round == update.round
        if current:
            self._record(update, order, body)
            if self._times is not None:
                self._times.hear(order, body, now)
        update.hear(order, body, now)
        self._follow(now)

    def take_fenced(self) -> list[tuple[str, str]]:
        """Servers that must not run on, and why."""
        fenced, self._fenced = self._fenced, []
        return fenced

    def take_events(self) -> Iterable[events.AnyEvent]:
        happened, self._events = self._events, []
        return happened

    # ---- what follows from the update's new state

    def _follow(self, now: float) -> None:
        update = self._update
        assert update is not None
        while update.outbox:
            order = update.outbox.pop(0)
            if self._times is not None:
                self._times.ask(order, now)
            self._send(order)
        self._fenced.extend(update.fences)
        update.fences.clear()
        self._report(update)
        if update.over:
            self._end(update, now)

    def _send(self, order: WeightOrder) -> None:
        try:
            number = self._hub.send(order.peer, order.body)
        except NoCredit:
            if order.peer in self._ranks:
                raise
            self._fenced.append((order.peer, "it leaves its weight orders unanswered"))
            return
        if number:  # else the peer has gone, which will be told next
            self._orders[order.peer, number] = order

    def _report(self, update: WeightUpdate) -> None:
        """One row for a version that is published, and one for each round that came to nothing."""
        if update.phase is self._reported:
            return
        if self._reported is UpdatePhase.PUBLISH and update.manifest is not None:
            self._recorder.record_weights(update, "published")
        if update.phase is UpdatePhase.ABORT:
            log.warning("weights of version %d, round %d: %s", update.version, update.round, update.cause)
            self._recorder.record_weights(update, "broken off")
            self._recorder.alert("warning", "weights", f"round {update.round} of version {update.version}: {update.cause}")
        self._reported = update.phase

    def _end(self, update: WeightUpdate, now: float) -> None:
        self._update = None
        self._manifest = update.manifest
        if update.phase is UpdatePhase.DONE:
            if self._times is not None:
                self._recorder.add_to_next_step(self._times.metrics(now), instead_of=UPDATE_TIMES)
            self._events.append(events.UpdateDone(version=update.version))
            return
        self._recorder.record_weights(update, "failed")
        self._events.append(events.UpdateFailed(version=update.version, cause=update.cause))

    def _record(self, update: WeightUpdate, order: WeightOrder, body: WeightAnswer) -> None:
        if isinstance(body, WeightsFailed):
            self._recorder.record_weights(update, "refused", order.peer, cause=body.cause)
        elif isinstance(body, WeightsSent):
            self._recorder.record_weights(update, "sent", order.peer)
        elif isinstance(body, WeightsReady) and update.phase in (UpdatePhase.PREPARE, UpdatePhase.COMMIT):
            self._recorder.record_weights(update, update.phase.value, order.peer, body.pause_s)

    def _make_group(self, servers: tuple[str, ...]) -> WeightGroup:
        """Rank 0 sends; each process of each server receives."""
        each = range(self._rules.workers_per_server)
        return self._epochs.find_group((self._ranks[0], *(f"{server}/{index}" for server in servers for index in each)))
