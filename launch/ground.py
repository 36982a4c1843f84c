"""Whether the run's directory is still there. Without it nothing of the run would be kept, and nothing says so by itself: open
files take rows as before, and what is made anew is made beside the old.

Looks at one file that is written before the run and never moved while it goes on. Refuses to judge errors of a file system,
which may pass: only that the file is not there counts, and only for a while.
"""

from __future__ import annotations

from pathlib import Path

LOOK_S = 1.0
MISSING_S = 20.0


class Ground:
    """`file`: in the run's directory, there from before the run to its end."""

    def __init__(self, file: Path, missing_s: float = MISSING_S) -> None:
        self._file, self._missing_s = file, missing_s
        self._missing_since: float | None = None
        self._next_look = 0.0

    def lost(self, now: float) -> str:
        """The sentence with which a run ends whose directory has been gone for `missing_s`; empty else. Call it often."""
        if now < self._next_look:
            return ""
        self._next_look = now + LOOK_S
        there = self._there()
        if there is None:
            return ""
        if there:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
        if self._missing_since is None or now - self._missing_since < self._missing_s:
            return ""
        return (
            f"{self._file} has been gone for {now - self._missing_since:.0f} s: the run directory was deleted or moved while "
            "the run went on, so nothing of it would be kept"
        )

    def lost_at_the_end(self) -> str:
        """The sentence of a run that is over, however short a while its directory has been gone; empty where it is there."""
        if self._there() is not False:
            return ""
        return (
            f"{self._file} is gone now that the run is over: the run directory was deleted or moved while the run went on. "
            "Rows, logs and journal are where it went; checkpoints and summary made since then are in "
            f"{self._file.parent}: put them together before you use either"
        )

    def _there(self) -> bool | None:
        """None: the file system does not say."""
        try:
            self._file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return None
        return True
