"""The end of a decoder: vocabulary projection and the objective's per-token function, in chunks.

The logits of a long row over a large vocabulary are the largest tensor of a training step by far;
here only one chunk of them exists at a time, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORE = -100
CHUNK_LOGITS = 2**25
"""Logits that exist at once; 128 MiB of float32."""
PIECE_LOGITS = 2**23
"""Logits that a CPU turns into values and gradients at once; these stay in its cache."""

Method = TypeVar("Method", bound=Callable[..., Tensor])


class LogitsView:
    """What an objective may ask about the logits of a chunk of N tokens; the same questions when
    the vocabulary is sharded.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logsumexp(self) -> Tensor:
        """`[N]`."""
        return self._logits.logsumexp(dim=-1)

    def gather(self, labels: Tensor) -> Tensor:
        """The logit of each token's label `[N]`; labels must be in the vocabulary."""
        return self._logits.gather(-1, labels[:, None])[:, 0]

    def log_probability(self, labels: Tensor) -> Tensor:
        """`gather(labels) - logsumexp()` `[N]`, in one kernel that is far cheaper going
        backward.
        """
        return -functional.cross_entropy(self._logits, labels, reduction="none")

    def logits(self) -> Tensor:
        """Those that this rank has of them, float32 `[N, V]`; all where the vocabulary is not
        sharded.
        """
        return self._logits

    def log_probabilities(self, temperature: float = 1.0) -> Tensor:
        """Of the tokens that `logits()` has, `[N, V]`, the logits divided by `temperature`."""
        return (self._logits / temperature).log_softmax(dim=-1)

    def total(self, values: Tensor) -> Tensor:
        """Sum over the whole vocabulary, `[N]`, of `values` `[N, V]` that were made from
        `logits()`.
        """
        return values.sum(dim=-1)


