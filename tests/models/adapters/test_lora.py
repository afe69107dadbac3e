"""Low-rank adaptation: what it changes and what it leaves alone, its dropout, and merging."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ingot.base.errors import WrongInput
from ingot.config.sections.lora import Lora
from ingot.models.adapters.layer import LoraKind, LoRAState
from ingot.models.adapters.lora import (
    adapter_parameters,
    add_lora,
    head_modules,
    init_adapter,
    linear_layers,
    lora_layers,
    lora_state,
    merge_in_place,
    merged_weights,
    target_layers,
)
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.folder import load_model
from ingot.models.hf.loading import hf_weights, init_hf_model, load_hf_model
from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import LogitsView
from tests import tolerances
from tests.models.hf.shrunk import shrunk
from tests.models.hf.tiny import ALL, ENCODERS, SEQ2SEQ, drawn, in_short
from tests.models.tiny import CASES, make_reference

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.arange(30).expand(2, 30)
WORDS = 4 + TOKENS % 50  # for models of transformers: none of their special tokens
HEADS = {
    "distilbert": ("pre_classifier", "classifier"),
    "deberta-v2": ("pooler", "classifier"),
    "modernbert": ("head", "classifier"),
}


def logits(model: Decoder, half: bool = False) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        return model.logits(model.hidden(TOKENS, POSITIONS))


def excite(model: nn.Module, size: float = 0.1) -> nn.Module:
    """Give the adapter something to say."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            layer.lora_B.normal_(0, size, generator=generator)
    return model


def negative_log_likelihood(view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
    return -view.log_probability(labels)


@pytest.mark.parametrize("case", ["grouped", "tied", "biases"])
@pytest.mark.parametrize("half", [False, True])
def test_at_step_0_it_says_what_the_base_says(case: str, half: bool, tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path, **CASES[case]), device=CPU)
    before = logits(model, half)
    add_lora(model, Lora(rank=4, dropout=0.3), 0)
    assert torch.equal(logits(model, half), before)
    assert not torch.equal(logits(excite(model), half), before)


def test_weights_keep_their_names_and_their_memory(tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path, **CASES["biases"]), device=CPU)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    add_lora(model, Lora(rank=4, targets=["q_proj"]), 0)
    after = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    new = [
        f"model.layers.{layer}.self_attn.q_proj.lora_{matrix}"
        for layer in (0, 1)
        for matrix in "AB"
    ]
    assert {name: after[name] for name in before} == before
    assert sorted(after.keys() - before.keys()) == new


def test_on_meta_first_it_becomes_the_same(tmp_path: Path) -> None:
    folder = make_reference(tmp_path)
    model = load_model(folder, device=CPU)
    with torch.device("meta"):
        later = Decoder(model.config)
    add_lora(model, Lora(rank=4), 5)
    add_lora(later, Lora(rank=4), 5)
    assert all(parameter.is_meta for parameter in later.parameters())
    later.to_empty(device="cpu")
    init_adapter(later, 5)
    for name, parameter in adapter_parameters(model).items():
        assert torch.equal(parameter, adapter_parameters(later)[name]), name


def test_the_first_matrices_have_pefts_variance_and_differ(tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path, hidden_size=256, intermediate_size=256), device=CPU)
    add_lora(model, Lora(rank=64), 0)
    drawn = [
        layer.lora_A.detach() for layer in lora_layers(model).values() if layer.in_features == 256
    ]
    assert len(drawn) == 14
    for number, matrix in enumerate(drawn):
        assert (
            abs(float(matrix.std()) * (3 * 256) ** 0.5 - 1) < 0.05
        )  # 16,384 values: the error of the estimate is 0.6 %
        assert not any(torch.equal(matrix, other) for other in drawn[:number])
    first = drawn[0].clone()
    init_adapter(model, 1)
    assert not torch.equal(next(iter(lora_layers(model).values())).lora_A, first)


@pytest.mark.parametrize(
    ("targets", "meant"),
    [
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (["mlp.up_proj"], {"up_proj"}),
        (
            ["wq", "wk", "wv", "wo", "w1", "w2", "w3"],
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj"},
        ),
        (["w1", "gate_proj"], {"gate_proj"}),
        (
            "all-linear",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj"},
        ),
    ],
)
def test_targets_mean_layers(targets: list[str], meant: set[str], tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path), device=CPU)
    found = target_layers(model, targets)
    assert {name.rpartition(".")[2] for name in found} == meant
    assert len(found) == 2 * len(meant)  # in both layers


def test_one_layer_alone_can_be_meant(tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path), device=CPU)
    assert target_layers(model, ["layers.1.self_attn.q_proj"]) == [
        "model.layers.1.self_attn.q_proj"
    ]


