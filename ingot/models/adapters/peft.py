"""Reads and writes adapter folders in PEFT's layout: `adapter_config.json` beside
`adapter_model.safetensors`.

Adapters written by PEFT open here and the reverse, with equal logits. A setting that would silently
change the mathematics is refused by name; a tensor that does not fit is named, and nothing is
loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ingot.base.errors import WrongInput, differing, some_of
from ingot.base.storage import atomic_folder
from ingot.config.models.source import ModelKind
from ingot.models.adapters.fused import (
    Product,
    join_products,
    product_shapes,
    product_tensors,
    short_targets,
    split_products,
    stored_modules,
)
from ingot.models.adapters.layer import LoraKind, LoRALinear, LoRASize, LoRAState
from ingot.models.adapters.lora import (
    attach_lora,
    head_modules,
    hf_module,
    linear_layers,
    lora_layers,
    lora_state,
    merge_in_place,
)
from ingot.models.adapters.peft_config import CONFIG, INSTEAD, AdapterConfig, read_adapter_config
from ingot.models.hf.content import content_check, digest
from ingot.models.hf.tensor_names import LORA_A, LORA_B, PEFT_MAGNITUDE, to_peft
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import local_tensor, shard_slices

WEIGHTS = "adapter_model.safetensors"

TASKS = {
    "decoder": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "encoder": "SEQ_CLS",
    "masked": None,
}
"""PEFT's task type of each kind of model; it has none for masked language models."""
ALL_LINEAR = "all-linear"
_USUAL_HEADS = {
    "classifier",
    "score",
}  # PEFT lists both for every classifier, whichever of them is there


def class_count(folder: Path) -> int | None:
    """The number of classes of the classification head in an adapter, which its base may not know;
    None if it has no head.
    """
    last = [
        tensor
        for name, tensor in sorted(_read(folder).items())
        if name.endswith(("out_proj.weight", "score.weight", ".classifier.weight"))
    ]
    return last[0].shape[0] if last and read_adapter_config(folder).heads else None


def save_adapter(
    model: nn.Module, folder: Path, *, base: str, kind: ModelKind, revision: str | None = None
) -> dict[str, str]:
    """Write the adapter of a model atomically, and return the hashes of its tensors. `base` is the
    model that it was trained on: a folder, or a name on the hub, there at `revision`.
    """
    layers, heads, state = lora_layers(model), head_modules(model), lora_state(model)
    assert state is not None, "the model has no adapter"
    products = join_products(
        model,
        {
            name: Product(
                layer.lora_A,
                layer.lora_B,
                layer.scale,
                layer.magnitude() if layer.is_dora else None,
            )
            for name, layer in layers.items()
        },
    )
    # The most common rank and alpha are the defaults; other layers are listed by name.
    ranks = {name: product.a.shape[0] for name, product in products.items()}
    alphas = {
        name: LoRASize(ranks[name], product.scale).alpha(state.kind)
        for name, product in products.items()
    }
    (rank, alpha), _ = Counter((ranks[name], alphas[name]) for name in products).most_common(1)[0]
    config = {
        "peft_type": "LORA",
        "task_type": TASKS[kind],
        "base_model_name_or_path": base.removeprefix("hf:"),
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": state.dropout,
        "target_modules": short_targets(model, products),
        "modules_to_save": list(heads) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": state.kind == "rslora",
        "use_dora": state.kind == "dora",
        "init_lora_weights": "gaussian" if state.init == "gaussian" else True,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
    }
    # Copies, since a head may hold one tensor under two names, which a file has twice.
    tensors = {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, tensor in product_tensors(model, products, heads).items()
    }
    with atomic_folder(folder) as partial:
        save_file(tensors, str(partial / WEIGHTS), metadata={"format": "pt"})
        (partial / CONFIG).write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return {key: digest(tensor) for key, tensor in tensors.items()}


@torch.no_grad()
def load_adapter(
    model: nn.Module, folder: Path, *, merge: bool = False, check: bool = True
) -> None:
    """Load the adapter in `folder`: into the adapter that the model has (to continue training it),
    else as a new one, merged into the weights if `merge`.

    If the model is sharded or split into stages and has its adapter, this rank's part is filled.

    Raises:
        WrongInput: not an adapter, one of another kind or one that does not fit this model (or its
            adapter), or, with `check`, one that changed since its export; the model is then
            unchanged.
    """
    config, path = read_adapter_config(folder), folder / CONFIG
    whole = _whole_model(model)
    heads = _heads(whole, config, path)
    stored = _sizes(whole, config, heads, path)
    tensors = _read(folder)
    if check:
        content = content_check(folder)
        for name, tensor in tensors.items():
            content.compare(folder / WEIGHTS, name, tensor)
        content.finish()
    shapes = product_shapes(whole, stored, heads, dora=config.kind == "dora")
    _check(shapes, tensors, folder / WEIGHTS)
    products = split_products(
        whole,
        {
            name: Product(
                tensors[to_peft(f"{name}.{LORA_A}")],
                tensors[to_peft(f"{name}.{LORA_B}")],
                size.scale,
                tensors.get(to_peft(f"{name}.{PEFT_MAGNITUDE}")),
            )
            for name, size in stored.items()
        },
        heads,
    )
    sizes = {name: LoRASize(made.a.shape[0], made.scale) for name, made in products.items()}
    if present := lora_layers(model):
        here = {name: sizes[name] for name in linear_layers(model, heads) if name in sizes}
        _compare(here, config.kind, present, path)
    else:
        attach_lora(model, sizes, LoRAState(0, config.dropout, config.kind))
    for name, layer in lora_layers(model).items():
        for place, whole_matrix in (
            (layer.lora_A, products[name].a),
            (layer.lora_B, products[name].b),
        ):
            local_tensor(place).copy_(whole_matrix[shard_slices(place)])
        if (magnitude := products[name].magnitude) is not None:
            layer.set_magnitude(magnitude)
    for key, head in product_tensors(model, {}, heads).items():
        local_tensor(head).copy_(tensors[key][shard_slices(head)])
    if merge:
        merge_in_place(model)


