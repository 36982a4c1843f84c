"""Which version sampled which token, and whose cached blocks a request may find: the rules, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from telescope.inference.vllm.patches import commit_between_steps
from telescope.inference.vllm.token_versions import TokenVersions, VersionSpans


class Client:
    """vLLM's client: what it sends to the engine, in order."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(request)


def request(name: str, cache_salt: str | None = None) -> Any:
    return SimpleNamespace(external_req_id=name, request_id=f"{name}-1", cache_salt=cache_salt)


def versions(client: Client, ours: dict[str, VersionSpans], salted: bool = True) -> TokenVersions:
    return TokenVersions(client, lambda external, internal: ours.get(external), salted)


async def test_a_request_is_born_with_the_version_whose_commit_was_sent_before_it():
    client, ours = Client(), {"a": VersionSpans(), "b": VersionSpans()}
    desk = versions(client, ours)
    await client.add_request_async(request("a"))
    desk.commit_is_sent(3)
    await client.add_request_async(request("b"))  # the engine has not answered the commit, and gets it first
    desk.commit_is_answered(3, {"a-1": 5}, {"a-1": ours["a"], "b-1": ours["b"]})
    assert ours["a"].of(7).tolist() == [0, 0, 0, 0, 0, 3, 3]
    assert ours["b"].of(2).tolist() == [3, 3]


def test_tokens_of_a_request_that_meets_two_commits_are_parted_where_the_engine_said():
    spans = VersionSpans([0], [4])
    spans.begin(2, 5)
    spans.begin(2, 6)  # nothing was sampled by 5
    spans.begin(3, 7)
    assert spans.of(5).tolist() == [4, 4, 6, 7, 7]
    assert spans.of(1).tolist() == [4]


async def test_an_answer_waits_until_a_commit_on_its_way_is_answered():
    """Its last tokens may be of either version until the engine has said so."""
    desk = versions(Client(), {})
    await asyncio.wait_for(desk.settled(), 5)
    desk.commit_is_sent(1)
    waiting = asyncio.ensure_future(desk.settled())
    assert not (await asyncio.wait({waiting}, timeout=0.05))[0]
    desk.commit_is_answered(1, {}, {})
    await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize(("salted", "found"), [(True, ["0:", "0:mine", "2:", "2:mine"]), (False, [None, "mine", None, "mine"])])
async def test_requests_over_http_too_carry_their_version_into_the_prefix_cache(salted: bool, found: list[str | None]):
    client = Client()
    desk = versions(client, {}, salted)
    for version in (0, 2):
        if version:
            desk.commit_is_sent(version)
        await client.add_request_async(request("http"))
        await client.add_request_async(request("http", "mine"))
    assert [sent.cache_salt for sent in client.sent] == found


class Held(SimpleNamespace):
    """A request in the engine."""

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"by {self.cache_salt}")


def held(computed: int, sampled: int = 0, on_the_way: int = 0, cache_salt: str | None = "1:") -> Held:
    return Held(
        num_computed_tokens=computed,
        num_output_tokens=sampled,
        num_output_placeholders=on_the_way,
        cache_salt=cache_salt,
        block_hashes=["before"],
    )


def test_a_commit_counts_what_is_on_its_way_and_renames_what_waits_with_nothing_computed():
    told: list[Any] = []
    executor = SimpleNamespace(is_sleeping=False, collective_rpc=lambda *given, **named: told.append((given, named)))
    requests = {
        "runs": held(40, 7, on_the_way=1), "prefills": held(16), "waits": held(0, cache_salt="1:mine"),
        "put back": held(0, 9), "unsalted": held(0, cache_salt=None),
    }  # fmt: skip
    core = SimpleNamespace(scheduler=SimpleNamespace(requests=requests), model_executor=executor)
    assert commit_between_steps(core, 2, 30.0) == {"runs": 8, "prefills": 0, "waits": 0, "put back": 9, "unsalted": 0}
    assert told == [(("telescope_load",), {"timeout": 30.0, "args": (2,)})]
    assert {name: (one.cache_salt, one.block_hashes) for name, one in requests.items()} == {
        "runs": ("1:", ["before"]), "prefills": ("1:", ["before"]), "waits": ("2:mine", ["by 2:mine"]),
        "put back": ("2:", ["by 2:"]), "unsalted": (None, ["before"]),
    }  # fmt: skip


def test_nothing_is_renamed_where_the_version_could_not_be_loaded():
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("half loaded")

    waiting = held(0)
    executor = SimpleNamespace(is_sleeping=False, collective_rpc=fails)
    core = SimpleNamespace(scheduler=SimpleNamespace(requests={"waits": waiting}), model_executor=executor)
    with pytest.raises(RuntimeError, match="half loaded"):
        commit_between_steps(core, 2, 30.0)
    assert (waiting.cache_salt, waiting.block_hashes) == ("1:", ["before"])
