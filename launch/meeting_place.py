"""Where the trainer ranks of a run meet, and the variables that tell them so.

On one host it is a file in a folder that the run's user alone may enter. Between hosts it is a port on the first rank's
address, where torch's store listens without a password.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from telescope._launch.hosts.address import KeptPort
from telescope._launch.process_plan import MEETING_FILE, LaunchPlan
from telescope.runlog import temporary


@contextlib.contextmanager
def open_meeting_place(plan: LaunchPlan, port: int = 0) -> Iterator[dict[str, str]]:
    """Variables of each trainer rank, true as long as the block lasts. `port`: kept where rank 0 will be; 0: one of this host's
    if ranks of several hosts need one."""
    if port:
        yield {"MASTER_PORT": str(port)}
    elif len(plan.hosts) > 1:
        with contextlib.closing(KeptPort(plan.head_address)) as kept:
            yield {"MASTER_PORT": str(kept.number)}
    else:
        with temporary.open_folder() as folder:
            yield {MEETING_FILE: str(folder / "ranks")}
