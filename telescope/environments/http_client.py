"""What a request to somebody else's server may cost, and who may see its key: the one httpx client that asks for completions.

A body counts as it comes, since no small one may unpack to a large one. The proxies of the process's environment are for https
alone, where they see neither key nor body. Refuses to know what an answer means.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

MAX_BODY_BYTES = 4 << 20


class BodyRefused(ConnectionError):
    """The body of an answer is too long, or is compressed."""


def open_client(url: str, key: str | None, *, takes_proxies: bool = True, **options: Any) -> httpx.AsyncClient:
    """For requests to a server at `url`, with `key` as their bearer token. `takes_proxies`: those of `HTTPS_PROXY` and
    its like, where `url` is https. `options`: of `httpx.AsyncClient`."""
    import httpx  # takes longer to import than all other modules of environments together

    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request
    return httpx.AsyncClient(
        headers={"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})},
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none is kept: each would lengthen all later requests
        trust_env=takes_proxies and url.lower().startswith("https://"),
        follow_redirects=False,
        **options,
    )


def _refuse_compressed(response: httpx.Response) -> None:
    """Raises `BodyRefused` for a body that would be unpacked, which nobody asked for."""
    if (coding := response.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise BodyRefused(f"the answer is compressed ({coding[:20]}), though the request says identity")


async def read_body(response: httpx.Response) -> bytes:
    """The body of a streamed response. Raises `BodyRefused` after `MAX_BODY_BYTES`, and for one that is compressed."""
    _refuse_compressed(response)
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BodyRefused(f"the answer has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def read_lines(response: httpx.Response) -> AsyncIterator[str]:
    """Its lines as they come, without their ends. Raises `BodyRefused` as `read_body` does, here for the length of one line."""
    _refuse_compressed(response)
    rest = b""
    async for part in response.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
        if len(rest) > MAX_BODY_BYTES:
            raise BodyRefused(f"a line of the answer has more than {MAX_BODY_BYTES} bytes")
    if rest:
        yield rest.decode("utf-8", "replace").rstrip("\r")
