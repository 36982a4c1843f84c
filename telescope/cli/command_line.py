"""Command lines of options and overrides: what argparse leaves over is told in words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

_DASHED = re.compile(r"--([A-Za-z_][\w.]*)=(.*)")


def parse_all(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Ends the process with exit code 2 and a sentence where an option is not known."""
    parsed, unknown = parser.parse_known_intermixed_args(list(arguments))
    for argument in unknown:
        if dashed := _DASHED.fullmatch(argument):
            parser.error(f"{argument}: a setting has no dashes here, write {dashed[1]}={dashed[2]}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed
