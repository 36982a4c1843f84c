"""The limits of the client that asks a model beside the policy, against servers that keep to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from telescope.environments.endpoint import ChatEndpoint, EndpointDown, EndpointRefused
from telescope.environments.http_client import MAX_BODY_BYTES
from tests.environments.judge_server import completion

ASKED = [{"role": "user", "content": "Is it so?"}]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(serve: Serve, timeout_s: float = 30.0) -> AsyncIterator[tuple[ChatEndpoint, list[str]]]:
    """A client of a server that reads each request and then does what `serve` does; and the heads it was sent."""
    heads: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next(line.partition(":")[2] for line in head.split("\r\n") if line.startswith("content-length"))
                await reader.readexactly(int(length))
                heads.append(head)
                await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = ChatEndpoint(f"http://127.0.0.1:{port}/v1", "wise", timeout_s=timeout_s)
    try:
        yield endpoint, heads
    finally:
        await endpoint.close()
        server.close()


def answer(body: bytes, *headers: str, status: int = 200) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def saying(response: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response)
        await writer.drain()

    return serve


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_that_is_too_large_is_left_before_it_is_there(chunked: bool):
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 X\r\n" + (b"transfer-encoding: chunked" if chunked else b"content-length: 99999999999"))
        writer.write(b"\r\n\r\n")
        part = b"x" * 0x10000
        while True:
            writer.write(b"10000\r\n" + part + b"\r\n" if chunked else part)
            await writer.drain()
            written += len(part)

    async with serving(flood) as (endpoint, _):
        with pytest.raises(EndpointDown, match=f"the answer has more than {MAX_BODY_BYTES} bytes"):
            await endpoint.chat(ASKED)
    assert written < 4 * MAX_BODY_BYTES  # the rest lies in buffers of the kernel


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 X\r\n", b"HTTP/1.1 200 X\r\ncontent-length: 9999\r\n\r\n"])
async def test_a_server_that_drips_is_left_at_the_time_limit(begun: bytes):
    """Before its head, within it, and within its body: no byte that comes puts the end off."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        while True:
            writer.write(b"x" if begun else b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with serving(drip, timeout_s=0.4) as (endpoint, _):
        started = time.monotonic()
        with pytest.raises(EndpointDown, match=r"gave no answer within 0\.4 s|failed: RemoteProtocolError"):
            await endpoint.chat(ASKED)
        assert time.monotonic() - started < 20


async def test_a_head_without_an_end_is_not_read_for_ever():
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 X\r\nx: ")
        while True:
            writer.write(b"x" * 0x10000)
            await writer.drain()

    async with serving(flood) as (endpoint, _):
        with pytest.raises(EndpointDown, match="failed: RemoteProtocolError"):
            await endpoint.chat(ASKED)


async def test_a_small_answer_cannot_unpack_to_a_large_one():
    packed = gzip.compress(completion("yes" * 1_000_000).encode())
    async with serving(saying(answer(packed, "content-encoding: gzip"))) as (endpoint, heads):
        with pytest.raises(EndpointDown, match=r"compressed \(gzip\), though the request says identity"):
            await endpoint.chat(ASKED)
    assert "accept-encoding: identity\r\n" in heads[0]


async def test_a_redirect_is_not_followed_with_the_key():
    moved = answer(b"moved", "location: http://127.0.0.1:9/v1", status=307)
    async with serving(saying(moved)) as (endpoint, heads):
        with pytest.raises(EndpointRefused, match="answered 307: moved"):
            await endpoint.chat(ASKED)
    assert len(heads) == 1


async def test_a_proxy_of_the_process_s_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serving(saying(answer(completion("yes").encode()))) as (endpoint, _):
        assert await endpoint.chat(ASKED) == "yes"


async def test_a_connection_that_breaks_within_an_answer_is_not_asked_twice():
    """The server may have counted the request: only one that closed a kept connection without a word is asked again."""

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(heads) < 2:
            writer.write(answer(completion("yes").encode()))
            return
        writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 9999\r\n\r\n{")
        await writer.drain()
        writer.close()
        raise ConnectionResetError

    async with serving(breaks) as (endpoint, heads):
        assert await endpoint.chat(ASKED) == "yes"
        with pytest.raises(EndpointDown, match="failed: RemoteProtocolError"):
            await endpoint.chat(ASKED)
    assert len(heads) == 2


async def test_a_new_connection_that_is_closed_without_a_word_is_a_failure():
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise ConnectionResetError

    async with serving(close) as (endpoint, heads):
        with pytest.raises(EndpointDown, match="failed: "):
            await endpoint.chat(ASKED)
    assert len(heads) == 1


async def test_a_rollout_that_is_given_up_leaves_its_place_to_others():
    held, asked = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await held.wait()
        writer.write(answer(completion(json.dumps({})).encode()))

    async with serving(hold) as (endpoint, heads):
        one = ChatEndpoint(endpoint.url.removesuffix("/chat/completions"), "wise", connections=1)
        for _ in range(3):
            given_up = asyncio.create_task(one.chat(ASKED))
            await asked.wait()
            asked.clear()
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
        held.set()
        assert await one.chat(ASKED) == "{}"
        await one.close()
    assert len(heads) == 4


async def test_a_host_that_no_request_could_name_is_refused_at_once():
    with pytest.raises(ValueError, match=r"base_url='http://jüdge\.\.com/v1' is not an address: Invalid IDNA"):
        ChatEndpoint("http://jüdge..com/v1", "wise")


async def test_what_a_server_gives_to_keep_is_not_sent_back():
    """Else each answer could lengthen all later requests."""

    async def give(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(completion("yes").encode(), "set-cookie: a=" + "z" * 1000))

    async with serving(give) as (endpoint, heads):
        for _ in range(2):
            await endpoint.chat(ASKED)
    assert [len(head) < 500 and "cookie" not in head for head in heads] == [True, True]


def test_a_host_of_punycode_without_an_end_is_refused_at_once():
    with pytest.raises(ValueError, match="is not an address"):
        ChatEndpoint("http://xn--/v1", "wise")
