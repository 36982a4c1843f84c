"""`python -m telescope.orchestrator --run-dir DIR --name orchestrator`."""

from telescope.orchestrator.main import main
from telescope.wire.process import leave

if __name__ == "__main__":
    leave(main())
