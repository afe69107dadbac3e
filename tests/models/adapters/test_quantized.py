"""Adapters beside a base in few bits compute what they compute beside the numbers that the bytes
stand for, in every family, and only the bytes are held.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ingot.config.sections.layout import Parallel
from ingot.config.sections.lora import Lora
from ingot.config.sections.quantize import Quantize
from ingot.models.adapters.lora import (
    add_lora,
    hf_module,
    init_adapter,
    linear_layers,
    lora_layers,
    merged_weights,
)
from ingot.models.adapters.quantized import quantize_base, round_base, rounded_tensors
from ingot.models.hf.folder import load_model, load_weights
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import allocate, fill_normal, is_dtensor
from ingot.models.quantized import Quantization, packed_matrices
from ingot.models.quantized_experts import STACKS, packed_stacks
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.parallel.apply import WrapSettings, apply_wrappers
from ingot.parallel.mesh import running_mesh
from ingot.parallel.shard import INTEGERS_SINCE
from tests import tolerances
from tests.models.hf.tiny import ALL, drawn
from tests.models.tiny import FAMILY, make_reference
from tests.ranks import run_ranks

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(30).expand(2, 30)
DOUBLE = Quantize(double=True)
LORA = Lora(rank=2, targets="all-linear")
QUICK = ("llama2", "phi3", "mixtral")


def awake(model: nn.Module) -> nn.Module:
    """The model with an adapter that says something."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B.normal_(0, 0.1, generator=generator)
    return model


def same_products(one: nn.Module, other: nn.Module, run: Callable[[Any], Tensor]) -> None:
    """Bits of outputs and of the gradients of two models with the same adapter."""
    found = []
    for model in (one, other):
        out = run(model)
        out.float().square().mean().backward()
        found.append(out.detach())
    assert torch.equal(*found)
    left = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        if parameter.requires_grad:
            one_grad, other_grad = parameter.grad, left[name].grad
            assert (one_grad is None) == (other_grad is None), name
            if one_grad is not None and other_grad is not None:
                assert torch.equal(one_grad, other_grad), name


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.drawn] * (name not in QUICK)) for name in FAMILY],
)
def test_a_decoder_equals_its_rounded_base(family: str, tmp_path: Path) -> None:
    folder = make_reference(tmp_path, **FAMILY[family])
    plain = load_model(folder, device=CPU)
    with torch.device("meta"):
        model = Decoder(plain.config)
    source = {name: one.detach().clone() for name, one in plain.named_parameters()}
    for one in (plain, model):
        add_lora(one, LORA, 0)
    quantize_base(model, DOUBLE)
    allocate(model, CPU)
    load_weights(model, folder)
    init_adapter(model, 0)
    for name, packed in packed_matrices(model).items():
        # Once: scales of scales make something else of what they made.
        assert torch.equal(packed.packed, Quantization("nf4", double=True).pack(source[name])), name
    assert packed_matrices(model).keys() == {f"{name}.weight" for name in linear_layers(plain)}
    stacks = packed_stacks(model)
    for name, stack in stacks.items():
        for number, matrix in enumerate(source[name]):
            data = Quantization("nf4", double=True).pack(matrix)
            assert torch.equal(stack.packed[number], data), (name, number)
    assert stacks.keys() == {name for name in source if name.endswith(STACKS)}
    assert not stacks.keys() & {name for name, _ in model.named_parameters()}
    round_base(plain, DOUBLE)
    same_products(awake(model), awake(plain), lambda one: one.logits(one.hidden(TOKENS, POSITIONS)))
    merged = dict(merged_weights(plain))
    for name, tensor in merged_weights(plain, rounded_tensors(plain, source.items(), DOUBLE)):
        assert torch.equal(tensor, merged[name]), name


def run_hub(model: Any) -> Tensor:
    words = 4 + TOKENS[:, :8] % 50
    given = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if model.config.kind == "seq2seq":
        given["decoder_input_ids"] = words
    out: Tensor = model.inner(**given).logits
    return out


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.drawn] * (name not in ("t5", "bert"))) for name in ALL],
)
def test_a_model_of_transformers_equals_its_rounded_base(name: str) -> None:
    model, plain = drawn(name).eval(), drawn(name).eval()
    for one in (model, plain):
        add_lora(one, LORA, 0)
    quantize_base(model, DOUBLE)
    round_base(plain, DOUBLE)
    assert packed_matrices(hf_module(model)).keys() == {
        f"{layer}.weight" for layer in linear_layers(plain)
    }
    same_products(awake(model), awake(plain), run_hub)


def test_the_matrix_has_a_shape_and_no_contents(tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path), device=CPU)
    add_lora(model, LORA, 0)
    quantize_base(model, Quantize(kind="int8"))
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, nn.Linear)
    assert layer.weight.shape == (layer.out_features, layer.in_features)
    with pytest.raises(TypeError, match="must be Tensor, not MatrixForm"):
        torch.nn.functional.linear(torch.ones(1, layer.in_features), layer.weight)
    assert not any("up_proj.weight" in name for name, _ in model.named_parameters())


NLL = lambda view, labels, extras: -view.log_probability(labels)  # noqa: E731


def losses_and_gradients(folder: str, shards: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Of an adapted mixture in few bits; every rank has the same rows."""
    parallel = Parallel(shard=shards)
    with running_mesh(parallel) as mesh:
        config = load_model(Path(folder), device=CPU).config
        spec = ModelSpec("decoder", config, Path(folder), False)
        model = create_model(spec, 0)
        add_lora(model, LORA, 0)
        quantize_base(model, DOUBLE)
        model = apply_wrappers(model, mesh, WrapSettings(parallel))
        materialize_model(model, spec, 0, CPU, filled=True)
        init_adapter(model, 0)
        for name, one in model.named_parameters():
            if name.endswith("lora_B"):
                fill_normal(one.detach(), 1, name, 0.1)
        out = model(TOKENS, POSITIONS, None, TOKENS.roll(-1, 1), NLL)
        out.sum().backward()
        found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return out.detach(), {
            name: one.full_tensor() if is_dtensor(one) else one for name, one in found.items()
        }


@pytest.mark.drawn("two ranks, a mixture in few bits")
def test_ranks_share_the_bytes_of_experts(tmp_path: Path) -> None:
    folder = str(make_reference(tmp_path, **FAMILY["mixtral"]))
    if torch.__version__ < INTEGERS_SINCE:
        with pytest.raises(AssertionError, match=r"need torch 2\.13 or newer"):
            run_ranks(2, losses_and_gradients, folder, 2)
        return
    values, wanted = losses_and_gradients(folder, 1)
    for found, gradients in run_ranks(2, losses_and_gradients, folder, 2):
        torch.testing.assert_close(found, values, rtol=0, atol=tolerances.LOGPROB)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            apart = (gradient / 2 - wanted[name]).norm() / wanted[name].norm()
            assert apart < tolerances.GRADIENTS_FP32, name
