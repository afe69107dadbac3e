"""How sure a number is: the confidence interval of a ratio of sums, by resampling what it is summed over."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000
MAX_UNITS = 10_000
CHUNK_DRAWS = 2**21


def ratio_interval(numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The interval of sum(numerators) / sum(denominators) when the units (documents, say) are a sample of many.

    Bootstrap with bias correction and acceleration (Efron 1987), which stays close to its level where units are few and
    unequal. Deterministic for a `seed`. More than 10,000 units are first added up at random into that many groups, which
    leaves the variance of the sums as it is and bounds time and memory. One unit says nothing about spread: the interval
    is then the value itself.

    Args:
        numerators: what is summed above, one number a unit.
        denominators: what is summed below, none negative.

    Raises:
        ValueError: there are no units, or the denominators sum to nothing.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if not len(above) or below.sum() <= 0:
        raise ValueError(f"an interval needs units with a positive sum below, not {len(above)} with {below.sum()}")
    generator = np.random.default_rng(seed)
    above, below = _grouped(above, below, generator)
    value = float(above.sum() / below.sum())
    ratios = np.sort(_resampled(above, below, generator))
    if len(ratios) == 0 or ratios[0] == ratios[-1]:
        return value, value
    low, high = (_corrected(share, ratios, value, _acceleration(above, below)) for share in ((1 - level) / 2, (1 + level) / 2))
    return float(np.quantile(ratios, low)), float(np.quantile(ratios, high))


def _grouped(above: Floats, below: Floats, generator: np.random.Generator) -> tuple[Floats, Floats]:
    if len(above) <= MAX_UNITS:
        return above, below
    group = generator.permutation(len(above)) % MAX_UNITS
    return np.bincount(group, above, MAX_UNITS).astype(np.float64), np.bincount(group, below, MAX_UNITS).astype(np.float64)


def _resampled(above: Floats, below: Floats, generator: np.random.Generator) -> Floats:
    """The ratio of each of RESAMPLES draws with replacement; draws whose denominators sum to nothing are left out."""
    units = len(above)
    at_once = max(1, CHUNK_DRAWS // units)
    ratios = []
    for first in range(0, RESAMPLES, at_once):
        drawn = generator.integers(0, units, (min(at_once, RESAMPLES - first), units))
        sums = below[drawn].sum(axis=1)
        ratios.append(above[drawn].sum(axis=1)[sums > 0] / sums[sums > 0])
    return np.concatenate(ratios)


def _acceleration(above: Floats, below: Floats) -> float:
    """How the spread changes with the value: a sixth of the skewness of the jackknife, the ratio with each unit left out."""
    rest = below.sum() - below
    kept = rest > 0
    without = (above.sum() - above)[kept] / rest[kept]
    deviation = without.mean() - without if len(without) else np.zeros(1)
    spread = float((deviation**2).sum())
    return float((deviation**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0


def _corrected(share: float, ratios: Floats, value: float, acceleration: float) -> float:
    """The quantile of the resampled ratios at which an unbiased one with this acceleration would have its `share`."""
    normal = NormalDist()
    below_value = float((ratios < value).mean() + (ratios == value).mean() / 2)
    edge = 0.5 / len(ratios)
    bias = normal.inv_cdf(min(max(below_value, edge), 1 - edge))
    shifted = bias + normal.inv_cdf(share)
    return normal.cdf(bias + shifted / max(1 - acceleration * shifted, 1e-3))
