"""The session machines with a clock that the test turns: who is welcome, what costs a credit, what is repeated, who is lost."""

from __future__ import annotations

import numpy as np
import pytest

from telescope.wire import messages as m
from telescope.wire.channel import MAX_AHEAD, NoCredit
from telescope.wire.codec import MalformedMessage, RawArrays, decode, encode
from telescope.wire.hub_session import HubIdentity, HubSession, Timing, UnknownPeer
from telescope.wire.messages import ACK_DELAY_S
from telescope.wire.peer_events import Delivery, PeerJoined, PeerLeft, PeerLost, PeerStuck
from telescope.wire.session import PeerSession
from tests.wire.samples import MANIFEST, ORDER, SAMPLES, SAMPLING, completion, hello, trajectory

TRAIN_STEP = next(sample for sample in SAMPLES if sample.name == "TrainStep")
IDENTITY = HubIdentity("run-1", "attempt-1", "c0ffee")
TIMING = Timing(heartbeat_s=3.0, silent_s=15.0, stuck_s=600.0)


class Wire:
    """A hub and peers joined by perfect connections; `now` is turned by hand."""

    def __init__(self, timing: Timing = TIMING) -> None:
        self.now = 100.0
        self.hub = HubSession(IDENTITY, timing, self.now)
        self.peers: dict[str, PeerSession] = {}
        self.routes: dict[bytes, PeerSession] = {}
        self.inbox: dict[str, list[Delivery]] = {}
        self.connections = 0

    def join(self, name: str, **changes: object) -> PeerSession:
        peer = self.peers[name] = PeerSession(hello(name, **changes), self.now)
        self.inbox[name] = []
        self.reconnect(name)
        return peer

    def reconnect(self, name: str) -> None:
        """What is under way both ways is lost, and a new connection stands."""
        peer = self.peers[name]
        self.routes = {route: other for route, other in self.routes.items() if other is not peer}
        self.connections += 1
        self.routes[b"c%d" % self.connections] = peer
        peer.disconnected()
        peer.connected(self.now)

    def cut(self, name: str) -> None:
        self.routes = {route: other for route, other in self.routes.items() if other is not self.peers[name]}
        self.peers[name].disconnected()

    def move(self) -> None:
        """Carry frames until none are left."""
        moved = True
        while moved:
            moved = False
            for route, peer in list(self.routes.items()):
                while peer.outbox:
                    moved = True
                    self.hub.receive(route, peer.hello.name, peer.outbox.popleft(), self.now)
            while self.hub.outbox:
                moved = True
                route, frames = self.hub.outbox.popleft()
                peer = self.routes.get(route)
                delivery = peer.receive(frames, self.now) if peer else None
                if peer and delivery:
                    self.inbox[peer.hello.name].append(delivery)

    def pass_time(self, seconds: float, step: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            self.hub.flush_acks()
            self.hub.tick(self.now)
            for peer in self.routes.values():
                peer.tick(self.now)
            self.move()

    def events(self) -> list[object]:
        happenings = list(self.hub.happenings)
        self.hub.happenings.clear()
        return happenings

    def order(self, name: str = "worker-0") -> int:
        return self.hub.send(name, m.RunRollout(ORDER), now=self.now)

    def settle(self) -> None:
        self.move()
        self.pass_time(2 * ACK_DELAY_S, ACK_DELAY_S)


@pytest.fixture
def wire() -> Wire:
    return Wire()


def joined(wire: Wire, name: str = "worker-0", **changes: object) -> PeerSession:
    peer = wire.join(name, **changes)
    wire.move()
    assert peer.welcomed
    wire.events()
    return peer


def done(peer: PeerSession, delivery: Delivery) -> int:
    body = m.RolloutResult(11, 0, 1.0, {}, (6,), 3, 3, 1, "stop", 1.0, "", "", (), 1, 2, 3)
    return peer.send(body, RawArrays.of(trajectory(6)), delivery.seq)


# ---- hello -----------------------------------------------------------------------------------------------------------


def test_a_hello_is_answered_by_a_welcome_and_told_to_the_application(wire: Wire) -> None:
    peer = wire.join("worker-0")
    wire.move()
    assert peer.welcomed
    (happening,) = wire.events()
    assert happening == PeerJoined("worker-0", hello("worker-0", connection=1))
    assert wire.hub.credits("worker-0") == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": "run-2"}, "belongs to run 'run-2', this is the hub of run 'run-1'"),
        ({"attempt": "attempt-0"}, "belongs to attempt 'attempt-0', this is attempt 'attempt-1'"),
        ({"config_hash": "beef"}, "runs with config 'beef', the orchestrator with 'c0ffee'"),
        ({"role": "server"}, "says it is a server; a server is named server-<index>"),
        ({"capacity": -1}, "capacity=-1"),
        ({"capacity": 2_000_000}, "capacity=2000000"),
    ],
)
def test_a_wrong_hello_is_rejected_in_a_whole_sentence(wire: Wire, changes: dict[str, object], says: str) -> None:
    peer = wire.join("worker-0", **changes)
    wire.move()
    assert says in peer.refused
    assert peer.over
    assert not wire.hub.happenings
    assert wire.hub.malformed == {("worker-0", "refused hello"): 1}


