"""What to type in this shell for the Telescope that runs: a line that a run prints must work where it was printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def name_own_command() -> str:
    """`telescope` or `python -m telescope` where the shell finds this installation by these words, else by its path, as in an
    environment that is not activated."""
    python = Path(sys.executable)
    for words, program in (("telescope", "telescope"), ("python -m telescope", "python")):
        found = shutil.which(program)
        if found is not None and Path(found).absolute().parent == python.parent:
            return words
    script = python.with_name("telescope")
    return _quote(script) if script.is_file() else f"{_quote(python)} -m telescope"


def _quote(path: Path) -> str:
    """From the folder where the command was given, if it lies below that."""
    here = Path.cwd()
    return shlex.quote(os.path.relpath(path, here) if path.is_relative_to(here) else str(path))
