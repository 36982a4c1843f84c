"""`python -m telescope.workers.rehearsal FOLDER FILE LABEL SECONDS`: would a worker load this environment?

For launch/preflight.py. Reads `config.json` in FOLDER and leaves what is wrong in FILE there, a sentence. It is a process of
its own because the code is the user's: as in a worker it has the main thread, the worker's variables, and an end, which SIGALRM
brings when that code has had SECONDS.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from telescope.config.run import load_run, make_redactor
from telescope.workers.loading import find_obstacle

CONFIG = "config.json"


def main(arguments: Sequence[str]) -> int:
    folder, file, label, limit_s = arguments
    config = load_run(Path(folder) / CONFIG)
    redactor = make_redactor(config)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it kills, also code that is deep in C
    signal.setitimer(signal.ITIMER_REAL, float(limit_s))
    found = find_obstacle(config, label)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    (Path(folder) / file).write_text(redactor.text(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