def test_a_key_may_only_speak_for_its_own_name(wire: Wire) -> None:
    wire.hub.receive(b"r", "worker-1", encode(hello("worker-0")), wire.now)
    (_, frames) = wire.hub.outbox.pop()
    assert decode(frames).envelope.body == m.Reject("the process says it is 'worker-0', but its key belongs to 'worker-1'")
    assert not wire.hub.peers


def test_another_protocol_is_rejected_with_both_versions(wire: Wire) -> None:
    wire.hub.receive(b"r", "worker-0", [b"telescope/9", b"?"], wire.now)
    (_, frames) = wire.hub.outbox.pop()
    reason = decode(frames).envelope.body.reason
    assert "telescope/9" in reason
    assert "telescope/1" in reason


def test_a_message_before_any_hello_is_counted_and_dropped(wire: Wire) -> None:
    wire.hub.receive(b"r", "worker-0", encode(m.Heartbeat(1, "")), wire.now)
    assert wire.hub.malformed == {("worker-0", "no hello"): 1}
    assert not wire.hub.outbox


def test_a_restarted_process_replaces_the_old_one_whose_messages_are_refused(wire: Wire) -> None:
    old = joined(wire)
    wire.order()
    wire.move()
    (order,) = wire.inbox["worker-0"]
    old_route = next(iter(wire.routes))
    new = wire.join("worker-0", incarnation="second", started_ns=1)
    wire.move()
    assert [type(event) for event in wire.events()] == [PeerLost, PeerJoined]
    assert wire.hub.credits("worker-0") == 4
    done(old, order)
    wire.hub.receive(old_route, "worker-0", old.outbox.pop(), wire.now)
    wire.hub.receive(b"another", "worker-0", encode(old.hello), wire.now)
    assert wire.hub.malformed == {("worker-0", "no hello"): 1, ("worker-0", "refused hello"): 1}
    unseen = hello("worker-0", incarnation="between", started_ns=0)
    wire.hub.receive(b"one more", "worker-0", encode(unseen), wire.now)
    assert wire.hub.malformed["worker-0", "late hello"] == 1
    assert wire.events() == []
    assert wire.hub.peers["worker-0"].hello.incarnation == "second"
    assert new.welcomed


def test_a_late_hello_of_an_earlier_connection_does_not_take_the_peer_back(wire: Wire) -> None:
    peer = joined(wire)
    first_hello = encode(peer.hello)
    wire.reconnect("worker-0")
    wire.move()
    wire.hub.receive(b"c1", "worker-0", first_hello, wire.now)
    assert wire.hub.malformed == {("worker-0", "late hello"): 1}
    wire.order()
    wire.move()
    assert len(wire.inbox["worker-0"]) == 1


def test_a_late_welcome_of_an_earlier_connection_does_not_count() -> None:
    peer = PeerSession(hello(), 100.0)
    peer.connected(100.0)
    peer.disconnected()
    peer.connected(101.0)
    peer.receive(encode(m.Welcome(3.0, 15.0, 1)), 101.0)
    assert not peer.welcomed
    peer.receive(encode(m.Welcome(3.0, 15.0, 2)), 101.0)
    assert peer.welcomed


def test_hello_is_said_again_until_it_is_answered(wire: Wire) -> None:
    peer = PeerSession(hello(), wire.now)
    peer.connected(wire.now)
    peer.outbox.clear()  # lost
    peer.tick(wire.now + 0.5)
    assert not peer.outbox
    peer.tick(wire.now + 1.5)
    assert isinstance(decode(peer.outbox[0]).envelope.body, m.Hello)


# ---- credits ---------------------------------------------------------------------------------------------------------


