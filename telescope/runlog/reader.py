"""Rows of a run directory, sealed or live, each once: the reader for tests, summaries and every tool that looks at a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from telescope.runlog.attempts import read_lineage
from telescope.runlog.files import DamagedFile, open_file
from telescope.runlog.layout import RunDirectory
from telescope.runlog.schema import COMMON, STREAMS
from telescope.runlog.sealing import segment_rows


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

    nested = [name for name, kind in {**COMMON, **STREAMS[stream].columns}.items() if kind == "json"]
    with open_file(block):  # an ordinary file
        try:
            # its own file and this thread: Arrow's threads, at work on a file of Python's, may abort or hang the program's end
            with pa.OSFile(str(block)) as file:
                found = pq.read_table(file, use_threads=False, pre_buffer=False).to_pylist()
            for row in found:
                row.update((name, orjson.loads(row[name])) for name in nested if row.get(name) is not None)
                int(row["seq"])
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedFile(block, f"is damaged: {error}") from error
    yield from ({name: value for name, value in row.items() if value is not None} for row in found)
