"""Benchmarks that a machine without a GPU can run, at their smallest: they end well, and say something.

What they measure is nobody's business here. A benchmark that has not kept up with the code it measures is found out by this,
and not in the first minute on a lent card.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PATIENCE_S = 600.0
SMALLEST = {
    "environments.concurrency": "--rollouts 20 --slow 0.05",
    "flow.burst": "--requests 8 --tokens 16 --waves 2",
    "flow.cancel": "--aborts 2 --others 2 --max-tokens 40",
    "flow.core_events": "--events 2000 --repeats 1",
    "flow.hub_roundtrip": "--trips 50 --window 4 --tokens 16 --rounds 1",
    "flow.paths": "--trips 50 --window 4 --tokens 16 --rounds 1 --shapes 1x1",
    "flow.refill": "--requests 8 --tokens 16 --waves 4",
    "flow.simulate": "--servers 4 --steps 2",
    "grader_agreement": "--first 4",
    "peers.ours": "--shape tiny --cpu --steps 4 --prompt 16 --answer 16",
    "training.attention": "--device cpu --row 64 --heads 2 1 16 --repeats 1",
    "training.checkpoint": "--layers 1 --hidden 128 --train",
    "training.logprobs": "--tokens 64 --vocabulary 512 --hidden 32 --chunks 16 --plain-tokens 16 --runs 1",
    "training.packing": "--draws 2",
    "training.throughput": "--row 256 --sample 64 --samples 8 --repeats 1 --warm 1 --steps 1 --methods ours plain",
    "weights.fixed": "--updates 1",
    "weights.pause": "--device cpu --transport gloo --updates 2 --requests 4",
    "weights.recovery": "",
    "weights.wire": "--device cpu --shapes tiny --updates 2",
}


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *SMALLEST[name].split()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    assert ran.stdout.strip()
