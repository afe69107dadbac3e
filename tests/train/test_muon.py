"""Muon: what it updates and how far, against torch's own; in every layout the bits of one process,
from checkpoints of any other layout; steps that are not taken.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.checkpoints.reader import WholeWeights, load_checkpoint
from ingot.checkpoints.store import checkpoint_in, step_folder
from ingot.config.sections.layout import Parallel, Precision
from ingot.config.sections.training import AdamW, Muon
from ingot.models.device import fast_compute
from ingot.models.native.config import DecoderConfig
from ingot.models.parameters import shard_slices
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.parallel.apply import WrapSettings, apply_wrappers, make_masters
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.parallel.whole import WholeMatrices
from ingot.train.optim.muon import layer_matrices, orthogonalise
from ingot.train.optim.optimizers import make_optimizer
from ingot.train.setup import make_setup
from tests import tolerances
from tests.exhaustive import some_of
from tests.ranks import run_ranks
from tests.saving import save_checkpoint
from tests.small import small_recipe

ALONE = Mesh(Ranks(), torch.device("cpu"))
# Widths that no number of ranks divides, biases, norms of heads, a head of its own.
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
# Experts in two of four layers, and one that a rank may hold half of.
SPARSE = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "mlp_only_layers": [0, 2],
}
# As gpt-oss has them: the rows of gate and up take turns.
IN_TURNS = {
    **{name: value for name, value in CONFIG.items() if name != "attention_bias"},
    "model_type": "gpt_oss",
    "intermediate_size": 10,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SETTINGS = Muon(kind="muon", lr=0.02, weight_decay=0.1, compute="fp32")
ORTHOGONAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def built(
    parallel: dict[str, int],
    mesh: Mesh,
    master: Any = "fp32",
    config: dict[str, Any] = CONFIG,
) -> tuple[nn.Module, Masters]:
    how = WrapSettings(
        Parallel(**parallel),
        precision=Precision(master=master),
        compute="fp32" if master == "fp32" else "bf16",
    )
    spec = ModelSpec("decoder", DecoderConfig.from_hf(config), None, True)
    model = apply_wrappers(create_model(spec, 0), mesh, how)
    materialize_model(model, spec, 0, mesh.device, filled=True)
    return model, make_masters(model, mesh, how)


def gradient(name: str, shape: Any, step: int) -> Tensor:
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(
    masters: Masters,
    optimizer: optim.Optimizer,
    number: int,
    skipped: float = 0.0,
    left_out: str | None = None,
) -> None:
    """A step with gradients made up from names, of which each rank has its shard; the parameter
    `left_out` has none.
    """
    for master in masters:
        if master.name == left_out:
            continue
        whole = gradient(master.name, master.parameter.shape, number)
        master.tensor.grad = whole[shard_slices(master.parameter)].contiguous()
        if skipped:
            master.tensor.grad.fill_(torch.nan)
    optimizer.found_inf = torch.tensor(skipped)  # type: ignore[attr-defined]
    optimizer.step()
    masters.publish()


def is_orthogonal(name: str) -> bool:
    if ".experts." in name:
        return True
    return name.rpartition(".")[0].rpartition(".")[2] in ORTHOGONAL and name.endswith("weight")


def alone(
    settings: Any = SETTINGS, config: dict[str, Any] = CONFIG
) -> tuple[Masters, optim.Optimizer]:
    _, masters = built({}, ALONE, config=config)
    return masters, make_optimizer(settings, masters)


def test_matrices_of_layers_get_torchs_muon_and_all_else_adamw() -> None:
    """In bf16, as torch does; the scale is that of AdamW's updates, which is not torch's default."""
    masters, optimizer = alone(SETTINGS.model_copy(update={"compute": "bf16"}))
    others, adamw = alone(AdamW(lr=0.02, weight_decay=0.1))
    start = {master.name: master.tensor.detach().clone() for master in masters}
    weights = {name: nn.Parameter(start[name].clone()) for name in start if is_orthogonal(name)}
    theirs = optim.Muon(weights.values(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    assert len(weights) == 4 * len(ORTHOGONAL)
    for number in range(3):
        step(masters, optimizer, number)
        step(others, adamw, number)
        for name, weight in weights.items():
            weight.grad = gradient(name, weight.shape, number)
        theirs.step()
    for master, other in zip(masters, others, strict=True):
        if master.name in weights:
            assert torch.equal(master.tensor, weights[master.name]), master.name
            assert set(optimizer.state[master.tensor]) == {"momentum_buffer"}
        else:
            assert torch.equal(master.tensor, other.tensor), master.name
            assert set(optimizer.state[master.tensor]) == {"step", "exp_avg", "exp_avg_sq"}


def test_an_update_is_as_large_as_adamws() -> None:
    masters, optimizer = alone(SETTINGS.model_copy(update={"weight_decay": 0.0}))
    before = {master.name: master.tensor.detach().clone() for master in masters}
    step(masters, optimizer, 0)
    for master in masters:
        if is_orthogonal(master.name):
            moved = (master.tensor.detach() - before[master.name]).square().mean().sqrt() / 0.02
            assert 0.13 < float(moved) < 0.25, master.name  # AdamW's is about 0.2


@pytest.mark.parametrize("shape", [(16, 16), (40, 8), (8, 40)])
def test_singular_values_end_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalise(matrix, 5))
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert torch.equal(orthogonalise(torch.zeros(shape), 5), torch.zeros(shape))


def test_a_step_that_is_not_taken_changes_nothing() -> None:
    masters, optimizer = alone()
    twins, twin = alone()
    for number, skipped in ((0, 0.0), (7, 1.0), (1, 0.0)):
        step(masters, optimizer, number, skipped)
        if not skipped:
            step(twins, twin, number)
    for one, other in zip(masters, twins, strict=True):
        assert torch.equal(one.tensor, other.tensor), one.name
        for key, value in optimizer.state[one.tensor].items():
            assert torch.equal(value, twin.state[other.tensor][key]), (one.name, key)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.zeros(3, 6, 4))


class Mixture(nn.Module):
    """A layer with a router and a stack of experts, as those of a mixture."""

    def __init__(self, **linear: nn.Linear) -> None:
        super().__init__()
        layer = nn.ModuleDict({"gate": nn.Linear(4, 3), "experts": Experts(), **linear})
        self.layers = nn.ModuleList([layer])


def test_each_expert_is_a_matrix_of_its_own_and_a_router_is_none() -> None:
    model = Mixture()
    masters = Masters(model, ALONE)
    assert [(one.name, rows) for one, rows in layer_matrices(masters)] == [
        ("layers.0.experts.stack", slice(number, number + 1)) for number in range(3)
    ]
    optimizer = make_optimizer(SETTINGS, masters)
    whole = gradient("stack", (3, 6, 4), 0)
    for master in masters:
        master.tensor.grad = whole.clone() if master.tensor.ndim == 3 else None
    optimizer.step()
    stack = model.layers[0]["experts"].stack  # type: ignore[index]
    for number in range(3):
        update = orthogonalise(whole[number], 5) * 0.2 * 6**0.5 * -0.02
        torch.testing.assert_close(stack[number].detach(), update)


@pytest.mark.parametrize(
    ("config", "gate", "up"),
    [(SPARSE, slice(0, 10), slice(10, 20)), (IN_TURNS, slice(0, None, 2), slice(1, None, 2))],
    ids=["one-above-the-other", "in-turns"],
)
def test_gate_and_up_of_an_expert_are_two_matrices(
    config: dict[str, Any], gate: slice, up: slice
) -> None:
    """In one, that of the smaller gradient would hardly move."""
    masters, optimizer = alone(SETTINGS.model_copy(update={"weight_decay": 0.0}), config)
    (both,) = [one for one in masters if one.name.endswith("layers.1.mlp.experts.gate_up_proj")]
    before, both.tensor.grad = both.tensor.detach().clone(), torch.randn_like(both.tensor)
    both.tensor.grad[:, up] *= 0.03
    expected = before.clone()
    for expert, whole in zip(expected, both.tensor.grad, strict=True):
        for rows in (gate, up):
            expert[rows] -= 0.02 * 0.2 * 24**0.5 * orthogonalise(whole[rows].clone(), 5)
    optimizer.step()
    torch.testing.assert_close(both.tensor.detach(), expected)


def test_what_would_be_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"cannot tell the matrices that layers\.0\.qkv_proj"):
        make_optimizer(SETTINGS, Masters(Mixture(qkv_proj=nn.Linear(4, 12)), ALONE))
    with pytest.raises(WrongInput, match="finds no matrix of a linear layer"):
        make_optimizer(SETTINGS, Masters(nn.Linear(3, 3), ALONE))
    with pytest.raises(WrongInput, match=r"muon makes .* model\.lora trains two thin factors"):
        small_recipe(tmp_path, train__optimizer="{kind: muon}", model__lora="{rank: 4}")


def test_the_model_is_never_whole_on_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices at most: the one that is computed, and the next."""
    masters, optimizer = alone()
    alive, most = 0, 0
    gather, take = WholeMatrices._gather, WholeMatrices._scatter

    def gathered(self: Any, matrices: Any, part_of: Any) -> Any:
        nonlocal alive, most
        alive, most = alive + len(matrices), max(most, alive + len(matrices))
        return gather(self, matrices, part_of)

    def scattered(self: Any, matrices: Any, result: Any) -> Any:
        nonlocal alive
        alive -= len(matrices)
        return take(self, matrices, result)

    monkeypatch.setattr(WholeMatrices, "_gather", gathered)
    monkeypatch.setattr(WholeMatrices, "_scatter", scattered)
    step(masters, optimizer, 0)
    assert (alive, most) == (0, 2)


