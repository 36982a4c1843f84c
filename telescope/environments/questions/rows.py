"""The rows of one file, with the values that it wrote: a date stays a text, a whole number keeps its digits, 1.10 its nought.

Only the columns that are asked for are kept, and only they must be sound: what stands in another one refuses no file. Each
row knows its place, so that whoever refuses it can say where it stands. Refuses to guess a type.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST_WHOLE = 4000  # digits; Python reads no longer ones, and none is computed with
_SHOWN = 80
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of half a character, which UTF-8 has no bytes for."""


class NoRows(ValueError):
    """The data set cannot be had; the message says what to do."""


class PlacedRow(dict[str, Any]):
    """A row and where it stands, e.g. `train.jsonl, line 3`."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        super().__init__(values)
        self.place = place


class WrittenFloat(float):
    """A number that is not whole; `str` gives the digits of the file."""

    written: str

    def __new__(cls, written: str) -> WrittenFloat:
        number = super().__new__(cls, written)
        number.written = written
        return number

    def __str__(self) -> str:
        return self.written


class _RepeatingObject(dict[str, Any]):
    """A JSON object that has a key twice; the last value counts where nobody minds."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.repeated = {name for name in names if names.count(name) > 1}


def find_column(path: str, have: Collection[str]) -> str:
    """The column that a field's name means: the one of that very name, else the one before its first dot."""
    return path if path in have else path.partition(".")[0]


def find_place(row: Any) -> str:
    """Where the row stands, for a message."""
    return str(getattr(row, "place", "a row"))


def write_text(value: Any) -> str:
    """A value as the text of a file has it. Null is empty, and so is NaN, which tables hold where a value is missing; what
    holds others is JSON. Bytes are UTF-8, or raise UnicodeDecodeError."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    return _write_json(value) if isinstance(value, bool | list | tuple | dict) else str(value)


def show(value: Any) -> str:
    """A value for a message: short, in one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def read_json(file: Path, columns: Sequence[str], required: Sequence[str] = ()) -> list[PlacedRow]:
    """The rows of JSON lines or of a JSON array, with the columns of these fields (`find_column`). Raises `NoRows`, also where
    no row has one of the columns, or where one row lacks one of those that are `required`."""
    content = (_unpack(file) if file.name.endswith(".gz") else file.read_bytes()).removeprefix(b"\xef\xbb\xbf")
    _refuse_other_bytes(file, content)
    lines = file.name.endswith((".jsonl", ".jsonl.gz"))
    objects = _read_lines(file, content) if lines or not content.lstrip().startswith(b"[") else _read_array(file, content)
    rows: list[PlacedRow] = []
    names: dict[str, None] = {}
    lacking: tuple[str, str, str] | None = None
    for at, whole, doubtful in objects:
        names.update(dict.fromkeys(whole))
        if lacks := [column for column in (find_column(path, whole) for path in required) if column not in whole]:
            lacking = lacking or (at, lacks[0], ", ".join(map(str, whole)) or "none")
        kept = {column: whole.get(column) for column in (find_column(path, whole) for path in columns)}
        if doubtful:
            _check_utf8(file, at, kept)
        _check_keys(file, at, whole, kept)
        rows.append(PlacedRow(kept, f"{file}, {at}"))
    check_columns(list(names), columns, str(file), bool(rows))
    if lacking is not None:
        at, column, have = lacking
        raise NoRows(
            f"{file}, {at} has no column {column!r}, which other rows have; it has {have}: mend the row or take it out"
        )
    return rows


def read_table(file: Path, columns: Sequence[str]) -> list[PlacedRow]:
    """The rows of Parquet, CSV or an Arrow stream, with the columns of these fields (`find_column`). Raises `NoRows`, and
    pyarrow's errors for what is none of them."""
    import pyarrow as pa
    from pyarrow import csv, ipc, parquet

    if file.name.endswith(".parquet"):
        wanted = check_columns(parquet.read_schema(file).names, columns, str(file))
        table = parquet.ParquetFile(file).read(columns=wanted)
    elif file.name.endswith(".csv"):
        with file.open("rb") as opened_raw:
            _refuse_other_bytes(file, opened_raw.read(_SHOWN))
        parse = csv.ParseOptions(newlines_in_values=True)
        with csv.open_csv(file, parse_options=parse) as opened:
            _check_commas(file, opened.schema.names, columns)
            wanted = check_columns(opened.schema.names, columns, str(file))
        as_written = csv.ConvertOptions(include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()))
        table = csv.read_csv(file, parse_options=parse, convert_options=as_written)
    else:
        with pa.memory_map(str(file)) as mapped:
            whole = ipc.open_stream(mapped).read_all()
        wanted = check_columns(whole.column_names, columns, str(file))
        table = whole
    values = [_read_column(file, column, table.column(column)) for column in wanted]
    return [
        PlacedRow(dict(zip(wanted, row, strict=True)), f"{file}, row {at}")
        for at, row in enumerate(zip(*values, strict=True), 1)
    ]


def check_columns(have: Sequence[str], paths: Sequence[str], place: str, any_rows: bool = True) -> list[str]:
    """The columns of these fields, each once. Raises `NoRows` for one that is not there, or is there twice."""
    if not have:
        raise NoRows(f"{place} has no rows" if not any_rows else f"{place} has no rows with columns")
    columns = list(dict.fromkeys(find_column(path, have) for path in paths))
    missing = [column for column in columns if column not in have]
    if missing:
        has = f"{place} has no column {missing[0]!r}; it has {', '.join(have)}"
        raise NoRows(f"{has}: name one of these in the environment's kwargs, as question_field does")
    if twice := [column for column in columns if list(have).count(column) > 1]:
        raise NoRows(f"{place} has {list(have).count(twice[0])} columns called {twice[0]!r}: rename all but one")
    return columns


