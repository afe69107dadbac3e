"""Number formats of weights and of sums over ranks: what is rounded, and that nothing is lost by
it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.store import newest_valid, step_folder
from ingot.config.degrees import Degrees
from ingot.config.sections.training import SGD, AdamW
from ingot.config.shape import BatchPlan
from ingot.models.hf.folder import stored_tensors
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train import announcement
from ingot.train.optim import optimizers as stochastic
from ingot.train.optim.optimizers import Noise, make_optimizer, round_to_bf16
from ingot.train.setup import check_formats, check_memory, computing_type
from ingot.train.trainer import train
from tests import tolerances
from tests.parallel import wrapped_run
from tests.parallel.wrapped_run import MODEL, Case, run_case
from tests.ranks import run_ranks
from tests.saving import save_checkpoint
from tests.small import small_recipe
from tests.train.test_step import distance, global_batch

SLOW = "no instructions for bf16"
FAST = "much faster in bf16"
HERE = Mesh(Ranks(), torch.device("cpu"))
KNOBS: dict[str, AdamW | SGD] = {
    "adamw": AdamW(lr=1e-3),
    "sgd": SGD(kind="sgd", lr=1e-3, weight_decay=0.1),
    "momentum": SGD(kind="sgd", lr=1e-3, momentum=0.9),
}


class Two(nn.Module):
    """A matrix and a vector."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(40, 30, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(50, generator=generator).to(dtype))


def made(knobs: AdamW | SGD, seed: int = 0) -> tuple[Two, Masters, optim.Optimizer]:
    model = Two(torch.bfloat16)
    masters = Masters(model, HERE, stochastic=True)
    return model, masters, make_optimizer(knobs, masters, seed)


def take_steps(
    masters: Masters, optimizer: optim.Optimizer, first: int, count: int, skipped: float = 0.0
) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step + 1)
        for master in masters:
            master.tensor.grad = torch.randn(master.tensor.shape, generator=generator)
            if skipped:
                master.tensor.grad[0] = torch.nan
        optimizer.found_inf = torch.tensor(skipped)  # type: ignore[attr-defined]
        optimizer.step()
        masters.publish()


def test_rounding_is_right_in_the_mean() -> None:
    values = torch.tensor([1.0, 1.001, -1.003, 3.14159, 1e-30, -2.7e20, 1 + 2.0**-16, 65504.0])
    step = torch.tensor(1.0)
    many = round_to_bf16(
        values.repeat(2**16, 1), Noise(7).bits(step, slice(0, 2**16), len(values))
    ).double()
    down = (values.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    up = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double()
    assert ((many == down) | (many == up)).all(), "always one of the two neighbours"
    # The standard error of a mean of n numbers that are one of two is at most half their distance
    # by the root of n.
    assert ((many.mean(dim=0) - values.double()).abs() < 5 * (up - down).abs() / 2 / 2**8).all()


def test_what_bf16_holds_stays_as_it_is() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, 2.0**-133])
    for noise in (0, 2**16 - 1):
        assert torch.equal(
            round_to_bf16(exact.clone(), torch.full((7,), noise, dtype=torch.int32)).float(), exact
        )


def test_the_random_bits_are_even_and_hang_on_everything() -> None:
    step, rows = torch.tensor(3.0), slice(0, 512)
    bits = Noise(5).bits(step, rows, 512)
    assert bits.min() >= 0
    assert bits.max() < 2**16
    for bit in range(16):
        assert ((bits >> bit) & 1).double().mean() == pytest.approx(0.5, abs=5 * 0.5 / 512)
    others = {
        "step": Noise(5).bits(step + 1, rows, 512),
        "parameter": Noise(6).bits(step, rows, 512),
        "row": Noise(5, 1).bits(step, rows, 512),
        "column": Noise(5, 0, 1).bits(step, rows, 512),
    }
    centred = bits.double() - bits.double().mean()
    for name, other in others.items():
        assert (other == bits).double().mean() < 0.001, name
        assert (
            centred * (other.double() - other.double().mean())
        ).mean() / centred.square().mean() == pytest.approx(0, abs=5 / 512), name


def test_a_part_has_the_bits_of_the_whole() -> None:
    """So ranks round as one process does, whichever of them has a number."""
    step = torch.tensor(9.0)
    whole = Noise(1).bits(step, slice(0, 40), 30)
    assert torch.equal(Noise(1, 10, 20).bits(step, slice(5, 25), 10), whole[15:35, 20:])


