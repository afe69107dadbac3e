"""Low-rank adaptation (Hu et al. 2021): a product of two small matrices is trained beside each of
some linear layers; everything else is frozen.

A layer is replaced in place: its weight keeps name and storage, so that loading, export and
wrappers see the model they know. Works on native models and on transformers' (alone or as `.inner`
of a wrapper); layer names are always those of the Hugging Face model. `ingot.models.adapters.peft`
reads and writes adapter folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.base.errors import WrongInput
from ingot.config.sections.training import Lora
from ingot.models.hf.tensor_names import LINEAR_FROM_META, LORA_A, LORA_B
from ingot.models.parameters import fill_normal, local_tensor

_VOCABULARY = "lm_head"  # never adapted: the head is applied in chunks, past its module
_GOLDEN, _MIX1, _MIX2 = (
    0x9E3779B97F4A7C15 - 2**64,
    0xBF58476D1CE4E5B9 - 2**64,
    0x94D049BB133111EB - 2**64,
)  # as signed 64-bit


class LoRASize(NamedTuple):
    """The adaptation of one layer: the inner size of the product, and its scale."""

    rank: int
    scale: float


class LoRAState:
    """What the adapted layers of one model share: whether the adapter is active, and the dropout
    masks in training.

    The masks are a hash of (seed, step, row, position, layer, feature): independent of the rank or
    micro-batch that a row falls to, and the same when activations are recomputed.
    """

    def __init__(self, seed: int, dropout: float) -> None:
        self.seed, self.dropout, self.active = seed, dropout, True
        self._rows: Tensor | None = None

    def begin_batch(self, step: int, rows: Tensor) -> None:
        """Call before each micro-batch. `rows` int64 `[R]` identifies the rows of one step, for
        example by their number in the split.
        """
        if self.dropout:
            self._rows = _mix(rows.long() * _GOLDEN + _signed(f"{self.seed}/lora/{step}"))

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
        keep = _keep_mask(
            self._rows.to(x.device), x.shape[1:-1].numel(), x.shape[-1], layer, self.dropout
        )
        return torch.where(keep.view(x.shape), x, 0.0).mul(1 / (1 - self.dropout))


@torch.no_grad()
def _keep_mask(rows: Tensor, positions: int, features: int, layer: int, dropout: float) -> Tensor:
    """The mask of kept elements, bool `[R, positions, features]`, each True with probability
    1 - dropout.
    """
    counter = torch.arange(max(positions, features), device=rows.device) * _GOLDEN
    place = _mix(rows[:, None] + counter[:positions] + layer)[:, :, None]  # [R, positions, 1]
    bits = place + _mix(counter[:features] ^ layer)  # [R, positions, features]
    bits = (bits ^ _shift(bits, 32)) * _MIX1
    return (bits ^ _shift(bits, 29)) >= int(dropout * 2.0**64) - 2**63


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): each output bit depends on every
    input bit.
    """
    bits = (bits ^ _shift(bits, 30)) * _MIX1
    bits = (bits ^ _shift(bits, 27)) * _MIX2
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's own shift of a signed integer is arithmetic."""
    zeros: int = 2 ** (64 - by) - 1
    return (bits >> by) & zeros


def _signed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


class LoRALinear(nn.Linear):
    """`x W^T + b + scale * drop(x) A^T B^T`, A `[rank, in]`, B `[out, rank]`, both float32; W and b
    are those of the layer that it replaces.
    """

    def __init__(self, base: nn.Linear, name: str, size: LoRASize, state: LoRAState) -> None:
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, device="meta"
        )
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.scale, self.state = size.rank, size.scale, state
        self.key = _signed(name)
        device = base.weight.device
        self.lora_A = nn.Parameter(
            torch.empty(size.rank, base.in_features, dtype=torch.float32, device=device)
        )
        self.lora_B = nn.Parameter(
            torch.empty(base.out_features, size.rank, dtype=torch.float32, device=device)
        )
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.linear(x, self.weight, self.bias)
        if not self.state.active:
            return out
        kept = self.state.drop(x, self.key) if self.training else x
        if not torch.is_autocast_enabled(x.device.type):
            kept = kept.to(
                self.lora_A.dtype
            )  # a model held in bf16: the products of the adapter stay float32
        low = functional.linear(kept, self.lora_A) * self.scale
        return (out + functional.linear(low, self.lora_B)).to(out.dtype)

    @torch.no_grad()
    def merged(self, weight: Tensor | None = None) -> Tensor:
        """Weight (this layer's, or one read elsewhere) plus the scaled product, as one float32
        matrix `[out, in]`.
        """
        return torch.addmm(
            (self.weight if weight is None else weight).float(),
            self.lora_B,
            self.lora_A,
            alpha=self.scale,
        )


