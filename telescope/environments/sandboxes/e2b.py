"""E2B sandboxes through `e2b-code-interpreter`. The key is E2B_API_KEY.

Cores and memory belong to the template, not to a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from pydantic import PrivateAttr

from telescope.environments.sandboxes.base import Limits
from telescope.environments.sandboxes.remote import RemoteProvider, RemoteSandbox, needed


class E2BSandbox(RemoteSandbox):
    def __init__(self, sandbox: Any, limits: Limits, failed: type[Exception]) -> None:
        super().__init__("e2b", limits)
        self._sandbox = sandbox
        self._failed = failed
        """What the SDK raises for an exit code other than 0, e.g. of a shell that its guest has killed."""

    async def run(self, line: str, timeout_s: float) -> str:
        try:
            said = await self._sandbox.commands.run(line, timeout=timeout_s, request_timeout=timeout_s + 10)
        except self._failed as error:
            said = error
        return str(said.stdout)

    async def put(self, path: str, content: bytes) -> None:
        await self._sandbox.files.write(path, content)

    async def get(self, path: str) -> bytes:
        return bytes(await self._sandbox.files.read(path, format="bytes"))

    async def end(self) -> None:
        await self._sandbox.kill()


class E2B(RemoteProvider):
    image: str = "code-interpreter-v1"
    """Name of the template, which E2B takes in place of an image."""
    holds: ClassVar[tuple[str, ...]] = ("a life time", "a virtual machine of its own")
    lacks: ClassVar[tuple[str, ...]] = ("cores and memory other than the template's", "disk", "the number of processes")

    _sdk: Any = PrivateAttr(default=None)
    _options: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    """Further arguments of the SDK's own calls, e.g. `api_url`."""

    async def connect(self) -> None:
        """Each request stands for itself: there is nothing to connect."""
        self._sdk = needed("e2b_code_interpreter", "e2b-code-interpreter", _load)

    async def make(self, limits: Limits) -> RemoteSandbox:
        sandbox = await self._sdk.AsyncSandbox.create(
            template=self.image,
            timeout=math.ceil(self.lifetime_s),
            metadata={"made-by": "telescope"},
            allow_internet_access=limits.network,
            **self._options,
        )
        return E2BSandbox(sandbox, limits, self._sdk.CommandExitException)


def _load() -> ModuleType:
    import e2b_code_interpreter

    module: ModuleType = e2b_code_interpreter
    return module
