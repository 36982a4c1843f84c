"""A model behind an OpenAI-compatible address: `POST {base_url}/chat/completions`, again where that may help, and not at all
while it is down.

    read(messages, what) ─▶ the breaker lets it ─▶ POST ─▶ what(text)
              ▲                                     │ down, or an answer that `what` can't use
              └───────── a pause that doubles ◀─────┘

`ChatEndpoint` owns the connections, the time and size of an answer, and what it means: `EndpointDown` where another try may
help (a connection, a time limit, 408, 425, 429, 5xx, an answer that is not a completion), `EndpointRefused` where it can't.
`RetryingEndpoint` owns the tries, their pauses and the circuit breaker. Whose failure it is when the tries end, its users say:
a judge's is the grader's (judge.py), a simulated customer's the infrastructure's (tasks/tau/users.py). httpx speaks HTTP; the
proxy variables of the process's environment are not looked at.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import orjson
from pydantic import Field, SecretStr, model_validator

from telescope.environments.breaker import Breaker, BreakerOpen
from telescope.environments.failures import InfrastructureError
from telescope.environments.http_client import open_client, read_body
from telescope.settings import Settings

T = TypeVar("T")
JSON = {"content-type": "application/json"}
SHOWN = 300
RETRIED_STATUSES = frozenset({408, 425, 429})
LONGEST_PAUSE_S = 60.0
LEAST_PAUSE_S = 1.0
"""Between two looks at a breaker that is open."""

Message = Mapping[str, str]


class EndpointDown(InfrastructureError):
    """No answer, or none that can be used; another try may bring one. `retry_after_s` is what the server asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EndpointRefused(RuntimeError):
    """The server does not take this request (a wrong key, model or address, a text that is too long): nor will it later."""


class ChatEndpoint:
    """One server and model, for one event loop. `connections` bounds how many requests are under way at once."""

    def __init__(self, base_url: str, model: str, *, api_key: str = "", timeout_s: float = 60.0, connections: int = 32) -> None:
        """Raises `ValueError` for an address that can't be asked."""
        import httpx

        self.url = f"{parse_address(base_url).geturl().rstrip('/')}/chat/completions"
        try:
            _ = httpx.URL(self.url).host
        except (httpx.InvalidURL, UnicodeError) as error:  # else each request would end with it
            raise ValueError(f"base_url={base_url!r} is not an address: {error}") from error
        self._model, self._timeout_s = model, timeout_s
        self._slots = asyncio.Semaphore(connections)
        self._http = open_client(
            self.url,
            clean_key(api_key),
            takes_proxies=False,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=None),
            timeout=None,  # of the whole request: see `chat`
            verify=ssl.create_default_context(),
        )

    async def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of the model's next message. `options` go into the request, e.g. `temperature=0.0`.

        Raises `EndpointDown` and `EndpointRefused`. Waiting for a free connection does not count against the time limit.
        """
        import httpx

        said = [{key: _replace_surrogates(text) for key, text in message.items()} for message in messages]
        request = orjson.dumps({"model": self._model, "messages": said, **options})
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    status, headers, body = await self._post(request)
            except TimeoutError as error:
                raise EndpointDown(f"{self.url} gave no answer within {self._timeout_s:g} s") from error
            except (OSError, httpx.HTTPError) as error:
                raise EndpointDown(f"{self.url} failed: {type(error).__name__}: {error}") from error
        return self._read_text(status, headers, body)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _post(self, request: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body). A kept connection that its server has closed costs no try: another takes the request."""
        import httpx

        while True:
            is_new = answered = False

            async def see(event: str, _: object) -> None:
                nonlocal is_new
                is_new = is_new or event == "connection.connect_tcp.started"

            try:
                async with self._http.stream(
                    "POST", self.url, content=request, headers=JSON, extensions={"trace": see}
                ) as response:
                    answered = True
                    return response.status_code, response.headers, await read_body(response)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if is_new or answered:
                    raise

    def _read_text(self, status: int, headers: Mapping[str, str], body: bytes) -> str:
        if status in RETRIED_STATUSES or status >= 500:
            raise EndpointDown(f"{self.url} answered {status}: {_shorten(body)}", _read_retry_after(headers))
        if status != 200:
            raise EndpointRefused(f"{self.url} answered {status}: {_shorten(body)}")
        try:
            said = orjson.loads(body)["choices"][0]["message"]["content"]
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise EndpointDown(f"{self.url} gave no chat completion: {_shorten(body)}") from error
        if not isinstance(said, str):
            raise EndpointDown(f"{self.url} gave a message without a text")
        return said


