"""Modal sandboxes through `modal`. The keys are MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or what `modal token new` has stored."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, ClassVar

from pydantic import PrivateAttr

from telescope.environments.sandboxes.base import Limits
from telescope.environments.sandboxes.remote import RemoteProvider, RemoteSandbox, needed

APP = "telescope-sandboxes"


class ModalSandbox(RemoteSandbox):
    def __init__(self, sandbox: Any, limits: Limits) -> None:
        super().__init__("modal", limits)
        self._sandbox = sandbox

    async def run(self, line: str, timeout_s: float) -> str:
        process = await self._sandbox.exec.aio("sh", "-c", line, timeout=math.ceil(timeout_s))
        printed: str = await process.stdout.read.aio()
        await process.wait.aio()
        return printed

    async def put(self, path: str, content: bytes) -> None:
        await self._sandbox.filesystem.write_bytes.aio(content, path)

    async def get(self, path: str) -> bytes:
        content: bytes = await self._sandbox.filesystem.read_bytes.aio(path)
        return content

    async def end(self) -> None:
        await self._sandbox.terminate.aio()


class Modal(RemoteProvider):
    holds: ClassVar[tuple[str, ...]] = ("cores", "memory", "a life time", "a kernel of its own (gVisor)")
    lacks: ClassVar[tuple[str, ...]] = ("disk", "the number of processes")

    _sdk: Any = PrivateAttr(default=None)
    _app: Any = PrivateAttr(default=None)

    async def connect(self) -> None:
        if self._sdk is None:
            self._sdk = needed("modal", "modal", _load)
        self._app = await self._sdk.App.lookup.aio(APP, create_if_missing=True)

    async def make(self, limits: Limits) -> RemoteSandbox:
        sandbox = await self._sdk.Sandbox.create.aio(
            app=self._app,
            image=self._sdk.Image.from_registry(self.image),
            timeout=math.ceil(self.lifetime_s),
            cpu=(limits.cpus, limits.cpus),  # what is asked for, and no more than that
            memory=(limits.memory_mb, limits.memory_mb),
            block_network=not limits.network,
        )
        return ModalSandbox(sandbox, limits)


def _load() -> ModuleType:
    import modal

    module: ModuleType = modal
    return module
