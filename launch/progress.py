"""What the launcher's terminal shows while a run goes on, and at its end.

Reads `status.json`, `summary.json` and the logs; writes to two streams. A missing or half-known file is shown as far as it
goes: the display never ends a run, and neither does a terminal that went away.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from telescope._launch.causes import read_tail_text
from telescope.inference.vllm.start_log import describe_server_start
from telescope.runlog.files import read_object
from telescope.runlog.layout import RunDirectory

PLAIN_EVERY_S = 1.0
"""A stream that is not a terminal gets a line a step, at most this often."""
START_EVERY_S, SAME_EVERY_S = 10.0, 60.0
"""The same until all processes are ready, which takes minutes with hundreds of them or a large model; and where the line would
be the same again."""
ALERT_EVERY_S = 10.0
"""Of many alerts one, at most this often."""
SAID_CHARACTERS = 100
"""Of what a process that is not ready says: a server's phase, another's last line."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: ")
"""Of our own lines: when, how grave and by whom."""
COPY_BYTES = 65_536


class Console:
    """The launcher's own two streams, for several threads; falls silent where they are closed."""

    def __init__(self, errors: TextIO, output: TextIO) -> None:
        self._errors = errors
        self._output = output
        self._live = ""
        self.tty = errors.isatty()
        self._one_at_a_time = threading.Lock()

    def say(self, text: str) -> None:
        """A whole line on stderr."""
        with self._one_at_a_time:
            self._write(self._errors, self._clear() + text.rstrip("\n") + "\n")

    def live(self, text: str) -> None:
        """The one line that is written over."""
        width = shutil.get_terminal_size().columns - 1
        with self._one_at_a_time:
            if text != self._live:
                self._write(self._errors, "\r\x1b[K" + shorten(text, width))
                self._live = text

    def result(self, text: str) -> None:
        """What the run came to, on stdout."""
        with self._one_at_a_time:
            if clear := self._clear():
                self._write(self._errors, clear)
            self._write(self._output, text.rstrip("\n") + "\n")

    def clear(self) -> None:
        """The line that is written over goes, and nothing takes its place."""
        with self._one_at_a_time:
            self._write(self._errors, self._clear())

    def _clear(self) -> str:
        cleared, self._live = "\r\x1b[K" if self._live else "", ""
        return cleared

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            return  # the terminal is gone; the run is not


class StartDisplay:
    """What a person sees who waits for a start: one line that is replaced on a terminal, a line now and then elsewhere, each
    with the time since the beginning. `announced`: somebody has said already that it begins."""

    def __init__(self, console: Console, *, announced: bool = False) -> None:
        self._console = console
        self._began = time.monotonic()
        self._shown: tuple[str, str] = ("", "")
        self._shown_at = self._began if announced else float("-inf")

    def show(self, line: str, read_detail: Callable[[], str] = lambda: "") -> None:
        """`read_detail`: of what is on its way. Not read within `START_EVERY_S` of the last line; from then on at each look: a
        line with a new detail is shown at once, and the same line again after `SAME_EVERY_S`."""
        now = time.monotonic()
        if not self._console.tty and now - self._shown_at < START_EVERY_S:
            return
        told = (line, read_detail())
        text = " · ".join(part for part in (format_duration(now - self._began), *told) if part)
        if self._console.tty:
            self._console.live(text)
        elif told != self._shown or now - self._shown_at >= SAME_EVERY_S:
            self._console.say(text)
            self._shown, self._shown_at = told, now

    def end(self) -> None:
        """The line that is replaced goes."""
        self._console.clear()


