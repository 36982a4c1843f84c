"""A whole run whose algorithm credits turns, with fakes: its rows, its checkpoint and its journal."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from telescope.cli.replay import main
from tests.run.conftest import Start

FAKE = ("experiment=fake", "env=[guess_letter]", "cluster.device=cpu", "orchestrator.discard_group_zero_advantage=false")


def center_turns(batch: dict[str, Any], rollouts: dict[int, dict[str, Any]], discount: float) -> list[list[float]]:
    """RLOO's advantages of a row's turns, out of the rows of its rollouts, whose reward is all the last turn's."""
    returns = {
        one: [rollouts[one]["reward"] * discount**left for left in reversed(range(rollouts[one]["turns"]))]
        for one in batch["rollout_ids"]
    }
    same: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one, own in returns.items():
        for turn, value in enumerate(own):
            same[rollouts[one]["group_id"], turn].append(value)
    found = []
    for one, own in returns.items():
        peers = [same[rollouts[one]["group_id"], turn] for turn in range(len(own))]
        found.append(
            [
                value - (sum(near) - value) / (len(near) - 1) if len(near) > 1 else 0.0
                for value, near in zip(own, peers, strict=True)
            ]
        )
    return found


@pytest.mark.timeout(240)
def test_turns_are_credited_over_a_checkpoint_and_the_journal_says_so_again(start: Start, capsys: pytest.CaptureFixture[str]):
    run = start(*FAKE, "algorithm=rloo", "algorithm.credit=turn", "algorithm.turn_discount=0.5", "number_of_steps=3",
                "checkpoint.every=2")  # fmt: skip
    assert run.wait() == 0, run.said()
    again = start("checkpoint.resume=2", resume=run)
    assert again.wait() == 0, again.said()
    rollouts = {row["rollout_id"]: row for row in again.rows("rollouts") if row["status"] == "scored"}
    batches = again.rows("batches")
    assert [row["step"] for row in batches] == [1, 2, 3]
    for batch in batches:
        expected = center_turns(batch, rollouts, 0.5)
        for found, right in zip(batch["turn_advantages"], expected, strict=True):
            assert found == pytest.approx(right, abs=1e-12)
    each = [own for batch in batches for own in batch["turn_advantages"]]
    assert {len(own) for own in each} > {1}
    assert any(len(set(own)) > 1 for own in each), each  # within a rollout
    assert all("advantage/lone_turn_fraction" in row["metrics"] for row in again.rows("step_metrics"))
    for place in (again.directory.earlier_attempt(1), again.directory.path):
        assert main([str(place)]) == 0, capsys.readouterr().out
