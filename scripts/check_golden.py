#!/usr/bin/env python3
"""Check the algorithms against a file of worked cases: `python scripts/check_golden.py FILE`.

Each case gives a configuration, rewards, groups and per-token log-probs with masks (null: not a number, only at masked
places), and the expected advantages, loss and gradient in float64. They are computed here on the path the trainer takes:
advantages from the algorithm, trajectories packed into several rows plus a filler row, the loss row by row over denominators
of the whole update. Prints the worst difference of each quantity; exit status 0 only if all are within 1e-9 * max(1, |x|).

A case that credits turns has `turns`, of each rollout the sampled tokens of its turns in order, and `turn_rewards`, of each
rollout one a turn or none; its advantages are then lists too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import UNSET

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from telescope.algorithms.base import Algorithm, PackedRow
from telescope.maths import minibatches, packing, turn_credit
from telescope.records import TrainItem, Trajectory

TOLERANCE = 1e-9
PROMPT = 1  # tokens put before each sequence, since a first token has no probability
CONFIGURED_GROUP_SIZE = 8  # where a case gives none: at least 2


@dataclass
class Worst:
    """The largest |difference| / max(1, |expected|) of one quantity, and the case it came from."""

    by: dict[str, tuple[float, str]] = field(default_factory=dict)

    def note(self, quantity: str, case: str, got: np.ndarray, expected: np.ndarray) -> None:
        if got.shape != expected.shape:
            self.by[quantity] = (math.inf, f"{case}: shape {got.shape} instead of {expected.shape}")
            return
        difference = np.abs(got - expected) / np.maximum(1.0, np.abs(expected))
        worst = float(np.where(np.isfinite(difference), difference, math.inf).max(initial=0.0))
        if worst >= self.by.get(quantity, (-1.0, ""))[0]:
            self.by[quantity] = (worst, case)


def algorithm_of(config: dict[str, Any]) -> Algorithm:
    """The project's algorithm with the settings of a case. Names that differ between file and project are translated here."""
    module = importlib.import_module(f"telescope.algorithms.{config['algorithm']}")
    (kind,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    )
    settings = {name: config[name] for name in kind.model_fields if name in config}
    if "dr_grpo_loss_agg_mode" in kind.model_fields and "loss_aggregation" in config:
        settings["dr_grpo_loss_agg_mode"] = config["loss_aggregation"]
    allowed = getattr(kind, "norms", ())
    if settings.get("advantage_norm") == "group" and "group" not in allowed and "none" in allowed:
        settings["advantage_norm"] = "none"  # the file's word for "as the algorithm does by itself"
    return kind(**settings)


def check(case: dict[str, Any], worst: Worst) -> None:
    """Compute one case and note its differences."""
    algorithm = algorithm_of(case["config"])
    rewards, groups = np.array(case["rewards"], np.float64), np.array(case["groups"])
    group_size = case["config"].get("group_size") or CONFIGURED_GROUP_SIZE
    expected = case["expected"]
    if "turns" in case:
        by_turn = credit_turns(algorithm, case, rewards, groups, group_size)
        for own, wanted in zip(by_turn, expected["advantages"], strict=True):
            worst.note("advantages", case["name"], own, np.array(wanted, np.float64))
        advantages = np.full(len(rewards), math.nan)  # no token is trained with its rollout's
    else:
        by_turn = None
        advantages = algorithm.advantages(rewards, groups, group_size=group_size)
        worst.note("advantages", case["name"], advantages, np.array(expected["advantages"], np.float64))
    loss, gradients = losses_and_gradients(algorithm, case, advantages, by_turn)
    worst.note("loss", case["name"], np.array(loss), np.array(expected["loss"], np.float64))
    for got, wanted in zip(gradients, expected["grad_current"], strict=True):
        worst.note("d loss / d current", case["name"], got, np.array(wanted, np.float64))


def credit_turns(
    algorithm: Algorithm, case: dict[str, Any], rewards: np.ndarray, groups: np.ndarray, group_size: int
) -> list[np.ndarray]:
    """The advantages of each rollout's turns."""
    counts = [len(turns) for turns in case["turns"]]
    shaped = map(turn_credit.shape_rewards, case["turn_rewards"], counts, rewards.tolist())
    returns = [number for own in shaped for number in algorithm.turn_returns(own) or ()]
    turns = np.array(counts)
    numbered = turn_credit.number_turns(groups, turns)
    found = algorithm.advantages(np.array(returns, np.float64), numbered, group_size=group_size)
    return np.split(found, np.cumsum(turns)[:-1])


