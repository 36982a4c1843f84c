"""What a run costs before and beside its work: processor seconds and memory of each process of a run with a fake engine and
backend, which does next to nothing else than start and end. From the repository's root:

    python -m benchmarks.starts [--repeats 3] [overrides]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

PARTS = {
    "telescope.run": "launcher",
    "telescope.orchestrator": "orchestrator",
    "telescope.workers": "worker",
    "telescope.inference": "server (fake)",
    "telescope.trainer": "trainer (fake)",
}
LOOK_S = 0.05


def part_of(process: psutil.Process) -> str | None:
    """Which process of the run it is; shims are None."""
    line = process.cmdline()
    return PARTS.get(line[2]) if line[1:2] == ["-m"] and len(line) > 2 else None


def watched(command: list[str]) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Processor seconds and most MiB by part, those of all together, and seconds of wall-clock."""
    found: dict[str, tuple[float, float]] = {}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None:
            try:
                for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
                    part, used = part_of(process), process.cpu_times()
                    if part is not None:
                        most = max(found.get(part, (0.0, 0.0))[1], process.memory_info().rss / 2**20)
                        found[part] = used.user + used.system, most
            except psutil.Error:
                continue  # it has just ended
            time.sleep(LOOK_S)
        if run.returncode:
            sys.exit(f"the run ended with exit code {run.returncode}: {' '.join(command)}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found, spent, time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.repeats):
            base = [sys.executable, "-m", "telescope.run", f"run_dir={Path(folder, str(number))}", "experiment=fake"]
            runs.append(watched([*base, "number_of_steps=2", "logging.use_wandb=false", *given.overrides]))
    for part in PARTS.values():
        seconds = [found[part][0] for found, *_ in runs if part in found]
        memory = [found[part][1] for found, *_ in runs if part in found]
        print(f"{part}: {statistics.median(seconds):.2f} CPU seconds, {statistics.median(memory):.0f} MiB")
    print(
        f"all: {statistics.median(run[1] for run in runs):.2f} CPU seconds, {statistics.median(run[2] for run in runs):.1f} s"
    )


if __name__ == "__main__":
    main()
