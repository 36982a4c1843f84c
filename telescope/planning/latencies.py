"""How long things take, for the simulator: lengths, an engine's step, rewards, train steps, weight updates. Numbers, no events.

    time of an engine step with n sequences that attend to K tokens = step_s + sequence_s · n + kv_token_s · K

Refuses to know where the numbers come from: a run's own records (telescope/planning/calibration.py) or a card's data sheet
(telescope/planning/cards.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, isfinite
from statistics import NormalDist

import msgspec

QUANTILES = 100
"""Equal parts that a distribution is cut into."""
HALVINGS = 60
"""Of the range of a log-normal's median: its last one is as narrow as a float can tell."""
_BITS = (1 << 64) - 1


class Distribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution by its quantiles, straight lines between: `Distribution((10.0, 20.0))` is uniform from 10 to 20."""

    quantiles: tuple[float, ...]
    """At equal parts from the smallest to the largest, ascending; a single one is a constant."""

    def __post_init__(self) -> None:
        values = self.quantiles
        if not values or any(not isfinite(value) or value < 0 for value in values) or list(values) != sorted(values):
            raise ValueError(f"quantiles {values} must be finite, 0 or more, and ascend")

    def at(self, share: float) -> float:
        """The value below which `share` (0 to 1) of all lie."""
        values = self.quantiles
        place = share * (len(values) - 1)
        index = min(int(place), len(values) - 2)
        if index < 0:
            return values[0]
        return values[index] + (place - index) * (values[index + 1] - values[index])

    @property
    def mean(self) -> float:
        values = self.quantiles
        if len(values) == 1:
            return values[0]
        return (sum(values) - (values[0] + values[-1]) / 2) / (len(values) - 1)

    def clipped(self, most: float) -> Distribution:
        return Distribution(tuple(min(value, most) for value in self.quantiles))


def constant(value: float) -> Distribution:
    return Distribution((float(value),))


def empirical(values: Sequence[float]) -> Distribution:
    """The quantiles of what was seen. Raises ValueError where nothing was."""
    if not values:
        raise ValueError("nothing was seen, so nothing is known of its distribution")
    ordered = sorted(float(value) for value in values)
    last = len(ordered) - 1
    parts = min(QUANTILES, last) or 1
    return Distribution(tuple(_between(ordered, part / parts * last) for part in range(parts + 1)))


def lognormal(mean: float, sigma: float, most: float) -> Distribution:
    """Log-normal lengths between 1 and `most`, where longer ones end: `mean` is theirs as they end, `sigma` the standard
    deviation of the logarithm before. With a mean of `most` all of them are as long. Raises ValueError for a mean below 1 or
    above `most`."""
    if not 1 <= mean <= most or not sigma >= 0:
        raise ValueError(f"mean={mean} must lie between 1 and {most}, and sigma={sigma} be at least 0")
    normal = NormalDist()
    spread = [exp(sigma * normal.inv_cdf((part + 0.5) / QUANTILES)) for part in range(QUANTILES)]

    def around(middle: float) -> Distribution:
        return Distribution(tuple(min(max(1.0, middle * value), most) for value in spread))

    low, high = 0.0, most / spread[0]  # from where all are 1 to where all are cut
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if around(middle).mean < mean else (low, middle)
    return around(high)


class EngineTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One inference server."""

    step_s: float
    """Of a decode step whatever it holds: weights read, launches, scheduling."""
    sequence_s: float = 0.0
    """More for each sequence in the step."""
    kv_token_s: float = 0.0
    """More for each cached token that the step attends to."""
    prefill_token_s: float = 0.0
    """Of a prompt token that is in no prefix cache; all sequences of the server wait for it."""
    kv_tokens: float = float("inf")
    """Tokens that the KV cache holds. Where it is full, the youngest sequence is put back and begins its prefill again."""
    max_seqs: int = 1_000_000
    """Sequences in a step; others wait."""

    def __post_init__(self) -> None:
        if not (self.step_s >= 0 and self.sequence_s >= 0 and self.step_s + self.sequence_s > 0):
            raise ValueError(f"step_s={self.step_s} and sequence_s={self.sequence_s} must be 0 or more, one of them above 0")
        if min(self.kv_token_s, self.prefill_token_s) < 0 or not self.kv_tokens >= 1 or self.max_seqs < 1:
            raise ValueError(f"{self} has a negative time, or room for nothing")

    def tokens_per_s(self, sequences: int, kv_tokens: float = 0.0) -> float:
        """Of the whole server at this concurrency."""
        return sequences / (self.step_s + self.sequence_s * sequences + self.kv_token_s * kv_tokens)


class Latencies(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run's work is like, and how long its parts take. Seconds and tokens."""

    prompt_tokens: Distribution
    completion_tokens: Distribution
    """Of one turn, before max_tokens cuts it."""
    turns: Distribution = constant(1)
    """Of a rollout; rounded down, at least 1."""
    engine: EngineTimes
    dispatch_s: Distribution = constant(0)
    """From the order to the request of its first turn, besides the worker's own work."""
    start_s: float = 0.0
    """A worker's own work to start a rollout. It does one thing after another, so a flood of orders waits for it."""
    request_s: float = 0.0
    """More that a turn takes than the engine needs for it: the way there and back."""
    environment_s: Distribution = constant(0)
    """Between two turns."""
    reward_s: Distribution = constant(0)
    """From the last token to the reward, besides the worker's own work."""
    score_s: float = 0.0
    """A worker's own work to score a rollout and to hand it in, in the same line as its starts."""
    train_step_s: float
    """Of a train step whatever it holds, all updates of the step together."""
    train_token_s: float
    """More for each token of a rank's share of the batch, prompts included."""
    sync_s: float
    """From a trained step to the commit of its weights on all servers."""
    pause_s: float = 0.0
    """Of it, how long servers stand still."""
    shared_share: float = 0.0
    """Share of its speed that a server loses while the trainer works: 0 on hardware of its own."""
    equal_share: float = 0.0
    """Share of complete groups whose rewards are all equal."""

    def __post_init__(self) -> None:
        if not 0 <= self.shared_share < 1 or not 0 <= self.equal_share < 1:
            raise ValueError(f"shared_share={self.shared_share} and equal_share={self.equal_share} must lie in [0, 1)")
        if (
            min(self.train_step_s, self.train_token_s, self.sync_s, self.pause_s, self.request_s, self.start_s, self.score_s)
            < 0
        ):
            raise ValueError("a time is negative")
        if self.pause_s > self.sync_s:
            raise ValueError(f"pause_s={self.pause_s} is part of sync_s={self.sync_s} and can't be longer")


def share_of(seed: int, place: int) -> float:
    """A number in [0, 1) from a seed that is uniform already and a small number, by two rounds of multiply and shift (the
    finisher of SplitMix64; Steele, Lea and Flood 2014): ten times cheaper than a keyed hash."""
    mixed = ((seed + place * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
    return (mixed ^ (mixed >> 31)) / 2.0**64


def draw(spread: Distribution, seed: int, place: int) -> float:
    """The draw of this seed and place from the distribution."""
    quantiles = spread.quantiles
    return quantiles[0] if len(quantiles) == 1 else spread.at(share_of(seed, place))


def _between(ordered: Sequence[float], place: float) -> float:
    index = min(int(place), len(ordered) - 1)
    after = min(index + 1, len(ordered) - 1)
    return ordered[index] + (place - index) * (ordered[after] - ordered[index])
