"""`python -m telescope.run …` is `telescope run …`: nothing but another name of the command."""

from __future__ import annotations

from telescope._launch import terminal

if __name__ == "__main__":
    terminal.prepare()  # before the imports below: they take a moment, in which a Ctrl-C must not be a traceback

import sys

from telescope.cli.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