@pytest.mark.parametrize("kind", KNOBS)
def test_the_formulas_are_those_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding left out, weights are what torch's own optimizer makes of them, slice by slice."""
    monkeypatch.setattr(stochastic, "round_to_bf16", lambda values, noise: values)
    monkeypatch.setattr(stochastic, "SLICE", 200)
    ours, theirs = Two(torch.float32), Two(torch.float32)
    masters = Masters(ours, HERE, stochastic=True)
    optimizer = make_optimizer(KNOBS[kind], masters, 0)
    other = Masters(theirs, HERE)
    reference = make_optimizer(KNOBS[kind], other)
    assert isinstance(reference, torch.optim.AdamW | torch.optim.SGD)
    take_steps(masters, optimizer, 0, 5)
    take_steps(other, reference, 0, 5)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one - two).norm() / two.norm() < tolerances.SPLIT_WEIGHTS
    for master, twin in zip(masters, other, strict=True):
        for key, value in reference.state[twin.tensor].items():
            if isinstance(value, Tensor):
                assert torch.allclose(
                    optimizer.state[master.tensor][key],
                    value,
                    rtol=tolerances.SPLIT_WEIGHTS,
                    atol=1e-12,
                ), key


def test_small_updates_add_up_where_plain_bf16_loses_them() -> None:
    """Two hundred steps of 2^-10, while bf16 numbers above 1 are 2^-7 apart."""
    model = Two(torch.bfloat16)
    with torch.no_grad():
        model.matrix.fill_(1.0)
    masters = Masters(model, HERE, stochastic=True)
    optimizer = make_optimizer(SGD(kind="sgd", lr=2.0**-10), masters)
    plain = torch.ones(40, 30, dtype=torch.bfloat16)
    for _ in range(200):
        for master in masters:
            master.tensor.grad = -torch.ones(master.tensor.shape)
        optimizer.step()
        plain += 2.0**-10
    assert (plain == 1).all(), "each update was rounded away"
    moved = model.matrix.float().mean() - 1
    assert moved.item() == pytest.approx(200 * 2.0**-10, rel=0.03)
    assert model.matrix.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KNOBS)
def test_a_step_that_is_not_finite_changes_nothing(kind: str) -> None:
    model, masters, optimizer = made(KNOBS[kind])
    take_steps(masters, optimizer, 0, 2)
    weights = [parameter.clone() for parameter in model.parameters()]
    state = [value.clone() for values in optimizer.state.values() for value in values.values()]
    take_steps(masters, optimizer, 2, 1, skipped=1.0)
    assert all(
        torch.equal(now, before) for now, before in zip(model.parameters(), weights, strict=True)
    )
    assert all(
        torch.equal(now, before)
        for now, before in zip(
            (value for values in optimizer.state.values() for value in values.values()),
            state,
            strict=True,
        )
    )


@pytest.mark.parametrize("kind", KNOBS)
def test_a_resumed_run_rounds_the_same(kind: str, tmp_path: Path) -> None:
    model, masters, optimizer = made(KNOBS[kind])
    take_steps(masters, optimizer, 0, 3)
    save_checkpoint(tmp_path, 3, masters, optimizer, {}, HERE)
    take_steps(masters, optimizer, 3, 3)
    resumed, its_masters, its_optimizer = made(KNOBS[kind])
    found = newest_valid(tmp_path)
    assert found is not None
    load_checkpoint(found, its_masters, its_optimizer, HERE)
    assert all(
        value.dtype == torch.float32
        for values in its_optimizer.state.values()
        for value in values.values()
    )
    take_steps(its_masters, its_optimizer, 3, 3)
    assert all(
        torch.equal(one, other)
        for one, other in zip(resumed.parameters(), model.parameters(), strict=True)
    )
    other_seed, masters, optimizer = made(KNOBS[kind], seed=1)
    take_steps(masters, optimizer, 0, 6)
    assert not torch.equal(other_seed.matrix, model.matrix)


