"""A worker's direct path to real ports of servers: one link a server, and what becomes of requests when it is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telescope.records import Sampling
from telescope.runlog.layout import RunDirectory
from telescope.wire.direct import DirectClient, DirectPathLost
from telescope.wire.hub import Hub
from telescope.wire.hub_session import HubIdentity
from telescope.wire.messages import Completion, DirectAddress, Generate, Grant, Hello
from telescope.wire.peer_events import Delivery, PeerJoined
from telescope.wire.security import make_keys

IDS = np.arange(5, dtype=np.int32)


@dataclass
class Town:
    """Two servers' ports, and a worker's path to them."""

    run: RunDirectory
    client: DirectClient
    ports: dict[str, Hub]

    def grant(self, name: str, server: str, address: DirectAddress | None = None) -> Grant:
        return Grant(name, server, address or self.ports[server].address, "secret", 30.0)

    def bring(self, name: str, server: str = "server-0", address: DirectAddress | None = None) -> asyncio.Task:
        request = Generate(name, 0, 0, 0, Sampling(1.0, 4, 1), grant="secret")
        return asyncio.create_task(self.client.bring(self.grant(name, server, address), request, IDS))

    async def asked(self, server: str = "server-0") -> Delivery:
        while not isinstance(happening := await self.ports[server].next(60), Delivery):
            assert isinstance(happening, PeerJoined)
        return happening

    def answer(self, asked: Delivery, server: str = "server-0") -> None:
        arrays = (np.array([7, 1], np.int32), np.array([-1, -2], np.float32), np.array([0, 0], np.int32))
        self.ports[server].send(asked.peer, Completion(asked.body.request_id, "stop", 2, 0, 0, 0), arrays, answers=asked)


@pytest.fixture
async def town(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Town]:
    """Nobody counts as silent on a busy machine, but where a test sets the time for it."""
    silent_s = getattr(request, "param", 60.0)
    run = RunDirectory.create(tmp_path / "run")
    make_keys(run, ("orchestrator", "worker-0", "server-0", "server-1"))
    identity = HubIdentity("r", "a", "c")
    ports = {name: await Hub.open_direct(run, name, identity, silent_s=silent_s) for name in ("server-0", "server-1")}
    count = itertools.count()
    unused: Any = None
    client = DirectClient(unused, run, lambda: Hello("worker", "worker-0", "r", "a", f"i{next(count)}", "c", 0, 1, "here"))
    yield Town(run, client, ports)
    await client.close()
    for port in ports.values():
        await port.close("the test has ended", timeout_s=0.0)


async def test_a_port_that_could_not_be_reached_for_a_reason_of_the_workers_own_is_tried_again(town: Town):
    secret = town.run.secret_key("worker-0")
    key = secret.read_bytes()
    secret.chmod(0o644)  # open to others, so it is not a secret
    with pytest.raises(DirectPathLost, match="is open to others"):
        await asyncio.wait_for(town.bring("a"), 60)
    secret.chmod(0o600)
    secret.write_bytes(key)
    bringing = town.bring("b")
    town.answer(await town.asked())
    assert (await asyncio.wait_for(bringing, 60))[0].request_id == "b"


async def test_requests_to_two_servers_are_answered_each_by_its_own(town: Town):
    bringing = [town.bring("a", "server-0"), town.bring("b", "server-1"), town.bring("c", "server-0")]
    for server in ("server-0", "server-1", "server-0"):
        town.answer(await town.asked(server), server)
    answers = await asyncio.wait_for(asyncio.gather(*bringing), 60)
    assert [body.request_id for body, _ in answers] == ["a", "b", "c"]
    assert [arrays[0].tolist() for _, arrays in answers] == [[7, 1]] * 3
    assert [list(port.peers) for port in town.ports.values()] == [["worker-0"]] * 2  # one link a server


@pytest.mark.parametrize("town", [4.0], indirect=True)
async def test_a_request_whose_server_falls_silent_fails_within_its_limit(town: Town):
    bringing = town.bring("a")
    await town.asked()
    await town.ports["server-0"].close("killed", timeout_s=0.0)
    with pytest.raises(DirectPathLost, match=r"the direct path to server-0 is closed: .*server-0 was not heard for "):
        await asyncio.wait_for(bringing, 60)


async def test_a_server_that_stops_says_so_and_ends_what_waits(town: Town):
    bringing = town.bring("a")
    await town.asked()
    await town.ports["server-0"].close("server-0 ends", timeout_s=0.2)
    with pytest.raises(DirectPathLost, match="the direct path to server-0 is closed: server-0 ends"):
        await asyncio.wait_for(bringing, 60)


async def test_a_revoked_link_is_closed_at_once_and_a_new_grant_opens_the_new_one(town: Town):
    bringing = town.bring("a")
    await town.asked()
    town.client.revoke("server-0", "server-0 was lost: killed by SIGKILL")
    with pytest.raises(DirectPathLost, match="server-0 was lost: killed by SIGKILL"):
        await asyncio.wait_for(bringing, 60)
    await town.ports["server-0"].close("over", timeout_s=0.0)
    town.ports["server-0"] = await Hub.open_direct(town.run, "server-0", HubIdentity("r", "a", "c"), silent_s=60.0)
    again = town.bring("b")
    town.answer(await town.asked())
    assert (await asyncio.wait_for(again, 60))[0].request_id == "b"


async def test_a_cancelled_request_leaves_the_link_open_for_the_others(town: Town):
    first, second = town.bring("a"), town.bring("b")
    asked = [await town.asked(), await town.asked()]
    first.cancel()
    for one in asked:
        town.answer(one)
    assert (await asyncio.wait_for(second, 60))[0].request_id == "b"


async def test_a_port_that_does_not_answer_fails_the_request_within_its_deadline(town: Town, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("telescope.wire.direct.CONNECT_S", 0.3)
    nobody = DirectAddress("tcp://127.0.0.1:9", town.ports["server-0"].address.public_key)
    with pytest.raises(DirectPathLost, match=r"server-0 at tcp://127.0.0.1:9 did not answer within 0.3 s"):
        await asyncio.wait_for(town.bring("a", address=nobody), 60)
