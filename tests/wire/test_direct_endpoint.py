"""A server's own port: real sockets and keys, a fake engine, and an orchestrator's end in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from telescope.inference.server import Server
from telescope.records import Sampling
from telescope.runlog.layout import RunDirectory
from telescope.wire.hub import Hub
from telescope.wire.hub_session import HubIdentity
from telescope.wire.link import Link, WireRefused
from telescope.wire.messages import (
    DIRECT_PORT,
    NOTED_OF_A_PEER,
    Abort,
    Body,
    Completion,
    ExpectRequest,
    Generate,
    GenerateFailed,
    Hello,
    Served,
    Stop,
)
from telescope.wire.security import make_keys
from tests.inference.test_server import PROMPT, Wire, make

TOKEN_S = 0.05


@dataclass
class Serving:
    """A server with its own port; `hub` is what the orchestrator says and hears."""

    run: RunDirectory
    hub: Wire
    port: Hub
    running: asyncio.Task[str]

    async def come(self, name: str = "worker-0", incarnation: str = "first", config: str = "c") -> Link:
        hello = Hello("worker", name, "r", "a", incarnation, config, 0, 1, "here")
        return await asyncio.to_thread(Link.connect_direct, self.run, hello, "server-0", self.port.address, 20.0)

    def expect(self, name: str = "q", worker: str = "worker-0", lifetime_s: float = 30.0) -> int:
        return self.hub.order(ExpectRequest(name, worker, len(PROMPT), f"secret of {name}", 0, lifetime_s))

    async def served(self) -> tuple[int, Served]:
        seq, body, arrays = await self.hub.answer()
        assert isinstance(body, Served)
        assert arrays == ()
        return seq, body


def bring(link: Link, name: str = "q", secret: str | None = None, ids: np.ndarray = PROMPT) -> None:
    grant = f"secret of {name}" if secret is None else secret
    link.send(Generate(name, 0, 0, 0, Sampling(1.0, 20, 1), grant=grant), (ids,))


async def heard(link: Link) -> Body:
    return (await asyncio.wait_for(link.received(), 60)).body


async def served_with(tmp_path: Path, token_s: float) -> AsyncIterator[Serving]:
    run = RunDirectory.create(tmp_path / "run")
    make_keys(run, ("orchestrator", "worker-0", "worker-1", "server-0", "trainer-0"))
    hub, port = Wire(), await Hub.open_direct(run, "server-0", HubIdentity("r", "a", "c"), silent_s=15.0)
    running = asyncio.create_task(Server(hub, make(token_s=token_s), port).run())
    yield Serving(run, hub, port, running)
    hub.order(Stop("the test has ended"))
    await asyncio.wait_for(running, 60)
    await port.close("the test has ended", timeout_s=0.0)


@pytest.fixture
async def quick(tmp_path: Path) -> AsyncIterator[Serving]:
    async for serving in served_with(tmp_path, 0.0):
        yield serving


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Serving]:
    async for serving in served_with(tmp_path, TOKEN_S):
        yield serving


async def test_a_grant_brings_the_worker_its_tokens_and_the_orchestrator_their_number(quick: Serving):
    with await quick.come() as link:
        order = quick.expect()
        bring(link)
        delivery = await asyncio.wait_for(link.received(), 60)
        assert isinstance(delivery.body, Completion)
        assert (delivery.peer, delivery.body.request_id) == ("server-0", "q")
        seq, served = await quick.served()
        assert (seq, served.cause) == (order, "")
        facts = (served.tokens, served.finish_reason, served.cached_tokens)
        assert facts == (delivery.body.tokens, delivery.body.finish_reason, delivery.body.cached_tokens)
        assert [len(array) for array in delivery.arrays] == [served.tokens] * 3


async def test_a_worker_that_comes_before_its_grant_is_known_waits_for_it(quick: Serving):
    with await quick.come() as link:
        bring(link)
        await asyncio.sleep(0.1)  # it has surely come
        assert quick.hub.answers.empty()
        quick.expect()
        assert isinstance(await heard(link), Completion)
        assert (await quick.served())[1].tokens > 0


async def test_a_grant_is_used_once(quick: Serving):
    with await quick.come() as link:
        quick.expect()
        bring(link)
        assert isinstance(await heard(link), Completion)
        bring(link)
        refused = await heard(link)
        assert isinstance(refused, GenerateFailed)
        assert refused.cause == "its grant is used, void, or missing"


@pytest.mark.parametrize("early", [False, True])
async def test_a_wrong_secret_another_worker_and_other_tokens_are_refused_and_the_grant_stays_good(quick: Serving, early: bool):
    with await quick.come() as link, await quick.come("worker-1", "other") as other:
        for stranger, secret, ids in ((link, "guess", PROMPT), (other, None, PROMPT), (link, None, PROMPT[1:])):
            if not early:
                quick.expect()
            bring(stranger, secret=secret, ids=ids)
            if early:
                await asyncio.sleep(0.05)
                quick.expect()
            refused = await heard(stranger)
            assert isinstance(refused, GenerateFailed)
            assert refused.cause == "its grant is not valid here"
        bring(link)
        assert isinstance(await heard(link), Completion)


async def test_without_a_grant_nothing_is_served(quick: Serving):
    with await quick.come() as link:
        bring(link, secret="")
        refused = await heard(link)
        assert isinstance(refused, GenerateFailed)
        assert quick.hub.answers.empty()


async def test_a_worker_that_is_refused_again_and_again_does_not_fill_the_log(quick: Serving, caplog: pytest.LogCaptureFixture):
    with await quick.come() as link:
        for _ in range(NOTED_OF_A_PEER + 20):
            bring(link, secret="")
            assert isinstance(await heard(link), GenerateFailed)
    lines = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert len(lines) == NOTED_OF_A_PEER
    assert lines[-1].endswith("(further ones of this process are not noted)")


@pytest.mark.parametrize("name", ["trainer-0", "server-0", "orchestrator"])
async def test_only_workers_keys_are_let_in(quick: Serving, name: str):
    with pytest.raises(WireRefused, match=r"server-0 at tcp://.* refused this process's key"):
        await quick.come(name)


async def test_a_worker_with_another_configuration_is_refused(quick: Serving):
    with pytest.raises(WireRefused, match=r"start both from the same config\.json"):
        await quick.come(config="other")


async def test_a_grant_that_is_not_used_in_time_gives_the_place_back(quick: Serving):
    quick.expect(lifetime_s=0.2)
    seq, served = await quick.served()
    assert (seq, served.tokens, served.finish_reason) == (1, 0, "abort")
    assert served.cause == "worker-0 did not come with its grant in 0.2 s"
    with await quick.come() as link:
        bring(link)
        assert isinstance(await heard(link), GenerateFailed)


async def test_an_abort_before_the_worker_has_come_voids_the_grant(quick: Serving):
    quick.expect()
    quick.hub.order(Abort("q"))
    assert (await quick.served())[1].cause == "it was aborted before its worker brought it"
    with await quick.come() as link:
        bring(link)
        assert isinstance(await heard(link), GenerateFailed)


async def test_an_abort_through_the_orchestrator_ends_a_direct_request(slow: Serving):
    with await slow.come() as link:
        slow.expect()
        bring(link)
        while "serving version 0: 1 requests running, 0 answered" not in slow.hub.doing:
            await asyncio.sleep(0.01)
        slow.hub.order(Abort("q"))
        served, answer = (await slow.served())[1], await heard(link)
        assert isinstance(answer, Completion)
        assert (served.finish_reason, answer.finish_reason) == ("abort", "abort")
        assert served.tokens == answer.tokens >= 1


async def test_the_requests_of_a_worker_that_leaves_are_aborted_and_their_places_free(slow: Serving):
    link = await slow.come()
    slow.expect()
    bring(link)
    while "serving version 0: 1 requests running, 0 answered" not in slow.hub.doing:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(link.close, "it failed")
    assert (await slow.served())[1].finish_reason == "abort"


async def test_a_worker_process_that_comes_anew_under_the_old_name_replaces_it(slow: Serving):
    link = await slow.come()
    slow.expect()
    bring(link)
    while "serving version 0: 1 requests running, 0 answered" not in slow.hub.doing:
        await asyncio.sleep(0.01)
    with await slow.come(incarnation="second") as second:
        assert (await slow.served())[1].finish_reason == "abort"
        slow.expect("r")
        bring(second, "r")
        assert isinstance(await heard(second), Completion)
    await asyncio.to_thread(link.close)


def test_a_servers_port_takes_requests_and_nothing_else():
    assert {kind.__name__ for kind in DIRECT_PORT.from_peer["worker"]} == {"Generate"}
    assert {kind.__name__ for kind in DIRECT_PORT.from_hub["worker"]} == {"Completion", "GenerateFailed", "Stop"}
    assert set(DIRECT_PORT.from_peer) == {"worker"}