def test_gradients_of_bf16_weights_add_up_in_float32() -> None:
    model, masters, _ = made(KNOBS["sgd"])
    for _ in range(3):
        model.matrix.grad = torch.full_like(model.matrix, 1 + 2.0**-7)
        model.matrix.grad[0] = 2.0**-9
        masters.accumulate()
    master = next(iter(masters))
    assert master.tensor.data_ptr() == model.matrix.data_ptr(), "there is no copy"
    assert master.tensor.grad is not None
    assert master.tensor.grad.dtype == torch.float32
    assert (master.tensor.grad[1:] == 3 * (1 + 2.0**-7)).all()


@pytest.mark.drawn("gradients in bf16", keep=2)
@pytest.mark.parametrize("adam", [True, False])
def test_a_model_learns_without_float32_weights(
    adam: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapped_run, "global_batch", lambda step: global_batch(0))
    case = Case(
        model={**MODEL, "num_hidden_layers": 2}, adam=adam, compute="bf16", steps=10, micro_batch=8
    )
    plain, rounded = run_case(case), run_case(replace(case, precision={"master": "stochastic"}))
    assert rounded.types == {torch.bfloat16}
    assert {weight.dtype for weight in rounded.weights.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in plain.weights.values()} == {torch.float32}
    assert sum(rounded.losses) / 10 == pytest.approx(
        sum(plain.losses) / 10, abs=tolerances.BF16_LOSS
    )
    assert rounded.losses[-1] < rounded.losses[0] - 1


