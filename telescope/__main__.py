"""`python -m telescope COMMAND …` is `telescope COMMAND …`."""

from __future__ import annotations

import sys

from telescope.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
