"""`ingot export --format compressed-tensors`: a model folder whose matrices are integers of four or
eight bits, which vLLM and transformers read; each rounded to the nearest, without data. What was
written is read back by way of `load_model` and compared before the folder takes its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.base.errors import Failed, WrongInput
from ingot.checkpoints.export import DTYPES, ExportType, copy_model
from ingot.config.models.experts import CORRECTION
from ingot.models.adapters.lora import linear_layers
from ingot.models.hf.compressed import (
    GROUPS,
    PACKED,
    SCALE,
    SHAPE,
    Scheme,
    SchemeName,
    pack,
    values,
)
from ingot.models.hf.content import digest
from ingot.models.hf.folder import load_model
from ingot.models.hf.tensor_names import expert_pieces, stored_name
from ingot.models.hf.tensorfile import TensorSpec
from ingot.models.kinds import AnyModel, exported_shapes, exported_weights, model_shapes
from ingot.models.native.decoder import Decoder
from ingot.models.native.experts import Router

KINDS: tuple[SchemeName, ...] = ("w4a16", "w8a16", "w8a8")
"""Bits of weights and of the inputs of products, as llm-compressor names them."""
COMPRESSED = "compressed"
"""The key in `ingot.json` of what was quantised and how far it is from the original."""
ROWS = 8
"""The rows of a matrix are a multiple of it in every kernel of vLLM."""

Measure = Callable[[AnyModel], float]


@dataclass(frozen=True)
class Difference:
    """How far a model in few bits is from its original."""

    matrices: int
    relative: float
    """The norm of the difference of all its matrices, relative to the norm of the originals."""
    worst: str
    """The matrix that is furthest, and by how much."""
    worst_relative: float
    loss: tuple[float, float] | None
    """The held-out loss before and after, in nats a token; None if it was not measured."""


def export_compressed(
    source: Path,
    target: Path,
    kind: str,
    *,
    overwrite: bool,
    measure: Measure | None = None,
) -> tuple[dict[str, Any], Difference]:
    """Write the model in `source` (an adapter merged) to the folder `target`, every linear layer
    but the head in few bits; returns the contents of its `ingot.json` and the difference.
    `measure`: the held-out loss of a model, taken before and after.

    Raises:
        WrongInput: `target` exists, the kind is unknown, or vLLM has no such matrices.
        Failed: what was read back differs.
    """
    if kind not in KINDS:
        raise WrongInput(f"--type {kind} is not known; it is one of {', '.join(KINDS)}")
    made: list[CompressedEncoding] = []

    def encode(model: AnyModel, export_type: ExportType) -> CompressedEncoding:
        if not isinstance(model, Decoder):
            raise WrongInput(
                f"{source}: only decoders are written as compressed-tensors; export it with"
                " --format hf"
            )
        made.append(CompressedEncoding(model, kind, DTYPES[export_type], str(source), measure))
        return made[0]

    lineage = copy_model(source, target, overwrite=overwrite, encode=encode)
    assert made[0].difference is not None
    return lineage, made[0].difference


class CompressedEncoding:
    """The tensors of a decoder's files in compressed-tensors, and the comparison of what is read
    back with what was to be written.
    """

    def __init__(
        self,
        model: Decoder,
        kind: str,
        dtype: torch.dtype,
        where: str,
        measure: Measure | None = None,
    ) -> None:
        self._dtype, self._where, self._measure = dtype, where, measure
        self._kind = kind
        self._matrices = _matrices(model, where)
        self._shapes = exported_shapes(model)
        self.scheme = _scheme(kind, {name: self._shapes[name] for name in self._matrices}, where)
        self.config = {"quantization_config": self.scheme.config(_kept(model))}
        self._wanted: dict[str, str] = {}
        """Hashes of the numbers that the written tensors stand for."""
        self._errors: dict[str, tuple[float, float]] = {}
        """Squared norms of each matrix's difference, and of the matrix."""
        self._before = None if measure is None else measure(model)
        self.difference: Difference | None = None

    def forms(self, plain: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The shapes of matrices first, as integers of eight bytes must."""
        packed = not self.scheme.integer_inputs
        forms = {name + SHAPE: TensorSpec((2,), torch.int64) for name in self._matrices if packed}
        for name, form in plain.items():
            if name not in self._matrices:
                forms[name] = form
                continue
            rows, columns = form.shape
            groups = 1 if self.scheme.group is None else columns // self.scheme.group
            if packed:
                words = columns * self.scheme.bits // 32
                forms[name + PACKED] = TensorSpec((rows, words), torch.int32)
            else:
                forms[name] = TensorSpec((rows, columns), torch.int8)
            forms[name + SCALE] = TensorSpec((rows, groups), self._dtype)
        return forms

    def tensors(self, plain: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        packed = not self.scheme.integer_inputs
        if packed:
            for name in self._matrices:
                yield name + SHAPE, torch.tensor(self._shapes[name])
        for name, tensor in plain:
            if name not in self._matrices:
                kept = tensor.detach().to("cpu")
                self._wanted[name] = digest(kept.to(self._form_dtype(name)).float())
                yield name, tensor
                continue
            matrix = tensor.detach().to("cpu", torch.float32)
            try:
                codes, scales = self.scheme.quantised(matrix, self._dtype)
            except ValueError as error:
                raise WrongInput(
                    f"{self._where}: {name} cannot be written in {self.scheme.bits} bits, {error};"
                    " fetch the model again"
                ) from None
            found = values(codes, scales).float()
            self._wanted[name] = digest(found)
            gap, size = (found - matrix).double().square().sum(), matrix.double().square().sum()
            self._errors[name] = (float(gap), float(size))
            yield (
                name + (PACKED if packed else ""),
                pack(codes, self.scheme.bits) if packed else codes,
            )
            yield name + SCALE, scales

    def _form_dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name.endswith(CORRECTION) else self._dtype

    def check(self, folder: Path) -> dict[str, Any]:
        """Open the folder as every verb does, and compare each number."""
        model = load_model(folder, device=torch.device("cpu"), check=False)
        found = {name: digest(tensor.float()) for name, tensor in exported_weights(model)}
        if wrong := sorted(
            name for name in self._wanted | found if self._wanted.get(name) != found.get(name)
        ):
            raise Failed(
                f"{folder}: {wrong[0]} is not in the files as it was to be; export it again"
            )
        gap, size = (sum(column) for column in zip(*self._errors.values(), strict=True))
        relative = {
            name: (one / max(whole, 1e-300)) ** 0.5 for name, (one, whole) in self._errors.items()
        }
        worst = max(relative, key=lambda name: relative[name])
        loss = None
        if self._measure is not None and self._before is not None:
            loss = (self._before, self._measure(model))
        self.difference = Difference(
            len(self._errors), (gap / max(size, 1e-300)) ** 0.5, worst, relative[worst], loss
        )
        return {COMPRESSED: self._record(self.difference)}

    def _record(self, difference: Difference) -> dict[str, Any]:
        record: dict[str, Any] = {
            "format": self.scheme.format,
            "type": self._kind,
            "group": self.scheme.group,
            "method": "round to nearest",
            "matrices": difference.matrices,
            "relative_difference": difference.relative,
            "furthest": {difference.worst: difference.worst_relative},
        }
        if difference.loss is not None:
            record["held_out_loss"] = dict(zip(("before", "after"), difference.loss, strict=True))
        return record


def _matrices(model: Decoder, where: str) -> list[str]:
    """The names in files of the matrices that are quantised: linear layers and experts."""
    config = model.config
    if config.experts is not None and config.experts.swiglu is not None:
        raise WrongInput(
            f"{where}: the experts of `{config.source['model_type']}` lie in one tensor a layer,"
            " for which compressed-tensors has no names; export it with --format hf"
        )
    shapes = model_shapes(model)
    found = dict.fromkeys(
        stored_name(f"{name}.weight", config.fused) for name in linear_layers(model)
    )
    for name, shape in shapes.items():
        found |= dict.fromkeys(stored for stored, _ in expert_pieces(name, shape, config.experts))
    return list(found)


def _kept(model: Decoder) -> list[str]:
    """The modules that are linear layers elsewhere and are not quantised: head and routers."""
    routers = (name for name, module in model.named_modules() if isinstance(module, Router))
    return ["lm_head", *(stored_name(name, model.config.fused) for name in routers)]


def _scheme(kind: str, shapes: Mapping[str, tuple[int, ...]], where: str) -> Scheme:
    """The scheme of a kind, with the largest size of groups that divides every matrix."""
    for name, (rows, columns) in shapes.items():
        if rows % ROWS or columns % GROUPS[-1]:
            raise WrongInput(
                f"{where}: {name} is {rows} x {columns}, and vLLM has no products of integers with"
                f" matrices whose rows are no multiple of {ROWS} or columns of {GROUPS[-1]};"
                " export it with --format hf"
            )
    if kind != "w4a16":
        return Scheme(8, None, integer_inputs=kind == "w8a8")
    group = next(
        size for size in GROUPS if all(columns % size == 0 for _, columns in shapes.values())
    )
    return Scheme(4, group)