def test_each_order_costs_a_credit_and_its_answer_returns_it(wire: Wire) -> None:
    peer = joined(wire)
    for left in (3, 2, 1, 0):
        wire.order()
        assert wire.hub.credits("worker-0") == left
    with pytest.raises(NoCredit, match="takes 4 orders at once and has 4"):
        wire.order()
    wire.move()
    assert [delivery.seq for delivery in wire.inbox["worker-0"]] == [1, 2, 3, 4]
    peer.send(m.RolloutError(11, 0, "x"), answers=2)
    wire.move()
    assert wire.hub.credits("worker-0") == 1
    (failed,) = wire.events()
    assert (failed.answers, failed.body.cause) == (2, "x")
    assert wire.order() == 5


def test_a_server_full_of_generations_still_takes_weight_orders(wire: Wire) -> None:
    joined(wire, "server-0", capacity=1)
    ids = RawArrays.of((np.zeros(2, np.int32),))
    wire.hub.send("server-0", m.Generate("a", 1, 0, 0, SAMPLING), ids, now=wire.now)
    assert wire.hub.credits("server-0") == 0
    for body in (m.PrepareWeights(MANIFEST), m.CommitWeights(5), m.AbortWeights(5, ""), m.AbortWeights(5, "")):
        wire.hub.send("server-0", body, now=wire.now)
    with pytest.raises(NoCredit, match="4 weight orders are unanswered"):
        wire.hub.send("server-0", m.AbortWeights(5, ""), now=wire.now)


def test_what_is_not_for_a_role_is_refused_on_both_ends(wire: Wire) -> None:
    peer = joined(wire)
    with pytest.raises(ValueError, match="TrainStep is not sent to a worker"):
        wire.hub.send("worker-0", TRAIN_STEP.body, RawArrays.of(TRAIN_STEP.arrays), now=wire.now)
    with pytest.raises(ValueError, match="a worker does not send StepReport"):
        peer.send(m.StepReport(1, {}, {}), answers=1)
    route = next(iter(wire.routes))
    wire.hub.receive(route, "worker-0", encode(m.StepReport(1, {}, {}), 1, 1), wire.now)
    wire.hub.receive(route, "worker-0", encode(m.Welcome(1, 1)), wire.now)
    assert wire.hub.malformed == {("worker-0", "direction"): 2}
    peer.receive(encode(m.PublishWeights(1), 1), wire.now)
    assert peer.malformed == {"direction": 1}


def test_answers_are_checked_before_they_are_sent(wire: Wire) -> None:
    peer = joined(wire)
    wire.order()
    wire.move()
    (order,) = wire.inbox["worker-0"]
    with pytest.raises(ValueError, match="RolloutError must name the message it answers"):
        peer.send(m.RolloutError(11, 0, "x"))
    with pytest.raises(ValueError, match="Generate answers nothing"):
        peer.send(m.Generate("a", 1, 0, 0, SAMPLING), answers=1)
    with pytest.raises(ValueError, match="answered already or never came"):
        peer.send(m.RolloutError(11, 0, "x"), answers=7)
    done(peer, order)
    with pytest.raises(ValueError, match="answered already or never came"):
        done(peer, order)
    assert peer.channel.last_seq == 1


def test_false_answers_from_outside_change_nothing(wire: Wire) -> None:
    joined(wire)
    joined(wire, "server-0")
    wire.order()
    wire.hub.send("server-0", m.CommitWeights(5), now=wire.now)
    worker_route, server_route = wire.routes
    failed = m.RolloutError(11, 0, "x")
    wire.hub.receive(worker_route, "worker-0", encode(failed, 1, 2), wire.now)  # never sent
    wire.hub.receive(server_route, "server-0", encode(m.GenerateFailed("a", "x"), 1, 1), wire.now)  # no answer to that
    wire.hub.receive(worker_route, "worker-0", encode(failed, 0, 1), wire.now)  # unnumbered
    wire.hub.receive(worker_route, "worker-0", encode(failed, 1, 0), wire.now)  # answers nothing
    wire.hub.receive(worker_route, "worker-0", encode(m.Heartbeat(1, ""), 5, 0), wire.now)
    assert sum(wire.hub.malformed.values()) == 4  # a heartbeat's number is the session's own affair
    assert wire.events() == []
    assert wire.hub.credits("worker-0") == 3
    wire.hub.receive(worker_route, "worker-0", encode(failed, 1, 1), wire.now)
    wire.hub.receive(worker_route, "worker-0", encode(failed, 2, 1), wire.now)  # answered twice
    assert wire.hub.credits("worker-0") == 4
    assert len(wire.events()) == 1
    assert wire.hub.malformed[("worker-0", "answers")] == 3


# ---- kept messages ---------------------------------------------------------------------------------------------------


