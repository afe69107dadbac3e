"""Frozen matrices in few bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): `nf4`, four bits
with a scale for each block of 64 weights, and `int8`, eight bits with a scale for each row.

A matrix is one parameter of bytes, which no wrapper casts and FSDP shards like any other. It is
turned back into numbers when it is used, in forward and again in backward: what is kept for
backward are the bytes. Codes, blocks and scales of nf4 are those of bitsandbytes.
Shapes: O outputs, D inputs of a layer; N blocks of 64 weights of a matrix, row after row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.base.errors import WrongInput, one_line
from ingot.base.progress import say
from ingot.config.sections.quantize import Quantize
from ingot.models.device import is_planned, kernel_type
from ingot.models.parameters import fill_normal, local_tensor, shard_slices

BLOCK = 64
"""Weights that share a scale."""
SCALE_BLOCK = 256
"""Scales that share a scale under double quantisation."""
CHUNK_BLOCKS = 2**17
"""Blocks turned into numbers together: what is needed besides the result stays small."""
SMALLEST = 1e-38
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, scaled to [-1, 1] (appendix E of the paper)."""


@dataclass(frozen=True)
class Quantization:
    """How matrices are kept: with `double` the scales of nf4 are in eight bits too."""

    kind: Literal["nf4", "int8"]
    double: bool = False

    @classmethod
    def of(cls, knobs: Quantize) -> Quantization:
        """What a recipe asks for."""
        return cls(knobs.kind, knobs.double)

    def parts(self, rows: int, columns: int) -> dict[str, tuple[torch.dtype, int]]:
        """Type and number of what a matrix `[O, D]` is kept as, in this order; floats first, so
        that they are aligned.
        """
        if self.kind == "int8":
            return {"scales": (torch.float32, rows), "codes": (torch.int8, rows * columns)}
        blocks = -(-rows * columns // BLOCK)
        codes = {"codes": (torch.uint8, blocks * BLOCK // 2)}
        if not self.double:
            return {"scales": (torch.float32, blocks), **codes}
        return {
            "mean": (torch.float32, 1),
            "scales_of_scales": (torch.float32, -(-blocks // SCALE_BLOCK)),
            "scales": (torch.uint8, blocks),
            **codes,
        }

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of a matrix `[O, D]`."""
        return sum(kind.itemsize * count for kind, count in self.parts(rows, columns).values())

    def pack(self, weight: Tensor) -> Tensor:
        """The bytes of a matrix `[O, D]`, on the CPU whatever it was on, so that every device gets
        the same ones. Raises ValueError if a weight is not finite.
        """
        flat = weight.detach().cpu().float().contiguous()
        if self.kind == "int8":
            largest = _finite(flat.abs().amax(dim=1))  # [O]
            scales = largest / 127
            scaled = flat / scales.clamp(min=SMALLEST)[:, None]
            made = {"scales": scales, "codes": scaled.round_().clamp_(-127, 127).to(torch.int8)}
        else:
            made = self._pack_blocks(flat.view(-1))
        return torch.cat([made[name].reshape(-1).view(torch.uint8) for name in self.parts(1, 1)])

    def _pack_blocks(self, flat: Tensor) -> dict[str, Tensor]:
        blocks = functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)  # [N, 64]
        scales = _finite(blocks.abs().amax(dim=1))
        codes = torch.cat(
            [
                _nearest(part, scale, _nf4_values(flat.device)).to(torch.uint8)
                for part, scale in zip(
                    blocks.split(CHUNK_BLOCKS), scales.split(CHUNK_BLOCKS), strict=True
                )
            ]
        )
        made = {"scales": scales, "codes": codes[:, ::2] << 4 | codes[:, 1::2]}
        if self.double:
            # In float64: a sum in float32 would depend on the number of threads.
            mean = scales.double().mean().float()
            off = functional.pad(scales - mean, (0, -len(scales) % SCALE_BLOCK))
            off = off.view(-1, SCALE_BLOCK)
            largest = off.abs().amax(dim=1)
            small = _nearest(off, largest, dynamic_values(flat.device)).to(torch.uint8)
            made |= {
                "mean": mean,
                "scales_of_scales": largest,
                "scales": small.view(-1)[: len(scales)].contiguous(),
            }
        return made

    def unpack(self, data: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The matrix `[O, D]` that the bytes stand for, computed in float32 and rounded to
        `dtype`.
        """
        parts = self.parts(rows, columns)
        sizes = [kind.itemsize * count for kind, count in parts.values()]
        held = {
            name: piece.view(kind)
            for (name, (kind, _)), piece in zip(parts.items(), data.split(sizes), strict=True)
        }
        scales, codes = held["scales"], held["codes"]
        if self.kind == "int8":
            whole: Tensor = codes.view(rows, columns) * scales[:, None]
            return whole.to(dtype)
        if self.double:
            scales = functional.embedding(scales.int(), dynamic_values(data.device)[:, None])
            wide = held["scales_of_scales"].repeat_interleave(SCALE_BLOCK)[: len(scales)]
            scales = scales.view(-1) * wide + held["mean"]
        made = _in_one_kernel(codes.view(-1, BLOCK // 2), scales, dtype)
        return made.view(-1)[: rows * columns].view(rows, columns)

    def rounded(self, weight: Tensor) -> Tensor:
        """What is left of a matrix `[O, D]`, in its own dtype and on its own device."""
        rows, columns = weight.shape
        return self.unpack(self.pack(weight), rows, columns, torch.float32).to(weight)


def _finite(scales: Tensor) -> Tensor:
    if not bool(scales.isfinite().all()):
        raise ValueError("a weight is not finite")
    return scales


def _nearest(values: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
    """The place of the code nearest to each value over its row's scale; values `[R, C]`."""
    scaled = (values * (1 / scales.clamp(min=SMALLEST))[:, None]).clamp_(-1, 1)
    return torch.bucketize(scaled, (codes[:-1] + codes[1:]) / 2, out_int32=True)


@cache
def _nf4_values(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


@cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """The two weights of each byte `[256, 2]`, the first in its upper four bits."""
    return torch.tensor(list(itertools.product(NF4, NF4)), device=device)


def _blocks(codes: Tensor, scales: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights `[N, 64]` of bytes `[N, 32]` and scales `[N]`; `pairs` as `_nf4_pairs`."""
    # Sizes that never differ are written out: a kernel divides by them, which takes its time.
    codes, pairs = codes.view(-1, BLOCK // 2), pairs.view(256, 2)
    values = functional.embedding(codes.int(), pairs)  # [N, 32, 2]
    return (values.view(-1, BLOCK) * scales[:, None]).to(dtype)


def _in_chunks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`_blocks`, some at a time."""
    made, pairs = codes.new_empty(len(scales), BLOCK, dtype=dtype), _nf4_pairs(codes.device)
    pieces = (each.split(CHUNK_BLOCKS) for each in (codes, scales, made))
    for part, scale, place in zip(*pieces, strict=True):
        place.copy_(_blocks(part, scale, pairs, torch.float32))
    return made


def _in_one_kernel(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`_blocks`; on a GPU in one kernel, which reads and writes a tenth of what the operators do
    one by one.
    """
    if is_planned() and kernel_type(codes.device) == "cuda":  # reads and writes as much
        return codes[..., None].expand(-1, -1, 2).to(dtype).view(-1, BLOCK)
    compiled = compiled_blocks(codes.device) if codes.device.type == "cuda" else None
    if compiled is None:
        return _in_chunks(codes, scales, dtype)
    return compiled(codes, scales, _nf4_pairs(codes.device), dtype)


@cache
def compiled_blocks(device: torch.device) -> Callable[..., Tensor] | None:
    """`_blocks` compiled; None, which is told, where it cannot be or gives other numbers."""
    compiled: Callable[..., Tensor] = torch.compile(_blocks, dynamic=True)
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(3).view(-1, BLOCK // 2)
    scales = torch.linspace(1e-3, 3.0, len(codes), device=device)
    try:
        if all(
            torch.equal(
                compiled(codes, scales, _nf4_pairs(device), dtype),
                _in_chunks(codes, scales, dtype),
            )
            for dtype in (torch.bfloat16, torch.float32)
        ):
            return compiled
        why = "it gives other numbers"
    except Exception as error:  # whatever a compiler may lack
        why = one_line(error, 120)
    say(
        f"nf4 matrices cannot be turned into numbers by one kernel here ({why}); they are, one"
        " operation at a time, which takes longer"
    )
    return None


@cache
def dynamic_values(device: torch.device) -> Tensor:
    """The 256 codes of the dynamic data type (Dettmers 2015, arXiv 1511.04561): 0, 1, and for each
    power of ten from -6 to 0 twice as many magnitudes as for the one below, of both signs.
    """
    magnitudes: list[float] = []
    for power in range(-6, 1):
        bounds = torch.linspace(0.1, 1, 2 ** (power + 6) + 1, dtype=torch.float32)
        magnitudes += (10**power * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
    return torch.tensor(
        sorted([*magnitudes, *(-one for one in magnitudes), 0.0, 1.0]), device=device
    )


def make_tables(device: torch.device) -> None:
    """Make the tables of codes, which are kept: before a plan, in which what is made has no
    contents, and would be kept so for the training after it.
    """
    for table in (_nf4_values, _nf4_pairs, dynamic_values):
        table(device)


class _Product(torch.autograd.Function):
    """`x W^T + b` with the matrix that bytes stand for, which is made anew for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, data: Tensor, bias: Tensor | None, matrix: PackedMatrix
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.matrix, ctx.dtypes = matrix, (x.dtype, dtype)
        ctx.save_for_backward(data)
        return functional.linear(x, matrix.unpacked(dtype, data), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (data,), (wanted, dtype) = ctx.saved_tensors, ctx.dtypes
        found = grad.flatten(0, -2).mm(ctx.matrix.unpacked(dtype, data))
        return found.view(*grad.shape[:-1], -1).to(wanted), None, None, None


class PackedMatrix(nn.Module):
    """A frozen matrix `[O, D]` as bytes."""

    def __init__(
        self, rows: int, columns: int, quantization: Quantization, device: torch.device
    ) -> None:
        super().__init__()
        self.rows, self.columns, self.quantization = rows, columns, quantization
        self.packed = nn.Parameter(
            torch.empty(quantization.bytes_of(rows, columns), dtype=torch.uint8, device=device),
            requires_grad=False,
        )

    @torch.no_grad()
    def fill(self, weight: Tensor, name: str) -> None:
        """Quantise a matrix `[O, D]` into this rank's share of the bytes. Raises WrongInput, with
        the `name` of the matrix, if a weight is not finite.
        """
        try:
            data = self.quantization.pack(weight)
        except ValueError as error:
            raise WrongInput(
                f"model.quantize {self.quantization.kind}: {name} cannot be quantised, {error};"
                " fetch the model again"
            ) from None
        local_tensor(self.packed).copy_(data[shard_slices(self.packed)])

    def unpacked(self, dtype: torch.dtype, data: Tensor | None = None) -> Tensor:
        """The matrix in `dtype`; `data` are its bytes, if they are at hand."""
        data = self.packed.detach() if data is None else data
        return self.quantization.unpack(data, self.rows, self.columns, dtype)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x `[..., D]` -> `[..., O]`, in the type of x, or that of autocast."""
        out: Tensor = _Product.apply(x, self.packed, bias, self)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class MatrixForm:
    """In the place of a matrix that is kept as bytes, for code that asks for its form. No tensor:
    torch refuses to compute with it, and takes one on `meta` for numbers on a CPU (2.13).
    """

    shape: tuple[int, int]
    dtype: torch.dtype = torch.float32


class QuantizedLinear(nn.Linear):
    """A linear layer whose matrix is kept as bytes, in `base`; made of one by `quantize_linear`."""

    base: PackedMatrix

    @property
    def weight(self) -> MatrixForm:  # type: ignore[override]
        return MatrixForm((self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x, self.bias)
        return out


def quantize_linear(
    layer: nn.Linear, kind: type[QuantizedLinear], quantization: Quantization, name: str
) -> None:
    """Turn a layer in place into one of class `kind`, which adds nothing to the layer's own class
    but this; its matrix is quantised, unless it is on `meta` and comes later.
    """
    weight = layer.weight
    base = PackedMatrix(layer.out_features, layer.in_features, quantization, weight.device)
    if not weight.is_meta:
        base.fill(weight, f"{name}.weight")
    del layer.weight
    layer.__class__ = kind
    layer.base = base


def packed_matrices(model: nn.Module) -> dict[str, PackedMatrix]:
    """The matrices kept as bytes, by the names that they have in files."""
    return {
        f"{name}.weight": module.base
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def init_packed(model: nn.Module, seed: int, std: float) -> None:
    """Fill every matrix with what `init_weights` would draw for it, one at a time."""
    for name, matrix in packed_matrices(model).items():
        weight = torch.empty(matrix.rows, matrix.columns)
        fill_normal(weight, seed, name, std)
        matrix.fill(weight, name)
