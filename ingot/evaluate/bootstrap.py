"""How sure a number is: the confidence interval of what is made of sums, a ratio say, by resampling
what it is summed over.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Sums `[..., K]` -> values `[...]`."""

RESAMPLES = 2000
MAX_UNITS = 10_000
CHUNK_DRAWS = 2**21


def ratio_interval(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """The interval of sum(numerators) / sum(denominators) when the units (documents, say) are a
    sample of many; see `interval`.

    Args:
        numerators: what is summed above, one number a unit.
        denominators: what is summed below, none negative.

    Raises:
        ValueError: there are no units, or the denominators sum to nothing.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if not len(above) or below.sum() <= 0:
        raise ValueError(
            f"an interval needs units with a positive sum below, not {len(above)} with"
            f" {below.sum()}"
        )
    return interval(np.stack((above, below), axis=1), _ratio, level=level, seed=seed)


def _ratio(sums: Floats) -> Floats:
    above, below = sums[..., 0], sums[..., 1]
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def interval(
    units: Floats, statistic: Statistic, *, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """The interval of `statistic(units.sum(axis=0))` when the units `[N, K]` are a sample of many.

    Bootstrap with bias correction and acceleration (Efron 1987), which stays close to its level
    where units are few and unequal. Deterministic for a `seed`. More than 10,000 units are first
    added up at random into that many groups, which
    leaves the variance of the sums as it is and bounds time and memory. One unit says nothing about
    spread: the interval is then the value itself.

    Args:
        statistic: from sums `[..., K]` to values `[...]`; NaN where it is not defined, and such
            draws are left out.
    """
    generator = np.random.default_rng(seed)
    units = _grouped(units, generator)
    value = float(statistic(units.sum(axis=0)))
    drawn = np.sort(_resampled(units, statistic, generator))
    if len(drawn) == 0 or drawn[0] == drawn[-1]:
        return value, value
    acceleration = _acceleration(units, statistic)
    low, high = (
        _corrected(share, drawn, value, acceleration)
        for share in ((1 - level) / 2, (1 + level) / 2)
    )
    return float(np.quantile(drawn, low)), float(np.quantile(drawn, high))


def _grouped(units: Floats, generator: np.random.Generator) -> Floats:
    if len(units) <= MAX_UNITS:
        return units
    group = generator.permutation(len(units)) % MAX_UNITS
    return np.stack([np.bincount(group, column, MAX_UNITS) for column in units.T], axis=1)


def _resampled(units: Floats, statistic: Statistic, generator: np.random.Generator) -> Floats:
    """The statistic of each of RESAMPLES draws with replacement, where it is defined."""
    at_once = max(1, CHUNK_DRAWS // len(units))
    finite, values = bool(np.isfinite(units).all()), []
    for first in range(0, RESAMPLES, at_once):
        drawn = generator.integers(0, len(units), (min(at_once, RESAMPLES - first), len(units)))
        sums = np.stack([column[drawn].sum(axis=1) for column in units.T], axis=1)
        found = statistic(sums)
        # Where the units themselves are not finite, nothing is left out: such a value must not seem
        # to be a sure one.
        values.append(found[~np.isnan(found)] if finite else found)
    return np.concatenate(values)


def _acceleration(units: Floats, statistic: Statistic) -> float:
    """How the spread changes with the value: a sixth of the skewness of the jackknife, the
    statistic with each unit left out.
    """
    without = statistic(units.sum(axis=0) - units)
    without = without[~np.isnan(without)]
    deviation = without.mean() - without if len(without) else np.zeros(1)
    spread = float((deviation**2).sum())
    return float((deviation**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0


def _corrected(share: float, ratios: Floats, value: float, acceleration: float) -> float:
    """The quantile of the resampled ratios at which an unbiased one with this acceleration would
    have its `share`.
    """
    normal = NormalDist()
    below_value = float((ratios < value).mean() + (ratios == value).mean() / 2)
    edge = 0.5 / len(ratios)
    bias = normal.inv_cdf(min(max(below_value, edge), 1 - edge))
    shifted = bias + normal.inv_cdf(share)
    return normal.cdf(bias + shifted / max(1 - acceleration * shifted, 1e-3))
