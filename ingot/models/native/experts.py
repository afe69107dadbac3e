"""Mixtures of experts (Shazeer et al. 2017) in the place of a layer's feed-forward, of which each
token takes a few. No token is ever dropped.

Rows are sorted by expert, multiplied group by group, put back in their slots, and the slots of a
row are added in the order of its choices: what a row becomes depends neither on the rows beside it
nor on the rank that an expert is on, as far as the device's products of matrices do not.
Shapes: R rows (tokens), D model, N experts, k of them for a row, F width of an expert, S = R * k
slots; slot r * k + j is the j-th choice of row r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.config.models.experts import ExpertsConfig
from ingot.models.native.config import ACTIVATIONS, DecoderConfig

ALIGNED_BYTES = 16
"""Rows of every matrix of a grouped product must be a multiple of this."""
SMALLEST_SUM = 1e-20


ToLocal = Callable[[Tensor], Tensor]
"""What this rank computes with of a parameter that a wrapper may have spread over ranks, as a plain
tensor.
"""


def whole(weights: Tensor) -> Tensor:
    """The `ToLocal` of a parameter of one process."""
    return weights


class RouterSums(NamedTuple):
    """What the router of one layer did with the tokens of a micro-batch."""

    counts: Tensor
    """How often each expert was chosen, int64 `[N]`."""
    sums: Tensor
    """Sums over tokens, float32 `[3]`: the entropy of the scores in nats, the auxiliary loss and
    the z-loss, both without their coefficients."""


@dataclass(frozen=True)
class Routing:
    """What the routers of one micro-batch in training are told.

    A sequence is a document, or the piece of one, in a row. Padding belongs to none: it is routed,
    but neither counted nor learnt from.
    """

    sequences: Tensor
    """The number of each token's sequence, int64 `[R]`; that of the last bin for padding."""
    lengths: Tensor
    """Tokens of each sequence, over all ranks that have a part of it, float32 `[Q + 1]`."""
    aux: float = 0.0
    z: float = 0.0
    """The factors of the two losses beside the objective's sum."""
    over_parts: Callable[[Tensor], Tensor] | None = None
    """The sum over the ranks that share rows; None if each has whole ones."""
    layers: dict[int, LayerRouting] = field(default_factory=dict)
    """What the routers of the layers leave."""

    def of(self, layer: int) -> LayerRouting:
        """For the router of this layer."""
        return self.layers.setdefault(layer, LayerRouting(self))