def test_a_name_of_this_model_beats_metas() -> None:
    found = target_layers(drawn("t5"), ["wo"])  # T5 calls its second feed-forward matrix so
    assert len(found) == 4
    assert all(name.endswith("DenseReluDense.wo") for name in found)


@pytest.mark.parametrize(
    "targets", [["attention"], ["q_proj", "query"], ["proj"], ["lm_head"], ["embed_tokens"]]
)
def test_a_target_that_matches_nothing_is_refused(targets: list[str], tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path), device=CPU)
    with pytest.raises(WrongInput) as error:
        add_lora(model, Lora(targets=targets), 0)
    assert f"`{targets[-1]}` matches no linear layer" in str(error.value)
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in str(error.value)
    assert not lora_layers(model)


@pytest.mark.parametrize("name", ALL)
def test_heads_are_trained_whole_or_left_alone(name: str) -> None:
    model = drawn(name)
    heads = HEADS.get(name, ("classifier",) if name in ENCODERS else ())
    assert head_modules(model) == heads
    layers = linear_layers(model)
    add_lora(model, Lora(rank=2), 0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == list(adapter_parameters(model))
    assert sorted(name for name in trained if "lora_" not in name) == sorted(
        f"inner.{head}.{name}"
        for head in heads
        for name, _ in model.inner.get_submodule(head).named_parameters()
    )
    assert [name for name in trained if "lora_" in name] == [
        f"inner.{layer}.lora_{matrix}" for layer in layers for matrix in "AB"
    ]


def test_every_adapted_layer_of_mobilebert_learns() -> None:
    """One of its head for masked tokens is used by its weight alone, and left as it is."""
    values = shrunk("mobilebert", "masked")
    model = init_hf_model(read_hf_config(values, "masked", "mobilebert"), 0, CPU)
    add_lora(model, Lora(rank=2), 0)
    words = WORDS % values["vocab_size"]
    model(words, POSITIONS, None, words, negative_log_likelihood).sum().backward()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert trained
    assert not [name for name, parameter in trained.items() if parameter.grad is None]


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_two_steps_change_the_adapter_and_nothing_else(name: str) -> None:
    model = drawn(name).train()
    add_lora(model, Lora(rank=2, dropout=0.1), 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01
    )
    labels = torch.tensor([0, 2]) if name == "bert" else WORDS
    state = lora_state(model)
    assert state is not None
    for step in range(2):
        state.begin_batch(step, torch.tensor([3, 8]))
        model(WORDS, POSITIONS, None, labels, negative_log_likelihood).sum().backward()
        assert all(
            parameter.grad is None
            for parameter in model.parameters()
            if not parameter.requires_grad
        )
        optimizer.step()
        optimizer.zero_grad()
    changed = [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    ]
    assert changed == list(adapter_parameters(model))


def test_two_steps_of_the_decoder_change_the_adapter_and_nothing_else(tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path), device=CPU).train()
    add_lora(model, Lora(rank=2, targets=["wq", "w2"]), 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(adapter_parameters(model).values(), lr=0.01)
    losses = []
    for _ in range(2):
        loss = model(TOKENS, POSITIONS, None, TOKENS.roll(-1, 1), negative_log_likelihood).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    changed = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert (
        changed
        == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        == set(adapter_parameters(model))
    )


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / (other - other.mean()).norm())


@pytest.mark.parametrize("case", ["grouped", "tied", "biases"])
def test_merged_equals_unmerged(case: str, tmp_path: Path) -> None:
    base = load_model(make_reference(tmp_path, **CASES[case]), device=CPU)
    unadapted, names = logits(base), [name for name, _ in base.named_parameters()]
    add_lora(base, Lora(rank=4, alpha=6.0), 0)
    unmerged = logits(excite(base))
    assert relative(unmerged, unadapted) > 10 * tolerances.MERGED_COMPUTED_BF16, (
        "the adapter must say something for equality to mean something"
    )
    weights = dict(merged_weights(base))
    assert list(weights) == names
    plain = Decoder(base.config).eval()
    plain.load_state_dict(weights)
    assert relative(logits(plain), unmerged) < tolerances.MERGED_FP32
    rounded = Decoder(base.config).eval()
    rounded.load_state_dict({name: tensor.bfloat16() for name, tensor in weights.items()})
    assert 1e-4 < relative(logits(rounded), unmerged) < tolerances.MERGED_BF16
    assert (
        relative(logits(rounded, half=True), logits(base, half=True))
        < tolerances.MERGED_COMPUTED_BF16
    )
    merge_in_place(base)
    assert not lora_layers(base)
    assert all(
        type(module) is nn.Linear for module in base.modules() if isinstance(module, nn.Linear)
    )
    assert torch.equal(logits(base), logits(plain))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_held_in_bf16_is_merged(kind: LoraKind, tmp_path: Path) -> None:
    """As stochastic rounding holds it."""
    base = load_model(make_reference(tmp_path), device=CPU)
    add_lora(base, Lora(rank=4, kind=kind), 0)
    excite(base)
    for parameter in adapter_parameters(base).values():
        parameter.data = parameter.data.bfloat16()
    for layer in lora_layers(base).values():
        rounded = layer.merged()
        for name in ("lora_A", "lora_B"):
            getattr(layer, name).data = getattr(layer, name).data.float()
        assert torch.equal(rounded, layer.merged())


