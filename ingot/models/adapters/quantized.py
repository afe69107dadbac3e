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
    """Quantise the matrices of all linear layers but the head, adapted or not, of a model that has
    its adapter: one at a time, in place; those on `meta` when they are loaded.

    Raises:
        WrongInput: a kind of layer that cannot be quantised, or a weight that is not finite.
    """
    inner, how = hf_module(model), Quantization.of(knobs)
    if any(isinstance(module, Experts) for module in model.modules()):
        raise WrongInput(
            f"model.quantize {knobs.kind} does not reach the experts of a mixture, which are most"
            " of its weights; set model.quantize to null, or take a model without experts"
        )
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


def rounded_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], knobs: Quantize
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a base by their names, its matrices as `round_base` leaves them."""
    how, names = Quantization.of(knobs), {f"{name}.weight" for name in linear_layers(model)}
    for name, tensor in tensors:
        yield name, how.rounded(tensor.float()) if name in names else tensor
