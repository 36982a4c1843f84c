"""The journal: one line of settings, then one line an event with the commands it gave. And whether a core says so again.

Owns the lines' format; refuses files. Times and rewards are written so that they read back to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from telescope.flow.commands import AnyCommand
from telescope.flow.core import Core
from telescope.flow.events import AnyEvent
from telescope.flow.settings import FlowSettings

FORMAT = 1


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    journal: int
    """Version of the format."""
    settings: FlowSettings


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
        return f"line {self.line}: {self.event}\n  the journal says {_words(self.journalled)}\n  this core says   {_words(self.replayed)}"


class Replay(msgspec.Struct, frozen=True):
    """What a replay found: lines read until the first disagreement, or all of them."""

    events: int
    commands: int
    disagreement: Disagreement | None
    torn: bool
    """The last line was cut off in writing; legal, and left out."""


class JournalDamaged(ValueError):
    """A line other than the last is not a journal line."""


_encoder = msgspec.json.Encoder()
_openings = msgspec.json.Decoder(Opening)
_lines = msgspec.json.Decoder(Line)


def encode_opening(settings: FlowSettings) -> bytes:
    """The first line, with its newline."""
    return _encoder.encode(Opening(FORMAT, settings)) + b"\n"


def encode_line(now: float, event: AnyEvent, commands: list[AnyCommand]) -> bytes:
    """One event's line, with its newline."""
    return _encoder.encode(Line(now, event, commands)) + b"\n"


def decode_opening(line: bytes) -> FlowSettings:
    """Raises JournalDamaged where the line does not open a journal of this format."""
    try:
        opening = _openings.decode(line)
    except msgspec.MsgspecError as error:
        raise JournalDamaged(f"line 1 does not open a journal: {error}") from error
    if opening.journal != FORMAT:
        raise JournalDamaged(
            f"the journal has format {opening.journal}, this program reads {FORMAT}: use the version that wrote it"
        )
    return opening.settings


def replay(lines: Iterable[bytes]) -> Replay:
    """Handle a journal's events again, and compare. `lines` are the file's lines, newlines included.

    Raises JournalDamaged where the journal has no opening or a line before the last does not decode.
    """
    events = commands = 0
    line = iter(lines)
    opening = next(line, None)
    if opening is None:
        raise JournalDamaged("the journal is empty: the run ended before it decided anything")
    core = Core(decode_opening(opening))
    torn = False
    for number, entry in _entries(line):
        if entry is None:
            torn = True
            break
        answer = core.handle(entry.event, entry.now)
        if answer != entry.commands:
            return Replay(events, commands, Disagreement(number, entry.event, entry.commands, answer), torn=False)
        events += 1
        commands += len(answer)
    return Replay(events, commands, None, torn)


def _entries(lines: Iterator[bytes]) -> Iterator[tuple[int, Line | None]]:
    """Decoded lines with their numbers from 2; None for a torn last one."""
    current = next(lines, None)
    number = 2
    while current is not None:
        following = next(lines, None)
        try:
            entry = _lines.decode(current)
        except msgspec.MsgspecError as error:
            if following is not None:
                raise JournalDamaged(f"line {number} is damaged and not the last: {error}") from error
            yield number, None
            return
        yield number, entry
        current, number = following, number + 1


def _words(commands: list[AnyCommand]) -> str:
    return ", ".join(map(str, commands)) or "nothing"
