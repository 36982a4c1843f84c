"""Whether the run's directory is still there. Without it nothing of the run would be kept, and nothing says so by itself: open
files take rows as before, and what is made anew is made beside the old.

Looks at one file that is written before the run and never moved while it goes on. Refuses to judge errors of a file system,
which may pass: only that the file is not there counts, look after look, and only for a while.
"""

from __future__ import annotations

from pathlib import Path

LOOK_S = 1.0
MISSING_S = 20.0
LONGEST_S = 2.0
"""What a look counts for at most, however long ago the one before it was: a file server that hangs for a minute and then
knows nothing for an instant has been seen to know nothing twice."""


class RunDirWatch:
    """`file`: in the run's directory, there from before the run to its end."""

    def __init__(self, file: Path, missing_s: float = MISSING_S) -> None:
        self._file, self._missing_s = file, missing_s
        self._gone_s: float | None = None
        """For how long it was seen to be gone; None: it is there, or nobody can tell."""
        self._looked = 0.0

    def check(self, now: float) -> str:
        """The sentence with which a run ends whose directory has been gone for `missing_s`; empty else. Call it often."""
        since_s = now - self._looked
        if since_s < LOOK_S:
            return ""
        self._looked = now
        if not self._is_gone():
            self._gone_s = None
            return ""
        self._gone_s = 0.0 if self._gone_s is None else self._gone_s + min(since_s, LONGEST_S)
        if self._gone_s < self._missing_s:
            return ""
        return (
            f"{self._file} has been gone for {self._gone_s:.0f} s: the run directory was deleted or moved while the run went "
            "on, so nothing of it would be kept"
        )

    def check_at_end(self) -> str:
        """The sentence of a run that is over, however short a while its directory has been gone; empty where it is there."""
        if not self._is_gone():
            return ""
        return (
            f"{self._file} is gone now that the run is over: the run directory was deleted or moved while the run went on. "
            "Rows, logs and journal are where it went; checkpoints and summary made since then are in "
            f"{self._file.parent}: put them together before you use either"
        )

    def _is_gone(self) -> bool:
        try:
            self._file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return False
