"""Mixtures of experts: the grouped product, what a row becomes beside other rows, gradients of
experts that nobody chose, and files in other spellings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.base.errors import WrongInput
from ingot.config.models.experts import ExpertsConfig
from ingot.models.hf.folder import load_model
from ingot.models.native import experts as mixture
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.experts import Experts, Router, SparseMLP, grouped_product
from ingot.models.parameters import init_weights
from tests import tolerances
from tests.models.tiny import make_member

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SMALL = ExpertsConfig(count=6, chosen=2, width=20)
SIZES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


GPT_OSS: dict[str, Any] = {
    "num_experts": None,
    "moe_intermediate_size": None,
    "num_local_experts": 6,
    "intermediate_size": 20,
    "swiglu_limit": 0.7,
}


def made_mlp(seed: int = 0, **changes: Any) -> SparseMLP:
    """The first layer's mixture of a small random decoder."""
    model = Decoder(DecoderConfig.from_hf({**SIZES, "initializer_range": 0.3, **changes}))
    init_weights(model, seed)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp


def rows(count: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[5, 0, 3, 8], [0, 0, 0, 16], [1, 1, 14, 0]])
def test_the_kernel_and_the_loop_give_the_same_bits(
    counts: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward; the gradient of an expert without rows is zero."""
    found: list[list[torch.Tensor]] = []
    for kernel in (True, False):
        monkeypatch.setattr(mixture, "_has_kernel", lambda *_, kernel=kernel: kernel)
        x = rows(16, dtype=dtype).requires_grad_()
        weights = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
        weights.requires_grad_()
        out = grouped_product(x, weights, torch.tensor(counts))
        (out * torch.linspace(-1, 1, 24, dtype=dtype)).sum().backward()
        assert x.grad is not None
        assert weights.grad is not None
        found.append([out.detach(), x.grad, weights.grad])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    empty = [number for number, count in enumerate(counts) if not count]
    assert not found[0][2][empty].any()


def test_any_width_and_float64_are_computed() -> None:
    """The kernel wants rows of whole 16 bytes, the loop does not."""
    weights = torch.randn(3, 7, 5, dtype=torch.float64)
    x, counts = torch.randn(9, 5, dtype=torch.float64), torch.tensor([2, 3, 4])
    expert = torch.tensor([0] * 2 + [1] * 3 + [2] * 4)
    wanted = torch.einsum("sa,sba->sb", x, weights[expert])
    torch.testing.assert_close(grouped_product(x, weights, counts), wanted)
    torch.testing.assert_close(
        grouped_product(x.float(), weights.float(), counts), wanted.float(), rtol=1e-5, atol=1e-5
    )


def test_rows_that_no_expert_has_are_refused() -> None:
    """Beyond the last offset the result, and the gradient, would be uninitialised."""
    with pytest.raises((RuntimeError, ValueError)):
        grouped_product(torch.randn(9, 5), torch.randn(3, 7, 5), torch.tensor([2, 3, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_beside_any_other_rows(dtype: torch.dtype) -> None:
    """No capacity: nothing is dropped, whatever the others choose, and nothing is added up in
    another order.
    """
    mlp, x = made_mlp().to(dtype), rows(40, dtype=dtype)
    with torch.no_grad():
        together = mlp(x[None])[0]
        crowd = torch.cat((x[:1].expand(64, -1), x))  # an expert with many times its share
        assert torch.equal(mlp(crowd[None])[0, 64:], together)
        backwards = mlp(x.flip(0)[None])[0].flip(0)
        assert torch.equal(backwards, together)
        for row in (0, 7, 39):
            alone = mlp(x[None, row : row + 1])[0, 0]
            torch.testing.assert_close(alone, together[row], atol=tolerances.PACKED, rtol=2**-7)


def test_every_choice_counts_with_its_weight() -> None:
    """Against the sum over experts, written out."""
    mlp, x = made_mlp(), rows(11)
    with torch.no_grad():
        chosen, weights, scores = mlp.gate(x)
        assert chosen.shape == weights.shape == (11, 2)
        assert weights.dtype == scores.dtype == torch.float32
        wanted = torch.zeros(11, 32)
        for row in range(11):
            best = sorted(range(6), key=lambda one: -scores[row, one])[:2]
            assert chosen[row].tolist() == best
            for one in best:
                gate, up = (mlp.experts.gate_up_proj[one] @ x[row]).chunk(2)
                fed = mlp.experts.down_proj[one] @ (torch.nn.functional.silu(gate) * up)
                wanted[row] += scores[row, one] * fed
        torch.testing.assert_close(mlp(x[None])[0], wanted, atol=1e-5, rtol=1e-4)


def test_an_expert_that_nobody_chose_has_a_gradient_of_zeros() -> None:
    """So that it steps as the others do: decay and momentum, and the sums over ranks, go on."""
    mlp = made_mlp()
    with torch.no_grad():
        mlp.gate.weight[3] = 0
        x = rows(5) + 10 * mlp.gate.weight[1]
        x -= 20 * mlp.gate.weight[5]
    chosen, _, _ = mlp.gate(x)
    idle = sorted(set(range(6)) - set(chosen.flatten().tolist()))
    assert idle
    mlp(x[None]).square().sum().backward()
    for parameter in (mlp.experts.gate_up_proj, mlp.experts.down_proj):
        assert parameter.grad is not None
        assert not parameter.grad[idle].any()
    assert mlp.gate.weight.grad is not None
    assert mlp.gate.weight.grad.any()


def test_a_rank_that_nobody_sent_rows_steps_as_the_others_do() -> None:
    mlp = made_mlp()
    out = mlp(torch.zeros(1, 0, 32))
    assert out.shape == (1, 0, 32)
    out.sum().backward()
    for name, parameter in mlp.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_gradients_are_those_of_differences() -> None:
    """In float64, the router's included."""
    experts = Experts(DecoderConfig.from_hf(SIZES), SMALL).double()
    router = Router(32, SMALL, 0)
    for parameter in (*experts.parameters(), *router.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    x = rows(4, dtype=torch.float64)
    with torch.no_grad():
        chosen, weights, _ = router(x)

    def out(*given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(
            experts, {"gate_up_proj": given[0], "down_proj": given[1]}, (given[2], chosen, given[3])
        )

    given = (experts.gate_up_proj, experts.down_proj, x, weights.double())
    assert torch.autograd.gradcheck(
        out, [one.detach().requires_grad_() for one in given], fast_mode=True
    )


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "minimax_m2"])
def test_stacked_files_are_read_as_well(case: str, tmp_path: Path) -> None:
    """transformers 5 stacks experts in memory, and some tools write them so."""
    folder = make_member(tmp_path / "single", case)
    model = load_model(folder, device=CPU)
    stacked = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    whole = tmp_path / "stacked"
    whole.mkdir()
    (whole / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(stacked, whole / "model.safetensors")
    found = load_model(whole, device=CPU).state_dict()
    assert found.keys() == stacked.keys()
    for name, one in stacked.items():
        assert torch.equal(found[name], one), name


def test_missing_and_surplus_experts_are_named(tmp_path: Path) -> None:
    folder = make_member(tmp_path / "model", "qwen3_moe")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    moved = tensors.pop("model.layers.1.mlp.experts.4.up_proj.weight")
    tensors["model.layers.1.mlp.experts.6.up_proj.weight"] = moved
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WrongInput) as error:
        load_model(folder, device=CPU)
    assert "model.layers.1.mlp.experts.4.up_proj.weight is missing" in str(error.value)
    assert "experts.6.up_proj.weight is not part of this model" in str(error.value)


def test_each_expert_is_drawn_apart() -> None:
    mlp = made_mlp()
    for stack in (mlp.experts.gate_up_proj, mlp.experts.down_proj):
        assert 0.25 < float(stack.detach().std()) < 0.35
        assert not any(torch.equal(stack[0], stack[other]) for other in range(1, 6))


def test_the_rows_of_a_biased_expert_are_those_written_out() -> None:
    """Gates are held below the limit, and the rows of gate and up alternate."""
    mlp, x = made_mlp(model_type="gpt_oss", **GPT_OSS), 3 * rows(11)
    for name, parameter in mlp.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    held = mlp.experts
    assert held.gate_up_proj_bias is not None
    assert held.down_proj_bias is not None
    with torch.no_grad():
        chosen, weights, _ = mlp.gate(x)
        logits = x @ mlp.gate.weight.T + mlp.gate.bias
        assert torch.equal(chosen, logits.topk(2).indices)
        torch.testing.assert_close(weights, logits.topk(2).values.softmax(-1))
        wanted = torch.zeros(11, 32)
        for row in range(11):
            for one, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                made = held.gate_up_proj[one] @ x[row] + held.gate_up_proj_bias[one]
                gate, up = made[::2].clamp(max=0.7), made[1::2].clamp(-0.7, 0.7)
                assert made.abs().max() > 0.7, "nothing would be clamped"
                fed = (up + 1) * gate / (1 + (-1.702 * gate).exp())
                wanted[row] += weight * (held.down_proj[one] @ fed + held.down_proj_bias[one])
        torch.testing.assert_close(mlp(x[None])[0], wanted, atol=1e-5, rtol=1e-4)


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of GLM-4.5 have one such layer after the last; one more is surplus."""
    folder = make_member(tmp_path / "model", "glm4_moe")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    wanted = load_model(folder, device=CPU)
    tensors |= {f"model.layers.3.{name}": torch.ones(4, 4) for name in ("eh_proj", "enorm")}
    save_file(tensors, file, metadata={"format": "pt"})
    found = load_model(folder, device=CPU)
    assert "2 tensors beside it are left out" in capsys.readouterr().err
    for name, one in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], one)
    save_file(tensors | {"model.layers.4.enorm": torch.ones(4)}, file, metadata={"format": "pt"})
    with pytest.raises(WrongInput, match=r"model\.layers\.4\.enorm is not part of this model"):
        load_model(folder, device=CPU)


def test_experts_are_chosen_by_corrected_scores_among_the_best_groups() -> None:
    """A correction counts beside a score, not beside its logit; a group by its two best."""
    config = ExpertsConfig(
        count=4, chosen=1, width=2, score="sigmoid", corrected=True, groups=2, groups_chosen=1
    )
    router = Router(4, config, 0)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
        assert router.e_score_correction_bias is not None
        router.e_score_correction_bias[3] = 0.1
    logits = torch.tensor([[6.0, -9.0, 0.5, 0.5], [-9.0, -9.0, 8.0, 4.0]])
    assert router(logits)[0].flatten().tolist() == [3, 3]
