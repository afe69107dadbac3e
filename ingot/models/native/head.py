"""The end of a decoder: vocabulary projection and the objective's per-token function, in chunks.

The logits of a long row over a large vocabulary are by far the largest tensor of a training step;
only one chunk of them exists at a time, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ingot.models.device import kernel_type

IGNORE = -100
CHUNK_LOGITS = 2**25
"""Logits held at once: 128 MiB in float32."""
CPU_CHUNK_BYTES = 2**26
"""The same on a CPU where gradients are made in forward, and products of fewer tokens take no
longer.
"""
CHUNK_TOKENS = 64
"""A chunk holds a multiple of so many tokens, on an accelerator of twice as many, or products in
bf16 take a fifth longer.
"""
MOST_TARGETS = 0.75
"""Share of tokens with a label from which on all are computed."""
PIECE_LOGITS = 2**19
"""Logits that each thread of a CPU turns into values and gradients at once, so that they stay in
its cache.
"""

Method = TypeVar("Method", bound=Callable[..., Tensor])


class LogitsView:
    """What an objective may compute from the logits of a chunk of N tokens; the same interface when
    the vocabulary is sharded.
    """

    def __init__(self, logits: Tensor) -> None:
        self._computed = logits
        """In the type that they were computed in."""

    @cached_property
    def _logits(self) -> Tensor:
        narrow = self._computed.dtype.itemsize < 4
        return self._computed.float() if narrow else self._computed

    def logsumexp(self) -> Tensor:
        """The log-sum-exp over the vocabulary, `[N]`."""
        return self._logits.logsumexp(dim=-1)

    def gather(self, labels: Tensor) -> Tensor:
        """The logit of each token's label `[N]`; labels must be valid ids."""
        return self._logits.gather(-1, labels[:, None])[:, 0]

    def log_probability(self, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """`gather(labels) - logsumexp()` `[N]` in one kernel, which is far cheaper in backward; of
        logits divided by `temperature`.
        """
        logits = self._logits if temperature == 1 else self._logits / temperature
        if kernel_type(logits.device) == "cpu" and not torch.compiler.is_compiling():
            values: Tensor = _LogProbability.apply(logits, labels)  # type: ignore[no-untyped-call]
            return values
        return -functional.cross_entropy(logits, labels, reduction="none")

    def logits(self) -> Tensor:
        """This rank's logits, float32 `[N, V]`; all of them unless the vocabulary is sharded."""
        return self._logits

    def log_probabilities(self, temperature: float = 1.0) -> Tensor:
        """Log-probabilities `[N, V]` of this rank's logits, each divided by `temperature`."""
        return (self._logits / temperature).log_softmax(dim=-1)

    def total(self, values: Tensor) -> Tensor:
        """The sum over the whole vocabulary, `[N]`, of `values` `[N, V]` computed from
        `logits()`.
        """
        return values.sum(dim=-1)


class TokenFunction(Protocol):
    """An objective's value per token, float32 `[N]`. Tokens whose label is -100 are left out, or
    arrive with label 0 and their values are discarded.

    `extras`: the objective's extra inputs for these tokens, `[N, ...]`; None if it has none.
    """

    def __call__(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor: ...


def summed_only(token: Method) -> Method:
    """Marks a token function whose values are only summed by the objective, so that in backward
    they all receive the same gradient.
    """
    token.summed = True  # type: ignore[attr-defined]
    return token


def by_log_probability(token: Method) -> Method:
    """Marks a token function that asks a view for `log_probability` alone, without a temperature:
    a `FusedView` then makes nothing of its logits, of which many can be held at once.
    """
    token.by_log_probability = True  # type: ignore[attr-defined]
    return token


Project = Callable[[Tensor], Tensor]
"""Hidden states `[N, D]` -> logits `[N, V]`."""


class VocabularyHead:
    """How the head is computed. This class is the head of one rank; `ingot.parallel` has a sharded
    one.
    """

    view_type: type[LogitsView] = LogitsView
    many_logits: int | None = None
    """How many a chunk may have of which nothing but log-probabilities are asked."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Final hidden states as the head needs them: every token, all features."""
        return hidden

    def weight(self, weight: Tensor) -> Tensor:
        """The rows of the projection `[V, D]` that this rank holds."""
        return weight

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., D]` for this rank's part of `weight`."""
        return functional.linear(hidden, self.weight(weight))

    def view(self, logits: Tensor) -> LogitsView:
        """Wrap the logits of a chunk for an objective."""
        return self.view_type(logits)

    def whole(self, logits: Tensor) -> Tensor:
        """Gather `[..., V]` from this rank's slice to the whole vocabulary."""
        return logits


class _Computation(NamedTuple):
    """How values are computed, as `apply_head` is told."""

    project: Project
    vocab_size: int
    token: TokenFunction
    view: Callable[[Tensor], LogitsView]
    weight: Tensor | None
    chunk_logits: int


def apply_head(
    hidden: Tensor,
    project: Project,
    vocab_size: int,
    labels: Tensor,
    token: TokenFunction,
    extras: Tensor | None = None,
    view: Callable[[Tensor], LogitsView] = LogitsView,
    weight: Tensor | None = None,
    *,
    many_logits: int | None = None,
) -> Tensor:
    """The values `[N]` of the tokens whose final hidden states are `hidden` `[N, D]`; 0 where
    `labels` `[N]` is -100.

    A single chunk keeps its logits for backward; with several, each chunk recomputes its own, so
    that memory does not grow with N. If `weight` `[V, D]` is given (`project` must then multiply by
    it) and the token function is marked `summed_only`, gradients are computed in forward and
    nothing is computed twice. On a CPU tokens without a label cost nothing. `many_logits`: how many
    a chunk may have in training of which `token` asks nothing but log-probabilities.
    """
    many = torch.is_grad_enabled() and getattr(token, "by_log_probability", False)
    chunk = (many_logits if many else None) or CHUNK_LOGITS
    by = _Computation(project, vocab_size, token, view, weight, chunk)
    kept = _targets(labels)
    if kept is None:
        return _values(by, hidden, labels, extras)
    values = _values(by, hidden[kept], labels[kept], None if extras is None else extras[kept])
    return values.new_zeros(labels.shape).index_put((kept,), values)


def _targets(labels: Tensor) -> Tensor | None:
    """The places of labels that are not -100, of which there is always one; None where all tokens
    are computed: if most are targets, so that copying them would cost more than it saves, or if it
    could not be known without waiting for the device or, in a plan, at all.
    """
    if labels.device.type != "cpu" or isinstance(labels, FakeTensor):
        return None
    kept = (labels != IGNORE).nonzero()[:, 0]
    if len(kept) >= MOST_TARGETS * len(labels):
        return None
    # A batch without any target still gives every weight a gradient, which other ranks wait for.
    return kept if len(kept) else kept.new_zeros(1)


def _values(by: _Computation, hidden: Tensor, labels: Tensor, extras: Tensor | None) -> Tensor:
    """`apply_head` of these tokens, whether they are targets or not."""
    weight = by.weight
    if (
        weight is not None
        and getattr(by.token, "summed", False)
        and torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
    ):
        return _apply_summed(by, hidden, weight, labels, extras)

    def chunk_values(part: Tensor, part_labels: Tensor, part_extras: Tensor | None) -> Tensor:
        target = part_labels != IGNORE
        values = by.token(by.view(by.project(part)), part_labels.clamp_min(0), part_extras)
        return torch.where(target, values, 0.0)

    size = max(1, by.chunk_logits // by.vocab_size)
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


def _apply_summed(
    by: _Computation, hidden: Tensor, weight: Tensor, labels: Tensor, extras: Tensor | None
) -> Tensor:
    """Excluded from compilation: the compiler cannot trace gradients taken in forward, and has
    nothing to gain here. Where nothing is compiled, the compiler is not even imported.
    """
    apply = _excluded if torch.compiler.is_compiling() else _summed
    return apply(by, hidden, weight, labels, extras)


def _summed(
    by: _Computation, hidden: Tensor, weight: Tensor, labels: Tensor, extras: Tensor | None
) -> Tensor:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden, weight = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (hidden, weight))
    values: Tensor = _Summed.apply(hidden, weight, by, labels, extras)  # type: ignore[no-untyped-call]
    return values


# `torch.compiler.disable` would import the compiler at this point, which takes a second.
_excluded = _disable_dynamo(_summed)


class _Summed(torch.autograd.Function):
    """Computes the values and at once the gradients of their sum: the logits of each chunk are
    overwritten by their own gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        by: _Computation,
        labels: Tensor,
        extras: Tensor | None,
    ) -> Tensor:
        size, piece = _sizes(hidden, by)
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
                        by, some, labels[rows], None if extras is None else extras[rows]
                    )
                    if len(some) == len(logits) and gradient.dtype == logits.dtype:
                        logits = gradient
                    else:
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
        # Asynchronous on an accelerator.
        torch._assert_async(
            (gradient == scale).all(), "values of a summed token function were not only added up"
        )
        made: tuple[Tensor | None, ...] = ctx.saved_tensors
        if not _is_one(scale):
            made = tuple(None if one is None else one * scale.to(one.dtype) for one in made)
        return *made, None, None, None


def _sizes(hidden: Tensor, by: _Computation) -> tuple[int, int]:
    """Tokens of a chunk, and of a piece of it."""
    vocab_size = by.vocab_size
    if kernel_type(hidden.device) != "cpu":
        size = max(1, by.chunk_logits // vocab_size)
        if size > 2 * CHUNK_TOKENS:
            size -= size % (2 * CHUNK_TOKENS)
        return size, size
    size = min(CHUNK_LOGITS, CPU_CHUNK_BYTES // hidden.dtype.itemsize) // vocab_size
    if size > CHUNK_TOKENS:
        size -= size % CHUNK_TOKENS
    piece = min(CHUNK_LOGITS, PIECE_LOGITS * torch.get_num_threads()) // vocab_size
    return max(1, size), max(1, piece)


def _is_one(scale: Tensor) -> bool:
    """Whether nothing needs to be multiplied, which an accelerator would have to be waited for to
    know. In a plan it is so, as it is where an objective adds up its values.
    """
    if kernel_type(scale.device) != "cpu":
        return False
    return isinstance(scale, FakeTensor) or scale.item() == 1


class _LogProbability(torch.autograd.Function):
    """Cross-entropy's own kernels on a CPU take two exponentials of each logit, slow ones, where
    this takes a fast one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        highest = logits.amax(-1, keepdim=True)
        powers = (logits - highest).exp_()
        total = powers.sum(-1, keepdim=True)
        ctx.save_for_backward(powers, total, labels)
        return (logits.gather(-1, labels[:, None]) - highest - total.log())[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        powers, total, labels = ctx.saved_tensors
        of_values = gradient[:, None]
        of_logits = powers * (-of_values / total)
        return of_logits.scatter_add_(-1, labels[:, None], of_values), None


def _values_and_gradient(
    by: _Computation, logits: Tensor, labels: Tensor, extras: Tensor | None
) -> tuple[Tensor, Tensor]:
    """For some tokens: values `[n]`, float32, and the gradient of their sum with respect to
    `logits` `[n, V]`; on an accelerator in their type.
    """
    leaf = logits.detach()
    if kernel_type(logits.device) == "cpu":
        # Rounded where it is written in their place.
        leaf = leaf.float()
    with torch.enable_grad():
        leaf.requires_grad_()
        found = by.token(by.view(leaf), labels.clamp_min(0), extras)
        values = torch.where(labels != IGNORE, found, 0.0)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, *, last: bool) -> Tensor:
    """`total` + `left` @ `right`, accumulated in float32 if their dtype is narrower; cast back to
    it after the last one.
    """
    narrow = left.dtype.itemsize < 4
    if narrow and left.device.type == "cuda" and not (total is None and last):
        # Added by the product itself, which rounds nothing and takes two thirds of the time.
        if total is None:
            total = left.new_zeros(left.shape[0], right.shape[1], dtype=torch.float32)
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return total.to(left.dtype) if last else total
    if total is None:
        product = left @ right
        return product.float() if narrow and not last else product
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    total += left @ right
    return total.to(left.dtype) if last else total