class ProgressDisplay:
    """Shows `status.json`: one live line on a terminal, a line a step elsewhere. Before there is one, and until all processes
    are ready: how many are, and what one that is not says in its log. `quoting`: false where all logs are shown anyway."""

    def __init__(self, run: RunDirectory, console: Console, *, quoting: bool = True) -> None:
        self._run = run
        self._console = console
        self._quoting = quoting
        self._shown: tuple[Any, ...] = ()
        self._shown_at = float("-inf")
        self._start = StartDisplay(console)
        self._told = False
        """The orchestrator has written how the run stands."""
        self._alerts, self._alerted_at = 0, float("-inf")
        self._evals = 0
        """Evals that were told."""

    def start(self, begun: int, processes: int) -> None:
        """So many have been begun; called after each."""
        if self._console.tty:
            self._starting(f"starting {processes} processes, {begun} begun", "orchestrator")
        elif begun == 1:
            self._starting(f"starting {processes} process{'es' * (processes != 1)}, logs in {self._run.path}/logs", "")

    def show(self) -> None:
        status = read_object(self._run.status_json)
        if not status:
            if not self._told:  # else it can't be read at this moment
                self._starting("starting: the orchestrator is not ready yet", "orchestrator")
            return
        self._told = True
        if status.get("state") == "starting" and status.get("missing"):
            waits = f"starting: {status.get('ready')} of {status.get('processes')} processes are ready, {status.get('doing')}"
            self._starting(waits, str(status["missing"][0]))
            return
        self._alert(status)
        self._tell_evals(status)
        if self._console.tty:
            self._console.live(format_status(status, shutil.get_terminal_size().columns - 1))
            return
        told = (status.get("step"), status.get("state"), status.get("message"))
        now = time.monotonic()
        if told != self._shown and now - self._shown_at >= PLAIN_EVERY_S:
            self._console.say(format_status(status))
            self._shown, self._shown_at = told, now

    def _alert(self, status: Mapping[str, Any]) -> None:
        """The latest alert in a line of its own, with how many more there were since the last one shown."""
        count, now = status.get("alerts"), time.monotonic()
        if not isinstance(count, int) or count <= self._alerts or now - self._alerted_at < ALERT_EVERY_S:
            return
        more = count - self._alerts - 1
        self._console.say(f"alert: {status.get('alert')}" + (f" ({more} more before it: the stream `alerts`)" if more else ""))
        self._alerts, self._alerted_at = count, now

    def _tell_evals(self, status: Mapping[str, Any]) -> None:
        """Each eval that has ended since the last look, a line each."""
        count, lines = status.get("evals"), status.get("latest_evals")
        if not isinstance(count, int) or not isinstance(lines, list) or count <= self._evals:
            return
        for line in lines[-(count - self._evals) :]:
            self._console.say(str(line))
        self._evals = count

    def _starting(self, line: str, name: str) -> None:
        """`name`: the process whose last words are shown."""

        def read_detail() -> str:
            said = describe_newest(self._run.log(name), name) if self._quoting and name else ""
            return f"{name}: {said}" if said else ""

        self._start.show(line, read_detail)


class LogCopy:
    """Copies what the components log to the launcher's stderr, each line behind its process's name."""

    def __init__(self, run: RunDirectory, names: Sequence[str], console: Console) -> None:
        self._paths = {name: run.log(name) for name in names}
        self._offsets = dict.fromkeys(names, 0)
        self._console = console

    def follow(self, name: str, path: Path) -> None:
        """The process was started again and writes elsewhere; the rest of what it wrote before is copied first."""
        self.copy(last=True)
        self._paths[name], self._offsets[name] = path, 0

    def copy(self, last: bool = False) -> None:
        """What has been written since the last call, in whole lines; `last` takes an unfinished line too."""
        for name, path in self._paths.items():
            while chunk := self._next(name, path, last):
                for line in chunk.decode("utf-8", errors="replace").splitlines():
                    self._console.say(f"{name} | {line}")

    def _next(self, name: str, path: Path, last: bool) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[name])
                chunk = file.read(COPY_BYTES)
        except FileNotFoundError:
            return b""
        whole = chunk if last or len(chunk) == COPY_BYTES else chunk[: chunk.rfind(b"\n") + 1]
        self._offsets[name] += len(whole)
        return whole


