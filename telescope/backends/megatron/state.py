"""All that a rank must keep to go on as if it had never stopped, under the names and in the shapes of Hugging Face's model.

So a checkpoint is read by any number of ranks of either kind of parallelism, exported as FSDP's is, and read by backend=fsdp's
reader. `model.<name>`, `optimizer.<name>.<kind>`, `trainer.counters` (JSON), and for each rank `rank_<r>.random`, as in
telescope.backends.fsdp.state.

Owns the way from the ranks' pieces to these tensors, one parameter at a time: of each, one of the ranks that share it out (the
data-parallel ones, or those with the same experts) gets all that belongs to its place in a model, and writes it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from telescope.backends.base import CheckpointUnfit, World
from telescope.backends.common import randomness
from telescope.backends.common.models import ModelCheckpoint, TensorFiles
from telescope.backends.common.saving import ShardReader, own_key
from telescope.backends.megatron import MOMENTS
from telescope.backends.megatron.masters import Masters, UpdatedPiece
from telescope.backends.megatron.parallel import Parallel
from telescope.backends.megatron.rules import Rule, TensorMap
from telescope.backends.megatron.updates import PieceUpdater

log = logging.getLogger(__name__)

MODEL = "model."
OPTIMIZER = "optimizer."
COUNTERS = "trainer.counters"
RANDOM = "random"
READ_AT_ONCE = 1 << 30
"""Bytes of parameters whose tensors are read together."""


def fill(
    table: TensorMap, files: ModelCheckpoint, shapes: Mapping[str, tuple[int, ...]], put: Callable[[str, Tensor], object],
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    """Read this rank's parts of a model's own files, one parameter after another, and hand each to `put`, by megatron-core's
    name. shapes: of the parameters that are here, as they lie here. Raises `UnfitModel`."""
    with TensorFiles(files) as reader:
        for rule in _here(table, shapes):
            parts = {part.name: _read(reader, table, part.name).to(device, dtype) for part in rule.parts}
            whole = torch.empty(shapes[rule.parameter], dtype=dtype, device=device)
            table.join(rule, parts, whole)
            put(rule.parameter, whole)


def _here(table: TensorMap, names: Container[str]) -> list[Rule]:
    """The rules of a stage's parameters."""
    return [rule for rule in table.rules.values() if rule.parameter in names]


def _read(reader: TensorFiles, table: TensorMap, name: str) -> Tensor:
    if table.of[name][0].of_experts:
        return _read_experts(reader, table, name)
    tensor, (dim, first, count) = reader.of(name, table.shapes[name]), table.here(name)
    rows = slice(first, first + count)
    part: Tensor = tensor[:] if dim is None else tensor[rows] if dim == 0 else tensor[:, rows]
    return part


def _read_experts(reader: TensorFiles, table: TensorMap, name: str) -> Tensor:
    """This rank's part of a stack, from the matrices of its experts."""
    begin, stack = table.here(name)[1], None
    for own in table.matrices(name):
        matrix: Tensor = reader.of(own, table.files[own].shape)[:]
        if stack is None:
            stack = torch.empty(table.part_shape(name), dtype=matrix.dtype)
        table.files[own].within(stack, begin).copy_(matrix)
    assert stack is not None
    return stack


def gathered(
    masters: Masters, updater: PieceUpdater, table: TensorMap, parallel: Parallel, world: World, *, training_state: bool
) -> Iterator[tuple[str, Tensor]]:
    """What this rank writes, made as it is asked for: to the end, by all ranks, as it holds collectives. What two stages have,
    the first one writes. `training_state`: all; else the weights alone."""
    kinds = _kinds(masters, updater) if training_state else _kinds(masters, None)
    for number, rule in enumerate(_here(table, masters.parameters.keys() - masters.counted_elsewhere)):
        owner = number % masters.copies(rule.parameter).size
        for name, of, dtype in kinds:
            whole = masters.whole(rule.parameter, of, dtype, owner)
            if whole is None:
                continue
            for tensor, part in table.split(rule, whole).items():
                key = name.format(tensor)
                yield key, _spread(part.contiguous(), tensor, table, parallel)
    if not training_state:
        return
    if updater.began:
        steps = torch.tensor([updater.steps], dtype=torch.float32)
        yield from ((f"{OPTIMIZER}{name}.step", steps) for name in table.shapes)
    yield COUNTERS, randomness.as_bytes({**updater.counters(), "optimizer": {}})
    yield own_key(world.rank, RANDOM), randomness.state(world.device)


