"""Adapters of modules that a family's files hold as one (queries, keys and values; gate and up).

Ours have a product beside each part, PEFT's one beside the whole. Written, the parts become one
product of the sum of their ranks, in blocks; read, such blocks become the parts again, and any
other product is given to each part with the rows of its output. Both are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ingot.models.adapters.layer import LoRASize
from ingot.models.adapters.lora import head_modules, hf_module, is_within, linear_layers
from ingot.models.hf.tensor_names import LORA_A, LORA_B, PEFT_MAGNITUDE, stored_parts, to_peft
from ingot.models.native.decoder import Decoder


class Product(NamedTuple):
    """The adaptation of one module: `scale` * B A, A `[rank, in]`, B `[out, rank]`; with DoRA the
    magnitudes of its rows, `[out]`.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None


def stored_modules(model: nn.Module, heads: tuple[str, ...] | None = None) -> dict[str, list[str]]:
    """The linear layers as PEFT knows them, each with those of ours that it holds."""
    fused = model.config.fused if isinstance(model, Decoder) else {}
    return stored_parts(linear_layers(model, heads), fused)


def rows_of(model: nn.Module, name: str) -> int:
    """The outputs of a linear layer."""
    return _layer(model, name).out_features


def _layer(model: nn.Module, name: str) -> nn.Linear:
    layer = hf_module(model).get_submodule(name)
    assert isinstance(layer, nn.Linear), name
    return layer


def join_products(model: nn.Module, products: Mapping[str, Product]) -> dict[str, Product]:
    """The products beside PEFT's modules, of those beside ours."""
    made: dict[str, Product] = {}
    for stored, parts in stored_modules(model).items():
        adapted = [part for part in parts if part in products]
        if len(parts) == 1 and adapted:
            made[stored] = products[parts[0]]
        elif adapted:
            scale, columns = products[adapted[0]].scale, []
            for name in adapted:
                product = products[name]
                # Rows of other parts are zero: [out of all parts, rank of this one].
                columns.append(
                    torch.cat(
                        [
                            product.b.detach().cpu() * (product.scale / scale)
                            if part == name
                            else torch.zeros(rows_of(model, part), product.b.shape[1])
                            for part in parts
                        ]
                    )
                )
            a = torch.cat([products[name].a.detach().cpu() for name in adapted])
            norms = [one.cpu() for name in adapted if (one := products[name].magnitude) is not None]
            magnitude = torch.cat(norms) if norms else None
            made[stored] = Product(a, torch.cat(columns, dim=1), scale, magnitude)
    return made


def split_products(
    model: nn.Module, products: Mapping[str, Product], heads: tuple[str, ...]
) -> dict[str, Product]:
    """The products beside our layers, of those beside PEFT's modules."""
    made: dict[str, Product] = {}
    for stored, parts in stored_modules(model, heads).items():
        if stored not in products:
            continue
        a, b, scale, magnitude = products[stored]
        if len(parts) == 1:
            made[parts[0]] = products[stored]
            continue
        heights = [rows_of(model, part) for part in parts]
        rows = dict(zip(parts, b.split(heights), strict=True))
        norms = dict(
            zip(
                parts,
                [None] * len(parts) if magnitude is None else magnitude.split(heights),
                strict=True,
            )
        )
        adapted = [part for part in parts if rows[part].any() or magnitude is not None] or parts
        blocks = a.shape[0] // len(adapted)
        own = {
            part: slice(blocks * number, blocks * (number + 1))
            for number, part in enumerate(adapted)
        }
        in_blocks = a.shape[0] % len(adapted) == 0 and all(
            int(rows[part].count_nonzero()) == int(rows[part][:, own[part]].count_nonzero())
            for part in adapted
        )
        for part in adapted if in_blocks else parts:
            kept = own[part] if in_blocks else slice(None)
            made[part] = Product(a[kept], rows[part][:, kept], scale, norms[part])
    return made


def short_targets(model: nn.Module, layers: Collection[str]) -> list[str]:
    """The last parts of the layer names if no other module of the model has them, else the whole
    names.
    """
    tails = sorted({name.rpartition(".")[2] for name in layers})
    heads = head_modules(model)
    modules = [name for name, _ in hf_module(model).named_modules()]
    called = {
        name
        for name in (*modules, *stored_modules(model))
        if name.rpartition(".")[2] in tails and not is_within(name, heads)
    }
    return tails if called == set(layers) else sorted(layers)


def product_tensors(
    model: nn.Module, products: Mapping[str, Product], heads: tuple[str, ...]
) -> dict[str, Tensor]:
    """The tensors of these products and heads of the model, by PEFT's key."""
    places: dict[str, Tensor] = {}
    for name, product in products.items():
        places[to_peft(f"{name}.{LORA_A}")] = product.a
        places[to_peft(f"{name}.{LORA_B}")] = product.b
        if product.magnitude is not None:
            places[to_peft(f"{name}.{PEFT_MAGNITUDE}")] = product.magnitude
    for head in heads:
        places |= {
            to_peft(f"{head}.{name}"): tensor
            for name, tensor in (
                hf_module(model).get_submodule(head).state_dict(keep_vars=True).items()
            )
        }
    return places


def product_shapes(
    model: nn.Module, sizes: Mapping[str, LoRASize], heads: tuple[str, ...], *, dora: bool
) -> dict[str, tuple[int, ...]]:
    """PEFT's key and the shape of every tensor that the adapter must have."""
    shapes: dict[str, tuple[int, ...]] = {
        key: tuple(tensor.shape) for key, tensor in product_tensors(model, {}, heads).items()
    }
    modules = stored_modules(model, heads)
    for name, size in sizes.items():
        rows = sum(rows_of(model, part) for part in modules[name])
        columns = _layer(model, modules[name][0]).in_features
        shapes[to_peft(f"{name}.{LORA_A}")] = (size.rank, columns)
        shapes[to_peft(f"{name}.{LORA_B}")] = (rows, size.rank)
        if dora:
            shapes[to_peft(f"{name}.{PEFT_MAGNITUDE}")] = (rows,)
    return shapes
