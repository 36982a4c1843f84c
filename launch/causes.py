"""What ended a run, in words: which process died first, of what, and what its log says.

Owns the choice of the root cause and its sentence; reads failure sentences and logs; decides nothing about processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from telescope._launch.child_processes import ProcessEnd
from telescope._launch.stacks import StackReport, read_crash, read_stacks
from telescope.exit_codes import COMPONENT_FAILED
from telescope.runlog.files import read_object
from telescope.runlog.layout import RunDirectory

TAIL_LINES = 15
TAIL_BYTES = 32_768
STACK_BYTES = 1_048_576
"""Stacks of some hundred threads."""
FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that a process gets for what it did itself."""


class FailureCause(msgspec.Struct, frozen=True):
    """Why a run failed."""

    process: str
    sentence: str
    log: str
    last_lines: tuple[str, ...]

    def text(self) -> str:
        lines = "".join(f"    {line}\n" for line in self.last_lines) or "    (empty)\n"
        return f"{self.sentence}\n  The last lines of {self.log}:\n{lines}"


def find_root_cause(
    run: RunDirectory,
    names: Sequence[str],
    ends: dict[str, ProcessEnd],
    incarnations: Mapping[str, int] | None = None,
    asked: str = "",
) -> FailureCause | None:
    """The first process that died without being told to, or the one that it blames; None where each was told or left with 0.

    `names` are all processes of the run, `ends` those that have ended; `incarnations` says of those started again which one
    each is in; `asked`: the process that was asked where it is. Ask at once: what is told to leave later writes sentences too.
    """
    failed = {name: end for name, end in ends.items() if end.failed}
    if not failed:
        return None
    first = min(failed, key=lambda name: failed[name].at)
    confession = _find_confession(run, names) if first == "orchestrator" and _leaves_for_another(ends[first]) else ""
    culprit = confession or find_suspect(run, names, ends) or first
    cause = make_cause(run, culprit, first, ends, (incarnations or {}).get(culprit, 1))
    more = ""
    if culprit == asked:
        more = describe_stack(run, culprit, Path(cause.log))
    elif culprit in failed and -failed[culprit].status in FAULTS:
        more = describe_crash(run, culprit, Path(cause.log))
    return msgspec.structs.replace(cause, sentence=cause.sentence + more)


def find_suspect(run: RunDirectory, names: Sequence[str], ends: Mapping[str, ProcessEnd]) -> str:
    """The process that the first one to fail has left for: it said goodbye with an error, fell silent, or is stuck. Empty where
    that one failed by itself."""
    failed = [name for name, end in ends.items() if end.failed]
    first = min(failed, key=lambda name: ends[name].at, default="")
    if not first or not _leaves_for_another(ends[first]):
        return ""
    return _find_blamed(read_own_sentence(run, first), [name for name in names if name != first])


def _leaves_for_another(end: ProcessEnd) -> bool:
    return not end.shim_died and end.status == COMPONENT_FAILED


def make_cause(run: RunDirectory, culprit: str, first: str, ends: dict[str, ProcessEnd], incarnation: int = 1) -> FailureCause:
    own = read_own_sentence(run, culprit)
    if culprit == first:
        sentence = f"{culprit} {describe_end(ends[first])}" + (f": {own}" if own else ".")
    elif own:
        sentence = f"{culprit} failed: {own}"
    else:
        sentence = read_own_sentence(run, first)
        left = ends.get(culprit)  # a reward that calls os._exit(0), say: no failure to see, and nobody heard a Goodbye
        if left and not left.ordered and left.at < ends[first].at:
            sentence = f"{culprit} {describe_end(left)} while the run went on, without a word. {sentence}"
    log = run.log(culprit, incarnation)
    return FailureCause(culprit, sentence, str(log), read_tail(log))


def describe_stack(run: RunDirectory, name: str, log: Path) -> str:
    """Where the process was when it was asked, as sentences to be added to another; empty where it did not say."""
    found = read_stacks(read_tail_text(log, STACK_BYTES))
    if found is None:
        return ""
    label = _find_environment(run, name, found)
    way_out = (
        f" Code of environments.{label} held the whole worker: a call that keeps the interpreter, which no time limit ends, "
        "belongs in a grader's process (docs/rewards.md)."
        if label and found.busy
        else ""
    )
    return f" When it was asked, {found.describe()}.{way_out}"


def describe_crash(run: RunDirectory, name: str, log: Path) -> str:
    """Where the process was when a fault killed it, likewise."""
    found = read_crash(read_tail_text(log, STACK_BYTES))
    if found is None:
        return ""
    label = _find_environment(run, name, found)
    whose = f" That is code of environments.{label}: what may crash belongs in a process of its own." if label else ""
    return f" When it crashed, {found.describe()}.{whose}"


def _find_environment(run: RunDirectory, name: str, found: StackReport) -> str:
    """The label of the environment whose code a worker was in; empty where it was in none's."""
    environments = read_object(run.config_json).get("environments")
    if not name.startswith("worker-") or not isinstance(environments, Mapping):
        return ""
    names = [
        (label, str(settings.get("name", label))) for label, settings in environments.items() if isinstance(settings, Mapping)
    ]
    return found.find_environment(names)


def describe_end(end: ProcessEnd) -> str:
    """`was killed by signal 9 (SIGKILL)`, `ended with exit code 1`."""
    if end.status < 0:
        number = -end.status
        whom = "ended, because its shim" if end.shim_died else ""
        return f"{whom} was killed by signal {number} ({signal.Signals(number).name})".strip()
    if end.shim_died:
        return f"ended, because its shim ended with exit code {end.status}"
    return f"ended with exit code {end.status}" + (" while the run went on" if end.early else "")


def read_own_sentence(run: RunDirectory, name: str) -> str:
    """What the process wrote about its own end; empty where it wrote nothing."""
    try:
        return " ".join(run.failure(name).read_text(encoding="utf-8", errors="replace").split())
    except FileNotFoundError:
        return ""


def read_tail(log: Path, lines: int = TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log, of which at most 32 KiB are read."""
    return tuple(line for line in read_tail_text(log).splitlines() if line.strip())[-lines:]


def read_tail_text(log: Path, nbytes: int = TAIL_BYTES) -> str:
    """The last 32 KiB of a log, or so many bytes; empty where there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - nbytes))
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _find_confession(run: RunDirectory, names: Sequence[str]) -> str:
    """The peer that wrote its own failure sentence earliest; empty where none did."""
    confessions = {name: run.failure(name) for name in names if name != "orchestrator" and read_own_sentence(run, name)}
    return min(confessions, key=lambda name: confessions[name].stat().st_mtime_ns, default="")


def _find_blamed(sentence: str, names: Sequence[str]) -> str:
    """The process that a sentence names; empty where it names none, or several."""
    words = {word.strip(".,:;()'\"`") for word in sentence.split()}
    named = [name for name in names if name in words]
    return named[0] if len(named) == 1 else ""
