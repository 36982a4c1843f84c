"""`python -m telescope.workers.rehearsal FOLDER LABEL…`: would a worker load these environments? For launch/preflight.py.

Reads `config.json` in FOLDER and leaves what is wrong in `obstacles.json`, a list of sentences. It is a process of its own
because the code is the user's: as in a worker it has the main thread, the worker's variables, and an end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from telescope.config.run import load_run, make_redactor
from telescope.workers.loading import find_obstacle

CONFIG, OBSTACLES = "config.json", "obstacles.json"


def main(arguments: Sequence[str]) -> int:
    folder, *labels = arguments
    config = load_run(Path(folder) / CONFIG)
    redactor = make_redactor(config)
    found = [redactor.text(sentence) for label in labels if (sentence := find_obstacle(config, label))]
    (Path(folder) / OBSTACLES).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