def add_lora(model: nn.Module, knobs: Lora, seed: int) -> None:
    """Adapt the layers named by `knobs.targets` and freeze everything else but a classification
    head; the model's outputs do not change yet.

    On a model on `meta` the new matrices are on `meta` as well: call `init_adapter` once they are
    allocated.

    Raises:
        WrongInput: a target that matches no linear layer, or a model that has none.
    """
    size, inner = LoRASize(knobs.rank, knobs.alpha / knobs.rank), hf_module(model)
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
    attach_lora(model, dict.fromkeys(targets, size), dropout=knobs.dropout, seed=seed)


def attach_lora(
    model: nn.Module, sizes: Mapping[str, LoRASize], *, dropout: float, seed: int
) -> None:
    """Adapt exactly these layers, and freeze everything but them and a classification head."""
    inner, state = hf_module(model), LoRAState(seed, dropout)
    if lora_layers(model):
        raise ValueError("this model has an adapter already")
    for name, size in sizes.items():
        inner.set_submodule(name, LoRALinear(_linear(inner, name), name, size, state))
    trained = set(adapter_parameters(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    init_adapter(model, seed)


@torch.no_grad()
def init_adapter(model: nn.Module, seed: int) -> None:
    """Set B to 0 and A to normal values with mean 0 and variance 1 / (3 * in), the variance of
    PEFT's uniform A, from the generator of `ingot.models.parameters`.

    Every rank therefore makes the same matrices. Does nothing on `meta`.
    """
    for name, layer in lora_layers(model).items():
        if not layer.lora_A.is_meta:
            fill_normal(
                layer.lora_A, seed, f"{name}.{LORA_A}", 1 / math.sqrt(3 * layer.in_features)
            )
            local_tensor(layer.lora_B).zero_()


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
    """The modules of a classifier outside its pretrained trunk: randomly initialised, so they are
    trained whole (except one that a PEFT folder adapts instead). Empty for other models.
    """
    inner = hf_module(model)
    if not type(inner).__name__.endswith("ForSequenceClassification"):
        return ()
    trunk = getattr(inner, "base_model_prefix", "")
    beside = {
        name: module
        for name, module in inner.named_children()
        if name != trunk and next(module.parameters(), None) is not None
    }
    return tuple(
        name
        for name, module in beside.items()
        if not any(isinstance(part, LoRALinear) for part in module.modules())
    )


def linear_layers(model: nn.Module, heads: Iterable[str] | None = None) -> list[str]:
    """The linear layers that can be adapted: all but those of the heads, which are by default the
    vocabulary projection and `head_modules`.
    """
    kept = {_VOCABULARY, *(head_modules(model) if heads is None else heads)}
    return [
        name
        for name, module in hf_module(model).named_modules()
        if isinstance(module, nn.Linear) and name.split(".")[0] not in kept
    ]


def target_layers(model: nn.Module, targets: Literal["all-linear"] | Iterable[str]) -> list[str]:
    """The layers that `targets` name: each target is a layer's name or a dotted suffix of one, or,
    if nothing here has that name, one of Meta's names.

    Raises:
        WrongInput: a target that matches nothing.
    """
    linears = linear_layers(model)
    if targets == "all-linear":
        return linears
    found: set[str] = set()
    for target in targets:
        matches = _ending_in(linears, target) or _ending_in(
            linears, LINEAR_FROM_META.get(target, target)
        )
        if not matches:
            there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            raise WrongInput(
                f"model.lora.targets: `{target}` matches no linear layer of this model; choose from"
                f" {there}, or all-linear"
            )
        found.update(matches)
    return [name for name in linears if name in found]


def _ending_in(names: Iterable[str], tail: str) -> list[str]:
    return [name for name in names if name == tail or name.endswith("." + tail)]


def _linear(inner: nn.Module, name: str) -> nn.Linear:
    module = inner.get_submodule(name)
    assert isinstance(module, nn.Linear), name
    return module


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters trained under LoRA, by the model's own names: the low-rank matrices, and a
    classifier's head.
    """
    prefix = "" if hf_module(model) is model else "inner."
    names = {
        f"{prefix}{layer}.{matrix}" for layer in lora_layers(model) for matrix in (LORA_A, LORA_B)
    }
    heads = tuple(f"{prefix}{head}." for head in head_modules(model))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in names or (heads and name.startswith(heads))
    }


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes what its base does. A trained classification head is not
    reverted.
    """
    state = lora_state(model)
    was_active = state is not None and state.active
    if state is not None:
        state.active = False
    try:
        yield
    finally:
        if state is not None:
            state.active = was_active


def merged_weights(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model by Hugging Face's names, one at a time, with the low-rank products
    merged in (in float32) and their matrices left out.

    `tensors`: the weights to yield, such as `hf_weights`, or those that a model on `meta` lacks;
    None for all parameters, tied ones once.
    """
    layers = lora_layers(model)
    for name, tensor in hf_module(model).named_parameters() if tensors is None else tensors:
        owner, _, leaf = name.rpartition(".")
        if owner not in layers:
            yield name, tensor.detach()
        elif leaf not in (LORA_A, LORA_B):
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
