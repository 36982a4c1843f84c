"""`python -m telescope.trainer`."""

from telescope.trainer.main import main
from telescope.wire.process import leave

if __name__ == "__main__":
    leave(main())
