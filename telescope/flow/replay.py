"""The journal: one line of settings, then one line an event with the commands it gave. And whether a core says so again.

Owns what a line means; refuses files (runlog/journal.py owns those). Times and rewards read back to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from telescope.flow.commands import AnyCommand
from telescope.flow.core import Core
from telescope.flow.events import AnyEvent
from telescope.flow.settings import FlowSettings
from telescope.flow.snapshot import Snapshot

FORMAT = 3
READABLE = (2, 3)
"""2 knew no snapshot: each of its journals is of a run that began at step 1."""


class JournalOpening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    journal: int
    """Version of the format."""
    settings: FlowSettings
    snapshot: Snapshot | None = None
    """What the run goes on from; None: it begins."""

    def core(self) -> Core:
        """As it was before the first event."""
        return Core(self.settings) if self.snapshot is None else Core.restore(self.settings, self.snapshot)


class JournalLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One handled event. `now` is in seconds since the run's start."""

    now: float
    event: AnyEvent
    commands: list[AnyCommand]


class Disagreement(msgspec.Struct, frozen=True):
    """The first line whose commands this core would not give. `line` counts the file's lines from 1."""

    line: int
    event: AnyEvent
    journalled: list[AnyCommand]
    replayed: list[AnyCommand]

    def __str__(self) -> str:
        said = f"  the journal says {_words(self.journalled)}\n  this core says   {_words(self.replayed)}"
        return f"line {self.line}: {self.event}\n{said}"


class Replay(msgspec.Struct, frozen=True):
    """What a replay found: lines that agree until the first disagreement, or all of them."""

    events: int
    commands: int
    disagreement: Disagreement | None


class JournalDamaged(ValueError):
    """A whole line of the journal is not one."""


_encoder = msgspec.json.Encoder()
_openings = msgspec.json.Decoder(JournalOpening)
_lines = msgspec.json.Decoder(JournalLine)


def encode_opening(settings: FlowSettings, snapshot: Snapshot | None = None) -> bytes:
    """The first line, without its newline."""
    return _encoder.encode(JournalOpening(FORMAT, settings, snapshot))


def encode_line(now: float, event: AnyEvent, commands: list[AnyCommand]) -> bytes:
    """One event's line, without its newline."""
    return _encoder.encode(JournalLine(now, event, commands))


def decode_opening(line: bytes) -> FlowSettings:
    """The settings of the first line; see `opening`."""
    return opening(line).settings


def opening(line: bytes) -> JournalOpening:
    """Raises JournalDamaged where the line does not open a journal of this format."""
    try:
        found = _openings.decode(line)
    except msgspec.MsgspecError as error:
        raise JournalDamaged(f"line 1 does not open a journal: {error}") from error
    if found.journal not in READABLE:
        raise JournalDamaged(
            f"the journal has format {found.journal}, this program reads {' and '.join(map(str, READABLE))}: use the version "
            "that wrote it"
        )
    return found


def decode_line(line: bytes, number: int) -> JournalLine:
    """Raises JournalDamaged, with the line's number."""
    try:
        return _lines.decode(line)
    except msgspec.MsgspecError as error:
        raise JournalDamaged(f"line {number} is damaged: {error}") from error


def replay(lines: Iterable[bytes]) -> Replay:
    """Handle a journal's events again, and compare. `lines` are whole lines without their newline, the opening first; a torn
    last one is left out.

    Raises JournalDamaged where the journal has no opening or a line is not one.
    """
    events = commands = 0
    rest = iter(lines)
    first = next(rest, None)
    if first is None:
        raise JournalDamaged("the journal is empty: the run ended before it decided anything")
    core = opening(first).core()
    for number, text in enumerate(rest, start=2):
        line = decode_line(text, number)
        answer = core.handle(line.event, line.now)
        if answer != line.commands:
            return Replay(events, commands, Disagreement(number, line.event, line.commands, answer))
        events += 1
        commands += len(answer)
    return Replay(events, commands, None)


def _words(commands: list[AnyCommand]) -> str:
    return ", ".join(map(str, commands)) or "nothing"
