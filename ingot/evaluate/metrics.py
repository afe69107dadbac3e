"""Metrics of a report from sums, each with its bootstrap confidence interval: loss, perplexity,
bits per byte, means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.reports import Metric
from ingot.evaluate.loss import SegmentLosses

Floats = npt.NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Sums `[..., K]` -> values `[...]`."""
Interval = tuple[float | None, float | None]
"""Both ends, or two None where they are not known."""

FEWEST_UNITS = 4
"""Of fewer units no interval is told: one of 95 % held half of the time with two units and 0.7 of
it with three, 0.8 with four (docs/LOG.md, 2026-11-26).
"""
SAME = 1e-12
"""Draws that differ by less do so by rounding alone."""
RESAMPLES = 2000
MAX_UNITS = 10_000
CHUNK_DRAWS = 2**21


def ratio_interval(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, level: float = 0.95, seed: int = 0
) -> Interval:
    """The confidence interval of sum(numerators) / sum(denominators), where the units (such as
    documents) are a sample of a population; see `bootstrap_interval`.

    Args:
        numerators: one number per unit. denominators: one number per unit, none negative.

    Raises:
        ValueError: there are no units, or the denominators sum to 0.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if not len(above) or below.sum() <= 0:
        raise ValueError(
            f"an interval needs units with a positive sum below, not {len(above)} with"
            f" {below.sum()}"
        )
    return bootstrap_interval(np.stack((above, below), axis=1), _ratio, level=level, seed=seed)


def _ratio(sums: Floats) -> Floats:
    above, below = sums[..., 0], sums[..., 1]
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def bootstrap_interval(
    units: Floats, statistic: Statistic, *, level: float = 0.95, seed: int = 0
) -> Interval:
    """The confidence interval of `statistic(units.sum(axis=0))`, where the units `[N, K]` are a
    sample of a population.

    Bootstrap with bias correction and acceleration (BCa, Efron 1987), which keeps its level well
    where units are few and unequal. Deterministic for a `seed`. More than 10,000 units are first
    summed at random into that many groups, which preserves the variance of the sums and bounds time
    and memory. It is not known for fewer than `FEWEST_UNITS`, nor where all draws are alike.

    Args:
        statistic: from sums `[..., K]` to values `[...]`; NaN where it is undefined, and such draws
            are left out.
    """
    if len(units) < FEWEST_UNITS:
        return None, None
    generator = np.random.default_rng(seed)
    units = _grouped(units, generator)
    value = float(statistic(units.sum(axis=0)))
    drawn = np.sort(_resampled(units, statistic, generator))
    if len(drawn) == 0 or math.isclose(drawn[0], drawn[-1], rel_tol=SAME):
        return None, None
    acceleration = _acceleration(units, statistic)
    low, high = (
        _corrected_quantile(share, drawn, value, acceleration)
        for share in ((1 - level) / 2, (1 + level) / 2)
    )
    return float(np.quantile(drawn, low)), float(np.quantile(drawn, high))


def _grouped(units: Floats, generator: np.random.Generator) -> Floats:
    if len(units) <= MAX_UNITS:
        return units
    group = generator.permutation(len(units)) % MAX_UNITS
    return np.stack([np.bincount(group, column, MAX_UNITS) for column in units.T], axis=1)


def _resampled(units: Floats, statistic: Statistic, generator: np.random.Generator) -> Floats:
    """The statistic of each of RESAMPLES draws with replacement, except where it is undefined."""
    at_once = max(1, CHUNK_DRAWS // len(units))
    finite, values = bool(np.isfinite(units).all()), []
    for first in range(0, RESAMPLES, at_once):
        drawn = generator.integers(0, len(units), (min(at_once, RESAMPLES - first), len(units)))
        sums = np.stack([column[drawn].sum(axis=1) for column in units.T], axis=1)
        found = statistic(sums)
        # If the units themselves are not finite, nothing is left out: such a value must not look
        # certain.
        values.append(found[~np.isnan(found)] if finite else found)
    return np.concatenate(values)


def _acceleration(units: Floats, statistic: Statistic) -> float:
    """BCa's acceleration: a sixth of the skewness of the jackknife, the statistic with each unit
    left out.
    """
    without = statistic(units.sum(axis=0) - units)
    without = without[~np.isnan(without)]
    deviation = without.mean() - without if len(without) else np.zeros(1)
    spread = float((deviation**2).sum())
    return float((deviation**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0


def _corrected_quantile(share: float, ratios: Floats, value: float, acceleration: float) -> float:
    """BCa's corrected quantile of the resampled values for the nominal `share`."""
    normal = NormalDist()
    below_value = float((ratios < value).mean() + (ratios == value).mean() / 2)
    edge = 0.5 / len(ratios)
    bias = normal.inv_cdf(min(max(below_value, edge), 1 - edge))
    shifted = bias + normal.inv_cdf(share)
    return normal.cdf(bias + shifted / max(1 - acceleration * shifted, 1e-3))


