"""An adapted linear layer: LoRA, with another scale rsLoRA, with trained row norms DoRA; and what
the adapted layers of a model share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.models.keyed import keep_mask, row_keys, signed_hash
from ingot.models.parameters import is_dtensor, local_tensor, shard_slices, whole_sum

LoraKind = Literal["lora", "rslora", "dora"]
FirstMatrices = Literal["kaiming", "gaussian"]


class LoRASize(NamedTuple):
    """The adaptation of one layer: the inner size of the product, and its scale."""

    rank: int
    scale: float

    @classmethod
    def of(cls, kind: LoraKind, rank: int, alpha: float) -> LoRASize:
        """alpha / rank; of rsLoRA alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""
        return cls(rank, alpha / rank**0.5 if kind == "rslora" else alpha / rank)

    def alpha(self, kind: LoraKind) -> float:
        """The alpha that gives this scale, without rounding errors."""
        exact = float(f"{self.scale * (self.rank**0.5 if kind == 'rslora' else self.rank):.12g}")
        return int(exact) if exact.is_integer() else exact


class LoRAState:
    """What the adapted layers of one model share: the kind of adapter, how its first matrices are
    drawn, and the dropout masks in training.

    The masks are a hash of (seed, step, row, position, layer, feature): independent of the rank or
    micro-batch that a row falls to, and the same when activations are recomputed.
    """

    def __init__(
        self,
        seed: int,
        dropout: float,
        kind: LoraKind = "lora",
        init: FirstMatrices = "kaiming",
    ) -> None:
        self.seed, self.dropout, self.kind, self.init = seed, dropout, kind, init
        self._rows: Tensor | None = None

    def begin_batch(self, step: int, rows: Tensor) -> None:
        """Call before each micro-batch. `rows` int64 `[R]` identifies the rows of one step, for
        example by their number in the split.
        """
        if self.dropout:
            self._rows = row_keys(rows, f"{self.seed}/lora/{step}")

    @property
    def rows(self) -> Tensor | None:
        """The rows of the current batch, hashed; None if `begin_batch` was not called or there is
        no dropout.
        """
        return self._rows

    @contextlib.contextmanager
    def with_rows(self, rows: Tensor | None) -> Iterator[None]:
        """Inside the block, use the remembered `rows` of an earlier batch to recompute it."""
        now, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = now

    def drop(self, x: Tensor, layer: int) -> Tensor:
        """Dropout of x `[R, ..., in]`: a share of its elements is 0, the others are scaled up so
        that the mean stays.

        Without `begin_batch`, or if x does not have one entry per row of the batch (a layer that
        folds rows into another shape), the mask comes from the device's generator instead.
        """
        if not self.dropout:
            return x
        if self._rows is None or x.ndim < 2 or x.shape[0] != self._rows.shape[0]:
            return functional.dropout(x, self.dropout)
        keep = keep_mask(
            self._rows.to(x.device), x.shape[1:-1].numel(), x.shape[-1], layer, self.dropout
        )
        return torch.where(keep.view(x.shape), x, 0.0).mul(1 / (1 - self.dropout))


