"""From a live JSON-lines segment to a Parquet block: temporary name, rename, one manifest line, and only then the segment goes.

A kill at any instant leaves the segment, the block, or both; the reader counts a row by its writer and `seq`, once.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from telescope.runlog.files import read_lines
from telescope.runlog.layout import RunDirectory
from telescope.runlog.schema import COMMON, Kind, Stream

ROW_GROUP = 512
ZSTD_LEVEL = 3


def segment_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a live segment. A line that a kill or a full disk tore is skipped; each whole line counts. Raises
    FileNotFoundError and `DamagedFile`."""
    for line in read_lines(path):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("seq"), int):
            yield row


def seal(run: RunDirectory, writer: str, stream: Stream, number: int) -> Path | None:
    """Write the segment's block. Returns its path, or None for a segment without rows. Raises OSError on a full disk."""
    segment = run.live(writer, stream.name, number)
    rows = list(segment_rows(segment))
    if not rows:
        segment.unlink()
        return None
    block = run.block(writer, stream.name, number)
    block.parent.mkdir(parents=True, exist_ok=True)
    partial = block.with_name(f".{block.name}.partial")
    _write_parquet(partial, stream, rows)
    os.replace(partial, block)
    _append_manifest(run, writer, stream, number, block, rows)
    segment.unlink()
    return block


def _write_parquet(path: Path, stream: Stream, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_(), "json": pa.string()}
    columns: dict[str, Kind] = {**COMMON, **stream.columns}
    table = pa.table(
        {name: pa.array([_cell(row.get(name), kind) for row in rows], type=arrow[kind]) for name, kind in columns.items()}
    )
    pq.write_table(table, path, compression="zstd", compression_level=ZSTD_LEVEL, row_group_size=ROW_GROUP)


def _cell(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    return orjson.dumps(value).decode() if kind == "json" else value


def _append_manifest(
    run: RunDirectory, writer: str, stream: Stream, number: int, block: Path, rows: list[dict[str, Any]]
) -> None:
    steps = [row["step"] for row in rows if row.get("step") is not None]
    line = {
        "stream": stream.name,
        "writer": writer,
        "segment": number,
        "file": str(block.relative_to(run.path)),
        "rows": len(rows),
        "seq": [rows[0]["seq"], rows[-1]["seq"]],
        "time_ns": [rows[0]["time_ns"], rows[-1]["time_ns"]],
        "step": [min(steps), max(steps)] if steps else None,
        "sha256": hashlib.sha256(block.read_bytes()).hexdigest(),
        "supersedes": str(run.live(writer, stream.name, number).relative_to(run.path)),
        "sealed_ns": time.time_ns(),
    }
    with run.manifest.open("ab") as file:
        file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
