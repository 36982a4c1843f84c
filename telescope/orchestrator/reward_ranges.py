"""The ranges that rewards are expected in, and what lies outside. Pure: writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class RewardRanges:
    """`ranges`: the two ends by label, of the environments that give both. Rewards outside are counted, never clipped."""

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    normalize: bool = False
    """Whether training takes the normalised reward too."""
    outside: Counter[str] = field(default_factory=Counter)

    def normalise(self, label: str, reward: float) -> float | None:
        """(r - min) / (max - min), e.g. 0.5 for 1.0 in [-1, 3]; None where the environment gives no range."""
        ends = self.ranges.get(label)
        return None if ends is None else (reward - ends[0]) / (ends[1] - ends[0])

    def choose(self, label: str, reward: float) -> float:
        """The reward that advantages are made of."""
        normalised = self.normalise(label, reward) if self.normalize else None
        return reward if normalised is None else normalised

    def find_scale(self, label: str) -> float:
        """What rewards are multiplied by for advantages, beside an offset."""
        ends = self.ranges.get(label)
        return 1.0 if ends is None or not self.normalize else 1.0 / (ends[1] - ends[0])

    def note(self, label: str, reward: float) -> str:
        """Count the reward if it is outside its range. A sentence at the first of an environment, else empty."""
        ends = self.ranges.get(label)
        if ends is None or ends[0] <= reward <= ends[1]:
            return ""
        self.outside[label] += 1
        if self.outside[label] > 1:
            return ""
        return (
            f"a reward of environments.{label} is {reward:g}, outside [reward_min={ends[0]:g}, reward_max={ends[1]:g}]: it is "
            "used as it is; summary.json counts them all"
        )
