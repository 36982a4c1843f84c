"""Over random losses, repeats, reordering, reconnects and restarts: each order is delivered at most once an incarnation, each
kept message arrives in the end, and credits stay between 0 and the capacity."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.wire import messages as m
from telescope.wire.codec import RawArrays
from telescope.wire.hub_session import HubIdentity, HubSession, Timing
from telescope.wire.peer_events import Delivery, PeerJoined
from telescope.wire.session import PeerSession
from tests.wire.samples import ORDER, SAMPLING, completion, hello, trajectory

CAPACITY = 3
RESULT = m.RolloutResult(11, 0, 1.0, {}, (4,), 2, 2, 1, "stop", 1.0, "", "", (), 1, 2, 3)


class World:
    """One hub and one worker, process after process; each connection is two bags of frames that may come in any order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.hub = HubSession(HubIdentity("run-1", "attempt-1", "c0ffee"), Timing(1.0, 1e9, 1e9), 0.0)
        self.processes = 0
        self.routes = 0
        self.to_hub: list[tuple[bytes, list[bytes]]] = []
        self.to_peer: dict[bytes, list[list[bytes]]] = defaultdict(list)
        self.performed: Counter[tuple[str, int]] = Counter()
        self.heard: Counter[tuple[str, int]] = Counter()
        self.unsafe: list[Delivery] = []
        self.questions: list[Delivery] = []
        self.ordered: dict[str, set[int]] = defaultdict(set)
        self.said: dict[str, set[int]] = defaultdict(set)
        self.restart(0)

    def restart(self, _: int) -> None:
        """A new process of the same name; what the old one has sent is still under way."""
        self.processes += 1
        incarnation = f"process-{self.processes}"
        self.peer = PeerSession(hello(incarnation=incarnation, capacity=CAPACITY, started_ns=self.processes), self.now)
        self.orders: list[Delivery] = []
        self.answers: list[Delivery] = []
        self.reconnect(0)

    def reconnect(self, _: int) -> None:
        self.routes += 1
        self.route = b"route-%d" % self.routes
        self.peer.disconnected()
        self.peer.connected(self.now)

    @property
    def incarnation(self) -> str:
        return self.peer.hello.incarnation

    # ---- the network -------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        while self.peer.outbox:
            self.to_hub.append((self.route, self.peer.outbox.popleft()))
        while self.hub.outbox:
            route, frames = self.hub.outbox.popleft()
            self.to_peer[route].append(frames)

    def hub_hears(self, pick: int, repeat: bool = False) -> None:
        self.gather()
        if self.to_hub:
            index = pick % len(self.to_hub)
            route, frames = self.to_hub[index] if repeat else self.to_hub.pop(index)
            self.hub.receive(route, "worker-0", frames, self.now)
        while self.hub.happenings:
            self.note(self.hub.happenings.popleft())

    def note(self, happening: object) -> None:
        if isinstance(happening, PeerJoined):
            self.questions = []
        if not isinstance(happening, Delivery):
            return
        self.heard[happening.incarnation, happening.seq] += 1
        if isinstance(happening.body, m.Generate):
            self.questions.append(happening)
        elif isinstance(happening.body, m.RolloutResult):
            self.unsafe.append(happening)

    def peer_hears(self, pick: int, repeat: bool = False) -> None:
        self.gather()
        bag = self.to_peer[self.route]
        if not bag:
            return
        index = pick % len(bag)
        delivery = self.peer.receive(bag[index] if repeat else bag.pop(index), self.now)
        if delivery is None:
            return
        self.performed[self.incarnation, delivery.seq] += 1
        (self.orders if isinstance(delivery.body, m.RunRollout) else self.answers).append(delivery)

    def hub_hears_twice(self, pick: int) -> None:
        self.hub_hears(pick, repeat=True)

    def peer_hears_twice(self, pick: int) -> None:
        self.peer_hears(pick, repeat=True)

    def lose_to_hub(self, pick: int) -> None:
        self.gather()
        if self.to_hub:
            self.to_hub.pop(pick % len(self.to_hub))

    def lose_to_peer(self, pick: int) -> None:
        self.gather()
        bag = self.to_peer[self.route]
        if bag:
            bag.pop(pick % len(bag))

    # ---- the applications --------------------------------------------------------------------------------------------

    def give_order(self, _: int) -> None:
        if self.hub.credits("worker-0") > 0:
            incarnation = self.hub.peers["worker-0"].hello.incarnation
            self.ordered[incarnation].add(self.hub.send("worker-0", m.RunRollout(ORDER), now=self.now))

    def answer_order(self, pick: int) -> None:
        if self.orders:
            order = self.orders.pop(pick % len(self.orders))
            if pick % 2:
                seq = self.peer.send(RESULT, RawArrays.of(trajectory(4)), order.seq)
            else:
                seq = self.peer.send(m.RolloutError(11, 0, "x"), answers=order.seq)
            self.said[self.incarnation].add(seq)

    def ask(self, _: int) -> None:
        body = m.Generate("a", 1, 0, 0, SAMPLING)
        self.said[self.incarnation].add(self.peer.send(body, RawArrays.of((np.zeros(2, np.int32),))))

    def answer_question(self, pick: int) -> None:
        if self.questions:
            question = self.questions.pop(pick % len(self.questions))
            body = m.Completion("a", "stop", 2, 0, 0.0, 0.0)
            seq = self.hub.send("worker-0", body, RawArrays.of(completion(2)), question, now=self.now)
            if seq:
                self.ordered[question.incarnation].add(seq)

    def make_safe(self, pick: int) -> None:
        if self.unsafe:
            self.hub.acknowledge(self.unsafe.pop(pick % len(self.unsafe)))

    def pass_time(self, pick: int) -> None:
        self.now += 0.2 + (pick % 3) * 0.5
        self.hub.flush_acks()
        self.hub.tick(self.now)
        self.peer.tick(self.now)

    # ---- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        peer = self.hub.peers.get("worker-0")
        assert peer is None or 0 <= peer.channel.credits <= CAPACITY
        assert all(count == 1 for count in self.performed.values())
        assert all(count == 1 for count in self.heard.values())

    def calm(self) -> None:
        """The network mends: a new connection, everything carried, acks given."""
        for _ in range(2):
            self.reconnect(0)
            for _ in range(2):
                self.gather()
                while self.to_hub or self.to_peer[self.route] or self.peer.outbox or self.hub.outbox:
                    self.hub_hears(0)
                    self.peer_hears(0)
                    self.check()
                while self.unsafe:
                    self.make_safe(0)
                self.pass_time(0)


