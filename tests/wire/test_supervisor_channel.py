"""What orchestrator and supervisor tell each other: in order, whole, and without holding either of them up."""

from __future__ import annotations

import os
import socket

import pytest

from telescope.wire import supervisor_channel
from telescope.wire.supervisor_channel import (
    DESCRIPTOR,
    MAX_REASON_CHARACTERS,
    FenceServer,
    OrchestratorChannel,
    ServerEnded,
    StopNotice,
    SupervisorChannel,
)


def pair() -> tuple[OrchestratorChannel, SupervisorChannel]:
    """The supervisor's end, and that which its orchestrator takes over."""
    ours = OrchestratorChannel()
    environ = {name: str(os.dup(int(number))) for name, number in ours.variables.items()}
    os.set_inheritable(int(environ[DESCRIPTOR]), True)
    theirs = SupervisorChannel.take_over(environ)
    assert environ == {}
    return ours, theirs


def test_each_end_hears_what_the_other_has_said():
    ours, theirs = pair()
    assert ours.underway is False
    theirs.tell_underway()
    theirs.ask_to_fence("server-0", 17, "it hangs")
    ours.read()
    assert (ours.underway, ours.fences) == (True, {"server-0": FenceServer("server-0", 17, "it hangs")})
    ours.tell_end("server-0", 1, 17, "server-0 was fenced: it hangs.")
    ours.tell_stop("walltime", failed=False)
    ours.tell_stop("trainer-0 was killed", failed=True)
    theirs.read()
    assert theirs.ends == {"server-0": ServerEnded("server-0", 1, 17, "server-0 was fenced: it hangs.")}
    assert theirs.stop == StopNotice("walltime", failed=False)
    theirs.tell_ending()
    ours.read()
    assert ours.underway is False


def test_what_was_said_before_an_end_is_heard_after_it():
    ours, theirs = pair()
    theirs.tell_underway()
    theirs.close()
    ours.read()
    assert ours.underway is True


def test_an_orchestrator_that_does_not_listen_holds_nobody_up_and_hears_all_later():
    ours, theirs = pair()
    names = [f"server-{number}" for number in range(500)]
    for name in names:
        ours.tell_end(name, 1, 17, "x" * 2 * MAX_REASON_CHARACTERS)
    while len(theirs.ends) < len(names):
        before = len(theirs.ends)
        theirs.read()
        ours.read()
        assert len(theirs.ends) > before
    assert list(theirs.ends) == names
    assert len(theirs.ends["server-0"].how) == MAX_REASON_CHARACTERS


def test_the_supervisor_is_not_woken_by_an_orchestrator_that_has_gone():
    ours, theirs = pair()
    theirs.close()
    ours.tell_stop("walltime", failed=False)
    with socket.socket(fileno=os.dup(ours.descriptor)) as watched:
        watched.settimeout(0.05)
        try:
            watched.recv(1)
            woken = True
        except TimeoutError:
            woken = False
    assert not woken


def test_a_supervisor_that_has_gone_keeps_its_orchestrator_from_nothing():
    ours, theirs = pair()
    ours.close()
    theirs.ask_to_fence("server-0", 17, "it hangs")
    theirs.read()
    assert theirs.ends == {}


def test_no_child_of_the_orchestrator_gets_the_end():
    ours = OrchestratorChannel()
    number = os.dup(ours.passed)
    os.set_inheritable(number, True)
    theirs = SupervisorChannel.take_over({DESCRIPTOR: str(number)})
    assert os.get_inheritable(number) is False
    theirs.close()


def test_an_orchestrator_started_by_hand_speaks_to_nobody():
    alone = SupervisorChannel.take_over({})
    alone.tell_underway()
    alone.ask_to_fence("server-0", 17, "it hangs")
    alone.read()
    assert (alone.ends, alone.stop) == ({}, None)


@pytest.mark.parametrize(
    "packet",
    [b"", b"\xff", b"{}", b'{"type":"Nope"}', b"[" * 60_000, b'{"type":"EndingNotice","x":' + b"[" * 60_000, b"x" * 100_000],
)
def test_a_packet_that_is_no_message_stops_neither_end_and_the_next_one_is_heard(packet: bytes):
    ours, theirs = pair()
    with socket.socket(fileno=os.dup(ours.passed)) as end:
        end.send(packet)
    theirs.tell_underway()
    ours.read()
    assert ours.underway is True


def test_a_flood_is_taken_in_bit_by_bit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor_channel, "MAX_PACKETS", 10)
    ours, theirs = pair()
    for number in range(25):
        theirs.ask_to_fence(f"server-{number}", 17, "it hangs")
    heard = []
    for _ in range(3):
        ours.read()
        heard.append(len(ours.fences))
    assert heard == [10, 20, 25]