def test_beside_weights_held_in_bf16_the_adapter_stays_float32(tmp_path: Path) -> None:
    folder = make_reference(tmp_path, dtype=torch.bfloat16)
    whole, half = (
        load_model(folder, device=CPU),
        load_model(folder, device=CPU, dtype=torch.bfloat16),
    )
    before = logits(half)
    for model in (whole, half):
        add_lora(model, Lora(rank=4), 0)
    assert torch.equal(logits(half), before)
    assert {parameter.dtype for parameter in adapter_parameters(half).values()} == {torch.float32}
    assert {layer.merged().dtype for layer in lora_layers(half).values()} == {torch.float32}
    assert relative(logits(excite(half)), logits(excite(whole))) < tolerances.MERGED_COMPUTED_BF16
    unmerged = logits(half)
    merge_in_place(half)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert relative(logits(half), unmerged) < tolerances.MERGED_COMPUTED_BF16


@pytest.mark.parametrize("name", in_short(ALL))
def test_merged_weights_of_transformers_models_open_there(name: str, tmp_path: Path) -> None:
    """Compared in float64, as some random models make much of the order of sums in float32."""
    model = drawn(name)
    add_lora(model, Lora(rank=2), 0)
    excite(model)
    inputs = {"input_ids": WORDS} | ({"decoder_input_ids": WORDS} if name in SEQ2SEQ else {})
    weights = dict(merged_weights(model, hf_weights(model)))
    assert list(weights) == list(dict(hf_weights(drawn(name))))
    save_weights(weights, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_hf()))
    opened = load_hf_model(
        model.config, tmp_path, device=CPU, dtype=torch.float32, seed=None
    ).eval()
    with torch.no_grad():
        assert (
            relative(opened.double().inner(**inputs).logits, model.double().inner(**inputs).logits)
            < tolerances.MERGED_FP32
        )


def test_merged_weights_come_one_at_a_time(tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path), device=CPU)
    add_lora(model, Lora(rank=2), 0)
    weights = merged_weights(model)
    next(weights)
    for _, layer in lora_layers(model).items():
        layer.weight.data.fill_(3.0)  # seen by what comes later: nothing was computed ahead
    assert all((tensor == 3).all() for name, tensor in weights if name.endswith("_proj.weight"))


def masks(
    state: LoRAState,
    rows: list[int],
    *,
    step: int = 3,
    layer: int = 11,
    shape: tuple[int, ...] = (16, 32),
) -> Tensor:
    state.begin_batch(step, torch.tensor(rows))
    return state.drop(torch.ones(len(rows), *shape), layer)


def test_a_row_has_its_mask_wherever_it_stands() -> None:
    state = LoRAState(0, 0.25)
    together = masks(state, [5, 9, 2, 7])
    assert torch.equal(masks(state, [2, 7]), together[2:])
    assert torch.equal(masks(LoRAState(0, 0.25), [9]), together[1:2])
    longer = masks(state, [5], shape=(20, 32))
    assert torch.equal(longer[:, :16], together[:1]), (
        "padding to another length changes nothing before it"
    )


