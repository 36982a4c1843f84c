"""What ended a run, in words: which process died first, of what, and what its log says.

Owns the choice of the root cause and its sentence; reads failure sentences and logs; decides nothing about processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from telescope._launch.processes import Ending
from telescope.runlog.layout import RunDirectory

TAIL_LINES = 15
TAIL_BYTES = 32_768


class Cause(msgspec.Struct, frozen=True):
    """Why a run failed."""

    process: str
    sentence: str
    log: str
    last_lines: tuple[str, ...]

    def text(self) -> str:
        lines = "".join(f"    {line}\n" for line in self.last_lines) or "    (empty)\n"
        return f"{self.sentence}\n  The last lines of {self.log}:\n{lines}"


def root_cause(
    run: RunDirectory, names: Sequence[str], endings: dict[str, Ending], lives: Mapping[str, int] | None = None
) -> Cause | None:
    """The first process that died without being told to, or the one that it blames; None where each was told or left with 0.

    `names` are all processes of the run, `endings` those that have ended; `lives` says of those started again which life they
    are in. Ask at once: what is told to leave later writes sentences too.
    """
    failed = {name: ending for name, ending in endings.items() if ending.status != 0 and not ending.ordered}
    if not failed:
        return None
    first = min(failed, key=lambda name: failed[name].at)
    culprit = first
    if first == "orchestrator" and not endings[first].shim_died and endings[first].status > 0:
        # It leaves because a peer said goodbye with an error, fell silent, or is stuck: the peer is the one to look at.
        culprit = _confessed(run, names) or _blamed(own_sentence(run, first), names) or first
    return describe(run, culprit, first, endings, (lives or {}).get(culprit, 1))


def describe(run: RunDirectory, culprit: str, first: str, endings: dict[str, Ending], life: int = 1) -> Cause:
    own = own_sentence(run, culprit)
    if culprit == first:
        sentence = f"{culprit} {how(endings[first])}" + (f": {own}" if own else ".")
    elif own:
        sentence = f"{culprit} failed: {own}"
    else:
        sentence = own_sentence(run, first)
        left = endings.get(culprit)  # a reward that calls os._exit(0), say: no failure to see, and nobody heard a Goodbye
        if left and not left.ordered and left.at < endings[first].at:
            sentence = f"{culprit} {how(left)} while the run went on, without a word. {sentence}"
    log = run.log(culprit, life)
    return Cause(culprit, sentence, str(log), tail(log))


def how(ending: Ending) -> str:
    """`was killed by signal 9 (SIGKILL)`, `ended with exit code 1`."""
    if ending.status < 0:
        number = -ending.status
        whom = "ended, because its shim" if ending.shim_died else ""
        return f"{whom} was killed by signal {number} ({signal.Signals(number).name})".strip()
    if ending.shim_died:
        return f"ended, because its shim ended with exit code {ending.status}"
    return f"ended with exit code {ending.status}"


def own_sentence(run: RunDirectory, name: str) -> str:
    """What the process wrote about its own end; empty where it wrote nothing."""
    try:
        return " ".join(run.failure(name).read_text(encoding="utf-8", errors="replace").split())
    except FileNotFoundError:
        return ""


def tail(log: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log, of which at most 32 KiB are read."""
    return tuple(line for line in tail_text(log).splitlines() if line.strip())[-lines:]


def tail_text(log: Path) -> str:
    """The last 32 KiB of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _confessed(run: RunDirectory, names: Sequence[str]) -> str:
    """The peer that wrote its own failure sentence earliest; empty where none did."""
    confessions = {name: run.failure(name) for name in names if name != "orchestrator" and own_sentence(run, name)}
    return min(confessions, key=lambda name: confessions[name].stat().st_mtime_ns, default="")


def _blamed(sentence: str, names: Sequence[str]) -> str:
    """The process that a sentence names; empty where it names none, or several."""
    words = {word.strip(".,:;()'\"`") for word in sentence.split()}
    named = [name for name in names if name in words and name != "orchestrator"]
    return named[0] if len(named) == 1 else ""