def _unpack(file: Path) -> bytes:
    try:
        return gzip.decompress(file.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise NoRows(f"{file} can't be read: it is not whole, or not packed by gzip: {error}: write it anew") from error


def _refuse_other_bytes(file: Path, content: bytes) -> None:
    """What is packed, and UTF-16: every second byte of a Latin text is 0 then."""
    if content.startswith(b"\x1f\x8b"):
        raise NoRows(f"{file} can't be read: it is packed by gzip, by its first bytes: call it {file.name}.gz")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content[:4]:
        raise NoRows(f"{file} can't be read: it is UTF-16, by its first bytes: write it as UTF-8")


def _check_commas(file: Path, names: Sequence[str], wanted: Sequence[str]) -> None:
    other = next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), "")
    if other and names[0] not in wanted:
        raise NoRows(f"{file} parts its columns by {other!r} ({show(names[0])}): write it with commas")


def _read_lines(file: Path, content: bytes) -> Iterator[tuple[str, dict[str, Any], bool]]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        text, doubtful = _decode(line)
        try:
            value = _DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise NoRows(_say_broken(file, number, text, error, _find_other_lines(content, line))) from error
        if not isinstance(value, dict):
            raise NoRows(f"{file} can't be read: line {number} is not an object of columns: {show(value)}")
        yield f"line {number}", value, doubtful


def _read_array(file: Path, content: bytes) -> Iterator[tuple[str, dict[str, Any], bool]]:
    text, doubtful = _decode(content)
    try:
        array = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise NoRows(_say_broken(file, None, text, error)) from error
    for at, value in enumerate(array):
        if not isinstance(value, dict):
            raise NoRows(f"{file} can't be read: row {at} is not an object of columns: {show(value)}")
        yield f"row {at}", value, doubtful


def _decode(content: bytes) -> tuple[str, bool]:
    """The text, and whether some of it may not be UTF-8, by its bytes or by an escape: it matters only in a column that is
    used."""
    try:
        text = content.decode()
        return text, _SURROGATE.search(text) is not None
    except UnicodeDecodeError:
        return content.decode(errors="surrogateescape"), True


def _find_other_lines(content: bytes, line: bytes) -> str:
    """What the file has in place of an object a line, with the remedy; "" where that is not known."""
    if b"\r" in content and b"\n" not in content:
        return "its lines end in a carriage return alone: end them in a line feed"
    if line.strip() in (b"{", b"["):
        return "an object or array goes over several lines: write one object a line (`jq -c`), or a JSON array named .json"
    return ""


def _say_broken(file: Path, line: int | None, text: str, error: Exception, remedy: str = "") -> str:
    said = "it is nested too deeply"
    start = 0
    if isinstance(error, json.JSONDecodeError):
        line, start = line or error.lineno, max(0, error.pos - _SHOWN // 2)
        said = f"{error.msg} at character {error.colno}"
    shown = show(text[start : start + _SHOWN])
    return (
        f"{file} can't be read: line {line or 1} is not JSON: {said}, near {shown}: {remedy or 'mend the line or take it out'}"
    )


def _check_utf8(file: Path, at: str, kept: dict[str, Any]) -> None:
    for column, value in kept.items():
        try:
            write_text(value).encode()
        except UnicodeEncodeError as error:
            held = write_text(value)
            shown = ascii(held[max(0, error.start - _SHOWN // 2) :][:_SHOWN])
            raw = "\udc80" <= held[error.start] <= "\udcff"  # so bytes that are not UTF-8 are read
            why = "write the file as UTF-8" if raw else "it has half of a character (a lone surrogate): mend the row"
            raise NoRows(f"{file} can't be read: it is not UTF-8: {at}, column {column!r} holds {shown}: {why}") from error


def _check_keys(file: Path, at: str, whole: dict[str, Any], kept: dict[str, Any]) -> None:
    """Of two values under one name nobody knows which is meant."""
    twice = sorted(whole.repeated & kept.keys()) if isinstance(whole, _RepeatingObject) else []
    if twice:
        raise NoRows(f"{file}, {at} has the column {twice[0]!r} more than once: mend the row or take it out")
    for column, value in kept.items():
        if (name := _find_repeated(value)) is not None:
            raise NoRows(
                f"{file}, {at}: an object in column {column!r} has {name!r} more than once: mend the row or take it out"
            )


def _find_repeated(value: Any) -> str | None:
    if isinstance(value, _RepeatingObject):
        return min(value.repeated)
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((name for one in within if (name := _find_repeated(one)) is not None), None)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    return made if len(made) == len(pairs) else _RepeatingObject(pairs)


def _read_column(file: Path, column: str, chunks: pa.ChunkedArray) -> list[Any]:
    import pyarrow as pa

    if pa.types.is_float32(chunks.type) or pa.types.is_float16(chunks.type):
        return [None if text is None else WrittenFloat(text) for text in chunks.cast(pa.string()).to_pylist()]
    try:
        values: list[Any] = chunks.to_pylist()
    except UnicodeDecodeError:
        for row, each in enumerate(chunks, 1):
            try:
                each.as_py()
            except UnicodeDecodeError as error:
                said = f"{file} can't be read: it is not UTF-8: row {row}, column {column!r}: {error}: write it as UTF-8"
                raise NoRows(said) from error
        raise
    return values


def _read_whole(text: str) -> int | str:
    return text if len(text) > _LONGEST_WHOLE or text == "-0" else int(text)


def _write_json(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(str(key), ensure_ascii=False)}: {_write_json(its)}" for key, its in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_write_json, value)) + "]"
    if value is None or isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_make_object, parse_float=WrittenFloat, parse_int=_read_whole, parse_constant=WrittenFloat
)
