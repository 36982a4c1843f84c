"""Every order of what two servers and a trainer rank can do during weight updates, with the real coordinator.

The real `WeightCoordinator` (with its `WeightUpdate` and `GroupEpochs`) and the core's `WeightVersions` stand in a world of
servers that take, refuse, keep silent, stay away from broadcasts, die, come back and answer late, of a rank that hears nothing
while it copies its state for a checkpoint, and of a server that is held for an eval, once, for any time. All that can follow
from a state is tried, each state once.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from telescope.flow import events
from telescope.flow.batches import GroupBatch
from telescope.flow.weight_versions import WeightVersions
from telescope.orchestrator.weight_coordinator import UpdateRules, WeightCoordinator
from telescope.records import WeightManifest
from telescope.wire import messages as m
from telescope.wire.peer_events import Delivery

RANK = "trainer-0"
TIMEOUT_S, RETRIES = 100.0, 1
BATCH = GroupBatch()
MIXTURE = -1
"""What a server serves whose commit has failed half-way."""


@dataclass
class Process:
    """A server's process, or the rank's. `inbox`: orders not yet done; `outbox`: answers not yet heard."""

    born: int = 0
    serves: int = 0
    staged: int | None = None
    aloof: bool = False
    """It comes to no broadcast, and answers all else."""
    inbox: list[tuple[int, Any]] = field(default_factory=list)
    outbox: list[tuple[int, Any]] = field(default_factory=list)

    def key(self, place: dict[int, int]) -> object:
        said = tuple((place[number], repr(body)) for number, body in self.outbox)
        return self.serves, self.staged, self.aloof, tuple((place[number], kind(body)) for number, body in self.inbox), said


def kind(body: Any) -> tuple[object, ...]:
    group = getattr(body, "group", None)
    version = body.manifest.version if isinstance(body, m.PrepareWeights) else body.version
    return type(body).__name__, version, None if group is None else (group.epoch, group.members)


class World:
    """What the coordinator sees of the hub, the recorder and the violations, and what lies behind."""

    def __init__(self, servers: int, collective: bool, faults: int) -> None:
        self.collective, self.faults = collective, faults
        self.servers = tuple(f"server-{index}" for index in range(servers))
        self.now, self.numbers, self.births = 0.0, 0, 0
        self.processes = {RANK: Process(), **{server: Process() for server in self.servers}}
        self.updater = WeightCoordinator(self, self, self, (RANK,), UpdateRules(TIMEOUT_S, RETRIES), self.saving)  # type: ignore[arg-type]
        self.core = WeightVersions(while_training=not collective)
        self.core.ready = True
        self.believed = dict.fromkeys(self.servers, 0)
        """By the core: which server serves which version."""
        self.groups: dict[int, tuple[object, ...]] = {}
        """By epoch: its members, each with the process that it was."""
        self.failed = ""
        self.copies, self.saved = False, False
        """Whether the rank copies its state for a checkpoint, and hears nothing; whether it ever did."""
        self.held, self.holds = "", servers > 1
        """The server that is held for an eval; whether one may be yet."""
        self.saves = collective and servers * faults <= 2  # with more of both there would be too many worlds
        self.only_aloof, self.stayed_away = True, 0
        """Whether no other fault has been made; how many servers have stayed away."""
        for server in self.servers:
            self.updater.join(server, 0)

    # ---- the hub, the recorder, the violations

    def send(self, peer: str, body: Any) -> int:
        process = self.processes.get(peer)
        if process is None:
            return 0
        self.numbers += 1
        process.inbox.append((self.numbers, body))
        assert peer != self.held, f"a held server is told of {type(body).__name__}"
        match body:
            case m.CommitWeights(version=version):
                assert version > process.serves or process.serves == MIXTURE, "a server goes back"
                assert process.staged == version, f"{peer} is told to commit what it has not staged"
                others = self.updater._update.servers if self.updater._update else ()
                there = [self.processes[name] for name in others if name in self.processes]
                assert self.updater._update is None or self.updater._update.checksum, "a commit of nobody knows what"
                assert all(version in (other.staged, other.serves) for other in there), "a commit before all have prepared"
            case m.SendWeights(group=group):
                assert not any(member.partition("/")[0] == self.held for member in group.members), (
                    "a held server in a broadcast"
                )
                found = self.groups.setdefault(group.epoch, self.who(group.members))
                assert group.epoch == max(self.groups), "an epoch comes back"
                assert found == self.who(group.members), "a group goes on without a process that founded it"
        return self.numbers

    def who(self, members: tuple[str, ...]) -> tuple[object, ...]:
        names = (member.partition("/")[0] for member in members)
        return tuple((name, self.processes[name].born if name in self.processes else None) for name in names)

    def record_weights(self, *_: object, **__: object) -> None: ...

    def add_to_next_step(self, *_: object, **__: object) -> None: ...

    def alert(self, *_: object, **__: object) -> None: ...

    def note(self, *_: object) -> None: ...

    def saving(self) -> tuple[str, ...]:
        return (RANK,) if self.copies else ()

    # ---- the orchestrator's loop, in small

    def collect(self) -> None:
        while fenced := self.updater.take_fenced():
            for server, _ in fenced:
                if server in self.believed:
                    self.processes.pop(server, None)
                    self.lose(server)
        for event in self.updater.take_events():
            if isinstance(event, events.UpdateFailed):
                self.failed = event.cause
            elif self.core.finish_update(event.version):  # type: ignore[union-attr]
                for server in self.core.reached:
                    if server in self.believed:
                        self.believed[server] = event.version  # type: ignore[union-attr]
                self.core.commit(event.version)  # type: ignore[union-attr]
                self.send_weights()

    def send_weights(self) -> None:
        version = self.core.start_update({name: version for name, version in self.believed.items() if name != self.held})
        if version is not None:
            self.updater.begin(version, self.now, (self.held,) if self.held else ())

    def lose(self, server: str) -> None:
        self.updater.lose(server, self.now)
        del self.believed[server]
        self.core.forget_server(server)
        if server == self.held or set(self.believed) == {self.held}:
            self.held = ""
            self.send_weights()

    # ---- what may happen next

    def moves(self) -> Iterator[tuple[str, str]]:
        if self.failed:
            return
        if self.core.idle and self.core.version < 1:
            yield "train", RANK
        if self.copies:
            yield "has copied", RANK
            yield "time passes", ""
        elif self.saves and self.core.version == 1 and not self.saved and not self.processes[RANK].inbox:
            yield "copies", RANK
        for peer, process in self.processes.items():
            if process.inbox and (peer != RANK or not self.copies):
                yield "does", peer
                if self.faults:
                    yield "fails", peer
                    if peer != RANK:
                        yield "forgets", peer
                        if self.collective and not process.aloof and isinstance(process.inbox[0][1], m.PrepareWeights):
                            yield "stays away", peer
            if process.outbox:
                yield "is heard", peer
                if self.faults:
                    yield "is heard twice", peer
            if peer != RANK and self.faults:
                yield "dies", peer
        for server in self.servers:
            if server in self.believed and server not in self.processes:
                yield "is missed", server
            elif server not in self.believed:
                yield "comes back", server
        if self.updater.doing and self.faults and not self.copies:
            yield "time passes", ""
        if self.held:
            yield "is released", self.held
        elif self.holds and self.core.travelling is None and self.core.version < 1 and len(self.believed) > 1:
            yield from (("is held", name) for name in self.servers[:1] if name in self.believed)  # all are alike

    def make(self, move: tuple[str, str]) -> None:
        what, who = move
        process, before = self.processes.get(who, Process()), self.faults
        match what:
            case "stays away":
                self.faults -= 1
                self.stayed_away += 1
                process.aloof = True
            case "train":
                self.core.train(BATCH)
                self.core.finish_step(self.core.step)
                self.send_weights()
            case "does" | "fails":
                self.faults -= what == "fails"
                number, body = process.inbox.pop(0)
                answer = self.answer(who, process, body, good=what == "does")
                if answer is not None:
                    process.outbox.append((number, answer))
            case "forgets":
                self.faults -= 1
                process.inbox.pop(0)
            case "is heard" | "is heard twice":
                self.faults -= what == "is heard twice"
                number, body = process.outbox.pop(0)
                for _ in range(1 + (what == "is heard twice")):
                    self.updater.hear(Delivery(who, 1, body, answers=number), body, self.now)
            case "dies":
                self.faults -= 1
                del self.processes[who]
            case "is missed":
                self.lose(who)
            case "comes back":
                self.births += 1
                self.processes[who] = Process(self.births)
                self.updater.join(who, 0)
                self.believed[who] = 0
                self.send_weights()
            case "time passes":
                self.faults -= not self.copies
                self.pass_time()
            case "is held":
                self.held, self.holds = who, False
            case "is released":
                self.held = ""
                self.send_weights()
            case "copies" | "has copied":
                self.copies, self.saved = what == "copies", True
        self.only_aloof &= self.faults == before or what == "stays away"
        self.collect()

    def pass_time(self) -> None:
        self.now += 2 * TIMEOUT_S
        self.updater.tick(self.now)

    def answer(self, who: str, process: Process, body: Any, *, good: bool) -> Any:
        version = body.manifest.version if isinstance(body, m.PrepareWeights) else body.version
        refused = m.WeightsFailed(version, "500", fatal=False)
        if process.aloof and isinstance(body, m.PrepareWeights):
            return None
        if missed := self.missed(getattr(body, "group", None)):
            return m.WeightsFailed(version, f"{missed} did not join", fatal=False, missing=missed)
        match body:
            case m.PublishWeights():
                transport = "gloo" if self.collective else "shared_memory"
                manifest = WeightManifest(version, transport, "x", (), 8, "" if self.collective else f"sum {version}")
                return m.WeightsPublished(version, manifest, 0.0) if good else refused
            case m.SendWeights():
                return m.WeightsSent(version, f"sum {version}", 0.0) if good else refused
            case m.PrepareWeights():
                process.staged = version if good else None
                return m.WeightsReady(process.serves, version, f"sum {process.serves}", 0.0) if good else refused
            case m.CommitWeights():
                process.serves, process.staged = (version if good else MIXTURE), None
                return m.WeightsReady(version, None, f"sum {version}", 0.0) if good else refused
            case _:
                process.staged = None
                return m.WeightsReady(process.serves, None, f"sum {process.serves}", 0.0)

    def missed(self, group: Any) -> tuple[str, ...]:
        """The members of a broadcast that do not come to it."""
        members = () if group is None else group.members
        owners = {member: self.processes.get(member.partition("/")[0]) for member in members}
        return tuple(member for member, owner in owners.items() if owner is not None and owner.aloof)

    # ---- what must hold

    def check(self) -> None:
        if self.failed and "did not break off" not in self.failed:
            served = [self.processes[name].serves for name in self.believed if name in self.processes]
            assert self.core.travelling not in served, "the run ends though a server has the version"
        if not self.failed:
            for server, version in self.believed.items():
                process = self.processes.get(server)
                committing = process is not None and any(isinstance(body, m.CommitWeights) for _, body in process.inbox)
                if process is not None and not committing:
                    assert process.serves == version or self.updater.doing, f"{server} serves {process.serves}, not {version}"
                    assert process.serves >= version or process.serves == MIXTURE

    def places(self) -> dict[int, int]:
        """The numbers of orders that still matter, counted anew, so that worlds are the same whatever has happened before."""
        lines = [process.inbox + process.outbox for process in self.processes.values()]
        numbers = {number for line in lines for number, _ in line} | {number for _, number in self.updater._orders}
        return {number: place for place, number in enumerate(sorted(numbers))}

    def key(self) -> object:
        update, core = self.updater._update, self.core
        state = None if update is None else (
            update.version, update.phase, update.round, update.retries, update.servers, tuple(sorted(update.waiting)),
            tuple(sorted(update._prepared)), tuple(sorted(update._failed)), update._in_grace,
            update._in_the_way, update._members, update.checksum, update._waited_in_full,
            tuple(sorted((peer, tuple(sorted(found))) for peer, found in update._missed.items())),
        )  # fmt: skip
        place, group = self.places(), self.updater._epochs._group
        broken = self.groups.get(group.epoch) not in (None, self.who(group.members))
        orders = tuple(
            sorted((peer, place[number], order.phase, order.round) for (peer, number), order in self.updater._orders.items())
        )
        return (
            state, orders, tuple((name, process.key(place)) for name, process in sorted(self.processes.items())),
            tuple(sorted(self.believed.items())), tuple(sorted(self.updater._served.items())), self.faults, self.failed != "",
            self.only_aloof, self.copies, self.saved, self.held, self.holds,
            core.version, core.travelling, core.reached, core._trained, core.batch is None,
            group.members, broken, self.updater._manifest.version if self.updater._manifest else None,
        )  # fmt: skip


def tail(world: World, manner: str) -> World:
    """From here on all are good, or refuse whatever they are told, or say nothing any more: it comes to an end. Who refuses is
    started again three times."""
    world = copy.deepcopy(world)
    births = world.births + 3
    for _ in range(200):
        world.faults = 0
        silent = ("is missed", "has copied")
        moves = [] if world.failed else [move for move in world.moves() if manner != "silent" or move[0] in silent]
        if manner == "refusing" and world.births == births:
            moves = [move for move in moves if move[0] != "comes back"]
        if moves:
            what, who = moves[0]
            world.make(("fails" if manner == "refusing" and what == "does" else what, who))
            world.check()
        elif world.updater.doing:
            world.pass_time()
            world.collect()
        else:
            return world
    raise AssertionError(f"an update without end, where all are {manner}")


def explore(servers: int, collective: bool, faults: int) -> int:
    """How many worlds there are; a broken rule is an AssertionError with the moves that led to it."""
    first = World(servers, collective, faults)
    seen, line = {first.key()}, deque[tuple[World, tuple[object, ...]]]([(first, ())])
    while line:
        world, path = line.popleft()
        for move in world.moves():
            after = copy.deepcopy(world)
            try:
                after.make(move)
                after.check()
                if after.key() in seen:
                    continue
                seen.add(after.key())
                tail(after, "silent")
                tail(after, "refusing")
                settled(tail(after, "good"))
            except AssertionError as error:
                raise AssertionError(f"{error} after {[*path, move]}") from error
            line.append((after, (*path, move)))
    return len(seen)


def settled(world: World) -> None:
    if world.failed:
        blameless = world.stayed_away == len(world.servers) or not world.only_aloof
        assert blameless, f"a server that stays away ends the run, though another one came: {world.failed}"
        return
    everywhere = dict.fromkeys(world.servers, 1)
    assert world.core.version == 1, "the step is not over"
    assert world.believed == everywhere, f"the core believes {world.believed}"
    assert {name: world.processes[name].serves for name in world.servers} == everywhere, "servers stay behind"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """A hundred thousand warnings of what is tried here."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize(("servers", "faults"), [(1, 2), (2, 1)])
def test_whatever_servers_do_in_whatever_order_they_end_with_one_version(collective: bool, servers: int, faults: int):
    assert explore(servers, collective, faults) > 100


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("servers", "collective", "faults"), [(2, False, 2), (2, True, 2), (3, False, 1)])
def test_whatever_more_of_them_do_they_end_with_one_version(servers: int, collective: bool, faults: int):
    assert explore(servers, collective, faults) > 1000
