"""vLLM's own OpenAI-compatible HTTP application beside the link: the same engine, the same event loop, loopback by default.

For looking in while a run goes on. It knows nothing of weights and can't pause the engine: vLLM's development routes stay off.
Owns the port, the address that is written down, and how the application is built in vLLM 0.25 to 0.32. vLLM is imported
by the functions that need it.
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

from telescope.config.sections import DEFAULT_PORT
from telescope.inference.status import Status
from telescope.inference.vllm.http_gate import GateRules, HttpGate

if TYPE_CHECKING:
    from telescope.config.sections import InferenceSettings, ModelSettings


LOOPBACK = "127.0.0.1"
PORTS_TRIED = 1000
"""From the default port on. A machine that holds so many servers is not ours."""
START_S, CLOSE_S = 30.0, 2.0
HEAD_S = 15.0
"""From a connection, or the first byte of a further request on it, to the end of the request's head."""

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
    except (OSError, UnicodeError) as error:
        listener.close()
        if isinstance(error, PortTaken):
            raise
        if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
            said = error if isinstance(error, UnicodeError) else error.strerror
            raise PortTaken(
                f"inference.host={address} is not an address of this host ({said}): give one that is, or leave it out for "
                "loopback"
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
    *,
    alone: bool = False,
) -> AsyncIterator[str]:
    """Serve `Engine.client` over HTTP on `listener` while the block runs; its URL, or empty without a listener. `model`: under
    its name the client is asked for it. `alone`: there are no rollouts.

    What of it is served, to whom and how much at once: http_gate.py.
    """
    if listener is None:
        yield ""
        return
    host, port = listener.getsockname()[:2]
    with _own_log_level():
        app = await application(client, model, inference)
        if status is not None:
            app.get("/telescope/status", response_model=None)(status.facts)
        last = inference.scheduling_policy == "priority"
        rules = GateRules(api_key, inference.http_sequences, last, adapters=model.lora is not None, alone=alone)
        server = _server(HttpGate(app, rules))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(START_S):
        await server.listening.wait()
    url = f"http://{_bracketed(reachable_address(host))}:{port}"
    log.info("OpenAI-compatible HTTP at %s/v1", url)
    try:
        yield url
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await serving
        listener.close()


def reachable_address(host: str) -> str:
    """Where others find what listens at `host`: an address that means all of them (0.0.0.0) is none to type."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, somewhere = (socket.AF_INET, "192.0.2.1") if host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as unsent, contextlib.suppress(OSError):
        unsent.connect((somewhere, 9))  # sends nothing: the kernel chooses the address that it would send from
        return str(unsent.getsockname()[0])
    return socket.gethostname()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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

    class OwnSignalsServer(uvicorn.Server):
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

    return OwnSignalsServer(
        uvicorn.Config(
            app, http=_protocol(), ws="none", log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=1
        )
    )


def _protocol() -> Any:
    """uvicorn's, which waits for ever for the head of a request, with an end to that: idle strangers would hold descriptors."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class HeadInTime(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._end = self.loop.call_later(HEAD_S, transport.close)

        def data_received(self, data: bytes) -> None:
            waited = self.cycle is None or self.cycle.response_complete
            if waited and self._end.cancelled():
                self._end = self.loop.call_later(HEAD_S, self.transport.close)
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._end.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end.cancel()
            super().connection_lost(exc)

    return HeadInTime


def unknown_parsers(inference: InferenceSettings) -> str:
    """A sentence if vLLM has no parser of a name that the settings give; else empty. Imports vLLM where they give one."""
    for setting, given in (
        ("tool_call_parser", inference.tool_call_parser),
        ("reasoning_parser", inference.reasoning_parser),
    ):
        if given is None:
            continue
        known = _tool_parsers() if setting == "tool_call_parser" else _reasoning_parsers()
        if given not in known:
            return f"inference.{setting}={given} is not a parser of this vLLM, which has {', '.join(sorted(known))}"
    return ""


async def application(client: Any, model: ModelSettings, inference: InferenceSettings) -> Any:
    """vLLM's FastAPI application over an AsyncLLM, all of it."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # 0.25
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--disable-fastapi-docs"])
    arguments.model = client.model_config.model
    arguments.served_model_name = [model.name]
    arguments.chat_template = model.chat_template
    arguments.default_chat_template_kwargs = {"enable_thinking": model.enable_thinking}  # as rollouts have it
    arguments.tool_call_parser = inference.tool_call_parser
    arguments.enable_auto_tool_choice = inference.tool_call_parser is not None
    if inference.reasoning_parser:
        arguments.reasoning_parser = inference.reasoning_parser
        arguments.structured_outputs_config.reasoning_parser = inference.reasoning_parser
    tasks = await client.get_supported_tasks()
    app = build_app(arguments, tasks, client.model_config)
    await init_app_state(client, app.state, arguments, tasks)
    return app


def _tool_parsers() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    return list(ToolParserManager.list_registered())


def _reasoning_parsers() -> list[str]:
    from vllm.reasoning import ReasoningParserManager

    return list(ReasoningParserManager.list_registered())