def format_status(status: Mapping[str, Any], width: int | None = None) -> str:
    """`step 12/60 · reward 0.412 (n=96) · exact 38% (n=96) · 5.1k sampled tok/s · lag 1.2 · queue 14 · ETA 1:05 · in flight
    96 · training step 13`. A step of whose policies none has been scored to the end has `reward –`. Behind it each of several
    environments, where all of them have room in `width` columns: `countdown 0.310 (n=48) exact 21% (n=48)`."""
    parts = [
        _format_step(status),
        _format_reward(status),
        _format_number(status, "exact", "exact {:.0%}") + _format_count(status, "exact_rollouts"),
        _format_tokens_per_s(status),
        _format_number(status, "lag", "lag {:.1f}"),
        _format_number(status, "queue", "queue {:.0f}"),
        f"ETA {format_duration(status['eta_s'])}" if _is_number(status.get("eta_s")) else "",
        _format_number(status, "in_flight", "in flight {:.0f}"),
        str(status.get("message") or status.get("doing") or ""),
    ]
    line = " · ".join(part for part in parts if part)
    whole = " · ".join([line, *_format_environments(status)])
    return whole if width is None or len(whole) <= width else line


def describe_newest(log: Path, name: str) -> str:
    """What the process of that name says newest in its log, as far as a terminal can show it; empty where it says nothing. Of a
    server, which may not be ready yet: how far its start is."""
    try:
        text = read_tail_text(log)
    except OSError:  # the display ends no run
        return ""
    plain = (_COLOURS.sub("", line) for line in text.splitlines())
    cleaned = (" ".join("".join(c if c.isprintable() else " " for c in line).split()) for line in plain)
    lines = [line for line in cleaned if line]
    said = describe_server_start(lines) if name.startswith("server-") else lines[-1] if lines else ""
    return shorten(_LOG_PREFIX.sub("", said), SAID_CHARACTERS)


def shorten(text: str, most: int) -> str:
    """At most so many characters, cut between two words; the first word itself where it alone is longer."""
    if len(text) <= most:
        return text
    kept = text[: max(0, most - 1)].rpartition(" ")[0] or text[: max(0, most - 2)]
    return f"{kept} …"


def format_summary(summary: Mapping[str, Any]) -> str:
    """The summary, a line a fact; a nested object is written as `a 1, b (c 2)`."""
    rows = [
        (str(name).replace("_", " "), _format_value(value)) for name, value in summary.items() if value not in (None, {}, [])
    ]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def format_duration(seconds: float) -> str:
    """`1:05`, `2:03:04`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _format_step(status: Mapping[str, Any]) -> str:
    step, steps = status.get("step"), status.get("steps")
    if step is None:
        return str(status.get("state", ""))
    if steps == 0:
        return "evals alone"
    return f"step {step}/{steps}" if steps is not None else f"step {step}"


def _format_reward(status: Mapping[str, Any]) -> str:
    """With the number of rollouts that it is the mean of."""
    reward = status.get("reward")
    if not _is_number(reward):
        return "reward –" if status.get("step") and "reward" in status else ""
    return f"reward {reward:.3f}{_format_count(status, 'reward_rollouts')}"


def _format_environments(status: Mapping[str, Any]) -> Iterator[str]:
    """Those of several that the last versions have a score of."""
    environments = status.get("environments")
    for label, told in environments.items() if isinstance(environments, Mapping) else ():
        if isinstance(told, Mapping) and _is_number(told.get("reward")):
            exact = _format_number(told, "exact", " exact {:.0%}") + _format_count(told, "exact_rollouts")
            yield f"{label} {told['reward']:.3f}{_format_count(told, 'rollouts')}{exact}"


def _format_count(status: Mapping[str, Any], name: str) -> str:
    """Of the rollouts that a mean is of."""
    return _format_number(status, name, " (n={:.0f})")


def _format_tokens_per_s(status: Mapping[str, Any]) -> str:
    rate = status.get("sampled_tokens_per_s")
    if not _is_number(rate):
        return ""
    return f"{rate / 1000:.1f}k sampled tok/s" if rate >= 1000 else f"{rate:.0f} sampled tok/s"


def _format_number(status: Mapping[str, Any], name: str, form: str) -> str:
    value = status.get(name)
    return form.format(value) if _is_number(value) else ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        parts = ((name, part) for name, part in value.items() if part not in (None, {}, []))
        return ", ".join(
            f"{name} ({_format_value(part)})" if isinstance(part, Mapping) else f"{name} {_format_value(part)}"
            for name, part in parts
        )
    if isinstance(value, list | tuple):
        return ", ".join(_format_value(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
