"""A plain process with limits: no wall at all. For code that you wrote yourself, or a machine that nobody will miss.

The guest reads what its user reads, reaches the network, and can leave processes behind. Never the default, never a fallback:
`provider: unsafe_subprocess` must be written out, and each start warns.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import ClassVar

from pydantic import PrivateAttr

from telescope.environments.sandboxes import local
from telescope.environments.sandboxes.base import Isolation, Limits, Wall

log = logging.getLogger(__name__)


class UnsafeSubprocess(local.LocalProvider):
    python: str | None = None
    """Interpreter that guests find first on their PATH; null: the system's python3."""
    wall: ClassVar[Wall] = Wall.NONE

    _python: local.Python = PrivateAttr()

    async def find(self) -> None:
        self._python = local.find_python(self.python)

    def held(self, limits: Limits) -> tuple[str, ...]:
        return ()

    def isolation(self, limits: Limits) -> Isolation:
        found = super().isolation(limits)
        lacks = (
            "files of this machine",
            "the network",
            "the size of all files",
            "processes that leave their group",
            *found.lacks,
        )
        return Isolation(found.provider, found.wall, found.holds, lacks)

    async def start(self, limits: Limits) -> Isolation:
        found = await super().start(limits)
        log.warning("sandbox.provider=unsafe_subprocess: %s. Run nothing there that a model wrote", found.sentence)
        return found

    def launch(self, limits: Limits, user: int | None, folder: Path) -> local.Launch:
        argv = [*local.as_user(user), self._python.path, "-I", "-S", "-c", local.agent_source()]
        path = f"{Path(self._python.path).parent}:/usr/bin:/bin"
        return local.Launch(argv, home=str(folder), env={"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8"})