ACTIONS = [
    World.hub_hears, World.hub_hears, World.hub_hears, World.peer_hears, World.peer_hears, World.peer_hears,
    World.hub_hears_twice, World.peer_hears_twice, World.lose_to_hub, World.lose_to_peer, World.reconnect, World.restart,
    World.give_order, World.give_order, World.answer_order, World.answer_order, World.ask, World.answer_question,
    World.make_safe, World.pass_time,
]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 50)), min_size=20, max_size=250))
@settings(max_examples=100, deadline=None)
def test_each_order_at_most_once_and_each_kept_message_in_the_end(script: list[tuple[object, int]]) -> None:
    world = World()
    for action, pick in script:
        action(world, pick)  # type: ignore[operator]
        world.check()
    world.calm()
    living = world.incarnation
    assert world.peer.welcomed
    assert {seq for (name, seq) in world.performed if name == living} == world.ordered[living]
    assert {seq for (name, seq) in world.heard if name == living} == world.said[living]
    assert world.peer.channel.unacknowledged == 0
    assert world.hub.credits("worker-0") == CAPACITY - len(world.orders)
    assert world.hub.peers["worker-0"].channel.unacknowledged == 0
    assert len(world.peer.channel.questions) == len(world.orders)
    unexpected = {reason for _, reason in world.hub.malformed} - {"no hello", "late hello", "refused hello"}
    assert not unexpected
    assert not world.peer.malformed
