"""`python -m telescope.inference`."""

from telescope.inference.main import main
from telescope.wire.process import leave

if __name__ == "__main__":
    leave(main())
