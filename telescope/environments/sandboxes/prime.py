"""Prime sandboxes through `prime-sandboxes`. The key is PRIME_API_KEY, or what `prime login` has stored."""

from __future__ import annotations

import asyncio
import math
import shlex
import tempfile
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from pydantic import PrivateAttr

from telescope.environments.sandboxes.base import Limits, SandboxError
from telescope.environments.sandboxes.remote import RemoteProvider, RemoteSandbox, needed

_POLICY_TRIES = 60


class PrimeSandbox(RemoteSandbox):
    def __init__(self, client: Any, identity: str, limits: Limits) -> None:
        super().__init__("prime", limits)
        self._client = client
        self._id = identity

    async def run(self, line: str, timeout_s: float) -> str:
        said = await self._client.execute_command(self._id, shlex.join(["sh", "-c", line]), timeout=math.ceil(timeout_s))
        return str(said.stdout)

    async def put(self, path: str, content: bytes) -> None:
        await self._client.upload_bytes(self._id, path, content, Path(path).name)

    async def get(self, path: str) -> bytes:
        # `read_file` gives text: bytes come through a file alone.
        with tempfile.TemporaryDirectory(prefix="telescope-") as folder:
            local = Path(folder, "file")
            await self._client.download_file(self._id, path, str(local))
            return await asyncio.to_thread(local.read_bytes)

    async def end(self) -> None:
        await self._client.delete(self._id)


class Prime(RemoteProvider):
    holds: ClassVar[tuple[str, ...]] = ("cores", "memory", "disk", "a life time")
    lacks: ClassVar[tuple[str, ...]] = ("the number of processes",)

    _sdk: Any = PrivateAttr(default=None)
    _client: Any = PrivateAttr(default=None)

    async def connect(self) -> None:
        self._sdk = needed("prime_sandboxes", "prime-sandboxes", _load)
        if self._client is None:
            self._client = self._sdk.AsyncSandboxClient()

    async def make(self, limits: Limits) -> RemoteSandbox:
        request = self._sdk.CreateSandboxRequest(
            name=f"telescope-{uuid.uuid4().hex[:12]}",
            docker_image=self.image,
            cpu_cores=limits.cpus,
            memory_gb=limits.memory_mb / 1024,
            disk_size_gb=max(1.0, limits.disk_mb / 1024),
            timeout_minutes=math.ceil(self.lifetime_s / 60),
            labels=["telescope"],
        )
        made = await self._client.create(request)
        sandbox = PrimeSandbox(self._client, made.id, limits)
        try:
            await self._client.wait_for_creation(made.id)
            if not limits.network:
                await self._cut_off(made.id)
        except BaseException:
            await asyncio.shield(sandbox.delete())
            raise
        return sandbox

    async def _cut_off(self, identity: str) -> None:
        """A request may not deny every address; a running sandbox may. It holds once the service says that it is applied."""
        status = await self._client.set_network(identity, deny=["*"])
        for _ in range(_POLICY_TRIES):
            if status.applied:
                return
            await asyncio.sleep(1.0)  # the service sends no word of it
            status = await self._client.get_network(identity)
        raise SandboxError(f"its network could not be cut off within {_POLICY_TRIES} s")

    async def disconnect(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _load() -> ModuleType:
    import prime_sandboxes

    module: ModuleType = prime_sandboxes
    return module