def test_an_order_lost_with_its_connection_comes_after_the_next_hello_and_only_once(wire: Wire) -> None:
    joined(wire)
    wire.order()
    wire.hub.outbox.clear()  # lost
    wire.order()
    wire.move()
    wire.reconnect("worker-0")
    wire.move()
    wire.reconnect("worker-0")
    wire.move()
    assert [delivery.seq for delivery in wire.inbox["worker-0"]] == [2, 1]


def test_results_are_kept_until_the_application_calls_them_safe(wire: Wire) -> None:
    peer = joined(wire)
    wire.order()
    wire.move()
    done(peer, wire.inbox["worker-0"][0])
    wire.settle()
    (delivery,) = wire.events()
    assert [array.dtype.str for array in delivery.arrays] == ["<i4", "|u1", "<f4", "<i4"]
    assert list(peer.channel.kept) == [1]
    wire.reconnect("worker-0")
    wire.settle()
    assert wire.events() == []  # resent, recognised
    assert list(peer.channel.kept) == [1]
    wire.hub.acknowledge(delivery)
    wire.hub.flush_acks()
    wire.hub.outbox.clear()  # the Ack is lost
    wire.reconnect("worker-0")
    wire.settle()
    assert not peer.channel.kept  # so it is given again


def test_other_answers_are_acknowledged_on_arrival(wire: Wire) -> None:
    peer = joined(wire)
    wire.order()
    wire.move()
    peer.send(m.RolloutError(11, 0, "x"), answers=1)
    wire.move()
    assert list(peer.channel.kept) == [1]
    wire.settle()
    assert not peer.channel.kept


def test_a_question_is_kept_until_its_answer_and_the_answer_until_it_has_arrived(wire: Wire) -> None:
    peer = joined(wire)
    peer.send(m.Generate("a", 1, 0, 0, SAMPLING), RawArrays.of((np.array([5, 6], np.int32),)))
    wire.settle()
    (question,) = wire.events()
    assert list(peer.channel.kept) == [1]
    wire.hub.send("worker-0", m.Completion("a", "stop", 3, 0, 0.0, 0.0), RawArrays.of(completion(3)), question, now=wire.now)
    wire.hub.outbox.clear()
    wire.reconnect("worker-0")
    wire.move()
    assert not peer.channel.kept
    (answer,) = wire.inbox["worker-0"]
    assert (answer.answers, answer.body.request_id, answer.arrays[0].tolist()) == (1, "a", [0, 1, 2])
    assert list(wire.hub.peers["worker-0"].channel.kept) == [1]
    wire.settle()
    assert not wire.hub.peers["worker-0"].channel.kept
    with pytest.raises(ValueError, match="answered already"):
        wire.hub.send("worker-0", m.GenerateFailed("a", "x"), answers=question, now=wire.now)


def test_messages_of_the_waiting_time_follow_the_welcome_in_order(wire: Wire) -> None:
    peer = joined(wire)
    wire.cut("worker-0")
    for name in ("a", "b"):
        peer.send(m.Generate(name, 1, 0, 0, SAMPLING), RawArrays.of((np.zeros(1, np.int32),)))
    assert not peer.outbox
    peer.send(m.Abort("a"))
    wire.reconnect("worker-0")
    wire.move()
    assert [delivery.body.request_id for delivery in wire.events()] == ["a", "b"]  # the Abort was not worth keeping


def test_to_a_peer_that_has_gone_nothing_is_sent(wire: Wire) -> None:
    with pytest.raises(UnknownPeer, match="no process worker-0 has said hello"):
        wire.order()
    peer = joined(wire)
    peer.send(m.Generate("a", 1, 0, 0, SAMPLING), RawArrays.of((np.zeros(1, np.int32),)))
    wire.move()
    (question,) = wire.events()
    peer.goodbye("")
    wire.move()
    assert wire.order() == 0
    assert wire.hub.credits("worker-0") == 0
    wire.join("worker-0", incarnation="second")
    wire.move()
    assert wire.hub.send("worker-0", m.GenerateFailed("a", "x"), answers=question, now=wire.now) == 0
    wire.hub.acknowledge(question)
    assert not wire.hub.owes_acks


