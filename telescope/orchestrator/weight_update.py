"""One weight update as a small state machine: publish, prepare, commit, or break off. Decides; sends and waits for nothing.

    PUBLISH ─▶ PREPARE ─▶ COMMIT ─▶ DONE          every wait has a deadline, and each round either ends, drops a server or
                 ▲  │                             uses up one of `max_retries`
          (HELD ─┤) ▼
                 └ ABORT ─▶ FAILED

A rank that copies its state off for a checkpoint hears nothing meanwhile, and does not hang: a broadcast is held until it has
done so, and its time to answer an abort begins then.

Until a server is told to commit, the old version is served. What does not answer is dropped and fenced, and the others go on;
a server without a part in the update is the core's to bring up later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum

from telescope.records import WeightGroup, WeightManifest
from telescope.wire.messages import (
    AbortWeights,
    Body,
    CommitWeights,
    PrepareWeights,
    PublishWeights,
    SendWeights,
    WeightsFailed,
    WeightsPublished,
    WeightsReady,
    WeightsSent,
)

ABORT_S = 30.0
"""To answer an abort: whoever is alive does so at once, but for a rank that copies its state off."""
GRACE_S = 5.0
"""When a member of a broadcast has failed or died: for the others to come to an end by themselves, before all is broken off."""

MAX_REASON = 1_000

WeightAnswer = WeightsPublished | WeightsSent | WeightsReady | WeightsFailed


class UpdatePhase(StrEnum):
    """What is being waited for."""

    PUBLISH = "published"
    PREPARE = "prepared"
    HELD = "held until ranks have copied their state for a checkpoint"
    ABORT = "broken off"
    COMMIT = "committed"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, eq=False)
class WeightOrder:
    """A message to be sent. Its answer is given back together with it, so that one of an earlier round is known as such."""

    peer: str
    body: Body
    phase: UpdatePhase
    round: int


class GroupEpochs:
    """The broadcast groups of a run: members that stay the same and whole keep their communicator, others get a new epoch."""

    def __init__(self) -> None:
        self._group = WeightGroup(0, ())

    def find_group(self, members: tuple[str, ...]) -> WeightGroup:
        if members != self._group.members:
            self._group = WeightGroup(self._group.epoch + 1, members)
        return self._group

    def break_up(self, server: str = "") -> None:
        """The communicator is of no use any more: broken off, or the server (if it was a member) is gone."""
        if not server or any(member.partition("/")[0] == server for member in self._group.members):
            self._group = WeightGroup(self._group.epoch, ())


@dataclass
class WeightUpdate:
    """Brings `servers` to a version. `manifest`: where the version has been published already.

    `waiting` holds the peers that have not answered yet. `outbox` are orders to be sent, `fences` servers that must not run on,
    with the reason: whoever drives the update empties both. `cause` says why it has failed.
    """

    version: int
    ranks: tuple[str, ...]
    servers: tuple[str, ...]
    timeout_s: float
    max_retries: int
    now: float
    make_group: Callable[[tuple[str, ...]], WeightGroup]
    """The group of a broadcast to these servers; a new epoch where the last one is not theirs or was broken up."""
    break_up: Callable[[], None]
    saving: Callable[[], Collection[str]] = tuple
    """The ranks that copy their state off for a checkpoint; each is bounded by `checkpoint.timeout_s`."""
    manifest: WeightManifest | None = None
    served_elsewhere: bool = False
    """Other servers hold the version already: those that can't be brought to it are fenced, and the run goes on."""
    others_held: bool = False
    """Other servers are held for evals, and could take the version once they are not: the run goes on without all of these."""
    phase: UpdatePhase = UpdatePhase.PUBLISH
    waiting: set[str] = field(default_factory=set)
    outbox: list[WeightOrder] = field(default_factory=list)
    fences: list[tuple[str, str]] = field(default_factory=list)
    cause: str = ""
    round: int = 0
    retries: int = 0
    checksum: str = ""
    """What every server must hold; of a broadcast it is known when all is sent."""
    deadline: float = 0.0

    def __post_init__(self) -> None:
        self._prepared: set[str] = set()
        self._failed: dict[str, str] = {}
        self._in_the_way: tuple[str, ...] = ()
        """Servers that refused a broadcast for which ranks and other servers still waited: not where a rank had failed too, and
        not those that had waited for another member in vain."""
        self._missed: dict[str, set[str]] = {}
        """Of this round's broadcast, by whoever waited in vain: the processes that had not come when it gave up."""
        self._waited_in_full = False
        """Whether those who had not come had all the time that there is to come."""
        self._in_grace = False
        self._members = len(self.servers)
        if self.manifest is None:
            self._ask(UpdatePhase.PUBLISH, {rank: PublishWeights(version=self.version) for rank in self.ranks}, self.now)
        else:
            self._prepare(self.now)

    @property
    def over(self) -> bool:
        return self.phase in (UpdatePhase.DONE, UpdatePhase.FAILED)

    @property
    def collective(self) -> bool:
        return self.manifest is not None and self.manifest.collective

    @property
    def _abort_s(self) -> float:
        return min(ABORT_S, self.timeout_s)

    # ---- what happens

    def hear(self, order: WeightOrder, body: WeightAnswer, now: float) -> None:
        """An order has its answer; one of an earlier round or phase, or a second one, changes nothing."""
        if (
            order.round == self.round
            and order.phase is UpdatePhase.PREPARE
            and isinstance(body, WeightsFailed)
            and body.missing
        ):
            self._missed[order.peer] = {member.partition("/")[0] for member in body.missing}  # also once all is broken off
        if order.round != self.round or order.phase is not self.phase or order.peer not in self.waiting:
            return
        match self.phase:
            case UpdatePhase.PUBLISH:
                self._hear_published(order.peer, body, now)
            case UpdatePhase.PREPARE:
                self._hear_prepared(order.peer, body, now)
            case UpdatePhase.COMMIT:
                self._hear_committed(order.peer, body, now)
            case UpdatePhase.ABORT:
                self._settle(order.peer, now)

    def lose(self, server: str, now: float) -> None:
        """The server is gone: nobody waits for it, and it has no part in what comes."""
        if server not in self.servers or self.over:
            return
        self.servers = tuple(name for name in self.servers if name != server)
        self._prepared.discard(server)
        self._failed.pop(server, None)
        if self.collective and self.phase is UpdatePhase.PREPARE:
            if not self.servers:  # nobody is left for whose sake the ranks should go on sending
                self.waiting.discard(server)
                self._failed[server] = f"{server} is gone, the last one of the group that weights were sent to"
                self._judge(now)
                return
            self._hurry(now)
        if server in self.waiting:
            self._settle(server, now)
        elif self.phase is UpdatePhase.PREPARE and not self.waiting:
            self._end_phase(now, late=False)

    def tick(self, now: float) -> None:
        """End the phase if it has outlived its deadline."""
        if self.phase is UpdatePhase.HELD:
            self._prepare(now)
            return
        if self.phase is UpdatePhase.ABORT and not self.waiting.isdisjoint(self.saving()):
            self.deadline = now + self._abort_s
        if not self.over and now > self.deadline:
            self._end_phase(now, late=True)

    # ---- answers

    def _hear_published(self, rank: str, body: WeightAnswer, now: float) -> None:
        if not isinstance(body, WeightsPublished) or body.version != self.version:
            self._give_up(f"{rank} could not publish weights of version {self.version}: {_describe_answer(body)}")
            return
        self.manifest = body.manifest or self.manifest
        self._settle(rank, now)

    def _hear_prepared(self, peer: str, body: WeightAnswer, now: float) -> None:
        if isinstance(body, WeightsReady) and body.prepared == self.version and peer in self.servers:
            self._prepared.add(peer)
        elif isinstance(body, WeightsSent) and body.version == self.version and peer in self.ranks:
            self.checksum = body.checksum or self.checksum
        else:
            self._failed[peer] = (
                f"{peer} could not {self._name_task(peer)} weights of version {self.version}: {_describe_answer(body)}"
            )
            if self.collective:
                self._hurry(now)
            if peer in self.ranks:  # nothing more will come: there is nobody to give time to
                self._judge(now)
                return
        self._settle(peer, now)

    def _hear_committed(self, server: str, body: WeightAnswer, now: float) -> None:
        if not isinstance(body, WeightsReady) or body.version != self.version:
            self._fence(server, f"it could not commit weights of version {self.version}: {_describe_answer(body)}")
        elif self.checksum and body.checksum != self.checksum:
            self._fence(server, f"it serves weights with checksum {body.checksum}, the trainer published {self.checksum}")
        self._settle(server, now)

    def _name_task(self, peer: str) -> str:
        return "send" if peer in self.ranks else "take"

    def _settle(self, peer: str, now: float) -> None:
        self.waiting.discard(peer)
        if not self.waiting:
            self._end_phase(now, late=False)

    # ---- from phase to phase

    def _end_phase(self, now: float, late: bool) -> None:
        """All have answered, or `late` ones (still waited for) are given up."""
        match self.phase:
            case UpdatePhase.PUBLISH if late:
                self._give_up(self._name_late())
            case UpdatePhase.PUBLISH if self.manifest is None:
                self._give_up("no trainer rank named where the weights lie")
            case UpdatePhase.PUBLISH:
                self._prepare(now)
            case UpdatePhase.PREPARE:
                self._judge(now)
            case UpdatePhase.ABORT:
                self._after_abort(now)
            case UpdatePhase.COMMIT:
                for server in sorted(self.waiting):
                    self._fence(server, self._name_late(server))
                self.phase, self.waiting = UpdatePhase.DONE, set()

    def _prepare(self, now: float) -> None:
        """A round begins. Without servers there is nobody to bring up: whoever comes later is behind, and the core sees it."""
        assert self.manifest is not None
        if self.collective and self.servers and self.saving():
            self.phase, self.waiting = UpdatePhase.HELD, set()
            return
        self._prepared, self._failed, self._in_grace, self._members = set(), {}, False, len(self.servers)
        self._missed = {}
        self.checksum = self.manifest.checksum
        self.round += 1
        if not self.servers:
            self.phase, self.waiting = UpdatePhase.DONE, set()
            return
        group = self.make_group(self.servers) if self.collective else None
        orders: dict[str, Body] = {server: PrepareWeights(manifest=self.manifest, group=group) for server in self.servers}
        if group is not None:
            orders |= {rank: SendWeights(version=self.version, group=group) for rank in self.ranks}
        self._ask(UpdatePhase.PREPARE, orders, now)

    def _judge(self, now: float) -> None:
        """Everybody has said how it went, or time is up. Commit with those who hold the version, or try again."""
        late = sorted(server for server in self.waiting if server in self.servers)
        sent = not any(rank in self.waiting or rank in self._failed for rank in self.ranks)
        if self._prepared and sent and (not self.collective or not late):
            for server in sorted(set(self.servers) - self._prepared):
                self._fence(server, self._failed.get(server) or self._name_late(server))
            self._ask(UpdatePhase.COMMIT, {server: CommitWeights(version=self.version) for server in self.servers}, now)
            return
        if not self.servers and sent:
            self.phase = UpdatePhase.DONE
            return
        self.cause = "; ".join(self._failed.values()) or self._name_late()
        if self._prepared and not self._in_grace:  # the others had the same time and managed
            for server in late:
                self._fence(server, self._name_late(server))
        if self.collective:
            self.break_up()
            waited_for = late and self._failed.keys().isdisjoint(self.ranks)
            refused = (server for server in self._failed if server in self.servers and server not in self._missed)
            self._in_the_way = tuple(refused) if waited_for else ()
            self._waited_in_full = bool(self._missed) or not self._in_grace
        peers = (*self.servers, *self.ranks) if self.collective else self.servers
        abort = AbortWeights(version=self.version, reason=self.cause[:MAX_REASON])
        self._ask(UpdatePhase.ABORT, dict.fromkeys(peers, abort), now, seconds=self._abort_s)

    def _after_abort(self, now: float) -> None:
        """Whoever has not even answered the abort hangs."""
        silent = sorted(self.waiting)
        ranks = [peer for peer in silent if peer in self.ranks]
        if ranks:
            self._give_up(f"{', '.join(ranks)} did not break off the sending of version {self.version}: {self.cause}")
            return
        for server in silent:
            self._fence(server, f"it neither took weights of version {self.version} nor answered the abort: it hangs")
        if len(self.servers) == self._members:
            self.retries += 1
        if self.retries > self.max_retries:
            cause = f"{self.cause}; that was retry {self.max_retries} of weight_sync.max_retries={self.max_retries}"
            unfit = self._find_unfit()
            if not unfit:
                absent = ", ".join(sorted(self._find_missed_by_all() & set(self.ranks)))
                self._give_up(f"{absent} did not come to send version {self.version}: {cause}" if absent else cause)
                return
            for server in unfit:
                self._fence(server, f"it could not be brought to version {self.version}, unlike others: {cause}")
        self._prepare(now)

    def _find_missed_by_all(self) -> set[str]:
        """Processes that did not come to the last broadcast, by the word of each that waited in vain: whoever came late is
        missed by the first of them alone. Nobody where what broke it off came before their time was up."""
        return set.intersection(*self._missed.values()) if self._missed and self._waited_in_full else set()

    def _find_unfit(self) -> tuple[str, ...]:
        """The servers that keep others from the version. No server is where the sender is missed; nor where all are missed,
        as where all refuse, unless there are others yet."""
        absent = self._find_missed_by_all()
        if self.served_elsewhere:
            return self.servers
        if not absent.isdisjoint(self.ranks):
            return ()
        in_the_way = tuple(name for name in self.servers if name in self._in_the_way)
        unfit = tuple(name for name in self.servers if name in absent or name in in_the_way)
        return unfit if len(unfit) < len(self.servers) or self.others_held else in_the_way

    def _ask(self, phase: UpdatePhase, bodies: dict[str, Body], now: float, seconds: float | None = None) -> None:
        self.phase, self.waiting = phase, set(bodies)
        self.deadline = now + (self.timeout_s if seconds is None else seconds)
        self.outbox.extend(WeightOrder(peer, body, phase, self.round) for peer, body in bodies.items())
        if not bodies:
            self._end_phase(now, late=False)

    def _hurry(self, now: float) -> None:
        self._in_grace = True
        self.deadline = min(self.deadline, now + GRACE_S)

    def _fence(self, server: str, why: str) -> None:
        self.servers = tuple(name for name in self.servers if name != server)
        self.fences.append((server, why))

    def _give_up(self, cause: str) -> None:
        self.phase, self.cause, self.waiting = UpdatePhase.FAILED, cause, set()

    def _name_late(self, server: str = "") -> str:
        late = server or ", ".join(sorted(self.waiting))
        limit = f"weight_sync.update_timeout_s={self.timeout_s:g} s"
        if self._in_grace:
            limit = f"{GRACE_S:g} s after another member of the group had failed"
        return f"weights of version {self.version} were not {self.phase.value} by {late} within {limit}"


def _describe_answer(body: WeightAnswer) -> str:
    if isinstance(body, WeightsFailed):
        return body.cause
    if isinstance(body, WeightsReady):
        return f"it says that it serves version {body.version} and holds {body.prepared}"
    return f"it answers with {type(body).__name__} of version {body.version}"
