"""Daytona sandboxes through `daytona`. The key is DAYTONA_API_KEY; DAYTONA_API_URL names a server of one's own."""

from __future__ import annotations

import math
import shlex
from types import ModuleType
from typing import Any, ClassVar

from pydantic import PrivateAttr

from telescope.environments.sandboxes.base import Limits
from telescope.environments.sandboxes.remote import CALL_S, RemoteProvider, RemoteSandbox, needed


class DaytonaSandbox(RemoteSandbox):
    def __init__(self, sandbox: Any, limits: Limits) -> None:
        super().__init__("daytona", limits)
        self._sandbox = sandbox

    async def run(self, line: str, timeout_s: float) -> str:
        said = await self._sandbox.process.exec(shlex.join(["sh", "-c", line]), timeout=math.ceil(timeout_s))
        return str(said.result)

    async def put(self, path: str, content: bytes) -> None:
        await self._sandbox.fs.upload_file(content, path)

    async def get(self, path: str) -> bytes:
        return bytes(await self._sandbox.fs.download_file(path) or b"")

    async def end(self) -> None:
        await self._sandbox.delete(timeout=CALL_S)


class Daytona(RemoteProvider):
    holds: ClassVar[tuple[str, ...]] = ("cores", "memory", "disk", "a life time")
    lacks: ClassVar[tuple[str, ...]] = ("the number of processes",)

    _sdk: Any = PrivateAttr(default=None)
    _client: Any = PrivateAttr(default=None)

    async def connect(self) -> None:
        self._sdk = needed("daytona", "daytona", _load)
        if self._client is None:
            self._client = self._sdk.AsyncDaytona()

    async def make(self, limits: Limits) -> RemoteSandbox:
        gigabytes = 1024  # it takes whole ones
        sizes = {
            "cpu": math.ceil(limits.cpus),
            "memory": math.ceil(limits.memory_mb / gigabytes),
            "disk": math.ceil(limits.disk_mb / gigabytes),
        }
        parameters = self._sdk.CreateSandboxFromImageParams(
            image=self.image,
            resources=self._sdk.Resources(**sizes),
            labels={"made-by": "telescope"},
            network_block_all=not limits.network,
            ephemeral=True,
            ttl_minutes=math.ceil(self.lifetime_s / 60),
        )
        return DaytonaSandbox(await self._client.create(parameters, timeout=4 * CALL_S), limits)

    async def disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()


def _load() -> ModuleType:
    import daytona

    module: ModuleType = daytona
    return module
