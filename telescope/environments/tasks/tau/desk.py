"""What both desks have: records, a calculator, and the way to a person."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from telescope.environments.expression import NotAnExpression, parse
from telescope.environments.tasks.tau.records import DeskError, Records, Tables

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
            return str(round(float(parse(whole).value), CENTS))
        except NotAnExpression as error:
            raise DeskError(f"this can't be calculated: {error}") from error

    def transfer_to_human_agents(self, summary: str) -> str:
        """Transfer the user to a human agent, if the request can't be handled with the other tools or the policy says so.

        Args:
            summary: What the user wants and what has been done, in one or two sentences.
        """
        self.transferred = True
        return "Transfer successful"


def cents(amount: float) -> float:
    """An amount of dollars without the dust of binary fractions."""
    return round(amount, CENTS)


def payment_method(user: Mapping[str, Any], payment_id: str) -> Mapping[str, Any]:
    """A payment method of the user's profile. Raises `DeskError`."""
    method: Mapping[str, Any] | None = user["payment_methods"].get(payment_id)
    if method is None:
        raise DeskError(f"{payment_id!r} is no payment method of {user['user_id']}")
    return method