def test_numbers_far_ahead_are_refused_and_the_memory_for_repeats_is_bounded(wire: Wire) -> None:
    joined(wire)
    route = next(iter(wire.routes))
    ids = RawArrays.of((np.zeros(1, np.int32),))
    wire.hub.receive(route, "worker-0", encode(m.Generate("a", 1, 0, 0, SAMPLING), MAX_AHEAD + 1, 0, ids), wire.now)
    assert wire.hub.malformed == {("worker-0", "seq"): 1}
    seen = wire.hub.peers["worker-0"].channel.seen
    for seq in range(2, MAX_AHEAD + 1):
        seen.add(seq)
    assert len(seen.ahead) == MAX_AHEAD - 1
    with pytest.raises(MalformedMessage):
        seen.add(MAX_AHEAD + 1)
    seen.add(1)
    assert (seen.floor, len(seen.ahead)) == (MAX_AHEAD, 0)
    assert 7 in seen


# ---- time ------------------------------------------------------------------------------------------------------------


def test_heartbeats_keep_both_sides_content(wire: Wire) -> None:
    peer = joined(wire)
    wire.pass_time(300)
    assert wire.events() == []
    assert not peer.over


def test_a_silent_peer_is_lost_after_silent_s_and_refused_when_it_comes_back(wire: Wire) -> None:
    peer = joined(wire)
    peer.progress("playing 3 rollouts")
    wire.pass_time(4)
    wire.cut("worker-0")
    wire.pass_time(14)
    assert wire.events() == []
    wire.pass_time(5)
    (lost,) = wire.events()
    assert lost.peer == "worker-0"
    assert "worker-0 (pid 4321 on node-7) was not heard for 1" in lost.cause
    assert lost.cause.endswith("(limit silent_s=15) and is given up; it was last doing: playing 3 rollouts")
    wire.reconnect("worker-0")
    wire.move()
    assert "is given up; start it anew" in peer.refused


def test_a_hub_that_did_not_listen_does_not_blame_its_peers(wire: Wire) -> None:
    joined(wire)
    wire.now += 40
    wire.hub.excuse(39.5, wire.now)
    wire.hub.tick(wire.now)
    assert wire.events() == []


def test_a_silent_hub_is_lost_after_its_own_silent_s(wire: Wire) -> None:
    peer = joined(wire)
    peer.tick(wire.now + 14.9)
    assert not peer.over
    peer.tick(wire.now + 15.1)
    assert peer.lost == "the orchestrator was not heard for 15.1 s (limit silent_s=15)"


def test_beating_without_progress_on_an_order_is_stuck_and_told_once() -> None:
    wire = Wire(Timing(3.0, 15.0, 60.0))
    peer = joined(wire)
    wire.pass_time(200)
    assert wire.events() == []  # idle is not stuck
    wire.order()
    peer.progress("playing 1 rollout")
    wire.pass_time(59)
    assert wire.events() == []
    wire.pass_time(30)
    (stuck,) = wire.events()
    assert (stuck.peer, stuck.doing) == ("worker-0", "playing 1 rollout")
    assert 60 < stuck.seconds < 65
    peer.progress("scoring")
    wire.pass_time(30)
    assert wire.events() == []
    wire.pass_time(60)
    assert [type(event) for event in wire.events()] == [PeerStuck]


def test_a_worker_whose_turn_is_at_a_server_is_not_stuck() -> None:
    wire = Wire(Timing(3.0, 15.0, 60.0))
    peer = joined(wire)
    wire.order()
    wire.move()
    peer.send(m.Generate("a", 1, 0, 0, SAMPLING), RawArrays.of((np.zeros(1, np.int32),)))
    wire.move()
    (question,) = wire.events()
    wire.pass_time(500)
    assert wire.events() == []
    wire.hub.send("worker-0", m.GenerateFailed("a", "x"), answers=question, now=wire.now)
    wire.pass_time(59)
    assert wire.events() == []
    wire.pass_time(5)
    assert [type(event) for event in wire.events()] == [PeerStuck]


def test_goodbye_without_error_is_leaving_and_with_one_is_a_loss(wire: Wire) -> None:
    peer = joined(wire)
    wire.order()
    peer.goodbye("")
    wire.move()
    assert wire.events() == [PeerLeft("worker-0", 1)]
    second = joined(wire, incarnation="second")
    second.goodbye("the sandbox image is missing")
    wire.move()
    assert wire.events() == [PeerLost("worker-0", "the sandbox image is missing")]


def test_stop_reaches_everyone_once(wire: Wire) -> None:
    one, two = joined(wire), joined(wire, "server-0")
    wire.hub.stop_all("done", wire.now)
    wire.hub.stop_all("done", wire.now)
    wire.move()
    assert [wire.inbox[name][0].body for name in ("worker-0", "server-0")] == [m.Stop("done")] * 2
    assert len(wire.inbox["worker-0"]) == 1
    assert one.stopping
    assert two.stopping
