"""The orchestrator's processor seconds a rollout, in whole runs with a fake engine and backend, by relay and with tickets.

    python -m benchmarks.flow.rollout_cpu [--steps 60] [overrides ...]

Starts `python -m telescope.run experiment=fake` and reads the orchestrator's processor time from the moment when the first step
is trained until the run's end, and the rollouts scored meanwhile from its status file. Everything that a rollout costs there is
in it: messages, the core, the journal, rows, batches. Answers of the fake engine are short, so arrays weigh little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 300.0
Look = tuple[float, int, float]


def status(run: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((run / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def orchestrator_of(pid: int) -> psutil.Process | None:
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if child.cmdline()[1:3] == ["-m", "telescope.orchestrator"]:
                return child
        except (psutil.Error, IndexError):
            continue
    return None


def look(run: Path, process: psutil.Process) -> Look:
    """Processor seconds and rollouts scored until now, and the time."""
    times = process.cpu_times()
    return times.user + times.system, int(status(run).get("counts", {}).get("rollouts_generated", 0)), time.monotonic()


def watch(run: Path, process: subprocess.Popen[bytes]) -> tuple[Look, Look]:
    """The first look and the last one. Raises `RuntimeError` where the run fails or is too short."""
    end, first, last = time.monotonic() + DEADLINE_S, None, None
    orchestrator: psutil.Process | None = None
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)  # the pace of looking, not a wait for something
        try:
            orchestrator = orchestrator or orchestrator_of(process.pid)
            if orchestrator is not None and status(run).get("step"):
                last = look(run, orchestrator)
                first = first or last
        except psutil.Error:
            continue  # it is ending
    if process.wait(30) != 0 or first is None or last is None or last[1] == first[1]:
        raise RuntimeError("the run failed, or was too short to be measured: give more --steps")
    return first, last


def measure(steps: int, direct: bool, overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = ["experiment=fake", f"number_of_steps={steps}", f"wire.direct={str(direct).lower()}", f"run_dir={run}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "telescope.run", *words, *overrides],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
        )
        try:
            first, last = watch(run, process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    rollouts = last[1] - first[1]
    return {
        "path": "direct" if direct else "relay",
        "rollouts": rollouts,
        "orchestrator_cpu_ms_per_rollout": round((last[0] - first[0]) / rollouts * 1000, 3),
        "rollouts_per_s": round(rollouts / (last[2] - first[2]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options, overrides = parser.parse_known_args()
    for direct in (False, True, False, True):
        print(json.dumps(measure(options.steps, direct, overrides)), flush=True)


if __name__ == "__main__":
    main()
