"""A run whose gradients are not finite numbers any more trains nothing: it ends with the step since which that is so."""

from __future__ import annotations

import pytest

from telescope.orchestrator.training_health import count_broken_steps, find_end_reason

MOVED = {"updates": 2.0, "update_skipped": 0.0, "updates_not_finite": 0.0}
HALF = {"updates": 2.0, "update_skipped": 1.0, "updates_not_finite": 1.0}
BROKEN = {"updates": 2.0, "update_skipped": 2.0, "updates_not_finite": 2.0}
EMPTY = {"updates": 2.0, "update_skipped": 2.0, "updates_not_finite": 0.0}
BROKEN_OR_EMPTY = {"updates": 2.0, "update_skipped": 2.0, "updates_not_finite": 1.0}


@pytest.mark.parametrize(("history", "steps"), [
    ([], 0),
    ([MOVED], 0),
    ([BROKEN, MOVED], 0),
    ([BROKEN, HALF], 0),  # one of its updates moved the weights
    ([BROKEN, EMPTY], 0),
    ([MOVED, BROKEN], 1),
    ([MOVED, BROKEN, BROKEN_OR_EMPTY, BROKEN], 3),
    ([{}, {"loss": 1.0}], 0),  # a backend that counts no updates
])  # fmt: skip
def test_a_broken_step_is_one_in_which_no_weight_moved_for_its_gradients(history: list[dict[str, float]], steps: int):
    assert count_broken_steps(history) == steps


def test_the_end_names_the_setting_the_last_step_that_moved_a_weight_and_the_way_on():
    assert find_end_reason([MOVED, BROKEN], 2, 2) == ""
    said = find_end_reason([MOVED, BROKEN, BROKEN], 2, 3)
    assert said.startswith("trainer.max_broken_steps=2: no gradient of the last 2 steps was a finite number")
    assert "have not moved since step 1: `telescope replay RUN_DIR --step 3`" in said
    assert "not moved from the beginning" in find_end_reason([BROKEN], 1, 1)
