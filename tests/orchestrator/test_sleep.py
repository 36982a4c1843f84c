"""A step waits until every server sleeps, or is gone; and only then its order goes to the trainer."""

from __future__ import annotations

import os
from typing import Any

import pytest

from telescope.orchestrator.peers import FencedServers, Peers, ProtocolViolations
from telescope.orchestrator.sleep import SleepCoordinator
from telescope.wire.hub import NoCredit
from telescope.wire.messages import Asleep, Sleep
from telescope.wire.peer_events import Delivery
from telescope.wire.supervisor_channel import DESCRIPTOR, OrchestratorChannel, SupervisorChannel
from tests.wire.samples import hello


class Hub:
    """Numbers what is sent to whom; `gone` peers get nothing, `full` ones have no credit."""

    def __init__(self, gone: str = "", full: str = "") -> None:
        self.sent: list[tuple[str, Any]] = []
        self.gone, self.full = gone, full
        self.expelled: list[str] = []

    def expel(self, peer: str, incarnation: str, reason: str) -> None:
        self.expelled.append(peer)

    def send(self, peer: str, body: Any) -> int:
        if peer == self.full:
            raise NoCredit(peer)
        if peer == self.gone:
            return 0
        self.sent.append((peer, body))
        return len(self.sent)


class Night:
    def __init__(self, *servers: str, **hub: str) -> None:
        self.alerts: list[str] = []
        self.hub = Hub(**hub)
        self.dying: set[str] = set()
        self.coordinator = SleepCoordinator(self.hub, ProtocolViolations(self), 10.0, lambda: self.dying)  # type: ignore[arg-type]
        self.began: list[int] = []
        self.coordinator.begin(3, servers, lambda: self.began.append(3), now=100.0)

    def alert(self, level: str, source: str, message: str) -> None:
        self.alerts.append(message)

    def says(self, server: str, number: int, step: int = 3) -> None:
        self.coordinator.hear(Delivery(server, 1, Asleep(step, 0.5), answers=number), Asleep(step, 0.5))


def test_without_servers_a_step_begins_at_once():
    assert Night().began == [3]


def test_a_step_begins_with_the_last_server_that_falls_asleep_and_once():
    night = Night("server-0", "server-1")
    assert night.hub.sent == [("server-0", Sleep(3)), ("server-1", Sleep(3))]
    assert night.coordinator.doing == "waiting for server-0, server-1 to fall asleep"
    night.says("server-1", 2)
    assert (night.began, night.coordinator.doing) == ([], "waiting for server-0 to fall asleep")
    night.says("server-0", 1)
    night.says("server-0", 1)
    assert (night.began, night.coordinator.doing) == ([3], "")
    assert night.alerts == ["its Asleep of step 3 answers no order to sleep; ignored"]


def test_a_lost_server_is_not_waited_for():
    night = Night("server-0")
    night.coordinator.lose("server-0")
    assert night.began == [3]
    assert Night("server-0", gone="server-0").began == [3]


@pytest.mark.parametrize("collected_first", [True, False])
def test_a_server_that_stays_awake_is_fenced_and_the_step_begins_when_it_is_lost(collected_first: bool):
    night = Night("server-0", "server-1")
    night.says("server-1", 2)
    night.coordinator.tick(110.0)
    assert night.coordinator.take_fenced() == []
    night.coordinator.tick(110.1)
    if collected_first:
        why = "it did not fall asleep within weight_sync.update_timeout_s=10 s"
        assert night.coordinator.take_fenced() == [("server-0", why)]
    assert night.began == []
    night.coordinator.lose("server-0")
    assert (night.began, night.coordinator.take_fenced()) == ([3], [])


def test_a_server_without_credit_is_fenced():
    night = Night("server-0", full="server-0")
    assert night.began == []
    assert night.coordinator.take_fenced() == [("server-0", "it leaves its weight orders unanswered")]
    night.coordinator.lose("server-0")
    assert night.began == [3]


def test_a_step_waits_for_the_end_of_a_server_that_was_given_up():
    night = Night("server-0")
    night.dying = {"server-0"}
    night.coordinator.lose("server-0")
    night.coordinator.tick(100.5)
    assert (night.began, night.coordinator.doing) == ([], "waiting for the end of server-0")
    night.dying = set()
    night.coordinator.tick(101.0)
    night.coordinator.tick(102.0)
    assert (night.began, night.coordinator.doing) == ([3], "")


def test_an_end_that_nobody_tells_of_is_not_waited_for_without_end():
    night = Night("server-0")
    night.dying = {"server-0"}
    night.coordinator.lose("server-0")
    night.coordinator.tick(170.0)
    assert night.began == []
    night.coordinator.tick(170.1)
    assert night.began == [3]


def test_a_server_given_up_is_dying_until_the_supervisor_has_seen_the_end_of_that_process():
    supervisor = OrchestratorChannel()
    channel = SupervisorChannel.take_over({DESCRIPTOR: str(os.dup(supervisor.passed))})
    roster = Peers((), ("server-0",), (), {"server-0": hello(pid=17)})
    servers = FencedServers(channel, Hub(), roster, 3)  # type: ignore[arg-type]
    assert servers.find_dying() == ()
    servers.give_up("server-0", "it hangs")
    supervisor.tell_end("server-0", 1, 16, "an earlier incarnation")
    assert servers.find_dying() == ("server-0",)
    supervisor.tell_end("server-0", 2, 17, "killed")
    assert servers.find_dying() == ()