class TokenFunction(Protocol):
    """An objective's value per token, float32 `[N]`. Labels of -100 arrive as 0; their values are
    discarded.

    `extras`: what else the objective asked for, `[N, ...]`, the tokens' own share of it; None where
    it asked for nothing.
    """

    def __call__(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor: ...


def summed_only(token: Method) -> Method:
    """Marks a token function whose values the objective only adds up, so that going backward all of
    them are given one and the same gradient.
    """
    token.summed = True  # type: ignore[attr-defined]
    return token


Project = Callable[[Tensor], Tensor]
"""Hidden states `[N, D]` -> logits `[N, V]`."""


class VocabularyHead:
    """How the head is computed. This is the whole of it on one rank; `ingot.parallel` has one that
    is shared.
    """

    def enter(self, hidden: Tensor) -> Tensor:
        """Final hidden states as the head wants them: every token, all features."""
        return hidden

    def weight(self, weight: Tensor) -> Tensor:
        """The rows of the projection `[V, D]` that are here."""
        return weight

    def view(self, logits: Tensor) -> LogitsView:
        """Float32 logits of a chunk, to be asked by an objective."""
        return LogitsView(logits)

    def whole(self, logits: Tensor) -> Tensor:
        """`[..., V]` of what is here -> of the whole vocabulary."""
        return logits


def apply_head(
    hidden: Tensor,
    project: Project,
    vocab_size: int,
    labels: Tensor,
    token: TokenFunction,
    extras: Tensor | None = None,
    view: Callable[[Tensor], LogitsView] = LogitsView,
    weight: Tensor | None = None,
) -> Tensor:
    """Values `[N]` of the tokens whose final hidden states are `hidden` `[N, D]`; 0 where `labels`
    `[N]` is -100.

    A single chunk keeps its logits for backward; of several, each recomputes its own, so that
    memory does not grow with N. If `weight` `[V, D]` is given (`project` must then be a product
    with it) and the token function is marked `summed_only`, the gradients are computed in forward
    and nothing is computed twice.
    """
    if (
        weight is not None
        and getattr(token, "summed", False)
        and torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
    ):
        made: Tensor = _apply_summed(hidden, weight, vocab_size, labels, token, extras, view)
        return made

    def chunk_values(part: Tensor, part_labels: Tensor, part_extras: Tensor | None) -> Tensor:
        target = part_labels != IGNORE
        values = token(view(project(part).float()), part_labels.clamp_min(0), part_extras)
        return torch.where(target, values, 0.0)

    size = max(1, CHUNK_LOGITS // vocab_size)
    if hidden.shape[0] <= size:
        return chunk_values(hidden, labels, extras)
    values: list[Tensor] = []
    for first in range(0, hidden.shape[0], size):
        part, part_labels = hidden[first : first + size], labels[first : first + size]
        part_extras = None if extras is None else extras[first : first + size]
        if torch.is_grad_enabled():
            values.append(
                checkpoint(chunk_values, part, part_labels, part_extras, use_reentrant=False)
            )
        else:
            values.append(chunk_values(part, part_labels, part_extras))
    return torch.cat(values)


# `torch.compiler.disable` would import the compiler here and now, which takes a second.
@_disable_dynamo
def _apply_summed(
    hidden: Tensor,
    weight: Tensor,
    vocab_size: int,
    labels: Tensor,
    token: TokenFunction,
    extras: Tensor | None,
    view: Callable[[Tensor], LogitsView],
) -> Tensor:
    """A compiler cannot follow gradients that are taken in forward, and there is nothing in between
    for it to gain.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (hidden, weight))
    values: Tensor = _Summed.apply(hidden, weight, vocab_size, labels, token, extras, view)  # type: ignore[no-untyped-call]
    return values


class _Summed(torch.autograd.Function):
    """Values, and at once the gradients of their sum: each chunk's logits are turned into their own
    gradient while they are there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        vocab_size: int,
        labels: Tensor,
        token: TokenFunction,
        extras: Tensor | None,
        view: Callable[[Tensor], LogitsView],
    ) -> Tensor:
        size = max(1, CHUNK_LOGITS // vocab_size)
        piece = (
            max(1, min(CHUNK_LOGITS, PIECE_LOGITS) // vocab_size)
            if hidden.device.type == "cpu"
            else size
        )
        count = hidden.shape[0]
        values = hidden.new_empty(count, dtype=torch.float32)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight: Tensor | None = None
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, count, size):
                part = hidden[first : first + size]
                logits = part @ weight.t()  # [size, V]
                for here in range(first, first + len(part), piece):
                    rows = slice(here, min(here + piece, first + len(part)))
                    some = logits[here - first : rows.stop - first]
                    values[rows], gradient = _values_and_gradient(
                        some, labels[rows], token, None if extras is None else extras[rows], view
                    )
                    some.copy_(gradient)
                if of_hidden is not None:
                    torch.mm(logits, weight, out=of_hidden[first : first + size])
                if ctx.needs_input_grad[1]:
                    of_weight = _add_product(
                        of_weight, logits.t(), part, last=first + size >= count
                    )
        ctx.save_for_backward(of_hidden, of_weight)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradient[0]
        # On an accelerator nobody waits for this.
        torch._assert_async(
            (gradient == scale).all(), "values of a summed token function were not only added up"
        )
        return (
            *(None if made is None else made * scale.to(made.dtype) for made in ctx.saved_tensors),
            None,
            None,
            None,
            None,
            None,
        )


def _values_and_gradient(
    logits: Tensor,
    labels: Tensor,
    token: TokenFunction,
    extras: Tensor | None,
    view: Callable[[Tensor], LogitsView],
) -> tuple[Tensor, Tensor]:
    """Of some tokens: values `[n]`, and the gradient of their sum with respect to `logits` `[n,
    V]`, both float32.
    """
    with torch.enable_grad():
        leaf = logits.detach().float().requires_grad_()
        values = torch.where(labels != IGNORE, token(view(leaf), labels.clamp_min(0), extras), 0.0)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, *, last: bool) -> Tensor:
    """`total` + `left` @ `right`, added up in float32 where they are smaller; after the last one in
    their own type.
    """
    if total is None:
        product = left @ right
        return product if last or left.dtype.itemsize >= 4 else product.float()
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    total += left @ right
    return total.to(left.dtype) if last else total
