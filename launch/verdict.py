"""What the supervisor's exit code is, of all that it has seen. Pure: the order of these questions is the whole of it."""

from __future__ import annotations

from telescope._launch.causes import Cause
from telescope.exit_codes import COMPONENT_FAILED, DONE, ERROR, STOPPED, UNSAVED


def exit_code(cause: Cause | None, orchestrator: int | None, *, warned: bool, interrupted: int | None) -> int:
    """`cause`: of the end, if a part failed; `orchestrator`: its status, None where it has none; `warned`: that the time is
    nearly up; `interrupted`: the signal that the supervisor got."""
    if cause:
        return ERROR if cause.process == "orchestrator" and orchestrator == ERROR else COMPONENT_FAILED
    if orchestrator == STOPPED or (warned and orchestrator != DONE):  # warned and done: it was so before it heard
        return STOPPED
    if interrupted is not None:
        return 128 + interrupted
    return UNSAVED if orchestrator == UNSAVED else DONE