class LayerRouting:
    """What the router of one layer leaves: an object for each, so that the compiler sees no number
    of a layer and equal layers are compiled once. No dataclass: FSDP would search those among the
    arguments of a layer, and what they refer to.
    """

    def __init__(self, told: Routing) -> None:
        self.told = told
        self.found: RouterSums | None = None
        """A layer that is recomputed leaves the same once more."""

    def learnt(self, logits: Tensor, scores: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The `weights` `[R, k]`, such that a gradient of them brings that of the router's own
        losses with it; logits and scores `[R, N]`.

        For a sequence of T tokens the auxiliary loss is T times the sum over experts of f_i P_i
        (DeepSeek-V3, equations 17 to 20): f_i, without gradient, is the share of its choices that
        fell on expert i, times N, and P_i the mean of its normalised scores. Choices count as they
        were made, with correction and groups; in the paper it is the k best scores without. The
        z-loss of a token is the square of the log of the sum of its exponentiated logits (Zoph et
        al. 2022).
        """
        told, experts, k = self.told, scores.shape[1], chosen.shape[1]
        real = told.sequences < len(told.lengths) - 1
        slots = (told.sequences[:, None] * experts + chosen).flatten()
        counts = torch.zeros(len(told.lengths) * experts, dtype=torch.int64, device=slots.device)
        counts = counts.index_add(0, slots, torch.ones_like(slots)).view(-1, experts)  # [Q + 1, N]
        probabilities = scores / scores.sum(dim=-1, keepdim=True)
        entropy = (torch.special.entr(probabilities.detach()).sum(-1) * real).sum()
        aux = z = torch.zeros_like(entropy)
        if told.aux:
            whole = counts if told.over_parts is None else told.over_parts(counts)
            shares = whole * (experts / k) / told.lengths[:, None]
            summed = torch.zeros_like(shares).index_add(0, told.sequences, probabilities)
            aux = (shares * summed)[:-1].sum()
        if told.z:
            z = (logits.logsumexp(dim=-1).square() * real).sum()
        sums = torch.stack((entropy, aux.detach(), z.detach()))
        self.found = RouterSums(counts[:-1].sum(0), sums)
        if told.aux or told.z:
            weights = _Joined.apply(weights, aux * told.aux + z * told.z)  # type: ignore[no-untyped-call]
        return weights


class _Joined(torch.autograd.Function):
    """A tensor that is passed on, and a loss that is added to whatever is made of it: so a layer's
    own loss needs no way to the end of the model, past recomputation and pipeline stages.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


class Router(nn.Module):
    """Chooses the experts of each row, and their weights. Computes in float32 whatever the type of
    the model, since the choice between two near scores hangs on the last bits. `to_local` is
    replaced where ranks have other rows each.
    """

    to_local: ToLocal

    def __init__(self, hidden: int, experts: ExpertsConfig, layer: int) -> None:
        super().__init__()
        self.experts, self.layer, self.is_frozen, self.to_local = experts, layer, False, whole
        self.weight = nn.Parameter(torch.empty(experts.count, hidden))
        self.bias = nn.Parameter(torch.empty(experts.count)) if experts.swiglu else None
        self.e_score_correction_bias: Tensor | None
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(experts.count) if experts.corrected else None
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """The correction bias stays float32 whatever type the model is given: its steps are smaller
        than the spacing of bf16.
        """
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype != torch.float32:
            self.e_score_correction_bias = bias.to(moved.device)
        return self

    def forward(
        self, x: Tensor, routing: LayerRouting | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x `[R, D]` -> experts int64 `[R, k]`, their weights float32 `[R, k]`, the scores of all
        experts float32 `[R, N]`. `routing`: of these rows in training.
        """
        experts = self.experts
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.to_local(self.bias).float()
            logits = functional.linear(
                x.float(), self.to_local(self.weight).float(), bias
            )  # [R, N]
        scores: Tensor = logits.sigmoid() if experts.score == "sigmoid" else logits.softmax(dim=-1)
        chosen = self._order(scores.detach()).topk(experts.chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if experts.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=SMALLEST_SUM)
        if experts.scale != 1:
            weights = weights * experts.scale
        if routing is not None:
            weights = routing.learnt(logits, scores, chosen, weights)
        return chosen, weights, scores

    def _order(self, scores: Tensor) -> Tensor:
        """What decides which experts are chosen, `[R, N]`: the scores, corrected, and only those of
        the best groups (DeepSeek-V3, section 2.1.2).
        """
        experts = self.experts
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias.float()
        if experts.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (experts.groups, -1))  # [R, G, N / G]
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(experts.groups_chosen, dim=-1).indices
        taken = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device)
        taken = taken.scatter(1, best, True)
        order: Tensor = grouped.masked_fill(~taken[..., None], -torch.inf).flatten(1)
        return order


class ExpertExchange(Protocol):
    """Takes rows to the ranks that have their experts, and back."""

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """rows `[S, D]`, sorted by expert, counts int64 `[N]` of rows for each expert -> the rows
        of all ranks for this rank's experts `[S', D]`, sorted by expert and then by the rank that
        they come from, and their counts int64 `[local N]`.
        """
        ...

    def combine(self, rows: Tensor) -> Tensor:
        """What the experts made of the rows of the last `dispatch`, `[S', D]` -> `[S, D]`, in the
        order that `dispatch` was given.
        """
        ...

    def to_local(self, weights: Tensor) -> Tensor:
        """This rank's part `[local N, ...]` of a stacked parameter, as a plain tensor."""
        ...


class Experts(nn.Module):
    """The experts of a layer, stacked: `gate_up_proj` `[N, 2 F, D]` and `down_proj` `[N, D, F]`,
    with biases `[N, 2 F]` and `[N, D]` if the configuration has them.

    `exchange` is set where other ranks have some of the experts; this one then has a part of the
    parameters.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.activation, self.count = ACTIVATIONS[config.activation], experts.count
        hidden, width = config.hidden_size, experts.width
        self.gate_up_proj = nn.Parameter(torch.empty(experts.count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts.count, hidden, width))
        self.swiglu = experts.swiglu
        self.gate_up_proj_bias = self.down_proj_bias = None
        if self.swiglu is not None:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(experts.count, 2 * width))
            self.down_proj_bias = nn.Parameter(torch.empty(experts.count, hidden))
        self.exchange: ExpertExchange | None = None

    @property
    def launches_alike(self) -> bool:
        """Whether a GPU is given the same kernels wherever rows are sent: those of grouped products
        read on the device how many rows each expert has, in bf16; what stands in for them asks.
        """
        matrices = self.gate_up_proj, self.down_proj
        return self.exchange is None and all(
            isinstance(each, Tensor) and each.dtype == torch.bfloat16 and _has_kernel(each, each)
            for each in matrices
        )

    @property
    def gate_and_up(self) -> tuple[slice, slice]:
        """The rows of an expert's `gate_up_proj` that are its gate, and those that are its up, as
        `_multiply` takes them apart.
        """
        if self.swiglu is not None:
            return slice(0, None, 2), slice(1, None, 2)
        width = self.gate_up_proj.shape[1] // 2
        return slice(0, width), slice(width, None)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x `[R, D]`, the experts of each row and their weights `[R, k]` -> `[R, D]`."""
        slots, k = chosen.flatten(), chosen.shape[1]
        order = slots.argsort(stable=True)
        counts = torch.zeros(self.count, dtype=torch.int64, device=x.device)
        counts = counts.index_add(0, slots, torch.ones_like(slots))
        # Expanded before it is sorted, so that backward adds the slots of a row up in their order.
        rows = x[:, None].expand(-1, k, -1).flatten(0, 1).index_select(0, order)  # [S, D]
        if self.exchange is None:
            made = self._multiply(rows, counts)
        else:
            made = self.exchange.combine(self._multiply(*self.exchange.dispatch(rows, counts)))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        by_slot = made.index_select(0, back).unflatten(0, (-1, k))  # [R, k, D]
        total: Tensor = by_slot[:, 0] * weights[:, :1]  # float32, as the weights are
        for slot in range(1, k):
            total = total + by_slot[:, slot] * weights[:, slot : slot + 1]
        return total.to(x.dtype)

    def _multiply(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each row through its expert; rows `[S, D]` are sorted by expert, `counts` `[N]` many."""
        gate_up = self._product(rows, self.gate_up_proj, self.gate_up_proj_bias, counts)
        if self.swiglu is None:
            gate, up = gate_up.chunk(2, dim=-1)
            fed = self.activation(gate) * up
        else:
            fed = clamped_swiglu(gate_up[:, ::2], gate_up[:, 1::2], *self.swiglu)
        return self._product(fed, self.down_proj, self.down_proj_bias, counts)

    def _product(
        self, rows: Tensor, weights: Tensor, bias: Tensor | None, counts: Tensor
    ) -> Tensor:
        """The rows of each expert times its matrix, and its bias."""
        if self.exchange is not None:
            weights = self.exchange.to_local(weights)
            bias = None if bias is None else self.exchange.to_local(bias)
        made = self._grouped(rows, weights, counts)
        if bias is None:
            return made
        expert = torch.arange(len(bias), device=counts.device)
        expert = expert.repeat_interleave(counts, output_size=len(rows))
        return made + bias.index_select(0, expert).to(made.dtype)

    def _grouped(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """The product alone, for kinds that keep their matrices otherwise."""
        return grouped_product(rows, weights, counts)


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation of gpt-oss."""
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * (gate * alpha).sigmoid() * (up + 1)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The next `counts[n]` of `rows` `[S, A]` times `weights[n]` `[B, A]` transposed, for each n ->
    `[S, B]`. The counts must add up to S: what lies beyond would stay uninitialised.
    """
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if _has_kernel(rows, weights):
        offsets = counts.cumsum(0).to(torch.int32)
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=offsets)
    parts = rows.split(counts.tolist())
    return torch.cat(
        [part @ matrix.T for part, matrix in zip(parts, weights.unbind(0), strict=True)]
    )


def _has_kernel(rows: Tensor, weights: Tensor) -> bool:
    """Whether torch has a grouped product for these; a loop gives the same bits."""
    return rows.dtype != torch.float64 and all(
        side * rows.dtype.itemsize % ALIGNED_BYTES == 0 for side in weights.shape[1:]
    )


class SparseMLP(nn.Module):
    """A mixture of experts in the place of a layer's feed-forward, and the expert beside it that
    all tokens share, if there is one. Its parts have the names of transformers' modules.
    """

    def __init__(
        self, config: DecoderConfig, experts: ExpertsConfig, shared: nn.Module | None, layer: int
    ) -> None:
        super().__init__()
        self.gate = Router(config.hidden_size, experts, layer)
        self.experts = Experts(config, experts)
        self.shared_experts = shared

    def forward(self, x: Tensor, routing: LayerRouting | None = None) -> Tensor:
        """x `[B, T, D]` -> `[B, T, D]`."""
        out = self.routed(x, routing)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def routed(self, x: Tensor, routing: LayerRouting | None = None) -> Tensor:
        """The same without the shared expert."""
        rows = x.flatten(0, 1)  # [R, D]
        chosen, weights, _ = self.gate(rows, routing)
        out: Tensor = self.experts(rows, chosen, weights).view(x.shape)
        return out
