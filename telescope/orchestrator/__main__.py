"""`python -m telescope.orchestrator --run-dir DIR --name orchestrator`."""

import sys

from telescope.orchestrator.main import main

sys.exit(main())
