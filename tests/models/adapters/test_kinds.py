"""rsLoRA and DoRA against PEFT: folders, logits and gradients; how they begin, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.config.sections.lora import Lora
from ingot.config.sections.training import AdamW, ModelSettings, ParameterGroup
from ingot.models.adapters.lora import (
    adapter_parameters,
    adapter_tensors,
    add_lora,
    lora_layers,
    lora_state,
    merge_in_place,
)
from ingot.models.adapters.peft import CONFIG, load_adapter, save_adapter
from ingot.models.hf.folder import load_model
from ingot.models.native.decoder import Decoder
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.train.optim.optimizers import make_optimizer
from tests import tolerances
from tests.models.adapters.test_families import MEMBERS
from tests.models.adapters.test_lora import (
    POSITIONS,
    TOKENS,
    excite,
    logits,
    negative_log_likelihood,
    relative,
)
from tests.models.adapters.test_peft import edit_config, reference, their_logits, theirs
from tests.models.hf.tiny import CPU
from tests.models.tiny import CASES, make_member, make_reference

SWITCHES = {"rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


def awake(model: nn.Module) -> nn.Module:
    """With magnitudes that differ from the norms of the rows."""
    excite(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            if layer.is_dora:
                layer.lora_magnitude.normal_(0, 0.2, generator=generator)
    return model


def stir_magnitudes(model: nn.Module) -> None:
    """PEFT's magnitudes near the norms, as training would leave them."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.copy_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=tolerances.LOGITS_FP32, rtol=0)


def gradients_of(model: Decoder) -> dict[str, Tensor]:
    labels = torch.cat((TOKENS[:, 1:], torch.full((2, 1), -100)), dim=1)
    values = model(TOKENS, POSITIONS, None, labels, negative_log_likelihood)
    (values.sum() / (labels != -100).sum()).backward()
    return {
        name: parameter.grad
        for name, parameter in adapter_parameters(model).items()
        if parameter.grad is not None
    }


def their_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By our names."""
    model(TOKENS, labels=TOKENS).loss.backward()
    return {
        name.removeprefix("base_model.model.")
        .replace("lora_magnitude_vector", "lora_magnitude")
        .removesuffix(".weight")
        .removesuffix(".default"): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_pefts_opens_here_with_its_gradients_and_ours_opens_there(
    kind: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    base, folder = make_reference(tmp_path / "base", **CASES["biases"]), tmp_path / "theirs"
    model = theirs(reference(base), folder, target_modules="all-linear", **SWITCHES[kind])
    stir_magnitudes(model)
    model.save_pretrained(str(folder))
    expected = their_logits(model)
    ours = load_model(base, device=CPU)
    plain = logits(ours)
    load_adapter(ours, folder)
    assert relative(plain, expected) > 0.1
    same(logits(ours), expected)
    wanted = their_gradients(PeftModel.from_pretrained(reference(base), folder, is_trainable=True))
    found = gradients_of(ours)
    assert sorted(found) == sorted(wanted)
    for name, gradient in found.items():
        error = float((gradient - wanted[name]).norm() / wanted[name].norm())
        assert error < tolerances.GRADIENTS_FP32, name
    save_adapter(ours, tmp_path / "again", base=str(base), kind="decoder")
    written = json.loads((tmp_path / "again" / CONFIG).read_text())
    assert (written["use_rslora"], written["use_dora"]) == (kind == "rslora", kind == "dora")
    assert (written["r"], written["lora_alpha"]) == (4, 6)
    opened = PeftModel.from_pretrained(reference(base), tmp_path / "again").eval()
    same(their_logits(opened), expected)
    again = load_model(base, device=CPU)
    add_lora(again, Lora(kind=kind, rank=4, alpha=6.0), 0)
    load_adapter(again, tmp_path / "again")
    for name, tensor in adapter_tensors(again).items():
        assert torch.equal(tensor, adapter_tensors(ours)[name]), name
    merge_in_place(ours)
    assert relative(logits(ours), expected) < tolerances.MERGED_FP32


@pytest.mark.drawn("kinds of adapters of families")
@pytest.mark.parametrize("case", MEMBERS)
def test_dora_of_every_family(case: str, tmp_path: Path) -> None:
    """Where a family's files hold queries, keys and values as one, so are their magnitudes."""
    from peft import PeftModel

    base = make_member(tmp_path / "base", case)
    model = load_model(base, device=CPU)
    add_lora(model, Lora(kind="dora", rank=4, alpha=6.0), 0)
    save_adapter(awake(model), tmp_path / "ours", base=str(base), kind="decoder")
    same(
        logits(model),
        their_logits(PeftModel.from_pretrained(reference(base), tmp_path / "ours").eval()),
    )
    again = load_model(base, device=CPU)
    load_adapter(again, tmp_path / "ours")
    same(logits(again), logits(model))
    made = theirs(reference(base), tmp_path / "t", target_modules="all-linear", use_dora=True)
    stir_magnitudes(made)
    made.save_pretrained(str(tmp_path / "t"))
    ours = load_model(base, device=CPU)
    load_adapter(ours, tmp_path / "t", merge=True)
    assert relative(logits(ours), their_logits(made)) < tolerances.MERGED_FP32


def test_dora_begins_as_the_base_and_trains_its_magnitudes(tmp_path: Path) -> None:
    base = make_reference(tmp_path, **CASES["biases"])
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(base, device=CPU, dtype=dtype)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3] = 0  # a row without a norm
        before = logits(model)
        add_lora(model, Lora(kind="dora", rank=4), 0)
        assert torch.equal(logits(model), before), dtype
    model = load_model(base, device=CPU).train()
    add_lora(model, Lora(kind="dora", rank=2, alpha=2.0, dropout=0.3), 0)
    state = lora_state(awake(model))
    assert state is not None
    state.begin_batch(0, torch.tensor([1, 2]))
    for name, gradient in gradients_of(model).items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


def test_dropout_of_dora_is_pefts() -> None:
    """W x stays whole, what the gain adds to it is of the inputs that were kept."""
    from peft.tuners.lora.dora import DoraLinearLayer

    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(6, 5)})
    add_lora(model, Lora(kind="dora", rank=2, dropout=0.5), 0)
    (layer,) = lora_layers(awake(model)).values()
    layer.train()
    layer.state.begin_batch(0, torch.tensor([7]))
    x = torch.randn(1, 3, 6)
    dropped, theirs_layer = layer.state.drop(x, layer.key), DoraLinearLayer(False)
    theirs_layer.weight = nn.Parameter(layer.magnitude())
    a, b = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)
    a.weight, b.weight = layer.lora_A, layer.lora_B
    plain = nn.Linear(6, 5)
    plain.weight, plain.bias = layer.weight, layer.bias
    expected = plain(x) + theirs_layer(
        dropped, lora_A=a, lora_B=b, scaling=layer.scale, base_layer=plain
    )
    torch.testing.assert_close(layer(x), expected)


def test_a_gaussian_beginning_has_pefts_deviation(tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path, hidden_size=256), device=CPU)
    add_lora(model, Lora(rank=64, init="gaussian", targets=["q_proj"]), 0)
    for layer in lora_layers(model).values():
        assert abs(float(layer.lora_A.detach().std()) * 64 - 1) < 0.05
        assert not layer.lora_B.any()
    save_adapter(model, tmp_path / "adapter", base="base", kind="decoder")
    written = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert written["init_lora_weights"] == "gaussian"
    assert Lora.model_validate({"init": True}).init == "kaiming"
    with pytest.raises(ValidationError, match="pissa begins with other weights of the base"):
        Lora.model_validate({"init": "pissa"})


def test_what_does_not_fit_a_kind_is_refused(tmp_path: Path) -> None:
    base = make_reference(tmp_path / "base")
    model = load_model(base, device=CPU)
    given: dict[str, Any] = {"rank": 4, "alpha": 6.0, "targets": ["q_proj"]}
    add_lora(model, Lora(kind="dora", **given), 0)
    save_adapter(model, tmp_path / "adapter", base=str(base), kind="decoder")
    other = load_model(base, device=CPU)
    add_lora(other, Lora(**given), 0)
    with pytest.raises(WrongInput, match=r"is of kind dora, model\.lora\.kind asks for lora"):
        load_adapter(other, tmp_path / "adapter")
    edit_config(tmp_path / "adapter", use_dora=False)
    with pytest.raises(WrongInput, match="lora_magnitude_vector is not part of it"):
        load_adapter(other, tmp_path / "adapter", check=False)
    with pytest.raises(ValidationError, match="dora needs the norms of the frozen rows"):
        ModelSettings.model_validate({"lora": {"kind": "dora"}, "quantize": {"kind": "nf4"}})
    phi = load_model(make_member(tmp_path / "phi", "phi3"), device=CPU)
    with pytest.raises(WrongInput, match=r"leaves .*k_proj out, .*qkv_proj, which .* as one"):
        add_lora(phi, Lora(kind="dora", targets=["q_proj", "v_proj"]), 0)


def test_rates_of_lora_plus_are_pefts(tmp_path: Path) -> None:
    """By parameter: the first matrices at `lr`, the second ones and DoRA's magnitudes at a multiple
    of it; a group's factor multiplies both.
    """
    from peft import LoraConfig, get_peft_model
    from peft.optimizers import create_loraplus_optimizer

    folder = make_reference(tmp_path)
    config = LoraConfig(r=2, target_modules="all-linear", use_dora=True)
    their_model = get_peft_model(reference(folder), config)
    their_optimizer = create_loraplus_optimizer(
        their_model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0
    )
    rates = {
        id(one): group["lr"] for group in their_optimizer.param_groups for one in group["params"]
    }
    theirs_by_name = {
        name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace("_magnitude_vector", "_magnitude")
        .removesuffix(".weight"): rates[id(one)]
        for name, one in their_model.named_parameters()
        if one.requires_grad
    }

    def ours(**knobs: Any) -> dict[str, float]:
        lora = Lora(rank=2, kind="dora", plus_ratio=16.0)
        model = load_model(folder, device=CPU)
        add_lora(model, lora, 0)
        masters = Masters(model, Mesh(Ranks(), CPU))
        optimizer = make_optimizer(AdamW(lr=1e-3, **knobs), masters, lora=lora)
        lr = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
        for group in optimizer.param_groups:
            assert group["lr"] == 1e-3 * group.get("lr_factor", 1.0)
        return {master.name: lr[id(master.tensor)] for master in masters}

    assert ours() == pytest.approx(theirs_by_name)
    assert set(ours().values()) == {1e-3, 16e-3}
    slower = ours(groups=[ParameterGroup(match="*q_proj*", lr_factor=0.5)])
    assert slower == pytest.approx(
        {name: rate * (0.5 if "q_proj" in name else 1) for name, rate in theirs_by_name.items()}
    )