def losses_and_gradients(
    algorithm: Algorithm, case: dict[str, Any], advantages: np.ndarray, by_turn: list[np.ndarray] | None = None
) -> tuple[float, list[np.ndarray]]:
    """The loss over all rows, and its gradient with respect to each sequence's current log-probs."""
    sequences = case["sequences"]
    groups = [int(group) for group in case["groups"]]
    current = [torch.tensor(numbers(each["current"]), requires_grad=True) for each in sequences]
    trajectories = [trajectory_of(each) for each in sequences]
    items = [
        TrainItem(
            rollout_id=index,
            group_id=group,
            sequence=index,
            length=len(trajectory.ids),
            advantage=float(advantage),
            sequence_tokens=trajectory.trained_tokens,
            temperature=1.0,
            turns=UNSET if by_turn is None else tuple(zip(case["turns"][index], by_turn[index].tolist(), strict=True)),
        )
        for index, (trajectory, group, advantage) in enumerate(zip(trajectories, groups, advantages, strict=True))
    ]
    denominators = minibatches.denominators([item.sequence_tokens for item in items], groups)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows_of([item.length for item in items]):
        packed = packed_row(row, sequences, current, trajectories, items)
        loss = loss + algorithm.loss(packed, denominators, max_tokens=case["config"]["max_tokens"]).loss
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), [grad_of(each) for each in current]


def rows_of(lengths: list[int]) -> Iterator[packing.Row]:
    """Several rows with padding, and one row of filler."""
    rows = packing.pack(lengths, seq_len=max(*lengths, sum(lengths) // 3), multiple=8)
    yield from packing.with_filler(rows, len(rows) + 1, multiple=8)


def packed_row(
    row: packing.Row,
    sequences: list[dict[str, Any]],
    current: list[torch.Tensor],
    trajectories: list[Trajectory],
    items: list[TrainItem],
) -> PackedRow:
    """One row as the trainer builds it; the log-probs under training stay connected to each sequence's own leaf."""
    arrays = packing.arrange(row, trajectories, items, dtype=np.float64)
    prompt = torch.full((PROMPT,), math.nan, dtype=torch.float64)
    padding = torch.full((row.size - row.used,), math.nan, dtype=torch.float64)
    pieces = [piece for index in row.items for piece in (prompt, current[index])]
    old = [np.concatenate([np.full(PROMPT, np.nan), numbers(each["old"])]) for each in sequences if each.get("old")]
    return PackedRow(
        current=torch.cat([*pieces, padding]),
        old=torch.from_numpy(packing.lay_out(row, old).astype(np.float64)) if old else None,
        rollout=torch.from_numpy(arrays.logprobs),
        mask=torch.from_numpy(arrays.mask),
        advantages=torch.from_numpy(arrays.advantages),
        segments=torch.from_numpy(arrays.segments),
        sequence_tokens=torch.from_numpy(arrays.sequence_tokens),
        entropy=None,
    )


def trajectory_of(sequence: dict[str, Any]) -> Trajectory:
    """A sequence behind one prompt token. Ids and versions play no part in the loss."""
    mask = np.array([*[0] * PROMPT, *sequence["mask"]], np.uint8)
    logprobs = np.concatenate([np.full(PROMPT, np.nan), numbers(sequence["rollout"])])
    return Trajectory(
        ids=np.arange(len(mask), dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask == 1, logprobs, np.nan),
        versions=np.where(mask == 1, 0, -1).astype(np.int32),
    )


def numbers(values: list[float | None]) -> np.ndarray:
    """Float64, null as NaN."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


def grad_of(leaf: torch.Tensor) -> np.ndarray:
    return np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()


def main(arguments: list[str]) -> int:
    """Exit status of the whole check."""
    parser = argparse.ArgumentParser(description="Check the algorithms against worked cases.")
    parser.add_argument("file", type=Path, help="a JSON file of cases, e.g. tests/digits/golden/algorithms.json")
    cases = json.loads(parser.parse_args(arguments).file.read_text())["cases"]
    worst = Worst()
    for case in cases:
        check(case, worst)
    for quantity, (difference, name) in worst.by.items():
        print(f"{quantity:20} worst {difference:.3e}  ({name})")
    failed = [quantity for quantity, (difference, _) in worst.by.items() if not difference <= TOLERANCE]
    print(f"{len(cases)} cases: " + ("all within 1e-9" if not failed else "beyond 1e-9: " + ", ".join(failed)))
    return 0 if cases and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
