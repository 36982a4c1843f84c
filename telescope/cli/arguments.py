"""Numbers on command lines: `type=` of an argparse argument, which refuses what the command could do nothing with."""

from __future__ import annotations

import argparse
import math


def from_one(text: str) -> int:
    """A whole number of 1 or more: `--prompts 0` would check nothing, and say that all is well."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return number


def whole_from_zero(text: str) -> int:
    """A whole number of 0 or more, where 0 leaves something out."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return number


def above_zero(text: str) -> float:
    """A finite number above 0, e.g. of seconds or gigabytes."""
    if (number := _finite(text)) is None or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def from_zero(text: str) -> float:
    """A finite number of 0 or more, e.g. of seconds to wait, where 0 asks and does not wait."""
    if (number := _finite(text)) is None or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return number


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
