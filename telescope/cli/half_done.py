"""A run directory that was made for a run that does not begin: it is put back as it was.

Where sbatch refuses the job, or a signal comes before anything is started.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from telescope.runlog import opening
from telescope.runlog.files import DamagedFile, read_bytes
from telescope.runlog.layout import RunDirectory, write_atomically


class HalfDone:
    """A run directory before it is made ready for a run: what is put back where none begins."""

    def __init__(self, path: Path) -> None:
        self._run = RunDirectory(path)
        self.path = self._run.path
        self._was_there = path.exists()
        self._files: dict[Path, bytes] = {}
        self._was_run = opening.is_run(path)
        if self._was_run:
            run = self._run
            for file in (run.config_json, run.config_yaml, run.cmdline, run.plan_json, run.run_json):
                with contextlib.suppress(OSError, DamagedFile):
                    self._files[file] = read_bytes(file)

    def take_back(self) -> None:
        """A new directory goes, or is empty as it was; one of an earlier attempt has its settings again. Raises OSError."""
        for file, held in self._files.items():
            write_atomically(file, held.decode("utf-8", "surrogateescape"), mode=0o600)
        if self._was_run:
            return
        if not self._was_there:
            shutil.rmtree(self._run.path)
            return
        for path in self._run.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def take_back_or_say(self, say: Callable[[str], None]) -> None:
        """The same; what can't be put back is told."""
        try:
            self.take_back()
        except OSError as error:
            say(f"{self.path} can't be put back as it was: {error.strerror or error} ({error.filename})")
