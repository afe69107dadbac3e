"""The head in chunks: gradients that are made in forward are those that autograd finds, and a token
function that is not summed is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ingot.models.native import fused_head, head
from ingot.models.native.fused_head import MANY_LOGITS, FusedView
from ingot.models.native.head import (
    IGNORE,
    LogitsView,
    apply_head,
    by_log_probability,
    summed_only,
)
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


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose layers are compiled, with kernels that are not."""
    kernels = fused_head._log_probability, fused_head._log_probability_backward
    monkeypatch.setattr(head, "kernel_type", lambda device: "cuda")
    monkeypatch.setattr(fused_head, "fused_kernels", lambda: kernels)


def both_ways(
    dtype: torch.dtype,
    *,
    extras: bool,
    autocast: bool = False,
    view: Callable[[Tensor], LogitsView] = LogitsView,
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
                view if known else LogitsView,
                weight=weight if known else None,
                many_logits=5 * VOCABULARY if known and view is FusedView else None,
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


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, GRADIENTS_FP32), (torch.bfloat16, 2 * SHARED_ROWS_BF16)]
)
def test_fused_as_on_a_gpu(dtype: torch.dtype, bound: float) -> None:
    ours, theirs = both_ways(dtype, extras=True, view=FusedView)
    assert [one.dtype for one in ours] == [one.dtype for one in theirs]
    assert max(map(off, ours, theirs)) < bound


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    ("token", "grad", "chunks"),
    [("log_probability_of", True, 1), ("judged", True, 3), ("log_probability_of", False, 3)],
)
def test_only_where_nothing_is_made_of_logits_are_many_held_at_once(
    token: str, grad: bool, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would run out of memory with tensors in float32 of so many."""
    monkeypatch.setattr(head, "CHUNK_LOGITS", 8 * VOCABULARY)
    hidden, weight, labels, _ = parts()
    made: list[int] = []

    def view(logits: Tensor) -> LogitsView:
        made.append(len(logits))
        return FusedView(logits)

    functions = {"log_probability_of": log_probability_of, "judged": Judge().token}
    with torch.set_grad_enabled(grad):
        apply_head(
            hidden,
            lambda part: functional.linear(part, weight),
            VOCABULARY,
            labels.clamp_min(0),
            functions[token],
            None,
            view,
            weight,
            many_logits=TOKENS * VOCABULARY,
        )
    assert (len(made), sum(made)) == (chunks, TOKENS)


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


@pytest.mark.usefixtures("fused")
def test_fused_log_probabilities_are_those_of_cross_entropy() -> None:
    assert_cross_entropy(FusedView)


def test_log_probabilities_are_those_of_cross_entropy() -> None:
    assert_cross_entropy(LogitsView)


def assert_cross_entropy(view: Callable[[Tensor], LogitsView]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator) * 4
    # Of nothing but one token, far from zero, and next to tokens that cannot be.
    logits[0, 7], logits[1], logits[2, 1:] = 1e4, logits[1] - 1e4, -torch.inf
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[:3] = torch.tensor([7, 3, 0])
    of_values = torch.randn(TOKENS, generator=generator)
    known = logits.double().requires_grad_()
    expected = -functional.cross_entropy(known, labels, reduction="none")
    expected.backward(of_values.double())
    logits.requires_grad_()
    values = view(logits).log_probability(labels)
    values.backward(of_values)
    assert torch.allclose(values.double(), expected, rtol=LOSS_FP32, atol=LOSS_FP32)
    assert logits.grad is not None
    assert known.grad is not None
    assert torch.allclose(logits.grad.double(), known.grad, rtol=0, atol=GRADIENTS_FP32)


@summed_only
@by_log_probability
def log_probability_of(view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
    return view.log_probability(labels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fused_on_a_gpu() -> None:
    """Compiled, and with the gradient of the weight added by the product of each chunk."""
    hidden, weight, labels, _ = (one.detach().cuda() for one in parts(torch.bfloat16))
    found = []
    for dtype, view in ((torch.bfloat16, FusedView), (torch.float32, LogitsView)):
        leaves = [one.to(dtype, copy=True).requires_grad_() for one in (hidden, weight)]
        values = apply_head(
            leaves[0],
            lambda part, weight=leaves[1]: functional.linear(part, weight),
            VOCABULARY,
            labels,
            log_probability_of,
            view=view,
            weight=leaves[1],
            many_logits=MANY_LOGITS if view is FusedView else None,
        )
        values.sum().backward()
        found.append([values.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert off(one, other) < 2 * SHARED_ROWS_BF16
