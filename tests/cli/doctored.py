"""vLLM beside the trainer's model, as the doctor compares them, both of one folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def gap(folder: Path, timeout_s: float) -> float:
    """Mean |trainer - server| of log-probs, in nats; fails unless the doctor says that they agree."""
    said = subprocess.run(
        [sys.executable, "-m", "telescope", "doctor", "logprobs", f"model.name={folder}", "--samples", "8"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    assert said.stdout.splitlines()[-1] == "  trainer and server agree"
    return float(said.stdout.splitlines()[1].split()[4])