class EndpointSettings(Settings):
    """Where a model is asked, how often and how long: settings of environments that need one beside the policy."""

    base_url: str
    """OpenAI-compatible address of the model, e.g. `http://localhost:8000/v1`."""
    model: str = Field(min_length=1)
    """Its name there."""
    api_key: SecretStr = SecretStr("")
    """Its key, as a reference to an environment variable: `'${oc.env:JUDGE_API_KEY}'`; empty: none is sent."""
    temperature: float | None = Field(default=0.0, ge=0)
    """How its answers are drawn; null: not said, for models that refuse it."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest answer, thoughts included."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one request may take."""
    max_concurrent: int = Field(default=32, ge=1)
    """Requests of one worker process at once; each has a connection, which is kept."""
    max_attempts: int = Field(default=4, ge=1)
    """Requests for one answer that can be used."""
    retry_backoff_s: float = Field(default=1.0, ge=0)
    """Pause before the second request; it doubles up to 60 s, and is what the server asks for where that is longer."""
    retry_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds after which no further request is made for an answer, those included in which the breaker is open."""
    breaker_failures: int = Field(default=5, ge=1)
    """Failures in a row, of any samples, after which the model is left alone for a while."""
    breaker_pause_s: float = Field(default=10.0, gt=0, le=300)
    """How long at first; then one request tries, and each that fails doubles the pause."""

    @model_validator(mode="after")
    def _an_address(self) -> EndpointSettings:
        parse_address(self.base_url)
        clean_key(self.api_key.get_secret_value())
        return self


class GaveUp(InfrastructureError):
    """No answer that can be used came of `requests` requests; `cause` is what was wrong with the last one."""

    def __init__(self, model: str, requests: int, cause: str) -> None:
        super().__init__(f"{model} gave no answer that can be used in {requests} requests; at last: {cause}")
        self.requests = requests
        self.cause = cause


class RetryingEndpoint:
    """One for each worker process and event loop: make it in `set_up`, close it in `tear_down`."""

    def __init__(
        self,
        role: str,
        settings: EndpointSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`role` is what the model is to the run, e.g. "the judge"; it begins every message about it."""
        self._settings, self._clock, self._pause = settings, clock, pause
        self._called = f"{role} {settings.model} at {settings.base_url}"
        self._endpoint = ChatEndpoint(
            settings.base_url,
            settings.model,
            api_key=settings.api_key.get_secret_value(),
            timeout_s=settings.timeout_s,
            connections=settings.max_concurrent,
        )
        self.breaker = Breaker(self._called, failures=settings.breaker_failures, pause_s=settings.breaker_pause_s, clock=clock)

    async def close(self) -> None:
        await self._endpoint.close()

    async def read(self, messages: Sequence[Message], what: Callable[[str], T]) -> T:
        """What `what` makes of the model's answer. An answer for which it raises `ValueError` is asked for again.

        Raises `GaveUp`, and `EndpointRefused` at once where the server does not take the request.
        """
        settings = self._settings
        deadline, pause_s = self._clock() + settings.retry_timeout_s, settings.retry_backoff_s
        asked, cause = 0, ""
        while True:
            least_s = 0.0
            try:
                return what(await self._ask_once(messages))
            except BreakerOpen as error:  # nobody was asked
                cause = cause or str(error)
                least_s = LEAST_PAUSE_S
            except EndpointDown as error:
                asked, cause, least_s = asked + 1, str(error), error.retry_after_s
            except ValueError as error:
                asked, cause = asked + 1, str(error)
            wait_s = max(pause_s, least_s)
            if asked >= settings.max_attempts or self._clock() + wait_s > deadline:
                raise GaveUp(self._called, asked, cause[:SHOWN])
            await self._pause(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _ask_once(self, messages: Sequence[Message]) -> str:
        settings = self._settings
        drawn = {} if settings.temperature is None else {"temperature": settings.temperature}
        async with self.breaker.call():
            return await self._endpoint.chat(messages, max_tokens=settings.max_tokens, **drawn)


def parse_address(base_url: str) -> SplitResult:
    """The parts of an address. Raises `ValueError` for a text that is not one."""
    shown = base_url.partition("?")[0].partition("#")[0]  # some put keys behind it
    try:
        url = urlsplit(base_url)
    except ValueError:
        raise ValueError("base_url is not an address: its host is within [] and is not an IPv6 one") from None
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


def clean_key(key: str) -> str:
    """The key as a header may hold it, without the white space around it that files end with. Raises `ValueError`, and does not
    show the key."""
    key = key.strip()
    if not key.isascii() or not key.isprintable():
        raise ValueError("api_key holds what no header can: a line break or a letter outside ASCII; see how it is set")
    return key


def _replace_surrogates(text: str) -> str:
    """With ? for halves of surrogate pairs: a policy can write them into JSON, and UTF-8 has none."""
    return text.encode("utf-8", "replace").decode()


def _read_retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; 0 where the server named none, or a date."""
    said = headers.get("retry-after", "").strip()
    return float(said) if said.isdecimal() and len(said) < 6 else 0.0


def _shorten(body: bytes) -> str:
    return body[:SHOWN].decode("utf-8", "replace").strip() or "(nothing)"