def test_the_type_of_the_iteration_is_part_of_what_a_run_is(root: Path) -> None:
    """Resumed on a CPU without bf16 instructions, `auto` would go on in another type."""
    found = make_setup(small_recipe(root, train__optimizer__kind="muon"), ALONE).identity
    assert found["train.optimizer"]["compute"] == fast_compute("auto", ALONE.device) != "auto"


LAYOUTS: tuple[dict[str, int], ...] = (
    {"shard": 4},
    {"shard": 2, "tensor": 2, "expert": 4},
    {"replicate": 4},
    {"pipeline": 2, "virtual": 2, "shard": 2, "expert": 2},
    {"shard": 2, "tensor": 2, "expert": 2},
    {"context": 2, "tensor": 2, "expert": 4},
    {"shard": 4, "expert": 4},
)
COPIES = {"replicate": 2, "shard": 2, "expert": 2}
"""One of two copies works out each matrix: here whatever is drawn."""


def chain() -> list[dict[str, int]]:
    return [*some_of(LAYOUTS, 3, "muon"), COPIES]


def chained(root: Path) -> None:
    """A step in each layout, from the checkpoint that the layout before wrote."""
    with running_mesh():
        for number, layout in enumerate(chain()):
            with running_mesh(Parallel(**layout)) as mesh:
                _, masters = built(layout, mesh, config=SPARSE)
                optimizer = make_optimizer(SETTINGS, masters)
                if number:
                    load_checkpoint(
                        checkpoint_in(step_folder(root, number)), masters, optimizer, mesh
                    )
                step(masters, optimizer, number)
                save_checkpoint(root, number + 1, masters, optimizer, {"samples": 1}, mesh)


