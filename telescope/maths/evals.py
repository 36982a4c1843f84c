"""What an eval says of a model: pass@k and pass^k of prompts with n samples each, and a mean with its standard error and
interval.

Samples of one prompt resemble each other, so the prompts are what is counted: an error is that of a mean over prompts, with the
prompts drawn at random and the samples of each within them (clustered by prompt). Numpy is not needed: an eval is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that of k samples, drawn without return from n = `samples` of which c = `passed` are right, one at least is:
    1 − C(n − c, k) / C(n, k). Unbiased for any n ≥ k (Chen et al. 2021, arXiv:2107.03374).

    Raises ValueError where k is not from 1 to n, or c not from 0 to n.
    """
    _check(samples, passed, k)
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def pass_power_k(samples: int, passed: int, k: int) -> float:
    """Chance that all of the k are right, pass^k: C(c, k) / C(n, k) (Yao et al. 2024, arXiv:2406.12045). Raises ValueError as
    `pass_at_k` does."""
    _check(samples, passed, k)
    return math.comb(passed, k) / math.comb(samples, k)


def _check(samples: int, passed: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} is not from 1 to n={samples}: k samples are drawn from n")
    if not 0 <= passed <= samples:
        raise ValueError(f"{passed} of {samples} samples cannot have passed")


def standard_error(means: Sequence[float]) -> float | None:
    """Of the mean over prompts, from the mean of each: their standard deviation (ddof 1) over the root of their number. It is
    the error clustered by prompt where every prompt has as many samples. None for fewer than two prompts."""
    count = len(means)
    if count < 2:
        return None
    centre = math.fsum(means) / count
    return math.sqrt(math.fsum((value - centre) ** 2 for value in means) / (count - 1) / count)


def interval(mean: float, error: float, prompts: int, level: float = 0.95) -> tuple[float, float]:
    """Both ends of the mean's interval by Student's t with `prompts` − 1 degrees of freedom. Raises ValueError for fewer than
    two prompts."""
    reach = student_t(0.5 + level / 2, prompts - 1) * error
    return mean - reach, mean + reach


def share_interval(share: float, error: float, prompts: int, samples: int, level: float = 0.95) -> tuple[float, float]:
    """Both ends of the interval of a share by Wilson's score (Wilson 1927), which stays within 0 and 1 and has a width where
    all prompts agree: of n samples that tell as much, n = share (1 − share) / error², from the number of prompts to that of
    all their samples (the effective sample size). With one sample a prompt n is the number of prompts.

    Raises ValueError for no prompt, and for a share outside 0 and 1.
    """
    if prompts < 1 or not 0.0 <= share <= 1.0:
        raise ValueError(f"a share of {share} over {prompts} prompts has no interval")
    spread = share * (1.0 - share)
    told = min(max(spread / error**2, prompts), prompts * samples) if error > 0.0 else float(prompts)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    shrunk = 1.0 + z * z / told
    centre = (share + z * z / (2 * told)) / shrunk
    reach = z * math.sqrt(spread / told + (z / (2 * told)) ** 2) / shrunk
    return max(0.0, centre - reach), min(1.0, centre + reach)


def student_t(share: float, freedom: int) -> float:
    """The value below which a `share` of Student's t lies: in closed form for 1 and 2 degrees of freedom, else by the expansion
    around the normal one (Abramowitz and Stegun 26.7.5), whose error at 0.975 is below 0.006. Raises ValueError for none."""
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom: an interval needs two prompts at least")
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        twice = 2.0 * share - 1.0
        return twice * math.sqrt(2.0 / (1.0 - twice * twice))
    z: float = NormalDist().inv_cdf(share)
    terms = (
        (z * z * z + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