def with_sums_watched(cases: list[Case]) -> list[Any]:
    """Results, and the types that gradients were summed in over ranks."""
    seen: set[torch.dtype] = set()

    def watched(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # A few numbers are losses and norms.
            seen.update(
                tensor.dtype
                for tensor in (*args, *kwargs.values())
                if isinstance(tensor, Tensor) and tensor.numel() > 8
            )
            return collective(*args, **kwargs)

        return call

    for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"):
        if hasattr(dist, name):
            setattr(dist, name, watched(getattr(dist, name)))
    answer = []
    with running_mesh():
        for case in cases:
            seen.clear()
            answer.append((run_case(case), set(seen)))
    return answer


@pytest.mark.drawn("gradients in bf16", keep=2)
@pytest.mark.parametrize("layout", [{"shard": 2}, {"replicate": 2}])
def test_gradients_are_summed_in_the_type_that_was_asked_for(layout: dict[str, Any]) -> None:
    case = Case(model={**MODEL, "num_hidden_layers": 2}, parallel=layout, steps=1, micro_batch=8)
    coarse = replace(case, precision={"reduce": "bf16"})
    rounded = replace(case, compute="bf16", precision={"master": "stochastic"})
    for (plain, types), (found, coarse_types), (stochastic_, types_of_rounded) in run_ranks(
        2, with_sums_watched, [case, coarse, rounded], timeout_s=120
    ):
        assert types <= {torch.float32}
        assert coarse_types == {torch.bfloat16}
        assert types_of_rounded == {torch.float32}, (
            "the weights are bf16, their gradients' sums are not"
        )
        assert stochastic_.types == {torch.bfloat16}
        assert found.losses == plain.losses
        assert found.norms != plain.norms
        assert found.norms == pytest.approx(plain.norms, rel=tolerances.REDUCED_BF16)
        # With SGD at rate 1 weights differ as the clipped gradients do.
        assert 0 < distance(found.weights, plain.weights) < tolerances.REDUCED_BF16


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    recipe = small_recipe(tmp_path, precision__master="stochastic")
    assert computing_type(recipe, cpu) == "bf16", "auto follows the weights"
    with pytest.raises(
        WrongInput,
        match=(
            r"precision\.master stochastic holds weights in bf16, and precision\.compute is fp32;"
            r" set compute to bf16"
        ),
    ):
        computing_type(
            small_recipe(tmp_path, precision__master="stochastic", precision__compute="fp32"), cpu
        )
    offloaded = small_recipe(tmp_path, memory__offload__weights=True, parallel__shard="auto")
    with pytest.raises(
        WrongInput, match=r"memory\.offload\.weights .* parallel\.shard is 1; set shard to 2"
    ):
        check_memory(offloaded, "decoder", Degrees(), "fp32")
    check_memory(offloaded, "decoder", Degrees(shard=2), "fp32")
    with pytest.raises(
        WrongInput,
        match=(
            r"train\.compile gives wrong types of gradients where parallel\.tensor, 2, .*set"
            r" train\.compile to false"
        ),
    ):
        check_memory(
            small_recipe(tmp_path, train__compile=True, parallel__tensor=2),
            "decoder",
            Degrees(tensor=2),
            "bf16",
        )
    compiled = small_recipe(tmp_path, train__compile=True)
    check_memory(compiled, "decoder", Degrees(), "bf16", experts=True)
    with pytest.raises(WrongInput, match=r"experts in bf16 alone .* is fp32; set that to bf16"):
        check_memory(compiled, "decoder", Degrees(), "fp32", experts=True)
    runs = small_recipe(tmp_path, memory__recompute__kind="full", memory__recompute__layers=2)
    check_memory(runs, "decoder", Degrees(), "fp32")
    with pytest.raises(
        WrongInput,
        match=r"memory\.recompute\.layers 2 with method=uniform is for decoders.*kind encoder",
    ):
        check_memory(runs, "encoder", Degrees(), "fp32")
    batch = BatchPlan(8, 2, 1)
    check_formats(recipe, "decoder", batch, Degrees(), "bf16", cpu)
    with pytest.raises(
        WrongInput, match=r"precision\.float8 rowwise needs a GPU of compute capability 8\.9"
    ):
        check_formats(
            small_recipe(tmp_path, precision__float8="rowwise"),
            "decoder",
            batch,
            Degrees(),
            "bf16",
            cpu,
        )


@pytest.mark.drawn("gradients in bf16", keep=2)
def test_a_recipe_with_bf16_weights_goes_on_from_a_checkpoint(root: Path) -> None:
    recipe = small_recipe(root, precision__master="stochastic", checkpoint__every=3)
    train(recipe)
    wanted = {name: tensor.clone() for name, tensor in stored_tensors(recipe.folder.model)}
    shutil.rmtree(recipe.folder.model)
    shutil.rmtree(step_folder(recipe.folder.checkpoints, 6))
    assert "the last 3 in" in train(recipe).result
    found = dict(stored_tensors(recipe.folder.model))
    assert all(
        torch.equal(found[name], tensor) and tensor.dtype == torch.bfloat16
        for name, tensor in wanted.items()
    )


def test_a_recipe_trains_with_everything_that_saves_memory(root: Path) -> None:
    weights = []
    for knobs in (
        {},
        {
            "memory__recompute__kind": "full",
            "memory__recompute__layers": 2,
            "memory__offload__optimizer": 0.5,
        },
    ):
        recipe = small_recipe(root, **knobs)
        train(recipe, fresh=True)
        weights.append(
            {name: tensor.clone() for name, tensor in stored_tensors(recipe.folder.model)}
        )
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("can", "slow"),
    [
        ({"architecture": "x86_64", "avx2": True}, True),
        ({"architecture": "x86_64", "avx512_bf16": True}, False),
        ({"architecture": "aarch64"}, False),  # which may have them
    ],
)
def test_a_processor_without_instructions_for_bf16_is_warned_of(
    can: dict[str, Any],
    slow: bool,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    train(small_recipe(root, train__steps=1, precision__compute="bf16"))
    assert (SLOW in capsys.readouterr().err) is slow
    train(small_recipe(root, train__steps=1), fresh=True)
    assert SLOW not in capsys.readouterr().err


def test_a_processor_that_is_fast_in_bf16_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    recipe = small_recipe(root, train__steps=1)
    train(recipe)
    assert FAST not in capsys.readouterr().err, "small models gain little"
    monkeypatch.setattr(announcement, "LARGE", 0)
    train(recipe, fresh=True)
    assert FAST in capsys.readouterr().err
    train(small_recipe(root, train__steps=1, precision__compute="fp32"), fresh=True)
    assert FAST not in capsys.readouterr().err, "who has chosen is not told"


@pytest.mark.parametrize(
    ("knobs", "device", "millions", "told"),
    [
        ({}, "cuda", 100.0, True),
        ({}, "cuda", 5.0, False),
        ({}, "cpu", 100.0, False),
        ({"train__compile": False}, "cuda", 100.0, False),
        ({"train__compile": True}, "cuda", 100.0, False),
    ],
)
def test_a_gpu_whose_layers_are_not_compiled_is_told_of(
    knobs: dict[str, Any], device: str, millions: float, told: bool, root: Path
) -> None:
    recipe = small_recipe(root, **knobs)
    said = announcement.advice_on_compute(recipe, "bf16", torch.device(device), millions)
    assert ("train.compile=true" in (said or "")) is told
