"""The direct way of a worker to real doors: one link a server, and what becomes of requests when it is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from telescope.records import Sampling
from telescope.runlog.layout import RunDirectory
from telescope.wire.happenings import Delivery, PeerJoined
from telescope.wire.hub import Hub
from telescope.wire.hub_session import HubIdentity
from telescope.wire.messages import Completion, DoorAddress, Generate, Hello, Ticket
from telescope.wire.security import make_keys
from telescope.workers.direct import DoorLost, Doors

IDS = np.arange(5, dtype=np.int32)


@dataclass
class Street:
    """Two servers' ports, and a worker's way to them."""

    run: RunDirectory
    doors: Doors
    ports: dict[str, Hub]

    def ticket(self, name: str, server: str, door: DoorAddress | None = None) -> Ticket:
        return Ticket(name, server, door or self.ports[server].address, "secret", 30.0)

    def bring(self, name: str, server: str = "server-0", door: DoorAddress | None = None) -> asyncio.Task:
        request = Generate(name, 0, 0, 0, Sampling(1.0, 4, 1), ticket="secret")
        return asyncio.create_task(self.doors.bring(self.ticket(name, server, door), request, IDS))

    async def asked(self, server: str = "server-0") -> Delivery:
        while not isinstance(happening := await self.ports[server].next(60), Delivery):
            assert isinstance(happening, PeerJoined)
        return happening

    def answer(self, asked: Delivery, server: str = "server-0") -> None:
        arrays = (np.array([7, 1], np.int32), np.array([-1, -2], np.float32), np.array([0, 0], np.int32))
        self.ports[server].send(asked.peer, Completion(asked.body.request_id, "stop", 2, 0, 0, 0), arrays, answers=asked)


@pytest.fixture
async def street(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Street]:
    """Nobody counts as silent on a busy machine, but where a test sets the time for it."""
    silent_s = getattr(request, "param", 60.0)
    run = RunDirectory.create(tmp_path / "run")
    make_keys(run, ("orchestrator", "worker-0", "server-0", "server-1"))
    identity = HubIdentity("r", "a", "c")
    ports = {name: await Hub.open_door(run, name, identity, silent_s=silent_s) for name in ("server-0", "server-1")}
    count = itertools.count()
    doors = Doors(run, lambda: Hello("worker", "worker-0", "r", "a", f"i{next(count)}", "c", 0, 1, "here"))
    yield Street(run, doors, ports)
    await doors.close()
    for port in ports.values():
        await port.close("the test has ended", timeout_s=0.0)


async def test_a_door_that_could_not_be_opened_for_a_reason_of_the_workers_own_is_tried_again(street: Street):
    secret = street.run.secret_key("worker-0")
    key = secret.read_bytes()
    secret.chmod(0o644)  # open to others, so it is no secret
    with pytest.raises(DoorLost, match="is open to others"):
        await asyncio.wait_for(street.bring("a"), 60)
    secret.chmod(0o600)
    secret.write_bytes(key)
    bringing = street.bring("b")
    street.answer(await street.asked())
    assert (await asyncio.wait_for(bringing, 60))[0].request_id == "b"


async def test_requests_to_two_servers_are_answered_each_by_its_own(street: Street):
    bringing = [street.bring("a", "server-0"), street.bring("b", "server-1"), street.bring("c", "server-0")]
    for server in ("server-0", "server-1", "server-0"):
        street.answer(await street.asked(server), server)
    answers = await asyncio.wait_for(asyncio.gather(*bringing), 60)
    assert [body.request_id for body, _ in answers] == ["a", "b", "c"]
    assert [arrays[0].tolist() for _, arrays in answers] == [[7, 1]] * 3
    assert [list(port.peers) for port in street.ports.values()] == [["worker-0"]] * 2  # one link a server


@pytest.mark.parametrize("street", [4.0], indirect=True)
async def test_a_request_whose_server_falls_silent_fails_within_its_limit(street: Street):
    bringing = street.bring("a")
    await street.asked()
    await street.ports["server-0"].close("killed", timeout_s=0.0)
    with pytest.raises(DoorLost, match=r"the direct way to server-0 is closed: .*server-0 was not heard for "):
        await asyncio.wait_for(bringing, 60)


async def test_a_server_that_stops_says_so_and_ends_what_waits(street: Street):
    bringing = street.bring("a")
    await street.asked()
    await street.ports["server-0"].close("server-0 ends", timeout_s=0.2)
    with pytest.raises(DoorLost, match="the direct way to server-0 is closed: server-0 ends"):
        await asyncio.wait_for(bringing, 60)


async def test_a_revoked_door_is_closed_at_once_and_a_new_ticket_opens_the_new_one(street: Street):
    bringing = street.bring("a")
    await street.asked()
    street.doors.revoke("server-0", "server-0 was lost: killed by SIGKILL")
    with pytest.raises(DoorLost, match="server-0 was lost: killed by SIGKILL"):
        await asyncio.wait_for(bringing, 60)
    await street.ports["server-0"].close("over", timeout_s=0.0)
    street.ports["server-0"] = await Hub.open_door(street.run, "server-0", HubIdentity("r", "a", "c"), silent_s=60.0)
    again = street.bring("b")
    street.answer(await street.asked())
    assert (await asyncio.wait_for(again, 60))[0].request_id == "b"


async def test_a_cancelled_request_leaves_the_way_open_for_the_others(street: Street):
    first, second = street.bring("a"), street.bring("b")
    asked = [await street.asked(), await street.asked()]
    first.cancel()
    for one in asked:
        street.answer(one)
    assert (await asyncio.wait_for(second, 60))[0].request_id == "b"


async def test_a_door_that_does_not_answer_fails_the_request_within_its_deadline(
    street: Street, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("telescope.workers.direct.CONNECT_S", 0.3)
    nobody = DoorAddress("tcp://127.0.0.1:9", street.ports["server-0"].address.public_key)
    with pytest.raises(DoorLost, match=r"server-0 at tcp://127.0.0.1:9 did not answer within 0.3 s"):
        await asyncio.wait_for(street.bring("a", door=nobody), 60)
