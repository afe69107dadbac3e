"""From sums to figures: what is divided by what, over which units, compared with whom."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ingot.base.errors import WrongInput
from ingot.evaluate.figures import loss_metrics
from ingot.evaluate.loss import Stretches


def stretches(documents: int, per_document: int = 3) -> Stretches:
    """Each document goes over `per_document` rows of one stretch each, 10 tokens a stretch, the
    last one ends it.
    """
    generator = np.random.default_rng(0)
    count = documents * per_document
    ends = np.arange(count) % per_document == per_document - 1
    level = np.repeat(generator.uniform(1, 5, documents), per_document)
    return Stretches(
        level * (10 - ends),
        10 - ends.astype(np.int64),
        np.full(count, 10),
        ends,
        np.ones(count, np.bool_),
    )


def metrics(
    losses: Stretches, sizes: np.ndarray, documents: str = "d", tokenizer: str = "t"
) -> dict[str, object]:
    return loss_metrics("held", losses, sizes, documents=documents, tokenizer=tokenizer)


def test_values_are_the_ratios() -> None:
    losses, sizes = stretches(40), np.linspace(50, 150, 40)
    found = loss_metrics("held", losses, sizes, documents="d", tokenizer="t")
    nll, targets = losses.nll.sum(), losses.targets.sum()
    assert targets == 40 * 29
    assert found["held/loss"].value == pytest.approx(nll / targets)
    assert found["held/perplexity"].value == pytest.approx(math.exp(nll / targets))
    assert found["held/bits_per_byte"].value == pytest.approx(nll / math.log(2) / sizes.sum())
    for metric in found.values():
        assert metric.ci_low < metric.value < metric.ci_high
        assert (metric.direction, metric.n) == ("lower", 40)
    assert found["held/perplexity"].ci_high == pytest.approx(math.exp(found["held/loss"].ci_high))


def test_documents_are_the_units_not_their_rows() -> None:
    """Rows of one document are alike here, so that resampling rows would claim too much."""
    many = loss_metrics("x", stretches(40, 30), np.full(40, 100.0), documents="d", tokenizer="t")[
        "x/loss"
    ]
    few = loss_metrics("x", stretches(40, 3), np.full(40, 100.0), documents="d", tokenizer="t")[
        "x/loss"
    ]
    assert many.ci_high - many.ci_low == pytest.approx(few.ci_high - few.ci_low, rel=0.1)


def test_few_documents_are_resampled_by_rows() -> None:
    found = loss_metrics("x", stretches(3, 20), np.full(3, 100.0), documents="d", tokenizer="t")[
        "x/loss"
    ]
    assert found.n == 60
    assert found.ci_low < found.value < found.ci_high


def test_bytes_can_be_compared_across_tokenizers_and_tokens_cannot() -> None:
    def prints(documents: str, tokenizer: str) -> list[str]:
        found = loss_metrics(
            "x", stretches(12), np.full(12, 100.0), documents=documents, tokenizer=tokenizer
        )
        return [
            found[f"x/{name}"].set_fingerprint for name in ("loss", "perplexity", "bits_per_byte")
        ]

    one, tokenizer, documents = prints("d", "t"), prints("d", "u"), prints("e", "t")
    assert one[0] == one[1] != one[2]
    assert tokenizer[2] == one[2]
    assert tokenizer[0] != one[0]
    assert not set(documents) & set(one)


def test_rows_and_documents_must_be_of_one_data() -> None:
    with pytest.raises(WrongInput, match="end 12 documents of 11"):
        metrics(stretches(12), np.full(11, 100.0))


def test_nothing_to_predict_is_not_a_loss_of_zero() -> None:
    losses = stretches(12)
    with pytest.raises(WrongInput, match="nothing to predict"):
        metrics(
            Stretches(
                losses.nll * 0,
                losses.targets * 0,
                losses.tokens,
                losses.ends_document,
                losses.begins_row,
            ),
            np.full(12, 100.0),
        )
    with pytest.raises(WrongInput, match="nothing to predict"):
        metrics(losses, np.zeros(12))


def test_a_loss_beyond_numbers_stays_infinite() -> None:
    losses = stretches(12)
    huge = Stretches(
        losses.nll * 1e6, losses.targets, losses.tokens, losses.ends_document, losses.begins_row
    )
    assert (
        loss_metrics("x", huge, np.full(12, 100.0), documents="d", tokenizer="t")[
            "x/perplexity"
        ].value
        == math.inf
    )
