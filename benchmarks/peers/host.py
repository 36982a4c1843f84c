"""The machine of a run: its GPUs, and processes that end with their deadline. Asks the driver, and never opens a CUDA context:
that would take memory from what is measured."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASK_S, END_S = 30.0, 40.0


@dataclass(frozen=True)
class PeerCard:
    """`ident`: what CUDA_VISIBLE_DEVICES calls it."""

    ident: str
    name: str
    driver: str


def find_cards(environ: Mapping[str, str], count: int) -> list[PeerCard]:
    """The first `count` GPUs that may be used. Ends the program where there are fewer."""
    cards = visible_cards(_ask_driver(), environ.get("CUDA_VISIBLE_DEVICES"))
    if len(cards) < count:
        raise SystemExit(f"this needs {count} GPU(s), and {len(cards)} can be used: look at CUDA_VISIBLE_DEVICES, or try --cpu")
    return cards[:count]


def visible_cards(listed: str, visible: str | None) -> list[PeerCard]:
    """By the driver's list, lines of `index, uuid, name, driver version`, and the variable; null: all of them."""
    lines = [[part.strip() for part in line.split(",")] for line in listed.splitlines() if line.count(",") == 3]
    known = {key: PeerCard(key, name, driver) for index, uuid, name, driver in lines for key in (index, uuid)}
    wanted = [line[0] for line in lines] if visible is None else [part.strip() for part in visible.split(",")]
    return [known[key] for key in wanted if key in known]


def _ask_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=index,uuid,name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def describe_machine(cards: Sequence[PeerCard]) -> dict[str, Any]:
    """What a reader has to know of it beside the cards' names."""
    driver = cards[0].driver if cards else None
    return {"system": platform.platform(), "cpus": os.cpu_count(), "driver": driver}


def start(command: Sequence[str], log: Path, environ: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    """In a process group of its own, with all it says in the log."""
    with log.open("wb") as said:
        return subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env=dict(environ), cwd=cwd, start_new_session=True
        )


def wait(process: subprocess.Popen[bytes], log: Path, limit_s: float, what: str) -> None:
    """Until it has ended well. Ends the program with the log's last lines where it has not, within the limit."""
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
        end(process)
    if code:
        raise SystemExit(f"{what} ended with exit code {code}; its log, {log}, ends so:\n{tail(log)}")
    if code is None:
        raise SystemExit(f"{what} did not end within --limit-s={limit_s:g}; its log, {log}, ends so:\n{tail(log)}")


def end(process: subprocess.Popen[bytes]) -> None:
    """The process with all that it has started: asked once, then killed."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait(END_S)


def tail(log: Path, length: int = 3000) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-length:]
