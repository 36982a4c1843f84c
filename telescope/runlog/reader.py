"""Rows of a run directory, sealed or live, each once: the reader for tests, summaries and every tool that looks at a run."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import orjson

from telescope.runlog.attempts import CountedRows, read_lineage
from telescope.runlog.files import DamagedFile, open_file
from telescope.runlog.layout import RunDirectory
from telescope.runlog.schema import COMMON, STREAMS, Kind
from telescope.runlog.sealing import segment_rows

_KINDS: dict[Kind, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,), "bool": (bool,)}
"""Python's types of a column's values; those of JSON may be any."""


def rows(run: RunDirectory, stream: str) -> list[dict[str, Any]]:
    """All rows of a stream that count, by attempt, writer and `seq`. Safe while the run writes; a row sealed and still live
    counts once. Of a run that has gone on from a checkpoint, rows of an earlier attempt count up to that. Raises
    `DamagedFile`."""
    found: list[dict[str, Any]] = []
    for part in read_lineage(run).before:
        earlier = _by_writer(RunDirectory(run.earlier_attempt(part.attempt)), stream)
        found += (row for (writer, _), row in earlier if part.counts(writer, row))
    return found + rows_of_attempt(run, stream)


def rows_of_attempt(run: RunDirectory, stream: str) -> list[dict[str, Any]]:
    """What lies in the directory itself, all of it: rows of one attempt."""
    return [row for _, row in _by_writer(run, stream)]


def newest_rows(
    run: RunDirectory, stream: str, damaged: list[DamagedFile], columns: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """The same rows for those who look: the newest file first, of each its last row first, and little of it in memory at a
    time, so that whoever has seen enough may leave. What can't be used is added to `damaged` and passed over: a file, or what
    is not of its column's kind, which its row then lacks. `columns`: those that are wanted, where not all are."""
    before: tuple[CountedRows, ...] = ()
    try:
        before = read_lineage(run).before
    except DamagedFile as error:
        damaged.append(error)
    for _, row in _newest_of_attempt(run, stream, damaged, columns):
        yield row
    for part in reversed(before):
        earlier = RunDirectory(run.earlier_attempt(part.attempt))
        needed = {*columns, "step"} if columns else ()  # by which rows count
        found = _newest_of_attempt(earlier, stream, damaged, needed)
        yield from (row for writer, row in found if part.counts(writer, row))


def _newest_of_attempt(
    run: RunDirectory, stream: str, damaged: list[DamagedFile], columns: Collection[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    seen: set[tuple[str, int]] = set()
    """What was live: a segment sealed between the two looks is found as a block too."""
    for segment in sorted((run.path / "live").glob(f"*/{stream}-*.jsonl"), key=lambda path: path.name, reverse=True):
        writer, held = segment.parent.name, []
        try:
            for row in segment_rows(segment):
                held.append({name: row[name] for name in ("seq", *columns) if name in row} if columns else row)
        except FileNotFoundError:
            continue
        except DamagedFile as error:
            damaged.append(error)
        seen.update((writer, row["seq"]) for row in held)
        check = _KindCheck(segment, stream, damaged)
        yield from ((writer, check.keep_sound(row)) for row in reversed(held))
    for block in sorted((run.path / "blocks" / stream).glob("*.parquet"), key=_number_of, reverse=True):
        writer, check = block.stem.rsplit("-", 1)[0], _KindCheck(block, stream, damaged)
        try:
            for row in _newest_of_block(block, stream, columns):
                if (writer, row["seq"]) not in seen:
                    yield writer, check.keep_sound(row)
        except FileNotFoundError:
            continue
        except DamagedFile as error:
            damaged.append(error)


class _KindCheck:
    """Whether the rows of one file have what their columns say; the first that has not is noted."""

    def __init__(self, path: Path, stream: str, damaged: list[DamagedFile]) -> None:
        self._path, self._damaged = path, damaged
        self._kinds = {name: _KINDS[kind] for name, kind in {**COMMON, **STREAMS[stream].columns}.items() if kind in _KINDS}
        self._noted = False

    def keep_sound(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row without what is null, or of another kind than its column."""
        wrong = [name for name, value in row.items() if name in self._kinds and type(value) not in self._kinds[name]]
        if not wrong:
            return row
        told = [name for name in wrong if row[name] is not None]
        if told and not self._noted:
            self._noted = True
            shown = reprlib.repr(row[told[0]])
            self._damaged.append(DamagedFile(self._path, f"is damaged: row {row['seq']} has {told[0]}={shown}"))
        return {name: value for name, value in row.items() if name not in wrong}


def _number_of(block: Path) -> str:
    return block.stem.rsplit("-", 1)[-1]


def _by_writer(run: RunDirectory, stream: str) -> list[tuple[tuple[str, int], dict[str, Any]]]:
    """Each row under its writer and number, in that order."""
    found = {(writer, row["seq"]): row for writer, row in _all_rows(run, stream)}
    return [(key, found[key]) for key in sorted(found)]


def _all_rows(run: RunDirectory, stream: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # live first: a segment sealed between the two looks is then found as a block
    for segment in sorted((run.path / "live").glob(f"*/{stream}-*.jsonl")):
        try:
            yield from ((segment.parent.name, row) for row in segment_rows(segment))
        except FileNotFoundError:
            continue
    for block in sorted((run.path / "blocks" / stream).glob("*.parquet")):
        writer = block.stem.rsplit("-", 1)[0]
        yield from ((writer, row) for row in _block_rows(block, stream))


def _block_rows(block: Path, stream: str) -> Iterator[dict[str, Any]]:
    """Raises FileNotFoundError and `DamagedFile`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_file(block):  # an ordinary file
        try:
            # its own file and this thread: Arrow's threads, at work on a file of Python's, may abort or hang the program's end
            with pa.OSFile(str(block)) as file:
                found = _make_rows(pq.read_table(file, use_threads=False, pre_buffer=False), stream)
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedFile(block, f"is damaged: {error}") from error
    yield from found


def _newest_of_block(block: Path, stream: str, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """The last row first, with all columns or those that are named; what lies before the rows that are taken is not read.
    Raises FileNotFoundError and `DamagedFile`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = ["seq", *(name for name in columns if name != "seq")] if columns else None
    with open_file(block), pa.OSFile(str(block)) as file:
        try:
            held = pq.ParquetFile(file, pre_buffer=False)
            groups = held.num_row_groups
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DamagedFile(block, f"is damaged: {error}") from error
        for group in reversed(range(groups)):
            try:  # a block of an older version may lack a column, and has the others
                found = _make_rows(held.read_row_group(group, columns=wanted, use_threads=False), stream)
            except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
                raise DamagedFile(block, f"is damaged: {error}") from error
            yield from reversed(found)


def _make_rows(table: Any, stream: str) -> list[dict[str, Any]]:
    """Of an Arrow table. Raises ValueError, KeyError and TypeError where it holds something else."""
    nested = [name for name, kind in {**COMMON, **STREAMS[stream].columns}.items() if kind == "json"]
    found = table.to_pylist()
    for row in found:
        row.update((name, orjson.loads(row[name])) for name in nested if row.get(name) is not None)
        int(row["seq"])
    return [{name: value for name, value in row.items() if value is not None} for row in found]
