"""`python -m telescope.workers`."""

from telescope.wire.process import leave
from telescope.workers.main import main

if __name__ == "__main__":
    leave(main())
