"""vLLM's own OpenAI-compatible HTTP application beside the link: the same engine, the same event loop, loopback by default.

For looking in while a run goes on. It knows nothing of weights and can't pause the engine: vLLM's development routes stay off.
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

if TYPE_CHECKING:
    from telescope.config.parts import ModelSettings

LOOPBACK = "127.0.0.1"
START_S, CLOSE_S = 30.0, 2.0

log = logging.getLogger(__name__)


class PortTaken(OSError):
    """Another process listens there."""


def bind(host: str | None, base_port: int, index: int) -> socket.socket:
    """A listening socket for server `index`, before the engine starts, so that a taken port is told in the first second.

    Raises `PortTaken` with a sentence.
    """
    port = base_port + index if base_port else 0
    address = host or LOOPBACK
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
        why = "is taken" if error.errno == errno.EADDRINUSE else f"can't be bound ({error.strerror})"
        raise PortTaken(
            f"port {port} of {address} {why}: set inference.base_port={base_port} to a free one, to 0 for any free port, or "
            "inference.http=false"
        ) from error
    return listener


@asynccontextmanager
async def http_beside(client: Any, listener: socket.socket | None, model: ModelSettings) -> AsyncIterator[str]:
    """Serve `Engine.client` over HTTP on `listener` while the block runs; its URL, or empty without a listener."""
    if listener is None:
        yield ""
        return
    host, port = listener.getsockname()[:2]
    with _own_log_level():
        server = _server(await application(client, model))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(START_S):
        await server.listening.wait()
    log.info("OpenAI-compatible HTTP at http://%s:%d/v1", host, port)
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(serving, CLOSE_S)
        listener.close()


async def application(client: Any, model: ModelSettings) -> Any:
    """vLLM's FastAPI application over an AsyncLLM. The two imports moved between 0.25 and 0.32."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--disable-fastapi-docs"])
    arguments.model = client.model_config.model
    arguments.served_model_name = [model.name]
    arguments.chat_template = model.chat_template
    tasks = await client.get_supported_tasks()
    app = build_app(arguments, tasks, client.model_config)
    await init_app_state(client, app.state, arguments, tasks)
    return app


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
