"""Products in float8, emulated: rounded as the kernels round, multiplied in the wider type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8.float8_linear import Float8Linear

from ingot.base.errors import WrongInput
from ingot.models.kinds import exported_weights
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.parallel import float8
from ingot.parallel.float8 import check_float8, use_float8
from ingot.parallel.shard import layers
from tests import tolerances
from tests.models.hf.tiny import drawn
from tests.parallel import wrapped_run
from tests.parallel.wrapped_run import MODEL, Case, run_case, run_cases
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.train.test_step import distance, global_batch

WIDE = {**MODEL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CPU = torch.device("cpu")
KINDS: tuple[float8.Float8, ...] = ("tensorwise", "rowwise")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "EMULATED", True)


def on_ranks(cases: list[Case]) -> list[Any]:
    float8.EMULATED = True
    return run_cases(cases)


@pytest.mark.drawn
@pytest.mark.parametrize("kind", KINDS)
def test_an_overfit_reaches_what_float32_reaches(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapped_run, "global_batch", lambda step: global_batch(0))
    case = Case(model=WIDE, adam=True, steps=16, micro_batch=8)
    plain, coarse = run_case(case), run_case(replace(case, precision={"float8": kind}))
    assert plain.losses[-1] < 0.02
    assert coarse.losses[-1] < 0.02
    assert coarse.losses[0] != plain.losses[0]
    assert sum(coarse.losses) / 16 == pytest.approx(
        sum(plain.losses) / 16, abs=tolerances.FLOAT8_LOSS
    )
    assert coarse.names == plain.names
    assert coarse.types == {torch.float32}


@pytest.mark.drawn("float8 of ranks")
def test_matrices_that_ranks_share_are_scaled_as_one() -> None:
    """By the largest number of the whole matrix, whoever has it."""
    case = Case(model=WIDE, steps=1, micro_batch=8, precision={"float8": "tensorwise"})
    alone = run_case(case)
    for (found,) in run_ranks(
        2, on_ranks, [replace(case, parallel={"tensor": 2})], timeout_s=PATIENCE_S
    ):
        assert found.losses == pytest.approx(alone.losses, rel=tolerances.LOSS_FP32)
        assert distance(found.weights, alone.weights) < tolerances.SPLIT_WEIGHTS


@pytest.mark.drawn("float8 of ranks")
def test_weights_that_are_sharded_are_multiplied_in_float8() -> None:
    """Activations are scaled by what a rank has of the batch, so that the losses are only near."""
    case = Case(model=WIDE, steps=2, micro_batch=8, precision={"float8": "rowwise"}, compute="bf16")
    alone = run_case(case)
    for (found,) in run_ranks(
        2, on_ranks, [replace(case, parallel={"shard": 2})], timeout_s=PATIENCE_S
    ):
        assert found.losses == pytest.approx(alone.losses, abs=tolerances.BF16_LOSS)


@pytest.mark.drawn("float8 of ranks")
def test_recomputed_products_round_the_same() -> None:
    case = Case(model=WIDE, steps=2, precision={"float8": "rowwise"})
    wanted = run_case(case)
    for kind in ("full", "selective"):
        assert run_case(replace(case, memory={"recompute": {"kind": kind}})).losses == wanted.losses


def eights(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def test_all_linear_layers_of_the_layers_and_no_others() -> None:
    model = Decoder(DecoderConfig.from_hf({**WIDE, "vocab_size": 64, "tie_word_embeddings": False}))
    names = [name for name, _ in model.named_parameters()]
    init_weights(model, 0)
    before = {name: tensor.clone() for name, tensor in exported_weights(model)}
    use_float8(model, "rowwise")
    assert (
        len(eights(model))
        == 7 * 2
        == sum(
            1
            for layer in layers(model)
            for module in layer.modules()
            if isinstance(module, nn.Linear)
        )
    )
    assert "lm_head" not in eights(model)
    assert [name for name, _ in model.named_parameters()] == names
    after = dict(exported_weights(model))
    assert before.keys() == after.keys()
    assert all(
        type(after[name]) in (torch.Tensor, nn.Parameter) and torch.equal(after[name], before[name])
        for name in before
    )


def test_odd_matrices_stay_as_they_are_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {**WIDE, "intermediate_size": 104}
    model = Decoder(DecoderConfig.from_hf(odd))
    use_float8(model, "tensorwise")
    assert len(eights(model)) == 4 * 2
    told = capsys.readouterr().err
    assert "multiples of 16" in told
    assert "mlp.gate_proj [104, 64], mlp.down_proj [64, 104]" in told.replace(
        "mlp.up_proj", "mlp.gate_proj"
    )
    use_float8(Decoder(DecoderConfig.from_hf(odd)), "tensorwise", loud=False)
    assert not capsys.readouterr().err


def test_a_model_without_one_fitting_matrix_is_refused() -> None:
    with pytest.raises(
        WrongInput, match=r"multiples of 128, this model has none .*; set precision\.float8 to none"
    ):
        use_float8(Decoder(DecoderConfig.from_hf(WIDE)), "rowwise", tensor=8)


def test_models_of_transformers_have_layers_too() -> None:
    model = drawn("bert")
    use_float8(model, "tensorwise")
    assert len(eights(model)) == 6 * 2
    assert not any("classifier" in name or "pooler" in name for name in eights(model))


def check(**others: Any) -> None:
    check_float8(
        **{
            "kind": "rowwise",
            "device": CPU,
            "compute": "bf16",
            "adapted": False,
            "lengths": {"data.seq_len": 4096},
            **others,
        }
    )


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    with pytest.raises(WrongInput, match=r"trains the matrices that model\.lora leaves"):
        check(adapted=True)
    monkeypatch.setattr(float8, "EMULATED", False)
    with pytest.raises(
        WrongInput,
        match=(
            r"precision\.float8 rowwise needs a GPU of compute capability 8\.9 .*this is CPU.*set"
            r" precision\.float8 to none"
        ),
    ):
        check()
    monkeypatch.setattr(float8, "has_float8", lambda device: True)
    check()
    with pytest.raises(WrongInput, match=r"goes with precision\.compute bf16, not fp32"):
        check(compute="fp32")
    with pytest.raises(
        WrongInput, match=r"multiple of 16 tokens on each rank, data\.seq_len makes 1,000"
    ):
        check(lengths={"data.seq_len": 1000})
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WrongInput, match=r"needs torchao; run `pip install ingot\[float8\]`"):
        check()
