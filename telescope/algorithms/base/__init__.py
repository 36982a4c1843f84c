"""What an algorithm is: settings, one advantage rule and one loss. Pure: numpy and tensor methods, no torch import.

A file of the folder above with one `Algorithm` subclass is an algorithm of that file's name. `PolicyLoss` holds what the
shipped seven share: where the masks are applied, the corrections, the penalties, the aggregation and the metrics.
"""

from telescope.algorithms.base.algorithm import Algorithm
from telescope.algorithms.base.corrections import Correction, GeometricMask, IcePop, SequenceMask, Tis
from telescope.algorithms.base.errors import AlgorithmRaised, named
from telescope.algorithms.base.policy import AdvantageNorm, PolicyGradient, PolicyLoss, clip_sums
from telescope.algorithms.base.rollouts import SampledRollout
from telescope.algorithms.base.row import LossOutput, PackedRow, TokenLosses

__all__ = [
    "AdvantageNorm",
    "Algorithm",
    "AlgorithmRaised",
    "Correction",
    "GeometricMask",
    "IcePop",
    "LossOutput",
    "PackedRow",
    "PolicyGradient",
    "PolicyLoss",
    "SampledRollout",
    "SequenceMask",
    "Tis",
    "TokenLosses",
    "clip_sums",
    "named",
]
