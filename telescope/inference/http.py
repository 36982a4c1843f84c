"""vLLM's own OpenAI-compatible HTTP application beside the link: the same engine, the same event loop, loopback by default.

For looking in while a run goes on. It knows nothing of weights and can't pause the engine: vLLM's development routes stay off.
Owns the port, the key and where the address is written. What moved between vLLM's releases is vllm_http.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from telescope.config.parts import DEFAULT_PORT
from telescope.inference import vllm_http
from telescope.inference.status import Status

if TYPE_CHECKING:
    from telescope.config.parts import InferenceSettings, ModelSettings

LOOPBACK = "127.0.0.1"
PORTS_TRIED = 1000
"""From the default port on. A machine that holds so many servers is not ours."""
START_S, CLOSE_S = 30.0, 2.0

log = logging.getLogger(__name__)


class PortTaken(OSError):
    """Another process listens there."""


def bind(host: str | None, base_port: int, index: int) -> socket.socket:
    """A listening socket for server `index`, before the engine starts, so that a taken port is told in the first second.

    The default port is a wish: where another run on this machine listens there, the next free one is taken. A port that the
    user chose is that one or none. Raises `PortTaken` with a sentence.
    """
    if base_port != DEFAULT_PORT:
        return _listen(host or LOOPBACK, base_port, index)
    for further in range(PORTS_TRIED):
        with contextlib.suppress(PortTaken):
            return _listen(host or LOOPBACK, base_port, index + further)
    return _listen(host or LOOPBACK, base_port, index)


def _listen(address: str, base_port: int, index: int) -> socket.socket:
    port = base_port + index if base_port else 0
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if port > 65535:
            raise PortTaken(f"inference.base_port={base_port} leaves no port for server {index}: {port} is above 65535")
        listener.bind((address, port))
        listener.listen()  # only this takes the port from another socket that is bound and not yet listening
    except OSError as error:
        listener.close()
        if isinstance(error, PortTaken):
            raise
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise PortTaken(
                f"inference.host={address} is no address of this host ({error.strerror}): give one that is, or leave it out "
                "for loopback"
            ) from error
        why = "is taken" if error.errno == errno.EADDRINUSE else f"can't be bound ({error.strerror})"
        raise PortTaken(
            f"port {port} of {address} {why}: set inference.base_port={base_port} to a free one, to 0 for any free port, or "
            "inference.http=false"
        ) from error
    return listener


@asynccontextmanager
async def http_beside(
    client: Any,
    listener: socket.socket | None,
    model: ModelSettings,
    inference: InferenceSettings,
    api_key: str | None = None,
    status: Status | None = None,
) -> AsyncIterator[str]:
    """Serve `Engine.client` over HTTP on `listener` while the block runs; its URL, or empty without a listener.

    With `api_key` each request below /v1 must bring it as a bearer token; /health, /metrics and /telescope/status are open.
    """
    if listener is None:
        yield ""
        return
    host, port = listener.getsockname()[:2]
    with _own_log_level():
        app = await vllm_http.application(client, model, inference, api_key)
        if status is not None:
            app.get("/telescope/status", response_model=None)(status.facts)
        server = _server(app)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(START_S):
        await server.listening.wait()
    log.info("OpenAI-compatible HTTP at http://%s:%d/v1", host, port)
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await serving
        listener.close()


@contextlib.contextmanager
def _own_log_level() -> Iterator[None]:
    """What the application imports silences the root logger."""
    level = logging.root.level
    try:
        yield
    finally:
        logging.root.setLevel(level)


def _server(app: Any) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Signals are the process's own; and it says when it listens."""

        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            self.listening = asyncio.Event()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.listening.set()

    return Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=1))