def _spread(part: Tensor, name: str, table: TensorMap, parallel: Parallel) -> Tensor:
    rule, own = table.of[name]
    return parallel.spread(part, own.dim, table.shapes[name], of_expert=rule.of_experts)


def _kinds(masters: Masters, updater: PieceUpdater | None) -> list[tuple[str, Callable[[UpdatedPiece], Tensor], torch.dtype]]:
    """Pattern of a key, where it lies, dtype."""
    kinds: list[tuple[str, Callable[[UpdatedPiece], Tensor], torch.dtype]] = [
        (f"{MODEL}{{}}", lambda piece: piece.updated, masters.dtype)
    ]
    if updater is not None and updater.began:
        for kind in MOMENTS:
            kinds.append((f"{OPTIMIZER}{{}}.{kind}", functools.partial(updater.moment, kind), updater.moment_dtypes[kind]))
    return kinds


def put_back(
    folder: Path, masters: Masters, updater: PieceUpdater, table: TensorMap, parallel: Parallel, world: World
) -> None:  # fmt: skip
    """Read what `gathered` gave, on any number of ranks. Raises `CheckpointUnfit`.

    A checkpoint of weights alone leaves the optimiser as it is; a rank that was not there then keeps the random state of its
    seed.
    """
    reader = ShardReader(folder)
    _put(reader, masters, table, parallel, f"{MODEL}{{}}", masters.put)
    if COUNTERS not in reader.shapes:
        log.warning("%s has weights alone: the optimiser begins anew", folder)
        return
    updater.set_counters(randomness.from_bytes(reader.read(COUNTERS, torch.uint8)))
    if any(OPTIMIZER in name for name in reader.shapes):
        _check_same_optimizer(folder, reader, table)
        updater.make_state(float(reader.read(f"{OPTIMIZER}{next(iter(table.shapes))}.step", torch.float32)[0]))
        for kind in MOMENTS:
            of = functools.partial(updater.moment, kind)
            put = functools.partial(masters.put_piece, of=of)
            _put(reader, masters, table, parallel, f"{OPTIMIZER}{{}}.{kind}", put)
    if (name := own_key(world.rank, RANDOM)) in reader.shapes:
        randomness.restore(reader.read(name, torch.uint8), world.device)


def _put(
    reader: ShardReader, masters: Masters, table: TensorMap, parallel: Parallel, key: str, put: Callable[[str, Tensor], None]
) -> None:
    for batch in _batches(_here(table, masters.parameters), masters):
        device = masters.parameters[batch[0].parameter].device
        names = [part.name for rule in batch for part in rule.parts]
        parts = {name: torch.empty(table.part_shape(name), dtype=masters.dtype, device=device) for name in names}
        spread = {key.format(name): _spread(part, name, table, parallel) for name, part in parts.items()}
        reader.read_into(spread)
        for rule in batch:
            whole = torch.empty(masters.parameters[rule.parameter].shape, dtype=masters.dtype, device=device)
            table.join(rule, parts, whole)
            put(rule.parameter, whole)


def _batches(rules: Sequence[Rule], masters: Masters) -> Iterator[list[Rule]]:
    held: list[Rule] = []
    filled = 0
    for rule in rules:
        nbytes = masters.parameters[rule.parameter].numel() * masters.dtype.itemsize
        if held and filled + nbytes > READ_AT_ONCE:
            yield held
            held, filled = [], 0
        held.append(rule)
        filled += nbytes
    yield held


def _check_same_optimizer(folder: Path, reader: ShardReader, table: TensorMap) -> None:
    there = {name for name in reader.shapes if name.startswith(OPTIMIZER)}
    here = {f"{OPTIMIZER}{name}.{kind}" for name in table.shapes for kind in (*MOMENTS, "step")}
    if there != here:
        odd = sorted(there ^ here)[0]
        raise CheckpointUnfit(
            f"{folder} {'holds' if odd in there else 'has no'} {odd}, and AdamW, which is what backend=megatron steps with, "
            "has other states: it was written with another optimizer or model"
        )
