"""What both desks have: a database during one rollout, a calculator, and the way to a person.

`Records` are the shared tables as they were, and copies of the few records that were changed: it owns what may change and how a
state is named (`digest`), and refuses to know what records mean. A rollout costs what it touches: the tables themselves (tens
of megabytes as Python objects) are loaded once a process and never written to.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import orjson

from telescope.environments.graders.expression import NotAnExpression, parse_expression

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


CENTS = 2
_DECIMAL = re.compile(r"(\d+)\.(\d+)")


class Desk:
    """One rollout at a desk: its tools are the methods named in `TOOLS`."""

    TOOLS: ClassVar[tuple[str, ...]] = ("calculate", "transfer_to_human_agents")

    def __init__(self, tables: Tables) -> None:
        self.records = Records(tables)
        self.transferred = False

    def tools(self) -> list[Callable[..., Any]]:
        return [getattr(self, name) for name in self.TOOLS]

    def calculate(self, expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses, such as "2 * (350.5 - 122)".
        """
        # Decimals become fractions of whole numbers, so that the parser of whole numbers gives exact values.
        whole = _DECIMAL.sub(lambda match: f"({int(match[1] + match[2])}/{10 ** len(match[2])})", expression)
        try:
            return str(round(float(parse_expression(whole).value), CENTS))
        except NotAnExpression as error:
            raise DeskError(f"this can't be calculated: {error}") from error

    def transfer_to_human_agents(self, summary: str) -> str:
        """Transfer the user to a human agent, if the request can't be handled with the other tools or the policy says so.

        Args:
            summary: What the user wants and what has been done, in one or two sentences.
        """
        self.transferred = True
        return "Transfer successful"


def round_to_cents(amount: float) -> float:
    """An amount of dollars without the dust of binary fractions."""
    return round(amount, CENTS)


def find_payment_method(user: Mapping[str, Any], payment_id: str) -> Mapping[str, Any]:
    """A payment method of the user's profile. Raises `DeskError`."""
    method: Mapping[str, Any] | None = user["payment_methods"].get(payment_id)
    if method is None:
        raise DeskError(f"{payment_id!r} is not a payment method of {user['user_id']}")
    return method
