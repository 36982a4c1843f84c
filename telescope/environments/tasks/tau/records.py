"""A desk's database during one rollout: the shared tables as they were, and copies of the few records that were changed.

Owns what may change and how a state is named (`digest`). Refuses to know what records mean. A rollout costs what it touches:
the tables themselves (tens of megabytes as Python objects) are loaded once a process and never written to.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

Record = Mapping[str, Any]
Tables = Mapping[str, Mapping[str, Record]]


class DeskError(ValueError):
    """The desk refuses what was asked; the text is for the policy."""


class Records:
    """`Records({"users": {"mia_li_3668": {...}}})`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._changed: dict[tuple[str, str], dict[str, Any]] = {}

    def find(self, table: str, key: str) -> Record:
        """The record as it is now, not to be written to. Raises `DeskError`."""
        changed = self._changed.get((table, key))
        if changed is not None:
            return changed
        record = self._tables[table].get(key)
        if record is None:
            raise DeskError(f"there is no {table.removesuffix('s')} {key!r}")
        return record

    def has(self, table: str, key: str) -> bool:
        return (table, key) in self._changed or key in self._tables[table]

    def every(self, table: str) -> Mapping[str, Record]:
        """The table as it was in the beginning: for those that nobody changes."""
        return self._tables[table]

    def edit(self, table: str, key: str) -> dict[str, Any]:
        """The record, to be changed in place. Judge first, edit then: a change is not undone by an error."""
        if (table, key) not in self._changed:
            self._changed[table, key] = copy.deepcopy(dict(self.find(table, key)))
        return self._changed[table, key]

    def add(self, table: str, key: str, record: dict[str, Any]) -> None:
        self._changed[table, key] = record

    def digest(self) -> str:
        """The same for the same state however it came about; of what differs from the beginning alone."""
        differs = {
            f"{table}/{key}": record for (table, key), record in self._changed.items() if record != self._tables[table].get(key)
        }
        return hashlib.sha256(orjson.dumps(differs, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]

    @property
    def untouched(self) -> bool:
        return self.digest() == Records(self._tables).digest()
