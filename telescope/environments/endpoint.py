"""A client of an OpenAI-compatible address: `POST {base_url}/chat/completions` over connections that are kept; h11 speaks HTTP.

    chat(messages) ─▶ a free connection, or a new one ─▶ the first choice's text

Owns how many connections there are and what an answer means: `EndpointDown` where another try may help (a connection, a time
limit, 408, 425, 429, 5xx, an answer that is no completion), `EndpointRefused` where it can't. Refuses to try again and to judge
(judge.py does). The proxy variables of the process's environment are not looked at.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import h11
import orjson

from telescope.environments.failures import InfrastructureError

MAX_BODY_BYTES = 4 << 20
SHOWN = 300
TRY_AGAIN = frozenset({408, 425, 429})
READ = 64 * 1024

Message = Mapping[str, str]


class EndpointDown(InfrastructureError):
    """No answer, or none that can be used; another try may bring one. `retry_after_s` is what the server asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EndpointRefused(RuntimeError):
    """The server does not take this request (a wrong key, model or address, a text that is too long): nor will it later."""


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    used: bool = False


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class _Stale(ConnectionError):
    """A kept connection that was closed before it answered anything: the request goes out again on a new one."""


class ChatEndpoint:
    """One server and model, for one event loop. `connections` bounds how many requests are under way at once."""

    def __init__(self, base_url: str, model: str, *, api_key: str = "", timeout_s: float = 60.0, connections: int = 32) -> None:
        self._url = parsed(base_url)
        self._model, self._api_key, self._timeout_s = model, sendable_key(api_key), timeout_s
        self._free = asyncio.Semaphore(connections)
        self._kept: list[_Connection] = []
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None

    @property
    def url(self) -> str:
        return f"{self._url.geturl().rstrip('/')}/chat/completions"

    async def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of the model's next message. `options` go into the request, e.g. `temperature=0.0`.

        Raises `EndpointDown` and `EndpointRefused`. Waiting for a free connection does not count against the time limit.
        """
        said = [{key: _sendable(text) for key, text in message.items()} for message in messages]
        body = orjson.dumps({"model": self._model, "messages": said, **options})
        async with self._free:
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await self._post(body)
            except TimeoutError as error:
                raise EndpointDown(f"{self.url} gave no answer within {self._timeout_s:g} s") from error
            except (OSError, h11.ProtocolError) as error:
                raise EndpointDown(f"{self.url} failed: {type(error).__name__}: {error}") from error
        return self._text(answer)

    async def close(self) -> None:
        """Close the connections that no request holds."""
        for connection in self._kept:
            connection.writer.close()
        self._kept.clear()

    async def _post(self, body: bytes) -> _Answer:
        while self._kept:
            try:
                return await self._asked(self._kept.pop(), body)
            except _Stale:
                continue
        return await self._asked(await self._connect(), body)

    async def _connect(self) -> _Connection:
        port = self._url.port or (443 if self._tls else 80)
        reader, writer = await asyncio.open_connection(self._url.hostname, port, ssl=self._tls, limit=READ)
        return _Connection(reader, writer)

    async def _asked(self, connection: _Connection, body: bytes) -> _Answer:
        """Send one request and read its answer whole. The connection is kept where it can serve another."""
        whole = False
        try:
            await self._send(connection, body)
            answer = await _read(connection)
            whole = connection.http.our_state is h11.DONE and connection.http.their_state is h11.DONE
        finally:
            if whole:
                connection.http.start_next_cycle()
                connection.used = True
                self._kept.append(connection)
            else:
                connection.writer.close()
        return answer

    async def _send(self, connection: _Connection, body: bytes) -> None:
        key = [("authorization", f"Bearer {self._api_key}")] if self._api_key else []
        headers = [
            ("host", self._url.netloc),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            *key,
        ]
        target = f"{self._url.path.rstrip('/')}/chat/completions"
        events = (h11.Request(method="POST", target=target, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        sent = b"".join(connection.http.send(event) or b"" for event in events)
        try:
            connection.writer.write(sent)
            await connection.writer.drain()
        except ConnectionError as error:
            if connection.used:
                raise _Stale from error
            raise

    def _text(self, answer: _Answer) -> str:
        if answer.status in TRY_AGAIN or answer.status >= 500:
            raise EndpointDown(f"{self.url} answered {answer.status}: {_shown(answer.body)}", _retry_after(answer.headers))
        if answer.status != 200:
            raise EndpointRefused(f"{self.url} answered {answer.status}: {_shown(answer.body)}")
        try:
            said = orjson.loads(answer.body)["choices"][0]["message"]["content"]
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise EndpointDown(f"{self.url} gave no chat completion: {_shown(answer.body)}") from error
        if not isinstance(said, str):
            raise EndpointDown(f"{self.url} gave a message without a text")
        return said


async def _read(connection: _Connection) -> _Answer:
    head, parts, size = None, [], 0
    while True:
        event = connection.http.next_event()
        if event is h11.NEED_DATA:
            await _more(connection, begun=head is not None)
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
            size += len(event.data)
            if size > MAX_BODY_BYTES:
                raise ConnectionError(f"the answer has more than {MAX_BODY_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head.headers}
            return _Answer(head.status_code, headers, b"".join(parts))
        elif isinstance(event, h11.ConnectionClosed | type):
            raise ConnectionError("the connection was closed before the answer was whole")


async def _more(connection: _Connection, *, begun: bool) -> None:
    stale = connection.used and not begun
    try:
        data = await connection.reader.read(READ)
    except ConnectionError as error:
        if stale:
            raise _Stale from error
        raise
    if not data and stale:
        raise _Stale
    connection.http.receive_data(data)


def parsed(base_url: str) -> SplitResult:
    """The parts of an address. Raises `ValueError` for one that is none."""
    shown = base_url.partition("?")[0].partition("#")[0]  # some put keys behind it
    try:
        url = urlsplit(base_url)
    except ValueError:
        raise ValueError("base_url is no address: its host is within [] and no IPv6 one") from None
    if "@" in url.netloc:  # it would stand in every message about the address
        raise ValueError("base_url must hold no user name and no password: a key is given by itself (api_key)")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"base_url={shown!r} must be an address such as http://localhost:8000/v1 or https://host/v1")
    if url.query or url.fragment:
        raise ValueError(f"base_url={shown!r} must end with its path: what stands behind ? or # has no place in it")
    try:
        _ = url.port
    except ValueError:
        raise ValueError("base_url must have a number between 0 and 65535 for its port, or none") from None
    return url


def sendable_key(key: str) -> str:
    """The key as a header may hold it, without the white space around it that files end with. Raises `ValueError`, and does not
    show the key."""
    key = key.strip()
    if not key.isascii() or not key.isprintable():
        raise ValueError("api_key holds what no header can: a line break or a letter outside ASCII; see how it is set")
    return key


def _sendable(text: str) -> str:
    """With ? for halves of surrogate pairs: a policy can write them into JSON, and UTF-8 has none."""
    return text.encode("utf-8", "replace").decode()


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; 0 where the server named none, or a date."""
    said = headers.get("retry-after", "").strip()
    return float(said) if said.isdecimal() and len(said) < 6 else 0.0


def _shown(body: bytes) -> str:
    return body[:SHOWN].decode("utf-8", "replace").strip() or "(nothing)"
