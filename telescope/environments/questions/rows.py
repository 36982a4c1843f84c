"""The rows of one file, with the values that it wrote: a date stays a text, a whole number keeps its digits, 1.10 its nought.

Only the columns that are asked for are kept, and only they must be sound: what stands in another one refuses no file. Each
row knows its place, so that whoever refuses it can say where it stands. Refuses to guess a type.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST_WHOLE = 4000  # digits; Python reads no longer ones, and none is computed with
_SHOWN = 80


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


def find_place(row: Any) -> str:
    """Where the row stands, for a message."""
    return str(getattr(row, "place", "a row"))


def write_text(value: Any) -> str:
    """A value as the text of a file has it. Null is empty, and so is NaN, which tables hold where a value is missing; what
    holds others is JSON."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value
    return _write_json(value) if isinstance(value, bool | list | tuple | dict) else str(value)


def show(value: Any) -> str:
    """A value for a message: short, in one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def read_json(file: Path, columns: Sequence[str], required: Sequence[str] = ()) -> list[PlacedRow]:
    """The rows of JSON lines or of a JSON array. Raises `NoRows`, also where no row has one of the columns, or where one row
    lacks one of those that are `required`."""
    content = gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else file.read_bytes()
    content = content.removeprefix(b"\xef\xbb\xbf")
    lines = file.name.endswith((".jsonl", ".jsonl.gz"))
    objects = _read_lines(file, content) if lines or not content.lstrip().startswith(b"[") else _read_array(file, content)
    rows: list[PlacedRow] = []
    names: dict[str, None] = {}
    lacking: tuple[str, str, str] | None = None
    for at, whole, doubtful in objects:
        names.update(dict.fromkeys(whole))
        if lacks := [column for column in required if column not in whole]:
            lacking = lacking or (at, lacks[0], ", ".join(map(str, whole)) or "none")
        kept = {column: whole.get(column) for column in columns}
        if doubtful:
            _check_utf8(file, at, kept)
        rows.append(PlacedRow(kept, f"{file}, {at}"))
    check_columns(list(names), columns, str(file), bool(rows))
    if lacking is not None:
        at, column, have = lacking
        raise NoRows(
            f"{file}, {at} has no column {column!r}, which other rows have; it has {have}: mend the row or take it out"
        )
    return rows


def read_table(file: Path, columns: Sequence[str]) -> list[PlacedRow]:
    """The rows of Parquet, CSV or an Arrow stream. Raises `NoRows`, and pyarrow's errors for what is none of them."""
    import pyarrow as pa
    from pyarrow import csv, ipc, parquet

    wanted = list(dict.fromkeys(columns))
    if file.name.endswith(".parquet"):
        check_columns(parquet.read_schema(file).names, wanted, str(file))
        table = parquet.ParquetFile(file).read(columns=wanted)
    elif file.name.endswith(".csv"):
        parse = csv.ParseOptions(newlines_in_values=True)
        with csv.open_csv(file, parse_options=parse) as opened:
            _check_commas(file, opened.schema.names, wanted)
            check_columns(opened.schema.names, wanted, str(file))
        as_written = csv.ConvertOptions(include_columns=wanted, column_types=dict.fromkeys(wanted, pa.string()))
        table = csv.read_csv(file, parse_options=parse, convert_options=as_written)
    else:
        with pa.memory_map(str(file)) as mapped:
            whole = ipc.open_stream(mapped).read_all()
        check_columns(whole.column_names, wanted, str(file))
        table = whole
    values = [_read_column(file, column, table.column(column)) for column in wanted]
    return [
        PlacedRow(dict(zip(wanted, row, strict=True)), f"{file}, row {at}")
        for at, row in enumerate(zip(*values, strict=True), 1)
    ]


def check_columns(have: Sequence[str], columns: Sequence[str], place: str, any_rows: bool = True) -> None:
    if not have:
        raise NoRows(f"{place} has no rows" if not any_rows else f"{place} has no rows with columns")
    missing = [column for column in columns if column not in have]
    if missing:
        raise NoRows(f"{place} has no column {missing[0]!r}; it has {', '.join(have)}: set the field's name to one of these")


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
            raise NoRows(_say_broken(file, number, text, error)) from error
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
    """The text, and whether some of its bytes are not UTF-8: they matter only in a column that is used."""
    try:
        return content.decode(), False
    except UnicodeDecodeError:
        return content.decode(errors="surrogateescape"), True


def _say_broken(file: Path, line: int | None, text: str, error: Exception) -> str:
    said = "it is nested too deeply"
    start = 0
    if isinstance(error, json.JSONDecodeError):
        line, start = line or error.lineno, max(0, error.pos - _SHOWN // 2)
        said = f"{error.msg} at character {error.colno}"
    shown = show(text[start : start + _SHOWN])
    return f"{file} can't be read: line {line or 1} is not JSON: {said}, near {shown}: mend the line or take it out"


def _check_utf8(file: Path, at: str, kept: dict[str, Any]) -> None:
    for column, value in kept.items():
        try:
            write_text(value).encode()
        except UnicodeEncodeError as error:
            shown = ascii(write_text(value)[:_SHOWN])
            raise NoRows(
                f"{file} can't be read: it is not UTF-8: {at}, column {column!r} holds {shown}: write the file as UTF-8"
            ) from error


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


_DECODER = json.JSONDecoder(parse_float=WrittenFloat, parse_int=_read_whole, parse_constant=WrittenFloat)
