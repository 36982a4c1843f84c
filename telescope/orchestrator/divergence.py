"""Whether a run still trains: steps in a row in which no update was made, because no gradient was a finite number.

Reads the steps' metrics alone. Refuses to find the cause: `telescope replay --step` looks for it in the batches that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def broken_steps(history: Sequence[Mapping[str, float]]) -> int:
    """How many of the latest steps moved no weight, a gradient of theirs being no finite number; `history`: each step's
    metrics, the latest last. A step that filters have emptied is none of them."""
    count = 0
    for metrics in reversed(history):
        left_out, broken = metrics.get("update_skipped", 0.0), metrics.get("updates_not_finite", 0.0)
        if not broken or left_out < metrics.get("updates", 1.0):
            break
        count += 1
    return count


def why_it_ends(history: Sequence[Mapping[str, float]], limit: int, step: int) -> str:
    """The sentence with which a run ends whose steps up to `step` train nothing any more; empty while it may go on."""
    count = broken_steps(history)
    if count < limit:
        return ""
    since = step - count
    moved = f"since step {since}" if since else "from the beginning"
    return (
        f"trainer.max_broken_steps={limit}: no gradient of the last {count} steps was a finite number, so the weights have not "
        f"moved {moved}: `telescope replay RUN_DIR --step {step}` looks for the cause; then begin anew, or at a checkpoint "
        "before it (checkpoint.resume=STEP), with a lower trainer.learning_rate, say"
    )
