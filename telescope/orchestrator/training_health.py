"""Whether a run still trains: steps that moved no weight, and log-probs on which trainer and servers differ.

Pure: reads metrics, writes nothing. Refuses to end the run, and to find a cause: `telescope replay --step` shows a batch that
is kept; a gap between trainer and servers is for people to judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from telescope.config.precision import parity_limit
from telescope.config.run import RunConfig


def count_broken_steps(history: Sequence[Mapping[str, float]]) -> int:
    """How many of the latest steps moved no weight, as a gradient of theirs was not a finite number; `history`: each step's
    metrics, the latest last. A step that filters have emptied is none of them."""
    count = 0
    for metrics in reversed(history):
        left_out, broken = metrics.get("update_skipped", 0.0), metrics.get("updates_not_finite", 0.0)
        if not broken or left_out < metrics.get("updates", 1.0):
            break
        count += 1
    return count


def find_end_reason(history: Sequence[Mapping[str, float]], limit: int, step: int) -> str:
    """The sentence with which a run ends whose steps up to `step` train nothing any more; empty while it may go on."""
    count = count_broken_steps(history)
    if count < limit:
        return ""
    since = step - count
    moved = f"since step {since}" if since else "from the beginning"
    return (
        f"trainer.max_broken_steps={limit}: no gradient of the last {count} steps was a finite number, so the weights have not "
        f"moved {moved}: `telescope replay RUN_DIR --step {step}` shows that batch and its loss; then begin anew, or at a "
        "checkpoint before it (checkpoint.resume=STEP), with a lower trainer.learning_rate, say"
    )


MOVED_NATS = 0.1
"""With several minibatches the later ones are of a policy that the earlier ones have moved: less than this is not a sign."""


class ParityCheck:
    """`limit_nats`: of the mean |sampler - trainer|; None: one of them has no model, and nothing is judged."""

    def __init__(self, limit_nats: float | None = None) -> None:
        self._limit, self._told = limit_nats, False

    @classmethod
    def from_config(cls, config: RunConfig, device: str) -> ParityCheck:
        """`device`: gpu or cpu, where the run's servers are."""
        if config.inference.engine == "fake" or config.backend_name == "fake":
            return cls()
        limit = parity_limit(config, device)
        return cls(limit if config.trainer.number_of_minibatches == 1 else max(limit, MOVED_NATS))

    def judge(self, step: int, metrics: Mapping[str, float]) -> str:
        """A sentence, at most once, if the step's tokens were all sampled by the very version that it trains and the two sides
        say other log-probs of them; else empty."""
        apart = metrics.get("logprob_difference")
        if self._limit is None or self._told or apart is None or metrics.get("staleness_max") != 0:
            return ""
        if apart <= self._limit:
            return ""
        self._told = True
        return (
            f"step {step}: the servers' log-probs of tokens that they sampled from the very weights in training are "
            f"{apart:.3g} nats from the trainer's (mean of |difference|; {self._limit:g} is expected at most), so they may "
            "compute another model than the trainer: compare them with `python -m telescope doctor logprobs` and this run's "
            "overrides"
        )