class LoRALinear(nn.Linear):
    """`x W^T + b + scale * drop(x) A^T B^T`, A `[rank, in]`, B `[out, rank]`, both float32; W and b
    are those of the layer that it replaces.

    DoRA (Liu et al. 2024, arXiv 2402.09353) multiplies each row of W + scale * B A by m / its norm,
    m trained. Here `lora_magnitude` `[out]` is m less the norm of the row of W: it begins with 0,
    so that in any dtype and layout the first output is the base's, bit for bit, and bf16 rounds a
    small change instead of the norm.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude: nn.Parameter

    def __init__(self, base: nn.Linear, name: str, size: LoRASize, state: LoRAState) -> None:
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.scale, self.state = size.rank, size.scale, state
        self.key = signed_hash(name)
        self.base_norms: Tensor | None = None
        shapes: dict[str, tuple[int, ...]] = {
            "lora_A": (size.rank, base.in_features),
            "lora_B": (base.out_features, size.rank),
        }
        if state.kind == "dora":
            shapes["lora_magnitude"] = (base.out_features,)
        for matrix, shape in shapes.items():
            empty = torch.empty(shape, dtype=torch.float32, device=base.weight.device)
            self.register_parameter(matrix, nn.Parameter(empty))
        self.train(base.training)

    @property
    def is_dora(self) -> bool:
        return self.state.kind == "dora"

    def base_product(self, x: Tensor) -> Tensor:
        """The layer's own product, without the adapter."""
        return functional.linear(x, self.weight, self.bias)

    def base_weight(self) -> Tensor:
        """The frozen matrix that the product is with, `[out, in]`."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_product(x)
        dropping = self.training and self.state.dropout > 0
        kept = adapted = self.state.drop(x, self.key) if dropping else x
        if not torch.is_autocast_enabled(x.device.type):
            # A model held in bf16: the products of the adapter stay float32.
            adapted = kept.to(self.lora_A.dtype)
        low = functional.linear(functional.linear(adapted, self.lora_A) * self.scale, self.lora_B)
        if not self.is_dora:
            return (out + low).to(out.dtype)
        # As in PEFT, what the gain adds to the base's output is of the inputs that were kept.
        base = out if self.bias is None else out - self.bias
        if dropping:
            base = functional.linear(kept, self.base_weight())
        return (out + low + (base + low) * (self._gain() - 1)).to(out.dtype)

    def _gain(self) -> Tensor:
        """Each row's magnitude over the norm of its adapted weights, float32 `[out]`. No gradient
        goes through the norms (section 4.3 of the paper).
        """
        with torch.no_grad(), torch.autocast(self.lora_A.device.type, enabled=False):
            base, adapted = self._norms()
        return (self.lora_magnitude.float() + base) / adapted

    def _norms(self) -> tuple[Tensor, Tensor]:
        """The norms of the rows of W and of W + scale * B A, float32 `[out]`; the sum of the two is
        never formed: |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b.

        Where a layer is split by inputs, each rank has partial sums over its columns.
        """
        weight, b = self.base_weight(), self.lora_B.float()
        squares = whole_sum(row_norms(weight)).square()  # [out]
        cross = functional.linear(weight, self.lora_A.to(weight.dtype)).float()  # [out, rank]
        gram = functional.linear(self.lora_A.float(), self.lora_A.float())  # [rank, rank]
        cross, gram = whole_sum(cross), whole_sum(gram)
        adapted = (
            squares
            + 2 * self.scale * (b * cross).sum(1)
            + self.scale**2 * (b * functional.linear(b, gram)).sum(1)
        )
        least = torch.finfo(torch.float32).tiny  # rows of zeros stay zeros
        return squares.sqrt(), adapted.clamp_min(least).sqrt()

    @torch.no_grad()
    def merged(self, weight: Tensor | None = None) -> Tensor:
        """Weight (this layer's, or one read elsewhere) plus the scaled product, with DoRA's norms,
        as one float32 matrix `[out, in]`. Notes the norms of the weight, for `magnitude`.
        """
        base = (self.base_weight() if weight is None else weight).float()
        low, high = self.lora_A.float(), self.lora_B.float()  # bf16 with stochastic rounding
        sum_of_both = torch.addmm(base, high, low, alpha=self.scale)
        if not self.is_dora:
            return sum_of_both
        self.base_norms = _norms_of_all(base)
        least = torch.finfo(torch.float32).tiny
        gain = self.magnitude() / row_norms(sum_of_both).clamp_min(least)
        return sum_of_both * gain[:, None]

    @torch.no_grad()
    def magnitude(self) -> Tensor:
        """DoRA's magnitudes as PEFT has them, float32 `[out]`: the trained changes on the norms of
        the weight, which for a weight on `meta` are those that `merged` noted.
        """
        if not self.weight.is_meta:
            self.base_norms = _norms_of_all(self.weight)
        assert self.base_norms is not None, "merge the layer first: its weight is not here"
        return self.base_norms + self.lora_magnitude.float()

    @torch.no_grad()
    def set_magnitude(self, magnitude: Tensor) -> None:
        """Take over PEFT's magnitudes, `[out]`; this rank's part where ranks share the layer."""
        norms, place = _norms_of_all(self.weight), self.lora_magnitude
        changes = magnitude.to(norms.device, torch.float32) - norms
        local_tensor(place).copy_(changes[shard_slices(place)])


def row_norms(weight: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm of each row of a weight, summed in `dtype`, `[out]`."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=dtype)
    return norms


def _norms_of_all(weight: Tensor) -> Tensor:
    """The norm of each row of a weight that ranks may share, float32 `[out]`, on all of them. It is
    summed in float64, so that every device and layout rounds to the same number.
    """
    if not is_dtensor(weight):
        return row_norms(weight, torch.float64).float()
    here, (rows, _), mesh = local_tensor(weight), shard_slices(weight), weight.device_mesh
    squares = torch.zeros(weight.shape[0], dtype=torch.float64, device=mesh.device_type)
    squares[rows] = row_norms(here, torch.float64).square().to(squares.device)
    for axis, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            torch.distributed.all_reduce(squares, group=mesh.get_group(axis))
    return squares.sqrt().float()
