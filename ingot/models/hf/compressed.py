"""Matrices in the `compressed-tensors` format of vLLM and llm-compressor: integers of four or eight
bits with a scale for each group of a row, or for each row; written, and read as the numbers that
they stand for.

In files a matrix `[O, D]` is `weight_packed` int32 `[O, ceil(D bits / 32)]`, the first numbers in
the lowest bits, each moved by 2^(bits - 1), beside `weight_scale` `[O, D / group]` and
`weight_shape`; or, where products are of integers, `weight` int8 and `weight_scale` `[O, 1]`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ingot.base.errors import WrongInput

METHOD = "compressed-tensors"
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
"""What follows `weight` in the names of a matrix's tensors."""
PACKED_FORMAT, INTEGER_FORMAT = "pack-quantized", "int-quantized"
WORD = 32
"""Bits of the integers that numbers are packed into."""

SchemeName = Literal["w4a16", "w8a16", "w8a8"]
GROUPS = (128, 64, 32)
"""Sizes of the groups of a row that vLLM has kernels for, the usual one first."""


@dataclass(frozen=True)
class Scheme:
    """How matrices are kept: `bits` of a number, the columns that share a scale (None: a whole
    row), and whether vLLM computes with inputs in eight bits too, a scale for each token.
    """

    bits: int
    group: int | None
    integer_inputs: bool = False

    @property
    def format(self) -> str:
        return INTEGER_FORMAT if self.integer_inputs else PACKED_FORMAT

    def quantised(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A matrix `[O, D]` as integers int8 `[O, D]` and scales `[O, D / group]` of `dtype`.

        A scale is the largest magnitude over half the range of the integers; a number becomes the
        nearest multiple of the scale as it is stored. Raises ValueError if a weight is not finite,
        or too large for a scale of `dtype`.
        """
        rows, columns = weight.shape
        blocks = weight.detach().float().view(rows, -1, self.group or columns)
        scales = (blocks.abs().amax(dim=-1) / ((2**self.bits - 1) / 2)).to(dtype)
        if not bool(scales.isfinite().all()):
            raise ValueError("a weight is not finite")
        scales = scales.clamp(min=torch.finfo(dtype).tiny)
        most = 1 << (self.bits - 1)
        codes = (blocks / scales.float()[..., None]).round().clamp(-most, most - 1)
        return codes.to(torch.int8).view(rows, columns), scales

    def config(self, ignore: Collection[str]) -> dict[str, Any]:
        """`quantization_config` of `config.json`; `ignore`: linear layers that are not
        quantised.
        """
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "dynamic": False,
        }
        inputs = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs if self.integer_inputs else None,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": METHOD,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted(ignore),
            "kv_cache_scheme": None,
        }


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme | None:
    """The scheme that a `config.json` tells; None for files of another kind.

    Raises:
        WrongInput: compressed-tensors of a kind that is not read here.
    """
    told = config.get("quantization_config")
    if not isinstance(told, Mapping) or told.get("quant_method") != METHOD:
        return None
    groups = list((told.get("config_groups") or {}).values())
    weights = groups[0].get("weights") or {} if len(groups) == 1 else {}
    inputs = groups[0].get("input_activations") if groups else None
    bits, group, strategy = (weights.get(key) for key in ("num_bits", "group_size", "strategy"))
    plain = (
        weights.get("type") == "int"
        and weights.get("symmetric")
        and not weights.get("actorder")
        and bits in (4, 8)
        and (strategy == "channel" or (strategy == "group" and group))
        and told.get("format") == (PACKED_FORMAT if inputs is None else INTEGER_FORMAT)
    )
    if not plain or told.get("kv_cache_scheme") or told.get("transform_config"):
        raise WrongInput(
            f"{where}: compressed-tensors of this kind are not read, only symmetric integers of"
            " four or eight bits in groups or by rows; take the model that they were made from"
        )
    return Scheme(bits or 8, group if strategy == "group" else None, inputs is not None)


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """The matrix `[O, D]` that integers and scales `[O, D / group]` stand for, in the scales'
    type.
    """
    blocks = codes.to(scales.dtype).view(len(codes), scales.shape[1], -1)
    found: Tensor = (blocks * scales[..., None]).view(codes.shape)
    return found


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers int8 `[O, D]` of `bits` (4 or 8) -> int32 `[O, ceil(D bits / 32)]`."""
    per = WORD // bits
    rows, columns = codes.shape
    words = math.ceil(columns / per)
    moved = torch.zeros(rows, words * per, dtype=torch.int64)
    moved[:, :columns] = codes.long() + (1 << (bits - 1))
    shifts = torch.arange(per) * bits
    whole = (moved.view(rows, words, per) << shifts).sum(dim=-1)
    return (whole - (whole >> (WORD - 1) << WORD)).to(torch.int32)  # as a signed integer


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack`."""
    shifts = torch.arange(WORD // bits, dtype=torch.int32) * bits
    moved: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return (moved.flatten(-2)[:, :columns] - (1 << (bits - 1))).to(torch.int8)


class CompressedMatrix:
    """A matrix in compressed-tensors as the numbers `[O, D]` that it stands for; only the rows that
    are asked for are read. Takes the place of a slice of a safetensors file.
    """

    def __init__(self, name: str, places: Mapping[str, tuple[Path, Any]]) -> None:
        """`places`: each stored tensor's file and reader; `name`: the matrix's."""
        self._packed = name + PACKED in places
        names = (
            [name + PACKED, name + SCALE, name + SHAPE] if self._packed else [name, name + SCALE]
        )
        self.parts = {each: (places[each][0], places[each][1].get_slice(each)) for each in names}
        """The tensors that it is made of, with their files."""
        slices = [there for _, there in self.parts.values()]
        self._codes, self._scales = slices[:2]
        self._shape = slices[2][:].tolist() if self._packed else list(self._codes.get_shape())

    def get_shape(self) -> list[int]:
        """`[O, D]`."""
        return self._shape

    def __getitem__(self, wanted: slice | tuple[slice, ...]) -> Tensor:
        rows, columns = (*(wanted if isinstance(wanted, tuple) else (wanted,)), slice(None))[:2]
        codes, scales = self._codes[rows], self._scales[rows]
        width, bits = self._shape[1], 8
        if self._packed:
            bits = 4 if codes.shape[1] == math.ceil(width / 8) else 8
            codes = unpack(codes, bits, width)
        found: Tensor = values(codes, scales)[:, columns]
        return found


def matrix_of(name: str, known: Collection[str]) -> str | None:
    """The name of the matrix in compressed-tensors that a stored tensor is a part of, among tensors
    of the names `known`; None for other tensors.
    """
    for ending in (PACKED, SCALE, SHAPE, ""):
        own = name.removesuffix(ending)
        if own.endswith(".weight") and own + SCALE in known:
            return own
    return None
