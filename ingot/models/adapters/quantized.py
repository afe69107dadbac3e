"""Low-rank adapters beside a base in few bits (QLoRA): which layers are quantised, and what such a
model is merged into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ingot.base.errors import WrongInput
from ingot.config.sections.quantize import Quantize
from ingot.models.adapters.layer import LoRALinear
from ingot.models.adapters.lora import hf_module, linear_layers
from ingot.models.native.experts import Experts
from ingot.models.quantized import Quantization, QuantizedLinear, quantize_linear
from ingot.models.quantized_experts import STACKS, quantize_experts


class QuantizedLoRALinear(QuantizedLinear, LoRALinear):
    """An adapted layer whose own matrix is kept as bytes."""

    def base_product(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x, self.bias)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return LoRALinear.forward(self, x)

    def merged(self, weight: Tensor | None = None) -> Tensor:
        return super().merged(self.base.unpacked(torch.float32) if weight is None else weight)


_KINDS: dict[type[nn.Linear], type[QuantizedLinear]] = {
    nn.Linear: QuantizedLinear,
    LoRALinear: QuantizedLoRALinear,
}


def quantize_base(model: nn.Module, knobs: Quantize) -> None:
    """Quantise the matrices of all linear layers but the head, adapted or not, and of a mixture's
    experts, of a model that has its adapter: one at a time, in place; those on `meta` when they
    are loaded.

    Raises:
        WrongInput: a kind of layer that cannot be quantised, or a weight that is not finite.
    """
    inner, how = hf_module(model), Quantization.of(knobs)
    for name, experts in _mixtures(model).items():
        quantize_experts(experts, how, name)
    for name in linear_layers(model):
        layer = inner.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if type(layer) not in _KINDS:
            raise WrongInput(
                f"model.quantize {knobs.kind}: {name} is a {type(layer).__name__}, which is not"
                " quantised; set model.quantize to null"
            )
        quantize_linear(layer, _KINDS[type(layer)], how, name)


@torch.no_grad()
def round_base(model: nn.Module, knobs: Quantize) -> None:
    """Set the matrices that `quantize_base` would quantise to the numbers that their bytes stand
    for, in place: the whole model that a training with `model.quantize` computes with.
    """
    how = Quantization.of(knobs)
    for name in linear_layers(model):
        weight = hf_module(model).get_parameter(f"{name}.weight")
        weight.copy_(how.rounded(weight))
    for name in _stack_names(model):
        for matrix in hf_module(model).get_parameter(name):
            matrix.copy_(how.rounded(matrix))


def rounded_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], knobs: Quantize
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a base by their names, its matrices as `round_base` leaves them."""
    how, names = Quantization.of(knobs), {f"{name}.weight" for name in linear_layers(model)}
    stacks = _stack_names(model)
    for name, tensor in tensors:
        if name in stacks:
            yield name, torch.stack([how.rounded(matrix.float()) for matrix in tensor])
        else:
            yield name, how.rounded(tensor.float()) if name in names else tensor


def _mixtures(model: nn.Module) -> dict[str, Experts]:
    """The experts of each layer by name; empty for a model without."""
    named = hf_module(model).named_modules()
    return {name: module for name, module in named if isinstance(module, Experts)}


def _stack_names(model: nn.Module) -> set[str]:
    return {f"{name}.{leaf}" for name in _mixtures(model) for leaf in STACKS}
