"""What this machine has: cores and GPUs, found without torch and without touching a GPU.

Owns the look at one host; refuses to decide what to do with it (process_plan.py does).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

from telescope._launch.process_environment import find_visible_gpus, read_own_environment
from telescope._launch.process_plan import Host

NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
NVIDIA_SMI_TIMEOUT_S = 20.0


def inspect_this_host() -> Host:
    """Cores that this process may run on, and the GPUs that CUDA_VISIBLE_DEVICES leaves (all where it is not set)."""
    return Host(name=socket.gethostname(), cpus=len(os.sched_getaffinity(0)), gpus=_keep_visible(list_installed_gpus()))


def list_installed_gpus() -> tuple[str, ...]:
    """Indices of the NVIDIA GPUs, e.g. `("0", "1")`: by nvidia-smi, or by the driver's own list where that is missing."""
    answer = _ask_nvidia_smi("index")
    if answer is None:
        return list_driver_gpus(NVIDIA_PROC)
    return tuple(line for line in answer if line.isdigit())


def find_compute_capability() -> int | None:
    """The major number of this machine's GPUs, e.g. 9 for an H100; None where nvidia-smi can't tell, or they differ."""
    majors = {line.partition(".")[0] for line in _ask_nvidia_smi("compute_cap") or [] if "." in line}
    found = majors.pop() if len(majors) == 1 else ""
    return int(found) if found.isdigit() else None


class SmallestCard(NamedTuple):
    """The GPU with least memory of those that this process may see."""

    name: str
    memory: int
    """Bytes."""
    capability: int | None = None
    """The least major compute capability of all of them; None where nvidia-smi can't tell."""


def find_smallest_card() -> SmallestCard | None:
    """None where nvidia-smi can't tell, as of cards that are divided (MIG): it has the whole card's memory."""
    visible = find_visible_gpus()
    if visible == () or any(name.startswith("MIG") for name in visible or ()):
        return None
    found: list[tuple[int, str]] = []
    majors: list[int] = []
    for line in _ask_nvidia_smi("mig.mode.current,compute_cap,memory.total,name", visible) or []:
        if line.count(", ") < 3:
            continue
        divided, capability, memory, name = line.split(", ", 3)
        if divided == "Enabled":
            return None
        if (major := capability.partition(".")[0]).isdigit():
            majors.append(int(major))
        if (number := memory.removesuffix(" MiB")).isdigit():
            found.append((int(number) << 20, name))
    if not found:
        return None
    memory_bytes, name = min(found)
    return SmallestCard(name, memory_bytes, min(majors, default=None))


def has_compilers() -> bool:
    """Whether this host has what torch.compile calls: a C and a C++ compiler, and the headers of this Python."""
    variables = read_own_environment()
    c, cxx = (variables.get(name) or default for name, default in (("CC", "cc gcc clang"), ("CXX", "c++ g++ clang++")))
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return headers.is_file() and all(any(map(shutil.which, names.split())) for names in (c, cxx))


def _ask_nvidia_smi(field: str, gpus: tuple[str, ...] | None = None) -> list[str] | None:
    """One line a GPU, of all or of these; None where nvidia-smi is missing or fails."""
    these = () if gpus is None else (f"--id={','.join(gpus)}",)
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", *these],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in answer.stdout.splitlines()]


def list_driver_gpus(folder: Path) -> tuple[str, ...]:
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    return tuple(str(index) for index in range(count))


def _keep_visible(installed: tuple[str, ...]) -> tuple[str, ...]:
    allowed = find_visible_gpus()
    return installed if allowed is None or not installed else allowed