def loss_metrics(
    task: str,
    losses: SegmentLosses,
    document_bytes: Floats,
    *,
    documents: str,
    tokenizer: str,
    whole: bool = True,
) -> dict[str, Metric]:
    """`TASK/loss` (nats per token), `TASK/perplexity`, `TASK/bits_per_byte`, with intervals of 95
    %.

    Intervals show how much another draw of held-out documents would have changed the value: whole
    documents are resampled, since tokens of one document are correlated. Of fewer than four none is
    known; one from their rows would hold a third of the time (docs/LOG.md, 2026-11-26).

    Args:
        document_bytes: bytes of each document that are predicted, in the order of rows.
        documents: identity of the held-out documents. Bits per byte are comparable on the same
            documents with any tokenizer, the other two only with the same tokenizer. Of chats that
            were cut they hold the tokenizer already, which decides what is left.
        whole: whether each document is predicted from its beginning; if not, bits per byte too are
            comparable only with the same tokenizer, which decides what its first token holds.

    Raises:
        WrongInput: there are no targets, or rows and documents are not of the same data.
    """
    of_document = losses.documents
    if int(losses.ends_document.sum()) != len(document_bytes):
        raise WrongInput(
            f"the validation rows end {int(losses.ends_document.sum())} documents of"
            f" {len(document_bytes)}; run `ingot prepare --again`"
        )
    tokens = np.bincount(of_document, losses.tokens)
    segment_bytes = document_bytes[of_document] * losses.tokens / tokens[of_document]
    nll, targets, size = (
        np.bincount(of_document, values).astype(np.float64)
        for values in (losses.nll, losses.targets, segment_bytes)
    )
    return sum_metrics(
        task, nll, targets, size, documents=documents, tokenizer=tokenizer, whole=whole
    )


def sum_metrics(
    task: str,
    nll: Floats,
    targets: Floats,
    size: Floats | None,
    *,
    documents: str,
    tokenizer: str,
    whole: bool = True,
) -> dict[str, Metric]:
    """The same from sums over each unit of resampling: nats, targets and their bytes, all [N].
    `size` None: without bits per byte, as where they hold no bytes, but ends of texts alone.

    Raises:
        WrongInput: there are no targets.
    """
    if not targets.sum():
        raise WrongInput(
            "the held-out documents have nothing to predict; set data.validation to more documents"
        )
    same_tokens = tokens_identity(documents, tokenizer)

    def metric(value: float, interval: Interval, compared_on: str) -> Metric:
        return Metric(value, *interval, direction="lower", n=len(nll), set_fingerprint=compared_on)

    loss, interval = float(nll.sum() / targets.sum()), ratio_interval(nll, targets)
    found = {
        f"{task}/loss": metric(loss, interval, same_tokens),
        f"{task}/perplexity": metric(_exp_or_inf(loss), mapped(interval, _exp_or_inf), same_tokens),
    }
    if size is not None and size.sum():
        bits = nll / math.log(2)
        per_byte = float(bits.sum() / size.sum())
        on = documents if whole else same_tokens
        found[f"{task}/bits_per_byte"] = metric(per_byte, ratio_interval(bits, size), on)
    return found


def tokens_identity(documents: str, tokenizer: str) -> str:
    """The identity of the tokens of a set of documents."""
    return fingerprint({"documents": documents, "tokenizer": tokenizer})


def mean_metric(
    values: Sequence[float] | Floats, *, direction: Literal["lower", "higher"], on: str
) -> Metric:
    """The mean over items with its interval; `on` is the identity of the items."""
    numbers = np.asarray(values, np.float64)
    return Metric(
        float(numbers.mean()),
        *ratio_interval(numbers, np.ones(len(numbers))),
        direction=direction,
        n=len(numbers),
        set_fingerprint=on,
    )


def likelier_metric(good: Floats, bad: Floats, *, on: str) -> Metric:
    """How often one of `good` is above one of `bad`, ties half: the area under the ROC curve.

    Both sides are samples of a population, so its variance is that of the means of both (DeLong et
    al. 1988); the interval is taken of its log-odds, which holds 95 % near 0 and 1 too. It is not
    known where either side has fewer than `FEWEST_UNITS`, nor where all pairs agree.
    """
    above, below = _shares_below(good, bad), 1.0 - _shares_below(bad, good)
    value = float(above.mean())
    interval: Interval = (None, None)
    if min(len(good), len(bad)) >= FEWEST_UNITS and 0.0 < value < 1.0:
        error = math.sqrt(above.var(ddof=1) / len(good) + below.var(ddof=1) / len(bad))
        width = NormalDist().inv_cdf(0.975) * error / (value * (1.0 - value))
        odds = math.log(value / (1.0 - value))
        low, high = (1.0 / (1.0 + math.exp(-end)) for end in (odds - width, odds + width))
        interval = low, high
    return Metric(value, *interval, direction="higher", n=len(good) + len(bad), set_fingerprint=on)


def _shares_below(values: Floats, others: Floats) -> Floats:
    """Of each value the share of the others that are below it, ties half."""
    ordered = np.sort(others)
    below, up_to = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return np.asarray((below + up_to) / (2 * len(others)), np.float64)


def mapped(interval: Interval, function: Callable[[float], float]) -> Interval:
    """The interval of `function`, which must be increasing, of a metric with this `interval`."""
    low, high = interval
    return (None, None) if low is None or high is None else (function(low), function(high))


def _exp_or_inf(loss: float) -> float:
    """Infinite for a loss whose exponential exceeds float64: the report then refuses the value with
    a message.
    """
    return math.exp(loss) if loss < 709 else math.inf
