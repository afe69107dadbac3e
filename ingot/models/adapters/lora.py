"""Low-rank adaptation (Hu et al. 2021): a product of two small matrices is trained beside each of
some linear layers; everything else is frozen.

A layer is replaced in place: its weight keeps name and storage, so that loading, export and
wrappers see the model they know. Works on native models and on transformers' (alone or as `.inner`
of a wrapper); layer names are always those of the Hugging Face model. `ingot.models.adapters.peft`
reads and writes adapter folders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ingot.base.errors import WrongInput
from ingot.config.sections.lora import Lora
from ingot.models.adapters.layer import LoRALinear, LoRASize, LoRAState
from ingot.models.hf.models import MaskedLM, TextReader
from ingot.models.hf.tensor_names import (
    LINEAR_FROM_META,
    LORA_A,
    LORA_LEAVES,
    LORA_MAGNITUDE,
    stored_name,
    stored_parts,
)
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import fill_normal, local_tensor, named_weights

_ATTENTION_ALONE = (
    "; of a mixture of experts attention alone is adapted, since PEFT has one product beside all"
    " experts of a layer (target_parameters) and vLLM one beside each"
)
_UNCALLED = ("cls.predictions.dense",)
"""A layer of MobileBERT's head for masked tokens that is used by its weight alone: a product beside
it would never be computed.
"""
_VOCABULARY = "lm_head"  # never adapted: the head is applied in chunks, past its module


def add_lora(model: nn.Module, knobs: Lora, seed: int) -> None:
    """Adapt the layers named by `knobs.targets` and freeze everything else but
    `head_modules`; the model's outputs do not change yet.

    On a model on `meta` the new matrices are on `meta` as well: call `init_adapter` once they are
    allocated.

    Raises:
        WrongInput: a target that matches no linear layer, or a model that has none.
    """
    size, inner = LoRASize.of(knobs.kind, knobs.rank, knobs.alpha), hf_module(model)
    # Layers that only other inputs use are frozen already: an adapter there would never learn.
    targets = [
        name
        for name in target_layers(model, knobs.targets)
        if _linear(inner, name).weight.requires_grad
    ]
    if not targets and inner is not model:
        raise WrongInput(
            f"model.lora: {type(inner).__name__} has no linear layer that can be adapted; set"
            " model.lora=null, or take another model"
        )
    if knobs.kind == "dora":
        _check_whole_modules(model, targets)
    sizes = dict.fromkeys(targets, size)
    state = LoRAState(seed, knobs.dropout, knobs.kind, knobs.init)
    attach_lora(model, sizes, state)


def attach_lora(model: nn.Module, sizes: Mapping[str, LoRASize], state: LoRAState) -> None:
    """Adapt exactly these layers, and freeze everything but them and `head_modules`."""
    inner = hf_module(model)
    if lora_layers(model):
        raise ValueError("this model has an adapter already")
    for name, size in sizes.items():
        inner.set_submodule(name, LoRALinear(_linear(inner, name), name, size, state))
    trained = set(adapter_parameters(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    init_adapter(model, state.seed)


@torch.no_grad()
def init_adapter(model: nn.Module, seed: int) -> None:
    """Set B, and DoRA's changes of magnitudes, to 0, and A to normal values with mean 0, from the
    generator of `ingot.models.parameters`: `kaiming` of variance 1 / (3 * in), that of PEFT's
    uniform A; `gaussian` of standard deviation 1 / rank, as in PEFT.

    Every rank therefore makes the same matrices. Does nothing on `meta`.
    """
    for name, layer in lora_layers(model).items():
        if not layer.lora_A.is_meta:
            uniform = 1 / math.sqrt(3 * layer.in_features)
            std = 1 / layer.rank if layer.state.init == "gaussian" else uniform
            fill_normal(layer.lora_A, seed, f"{name}.{LORA_A}", std)
            for zero in (layer.lora_B, *([layer.lora_magnitude] if layer.is_dora else [])):
                local_tensor(zero).zero_()


def hf_module(model: nn.Module) -> nn.Module:
    """The module that has Hugging Face's names: `.inner` of a wrapper, else the model itself."""
    inner = getattr(model, "inner", model)
    assert isinstance(inner, nn.Module)
    return inner


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers by name; empty without an adapter."""
    return {
        name: module
        for name, module in hf_module(model).named_modules()
        if isinstance(module, LoRALinear)
    }


def lora_state(model: nn.Module) -> LoRAState | None:
    """The state that the adapted layers share; None without an adapter."""
    return next(
        (module.state for module in model.modules() if isinstance(module, LoRALinear)), None
    )


def head_modules(model: nn.Module) -> tuple[str, ...]:
    """The modules that are trained whole (except one that a PEFT folder adapts instead): those of a
    classifier outside its pretrained trunk, and whatever else was drawn at random, since the
    folder that training starts from lacks it. Empty for other models.
    """
    inner, drawn = hf_module(model), model.drawn if isinstance(model, TextReader) else ()
    beside: list[str] = []
    if type(inner).__name__.endswith("ForSequenceClassification"):
        trunk = getattr(inner, "base_model_prefix", "")
        beside = [
            name
            for name, module in inner.named_children()
            if name != trunk and next(module.parameters(), None) is not None
        ]
    return tuple(
        name
        for name in dict.fromkeys((*beside, *drawn))
        if not any(isinstance(part, LoRALinear) for part in inner.get_submodule(name).modules())
    )


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether `name` is that of one of the modules, or of a part of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def linear_layers(model: nn.Module, heads: Iterable[str] | None = None) -> list[str]:
    """The linear layers that can be adapted: all but those of the heads, which are by default the
    vocabulary projection and `head_modules`, and those that are never called.
    """
    kept = {_VOCABULARY, *(head_modules(model) if heads is None else heads)}
    inner = hf_module(model)
    # That of a masked language model has other names, and its weights are the embedding's.
    projection = model.projection if isinstance(model, MaskedLM) else None
    return [
        name
        for name, module in inner.named_modules()
        if isinstance(module, nn.Linear) and not is_within(name, kept) and module is not projection
        if not (isinstance(model, MaskedLM) and name in _UNCALLED)
    ]


def target_layers(model: nn.Module, targets: Literal["all-linear"] | Iterable[str]) -> list[str]:
    """The layers that `targets` name: each target is a layer's name or a dotted suffix of one, or,
    if nothing here has that name, one of Meta's names, or that of the module which holds several
    layers in the family's files.

    Of a mixture of experts only attention is adapted. PEFT takes an adapter of `up_proj` for one of
    the experts, and leaves dense layers and shared experts without it; what it writes for experts,
    one product beside their stacked weights, vLLM does not apply.

    Raises:
        WrongInput: a target that matches nothing.
    """
    config = getattr(model, "config", None)
    linears, fused = linear_layers(model), getattr(config, "fused", {})
    mixture = isinstance(model, Decoder) and model.config.experts is not None
    if mixture:
        linears = [name for name in linears if ".self_attn." in name]
    if targets == "all-linear":
        return linears
    found: set[str] = set()
    for target in targets:
        matches = (
            _ending_in(linears, target)
            or _ending_in(linears, LINEAR_FROM_META.get(target, target))
            or [name for name in linears if _ending_in([stored_name(name, fused)], target)]
        )
        if not matches:
            there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise WrongInput(
                f"model.lora.targets: `{target}` matches no linear layer of this model; choose from"
                f" {there}, or all-linear" + (_ATTENTION_ALONE if mixture else "")
            )
        found.update(matches)
    return [name for name in linears if name in found]


def _check_whole_modules(model: nn.Module, targets: list[str]) -> None:
    """Raises WrongInput if DoRA is to adapt a part of what the family's files hold as one module:
    the adapter's file has magnitudes of all its rows.
    """
    fused = getattr(getattr(model, "config", None), "fused", {})
    for stored, parts in stored_parts(linear_layers(model), fused).items():
        left = [part for part in parts if part not in targets]
        if left and len(left) < len(parts):
            raise WrongInput(
                f"model.lora.targets leaves {left[0]} out, and this family's files hold it with"
                f" others as {stored}, which model.lora.kind dora adapts as one; add it, or set"
                " kind to lora"
            )


def _ending_in(names: Iterable[str], tail: str) -> list[str]:
    return [name for name in names if name == tail or name.endswith("." + tail)]


def _linear(inner: nn.Module, name: str) -> nn.Linear:
    module = inner.get_submodule(name)
    assert isinstance(module, nn.Linear), name
    return module


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters trained under LoRA, by the model's own names: the low-rank matrices, DoRA's
    changes of magnitudes, and `head_modules`.
    """
    prefix = "" if hf_module(model) is model else "inner."
    names = {f"{prefix}{layer}.{matrix}" for layer in lora_layers(model) for matrix in LORA_LEAVES}
    heads = [prefix + head for head in head_modules(model)]
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in names or is_within(name, heads)
    }


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a file has of `adapter_parameters`: DoRA's magnitudes in place of their changes."""
    found: dict[str, Tensor] = {
        name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()
    }
    for name in [name for name in found if name.endswith(LORA_MAGNITUDE)]:
        layer = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(layer, LoRALinear)
        found[name] = layer.magnitude()
    return found


def merged_weights(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model by Hugging Face's names, one at a time, with the low-rank products
    merged in (in float32) and their matrices left out.

    `tensors`: the weights to yield, such as `hf_weights`, or those that a model on `meta` lacks;
    None for all parameters, tied ones once.
    """
    layers = lora_layers(model)
    for name, tensor in named_weights(hf_module(model)) if tensors is None else tensors:
        owner, _, leaf = name.rpartition(".")
        if owner not in layers:
            yield name, tensor.detach()
        elif leaf not in LORA_LEAVES:
            yield name, layers[owner].merged(tensor) if leaf == "weight" else tensor.detach()


@torch.no_grad()
def merge_in_place(model: nn.Module) -> None:
    """Merge the products into the weights, in place; plain linear layers remain."""
    inner = hf_module(model)
    for name, layer in lora_layers(model).items():
        layer.weight.copy_(layer.merged())
        plain = nn.Linear(
            layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta"
        )
        plain.weight, plain.bias = layer.weight, layer.bias
        inner.set_submodule(name, plain.train(layer.training))
