"""What the exit code of a run says, and of the process that ends it (docs/configuration.md has the table). Numbers alone."""

from __future__ import annotations

import signal

DONE = 0
ERROR = 1
"""The configuration is wrong, or the orchestrator ended with an error of its own: a full disk, say, or all steps are trained
and the last checkpoint could not be written. A person has to mend it: nothing starts such a run again by itself."""
COMPONENT_FAILED = 70
"""A part of the run failed for good (EX_SOFTWARE of sysexits.h)."""
STOPPED = 75
"""Stopped in good order before it was done, with the time nearly up or all in a checkpoint: run it again (EX_TEMPFAIL)."""
BY_SIGNAL = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
STOPS = (STOPPED, *BY_SIGNAL)
"""Ends that somebody asked for, and no failures."""
