"""E2B sandboxes through `e2b-code-interpreter`. The key is E2B_API_KEY.

Cores and memory belong to the template, not to a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from telescope.environments.sandboxes.base import Limits
from telescope.environments.sandboxes.remote import RemoteProvider, RemoteSandbox, needed

_IMAGE_DEFAULT, _TEMPLATE_DEFAULT = "python:3.11-slim", "code-interpreter-v1"


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
    name = "e2b"
    holds: ClassVar[tuple[str, ...]] = ("a life time", "a virtual machine of its own")
    lacks: ClassVar[tuple[str, ...]] = ("cores and memory other than the template's", "disk", "the number of processes")

    def __init__(self, image: str, lifetime_s: float, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._sdk: ModuleType = needed("e2b_code_interpreter", "e2b-code-interpreter", _load)
        self._template = _TEMPLATE_DEFAULT if image == _IMAGE_DEFAULT else image
        self._lifetime_s = lifetime_s
        self._options = dict(options or {})
        """Further arguments of the SDK's own calls, e.g. `api_url`."""

    async def connect(self) -> None:
        """Nothing to do: each request stands for itself."""

    async def make(self, limits: Limits) -> RemoteSandbox:
        sandbox = await self._sdk.AsyncSandbox.create(
            template=self._template,
            timeout=math.ceil(self._lifetime_s),
            metadata={"made-by": "telescope"},
            allow_internet_access=limits.network,
            **self._options,
        )
        return E2BSandbox(sandbox, limits, self._sdk.CommandExitException)


def _load() -> ModuleType:
    import e2b_code_interpreter

    module: ModuleType = e2b_code_interpreter
    return module
