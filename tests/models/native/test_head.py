"""The head in chunks: gradients that are made in forward are those that autograd finds, and a token
function that is not summed is refused.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ingot.models.native import head
from ingot.models.native.head import IGNORE, LogitsView, apply_head, summed_only
from tests.tolerances import GRADIENTS_FP32, LOSS_FP32, SHARED_ROWS_BF16

TOKENS, WIDTH, VOCABULARY = 23, 8, 50


class Judge:
    """A value that depends on the label, on all logits and on what came along."""

    @summed_only
    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        value = -view.log_probability(labels) + 0.1 * view.logsumexp().square()
        return value if extras is None else value * extras[:, 0]

    def plainly(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        return self.token(view, labels, extras)


@pytest.fixture(
    autouse=True,
    params=[(TOKENS, False), (5, False), (5, True)],
    ids=["one chunk", "chunks", "chunks of all tokens, as on a GPU"],
)
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, every = request.param
    monkeypatch.setattr(head, "CHUNK_LOGITS", tokens * VOCABULARY)
    monkeypatch.setattr(head, "PIECE_LOGITS", 2 * VOCABULARY)
    if every:
        monkeypatch.setattr(head, "_targets", lambda labels: None)


def parts(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels (some of no token) and extras."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
        for rows in (TOKENS, VOCABULARY)
    )
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[::3] = IGNORE
    return hidden, weight, labels, torch.rand(TOKENS, 2, generator=generator)


def both_ways(
    dtype: torch.dtype, *, extras: bool, autocast: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients, with gradients made in forward and through autograd."""
    found = []
    for token, known in ((Judge().token, True), (Judge().plainly, False)):
        hidden, weight, labels, more = parts(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            values = apply_head(
                hidden,
                lambda part, weight=weight: functional.linear(part, weight),
                VOCABULARY,
                labels,
                token,
                more if extras else None,
                weight=weight if known else None,
            )
        (values.sum() * 3).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        found.append([values.detach(), hidden.grad, weight.grad])
    return found[0], found[1]


def of_labels(labels: Tensor, *, known: bool) -> list[Tensor]:
    """Values and gradients for these labels."""
    hidden, weight, _, _ = parts()
    values = apply_head(
        hidden,
        lambda part: functional.linear(part, weight),
        VOCABULARY,
        labels,
        Judge().token if known else Judge().plainly,
        weight=weight if known else None,
    )
    values.sum().backward()
    assert hidden.grad is not None, "data parallel would wait for it"
    assert weight.grad is not None, "data parallel would wait for it"
    return [values.detach(), hidden.grad, weight.grad]


def off(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("extras", [False, True])
def test_gradients_made_in_forward(extras: bool) -> None:
    (values, *gradients), (wanted, *others) = both_ways(torch.float32, extras=extras)
    assert off(values, wanted) < LOSS_FP32
    assert (values[::3] == 0).all()
    assert max(map(off, gradients, others)) < GRADIENTS_FP32


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16(autocast: bool) -> None:
    ours, theirs = both_ways(
        torch.float32 if autocast else torch.bfloat16, extras=False, autocast=autocast
    )
    assert [one.dtype for one in ours] == [one.dtype for one in theirs]
    assert max(map(off, ours, theirs)) < 2 * SHARED_ROWS_BF16


@pytest.mark.parametrize("known", [False, True])
def test_tokens_without_a_label_are_as_if_they_were_not_there(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = parts()[2]
    labels[1] = 0  # an id like any other
    found = of_labels(labels, known=known)
    monkeypatch.setattr(head, "_targets", lambda labels: None)
    for one, other in zip(found, of_labels(labels, known=known), strict=True):
        assert off(one, other) < GRADIENTS_FP32
    assert found[0][1] != 0


@pytest.mark.parametrize("known", [False, True])
def test_without_any_label_every_gradient_is_there_and_zero(known: bool) -> None:
    for found in of_labels(torch.full((TOKENS,), IGNORE), known=known):
        assert (found == 0).all()


def test_what_wants_no_gradient_is_given_none() -> None:
    for kept in (0, 1):
        hidden, weight, labels, _ = parts()
        (hidden, weight)[kept].requires_grad_(False)
        apply_head(
            hidden,
            lambda part, weight=weight: functional.linear(part, weight),
            VOCABULARY,
            labels,
            Judge().token,
            weight=weight,
        ).sum().backward()
        assert (hidden, weight)[kept].grad is None
        assert (hidden, weight)[1 - kept].grad is not None


def test_values_that_are_not_only_added_up_are_refused() -> None:
    hidden, weight, labels, _ = parts()
    values = apply_head(
        hidden,
        lambda part: functional.linear(part, weight),
        VOCABULARY,
        labels,
        Judge().token,
        weight=weight,
    )
    with pytest.raises(RuntimeError, match="not only added up"):
        values.square().sum().backward()


def test_without_gradients_and_without_the_mark_nothing_is_made_ahead() -> None:
    hidden, weight, labels, _ = parts()
    labels = labels.clamp_min(0)
    for token, grad in ((Judge().plainly, True), (Judge().token, False)):
        with torch.set_grad_enabled(grad):
            values = apply_head(
                hidden,
                lambda part: functional.linear(part, weight),
                VOCABULARY,
                labels,
                token,
                weight=weight,
            )
        assert "Summed" not in type(values.grad_fn).__name__
