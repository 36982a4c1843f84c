"""Which rows of which parameter are which tensor of a model's own files.

transformers keeps some weights otherwise than their files do: one [E, 2 I, H] parameter for the gates and ups of all experts of
a layer, where the files (and every server) have a matrix each. Owns the table from one to the other, which transformers' own
conversion is asked for. Refuses conversions that are more than a choice of rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Unpublishable(ValueError):
    """A parameter can't be given to servers under the names of the model's files; the message says why."""


@dataclass(frozen=True)
class Rows:
    """A tensor of the files: `shape`, at row `start` of parameter `name` with its first two axes made one (`depth` 2), or as it
    is (`depth` 1)."""

    name: str
    start: int
    shape: tuple[int, ...]
    depth: int = 1


def table(lm: Any, parameters: Mapping[str, Tensor]) -> dict[str, Rows]:
    """By the name in the files, for all of `parameters`, in their order. Asks for shapes alone.

    Found by converting numbered rows in place of weights, each number once: what comes out tells where it was.
    """
    if getattr(lm, "_weight_conversions", None) is None:  # set where transformers read the files, and not where we did
        return as_they_are(parameters)
    from transformers.core_model_loading import revert_weight_conversion

    probes, starts, end = {}, [], 0
    for name, parameter in parameters.items():
        starts.append(end)
        probes[name], end = _numbered(parameter.shape, end)
    names, found = list(parameters), []
    for name, probe in revert_weight_conversion(lm, dict(probes)).items():
        first = int(probe.flatten()[0])
        owner = names[bisect_right(starts, first) - 1]
        where = _rows(name, probe, owner, parameters[owner].shape, first - starts[names.index(owner)])
        found.append((first, name, where))
    _check_complete(found, probes)
    return {name: where for _, name, where in sorted(found)}


def as_they_are(parameters: Mapping[str, Tensor]) -> dict[str, Rows]:
    """The table of a model whose files have its parameters."""
    return {name: Rows(name, 0, tuple(parameter.shape)) for name, parameter in parameters.items()}


def in_turn(rows: Mapping[str, Rows], parameters: Mapping[str, Tensor], shards: int) -> dict[str, Rows]:
    """The same with the pieces of one parameter, which is spread over `shards` ranks by its first axis, in such an order that
    all ranks take turns."""
    order = {name: number for number, name in enumerate(parameters)}

    def place(entry: tuple[str, Rows]) -> tuple[int, int, int]:
        where = entry[1]
        if where.depth == 1:
            return order[where.name], 0, 0
        count, inner = parameters[where.name].shape[:2]
        return order[where.name], where.start // inner % -(-count // shards), where.start

    return dict(sorted(rows.items(), key=place))


def _numbered(shape: torch.Size, first: int) -> tuple[Tensor, int]:
    """Row numbers from `first` on in the shape of a parameter, though narrower; of 3 axes the first two count rows."""
    depth = 2 if len(shape) == 3 else 1
    count = shape[:depth].numel()
    numbers = torch.arange(first, first + count).view(*shape[:depth], *[1] * (len(shape) - depth))
    wide = numbers.expand(*shape[:depth], *[2] * (len(shape) - depth))  # an axis of 1 would be squeezed out on the way
    return wide, first + count


def _rows(name: str, probe: Tensor, owner: str, shape: torch.Size, start: int) -> Rows:
    whole = probe.ndim == len(shape)
    count = probe.shape[: 2 if len(shape) == 3 and whole else 1].numel()
    numbers = probe.reshape(count, -1)[:, 0]
    if not torch.equal(numbers, torch.arange(int(numbers[0]), int(numbers[0]) + count)) or (whole and start):
        raise Unpublishable(
            f"{owner} is more than a stack of {name} and its like: servers can't be given it under the names of the model's "
            "files"
        )
    if whole:
        return Rows(owner, 0, tuple(shape))
    return Rows(owner, start, (count, *shape[2:]), depth=2)


def _check_complete(found: list[tuple[int, str, Rows]], probes: Mapping[str, Tensor]) -> None:
    """Every row of every parameter once."""
    named = sum(where.shape[0] if where.depth == 2 else _count(probes[where.name]) for _, _, where in found)
    wanted = sum(_count(probe) for probe in probes.values())
    if named != wanted:
        raise Unpublishable(f"of the {wanted} rows of the model's weights {named} have a name in its files")


def _count(probe: Tensor) -> int:
    return probe.shape[: 2 if probe.ndim == 3 else 1].numel()
