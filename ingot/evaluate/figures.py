"""From sums to the figures of a report: loss, perplexity, bits per byte, means, each with its
interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.reports import Metric
from ingot.evaluate.bootstrap import ratio_interval
from ingot.evaluate.loss import Stretches

FEW_DOCUMENTS = 10

Floats = npt.NDArray[np.float64]


def loss_metrics(
    task: str, losses: Stretches, document_bytes: Floats, *, documents: str, tokenizer: str
) -> dict[str, Metric]:
    """`TASK/loss` (nats per token), `TASK/perplexity`, `TASK/bits_per_byte`, with intervals of 95
    %.

    Intervals say how much another draw of held-out documents would have changed the value: whole
    documents are resampled, since tokens of one document rise and fall together. Of fewer than ten
    documents, rows are resampled instead, which makes the interval narrower than it should be, but
    not empty.

    Args:
        document_bytes: bytes of each document, in the order of rows.
        documents: identity of the held-out documents. Bits per byte can be compared on the same
            documents whatever the tokenizer, the other two with the same tokenizer only.

    Raises:
        WrongInput: there are no targets, or rows and documents are not of the same data.
    """
    of_document = losses.documents
    if int(losses.ends_document.sum()) != len(document_bytes):
        raise WrongInput(
            f"the validation rows end {int(losses.ends_document.sum())} documents of"
            f" {len(document_bytes)}; run `ingot prepare` again"
        )
    tokens = np.bincount(of_document, losses.tokens)
    stretch_bytes = document_bytes[of_document] * losses.tokens / tokens[of_document]
    units = of_document if len(document_bytes) >= FEW_DOCUMENTS else losses.rows
    nll, targets, size = (
        np.bincount(units, values).astype(np.float64)
        for values in (losses.nll, losses.targets, stretch_bytes)
    )
    return sum_metrics(task, nll, targets, size, documents=documents, tokenizer=tokenizer)


def sum_metrics(
    task: str, nll: Floats, targets: Floats, size: Floats, *, documents: str, tokenizer: str
) -> dict[str, Metric]:
    """The same of sums over each unit of resampling: nats, targets, and the bytes that these spell,
    all [N].

    Raises:
        WrongInput: there are no targets.
    """
    if not targets.sum() or not size.sum():
        raise WrongInput(
            "the held-out documents have nothing to predict; set data.validation to more documents"
        )
    same_tokens = fingerprint({"documents": documents, "tokenizer": tokenizer})

    def metric(value: float, interval: tuple[float, float], compared_on: str) -> Metric:
        return Metric(value, *interval, direction="lower", n=len(nll), set_fingerprint=compared_on)

    loss, interval = float(nll.sum() / targets.sum()), ratio_interval(nll, targets)
    bits = nll / math.log(2)
    return {
        f"{task}/loss": metric(loss, interval, same_tokens),
        f"{task}/perplexity": metric(
            _exp(loss), (_exp(interval[0]), _exp(interval[1])), same_tokens
        ),
        f"{task}/bits_per_byte": metric(
            float(bits.sum() / size.sum()), ratio_interval(bits, size), documents
        ),
    }


def mean_metric(
    values: Sequence[float] | Floats, *, direction: Literal["lower", "higher"], on: str
) -> Metric:
    """The mean over items, with its interval; `on` is the identity of the items."""
    numbers = np.asarray(values, np.float64)
    return Metric(
        float(numbers.mean()),
        *ratio_interval(numbers, np.ones(len(numbers))),
        direction=direction,
        n=len(numbers),
        set_fingerprint=on,
    )


def _exp(loss: float) -> float:
    """Infinite rather than an error for a loss beyond float64: the report refuses it in words."""
    return math.exp(loss) if loss < 709 else math.inf