def _whole_model(model: nn.Module) -> nn.Module:
    """The complete model, possibly on `meta`: the given one may be the pipeline stage of
    this rank.
    """
    if not isinstance(model, Decoder):
        return model
    with torch.device("meta"):
        return Decoder(model.config)


def _sizes(
    model: nn.Module, config: AdapterConfig, heads: tuple[str, ...], path: Path
) -> dict[str, LoRASize]:
    """The modules that an adapter applies to, by PEFT's names, and the adaptation of each."""
    linears, targets = list(stored_modules(model, heads)), config.targets
    if isinstance(targets, tuple):
        names = [
            name
            for name in linears
            if any(name == target or name.endswith("." + target) for target in targets)
        ]
    else:
        names = (
            linears
            if targets == ALL_LINEAR
            else [name for name in linears if _fits(targets, name, path)]
        )
    if not names:
        raise WrongInput(
            f"{path}: target_modules {targets!r} matches no linear layer of this model; give the"
            f" base of the adapter ({config.base})"
        )
    sizes = {}
    for name in names:
        rank = next(
            (value for key, value in config.ranks.items() if _fits(rf"(.*\.)?({key})", name, path)),
            config.rank,
        )
        alpha = next(
            (
                value
                for key, value in config.alphas.items()
                if _fits(rf"(.*\.)?({key})", name, path)
            ),
            config.alpha,
        )
        if rank < 1:
            raise WrongInput(f"{path}: the rank of {name} is {rank}; fetch the adapter again")
        sizes[name] = LoRASize.of("rslora" if config.root else "lora", rank, alpha)
    return sizes


def _fits(pattern: str, name: str, path: Path) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise WrongInput(
            f"{path}: {pattern!r} is not a regular expression ({error}); fetch the adapter again"
        ) from None


def _heads(model: nn.Module, config: AdapterConfig, path: Path) -> tuple[str, ...]:
    """The modules that the adapter holds whole. Only `head_modules` are trained that way here."""
    here, there = head_modules(model), [name for name, _ in hf_module(model).named_modules()]
    held: set[str] = set()
    for wanted in config.heads:
        matches = {
            name for name in here if name.endswith(wanted)
        }  # as PEFT does: `classifier` means `pre_classifier` as well
        if not matches and (
            wanted not in _USUAL_HEADS or any(name.endswith(wanted) for name in there)
        ):
            raise WrongInput(
                f"{path}: modules_to_save {wanted!r} is not supported, only the head of a"
                f" classifier ({', '.join(here) or 'this model has none'}); {INSTEAD}"
            )
        held |= matches
    return tuple(name for name in here if name in held)


def _compare(
    stored: Mapping[str, LoRASize], kind: LoraKind, present: Mapping[str, LoRALinear], path: Path
) -> None:
    """Check that a recipe that continues an adapter asks for the same layers, ranks, scales and
    magnitudes.
    """
    asked_kind = next(iter(present.values())).state.kind
    if (kind == "dora") != (asked_kind == "dora"):
        raise WrongInput(
            f"{path} is of kind {kind}, model.lora.kind asks for {asked_kind}; set it to {kind}"
        )
    if different := sorted(stored.keys() ^ present.keys()):
        side = (
            "adapts it, the recipe does not"
            if different[0] in stored
            else "does not adapt it, the recipe does"
        )
        raise WrongInput(
            f"{path}: {different[0]} and {len(different) - 1} more differ: the adapter {side}; set"
            " model.lora.targets to the adapter's own"
        )
    for name, size in stored.items():
        if size.rank != present[name].rank:
            raise WrongInput(
                f"{path}: the rank of {name} is {size.rank}, model.lora.rank asks for"
                f" {present[name].rank}; set it to {size.rank}"
            )
        if not math.isclose(size.scale, present[name].scale, rel_tol=1e-6):
            alpha = size.alpha(asked_kind)
            has, asked = differing(size.scale, present[name].scale, "{:g}".format)
            raise WrongInput(
                f"{path}: {name} is scaled by {has}, the recipe asks for {asked}; set"
                f" model.lora.alpha to {alpha}"
            )


def _read(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.exists():
        pickled = " (pickled weights are not read)" if list(folder.glob("*.bin")) else ""
        raise WrongInput(
            f"{folder} has no {WEIGHTS}{pickled}; give a folder with safetensors weights"
        )
    try:
        with safe_open(str(file), framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 (a reader is not a mapping)
    except SafetensorError as error:
        raise WrongInput(
            f"{file} is torn or not safetensors ({error}); fetch the adapter again"
        ) from None


def _check(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor], file: Path) -> None:
    """Raises WrongInput naming the differences."""
    problems = [f"{key} is missing" for key in wanted if key not in found]
    problems += [f"{key} is not part of it" for key in sorted(found.keys() - wanted.keys())]
    problems += [
        f"{key} is {list(found[key].shape)}, {list(shape)} is wanted"
        for key, shape in wanted.items()
        if key in found and tuple(found[key].shape) != shape
    ]
    if problems:
        raise WrongInput(
            f"{file}: weights do not fit this model and {CONFIG}: {some_of(problems, 8, '; ')};"
            " give the adapter with its own base"
        )