def test_masks_have_the_right_rate_and_hang_on_everything() -> None:
    state = LoRAState(0, 0.25)
    one = masks(state, [1], shape=(200, 300))
    assert one.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    kept = (one > 0).float()[0]
    assert abs(float(kept.mean()) - 0.75) < 0.01  # 60,000 draws: six standard deviations
    assert float((kept.mean(0) - 0.75).abs().max()) < 0.2  # each feature and each position too
    assert float((kept.mean(1) - 0.75).abs().max()) < 0.15
    assert abs(float(one.mean()) - 1) < 0.014
    others = {
        "row": masks(state, [2], shape=(200, 300)),
        "step": masks(state, [1], step=4, shape=(200, 300)),
        "layer": masks(state, [1], layer=12, shape=(200, 300)),
        "seed": masks(LoRAState(1, 0.25), [1], shape=(200, 300)),
    }
    for what, other in others.items():
        assert (
            abs(
                float(
                    torch.corrcoef(torch.stack((kept.flatten(), (other > 0).float().flatten())))[
                        0, 1
                    ]
                )
            )
            < 0.025
        ), what
    for what, moved in {
        "position": kept.roll(1, 0),
        "feature": kept.roll(1, 1),
        "both": kept.roll((1, 1), (0, 1)),
    }.items():
        assert (
            abs(float(torch.corrcoef(torch.stack((kept.flatten(), moved.flatten())))[0, 1])) < 0.025
        ), what
    square = (
        kept * kept.roll(1, 0) * kept.roll(1, 1) * kept.roll((1, 1), (0, 1))
    )  # four corners share two positions and two features
    assert abs(float(square.mean()) - 0.75**4) < 0.015


def test_layers_of_other_shapes_are_dropped_too() -> None:
    state = LoRAState(0, 0.5)
    pooled = masks(state, [1, 2, 3], shape=(64,))  # what a pooler sees: one vector a row
    assert torch.equal(pooled, masks(state, [1, 2, 3], shape=(1, 64))[:, 0])
    folded = state.drop(
        torch.ones(48, 64), 0
    )  # rows folded into another shape: the device's generator
    assert abs(float(folded.mean()) - 1) < 0.15
    assert not torch.equal(folded, state.drop(torch.ones(48, 64), 0))
    assert abs(float(LoRAState(0, 0.5).drop(torch.ones(2, 40, 64), 0).mean()) - 1) < 0.15


def gradients(
    model: Decoder, rows: list[int], which: list[int], *, recompute: bool = False
) -> dict[str, Tensor]:
    """Of the summed loss of some rows, as one micro-batch."""
    state = lora_state(model)
    assert state is not None
    state.begin_batch(3, torch.tensor(rows))
    if recompute:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    tokens, positions = TOKENS[which], POSITIONS[which]
    model.zero_grad()
    model(tokens, positions, None, tokens.roll(-1, 1), negative_log_likelihood).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in adapter_parameters(model).items()
        if parameter.grad is not None
    }


def test_dropout_ends_with_training_and_does_not_hang_on_micro_batches(tmp_path: Path) -> None:
    model = load_model(make_reference(tmp_path), device=CPU)
    add_lora(model, Lora(rank=4, dropout=0.4), 0)
    silent = logits(excite(model))
    model.train()
    whole = gradients(model, [10, 20], [0, 1])
    first, second = gradients(model, [10], [0]), gradients(model, [20], [1])
    swapped = gradients(model, [20, 10], [0, 1])
    again = gradients(copy.deepcopy(model), [10, 20], [0, 1], recompute=True)
    for name, gradient in whole.items():
        assert relative(first[name] + second[name], gradient) < tolerances.GRADIENTS_FP32, name
        assert relative(again[name], gradient) < tolerances.GRADIENTS_FP32, name
        assert relative(swapped[name], gradient) > 0.01, name
    assert not torch.equal(logits(model), silent)
    assert torch.equal(logits(model.eval()), silent)


def test_gradients_go_through_the_kept_inputs_only(tmp_path: Path) -> None:
    """By hand: A's gradient is (scale * B^T dY)^T of the masked inputs, the mask read off the
    forward pass.
    """
    model = load_model(make_reference(tmp_path), device=CPU).train()
    add_lora(model, Lora(rank=4, alpha=12.0, dropout=0.4, targets=["layers.0.self_attn.q_proj"]), 0)
    (layer,) = lora_layers(excite(model)).values()
    layer.state.begin_batch(0, torch.tensor([4, 5]))
    x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    upstream = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1))
    layer(x).backward(upstream)
    dropped = layer.state.drop(x.detach(), layer.key)
    assert 0.3 < float((dropped == 0).float().mean()) < 0.5
    back = 3.0 * (upstream @ layer.lora_B.detach())  # [2, 6, 4]
    assert (
        relative(layer.lora_A.grad, torch.einsum("btr,bti->ri", back, dropped))
        < tolerances.GRADIENTS_FP32
    )
    assert (
        relative(
            layer.lora_B.grad,
            torch.einsum("bto,btr->or", upstream, 3.0 * dropped @ layer.lora_A.detach().T),
        )
        < tolerances.GRADIENTS_FP32
    )
    through = (back @ layer.lora_A.detach()) * (dropped != 0) / 0.6
    assert relative(x.grad, upstream @ layer.weight + through) < tolerances.GRADIENTS_FP32