@pytest.mark.drawn("Muon over ranks")
def test_a_run_through_all_layouts_has_the_bits_of_one_process(tmp_path: Path) -> None:
    """Gradients are equal, so weights must be: a matrix that is orthogonalised in pieces, a
    momentum that is not saved, an expert updated as another's, or what is loaded into another
    place, give other ones.
    """
    run_ranks(4, chained, tmp_path)
    masters, optimizer = alone(config=SPARSE)
    for number in range(len(chain())):
        step(masters, optimizer, number)
        weights = WholeWeights(step_folder(tmp_path, number + 1))
        assert sum(".experts." in name for name in weights.names) >= 4
        for master in masters:
            if is_orthogonal(master.name):
                assert torch.equal(weights[master.name], master.tensor), (number, master.name)
            else:  # AdamW's fused kernel rounds the ends of a tensor in another way
                torch.testing.assert_close(weights[master.name], master.tensor.detach())


def rounded(root: Path) -> None:
    with running_mesh(Parallel(shard=2)) as mesh:
        _, masters = built({"shard": 2}, mesh, "stochastic", config=SPARSE)
        optimizer = make_optimizer(SETTINGS, masters, seed=3)
        for number in range(2):
            step(masters, optimizer, number)
        save_checkpoint(root, 1, masters, optimizer, {"samples": 1}, mesh)


@pytest.mark.drawn("Muon over ranks")
def test_stochastic_rounding_of_shards_is_that_of_the_whole(tmp_path: Path) -> None:
    """Also of experts, of which a rank has only some."""
    run_ranks(2, rounded, tmp_path)
    _, masters = built({}, ALONE, "stochastic", config=SPARSE)
    optimizer = make_optimizer(SETTINGS, masters, seed=3)
    _, plain = built({}, ALONE, config=SPARSE)
    exact = make_optimizer(SETTINGS, plain)
    for number in range(2):
        step(masters, optimizer, number)
        step(plain, exact, number)
    weights = WholeWeights(step_folder(tmp_path, 1))
    for master, other in zip(masters, plain, strict=True):
        assert master.tensor.dtype == torch.bfloat16
        assert torch.equal(weights[master.name], master.tensor), master.name
        difference = (master.tensor.float() - other.tensor).norm() / other.tensor.norm()
        assert difference < 3 * 2 * tolerances.REDUCED_BF16, master.name
