"""Whether trainer and servers compute the same model: judged where their log-probs should be the same, and said once.

Owns which steps can tell. Refuses to end the run: a gap is for people to judge.
"""

from __future__ import annotations

from collections.abc import Mapping

from telescope.config.precision import parity_limit
from telescope.config.run import RunConfig

MOVED_NATS = 0.1
"""With several minibatches the later ones are of a policy that the earlier ones have moved: less than this is no sign."""


class Parity:
    """`limit_nats`: of the mean |sampler - trainer|; None: one of them has no model, and nothing is judged."""

    def __init__(self, limit_nats: float | None = None) -> None:
        self._limit, self._told = limit_nats, False

    @classmethod
    def of(cls, config: RunConfig, device: str) -> Parity:
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
