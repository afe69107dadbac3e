"""The optimizers against their formulas, written down here in float64: every setting counts, and
what decays are the matrices.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.config.sections.training import SGD, AdamW, OptimizerSettings
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.train.optim import optimizers
from ingot.train.optim.eager import EagerAdamW, EagerSGD
from ingot.train.optim.optimizers import StochasticAdamW, check_groups, make_optimizer

LR, DECAY, EPS, BETAS, STEPS = 0.05, 0.3, 0.4, (0.8, 0.95), 3


class Layer(nn.Module):
    """A matrix, its bias, a norm's weight and the biases of a stack."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.linear = nn.Linear(5, 4)
        self.norm = nn.LayerNorm(4, bias=False)
        self.stack_bias = nn.Parameter(torch.empty(2, 3))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) + 1


def gradients(step: int, layer: Layer) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in layer.named_parameters()
    }


def trained(settings: AdamW | SGD) -> tuple[Layer, Layer]:
    """A layer after some steps, and as it was before."""
    before, layer = Layer(), Layer()
    masters = Masters(layer, Mesh(Ranks(), torch.device("cpu")))
    optimizer = make_optimizer(settings, masters)
    for step in range(STEPS):
        for name, gradient in gradients(step, layer).items():
            layer.get_parameter(name).grad = gradient
        optimizer.step()
    return layer, before


def usual_decay(name: str, weight: torch.Tensor) -> float:
    return DECAY if weight.ndim > 1 and not name.endswith("bias") else 0.0


def adamw(
    name: str, weight: torch.Tensor, layer: Layer, lr: float = LR, decay: float | None = None
) -> torch.Tensor:
    decay = usual_decay(name, weight) if decay is None else decay
    weight, mean, square = weight.double(), 0.0, 0.0
    for step in range(STEPS):
        gradient = gradients(step, layer)[name].double()
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        root = (square / (1 - BETAS[1] ** (step + 1))) ** 0.5 + EPS
        weight = weight * (1 - lr * decay)
        weight = weight - lr * (mean / (1 - BETAS[0] ** (step + 1))) / root
    return weight


def test_adamw_is_its_formula_and_norms_and_biases_do_not_decay() -> None:
    layer, before = trained(AdamW(lr=LR, weight_decay=DECAY, eps=EPS, betas=BETAS))
    for name, weight in before.named_parameters():
        expected = adamw(name, weight.detach(), before)
        torch.testing.assert_close(layer.get_parameter(name).detach().double(), expected)


def test_sgd_is_its_formula_and_norms_and_biases_do_not_decay() -> None:
    layer, before = trained(SGD(kind="sgd", lr=LR, weight_decay=DECAY, momentum=0.7))
    for name, parameter in before.named_parameters():
        weight, move = parameter.detach().double(), 0.0
        for step in range(STEPS):
            gradient = gradients(step, before)[name].double()
            move = 0.7 * move + gradient + usual_decay(name, weight) * weight
            weight = weight - LR * move
        torch.testing.assert_close(layer.get_parameter(name).detach().double(), weight)


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (EagerAdamW, torch.optim.AdamW, {"lr": LR, "betas": BETAS, "weight_decay": DECAY}),
        (EagerSGD, torch.optim.SGD, {"lr": LR, "momentum": 0.7, "weight_decay": DECAY}),
    ],
)
def test_an_eager_optimizer_is_torchs_bit_for_bit(
    ours: Any, theirs: Any, settings: dict[str, Any]
) -> None:
    """Through a saved state, a second group, and a step that is skipped."""
    made = []
    for kind in (ours, theirs):
        layer = Layer()
        optimizer = kind(layer.linear.parameters(), fused=True, **settings)
        optimizer.add_param_group({"params": [layer.norm.weight], "lr": LR / 2})
        for step in range(STEPS):
            optimizer.zero_grad()
            assert all(one.grad is None for one in layer.linear.parameters())
            for name, gradient in gradients(step, layer).items():
                layer.get_parameter(name).grad = gradient.requires_grad_()
            optimizer.found_inf = torch.tensor(float(step == 1))
            optimizer.step()
            again = kind(optimizer.param_groups, fused=True, **settings)
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        made.append((layer.state_dict(), optimizer.state_dict()))
    assert all(torch.equal(made[0][0][name], weight) for name, weight in made[1][0].items())
    assert str(made[0][1]) == str(made[1][1])
    assert not torch.equal(made[0][0]["linear.weight"], Layer().linear.weight)


def test_momentum_begins_as_0_where_the_first_step_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not as what the memory held before."""
    monkeypatch.setattr(torch, "empty_like", lambda one, **_: torch.full(one.shape, 7e3))
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = EagerSGD([weight], lr=LR, momentum=0.7, fused=True)
    for skipped in (1.0, 0.0):
        weight.grad = torch.full((3,), float("nan") if skipped else 0.5)
        optimizer.found_inf = torch.tensor(skipped)
        optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((3,), 0.5))
    assert torch.equal(weight.detach(), torch.ones(3) - LR * torch.full((3,), 0.5))


GROUPS: list[dict[str, Any]] = [
    {"match": "linear.*", "lr_factor": 0.5},
    {"match": "*", "weight_decay": 0.2},
]


class Own(OptimizerSettings):
    """An optimizer as a package brings one."""

    implementation = "make_own"
    kind: Literal["own"] = "own"
    lr: float = 0.1
    name: str = "SGD"
    fused: bool | None = None


class Heeding(torch.optim.RMSprop):
    found_inf: torch.Tensor | None = None


def make_own(
    settings: Own, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> torch.optim.Optimizer:
    kind = Heeding if settings.name == "Heeding" else getattr(torch.optim, settings.name, object)
    made = kind() if kind is object else kind(groups, **({"fused": True} if settings.fused else {}))
    return cast("torch.optim.Optimizer", made)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "NAdam", "RMSprop", "Adamax", "Adafactor"])
def test_an_optimizer_that_takes_every_step_is_refused(name: str) -> None:
    masters = Masters(Layer(), Mesh(Ranks(), torch.device("cpu")))
    with pytest.raises(WrongInput, match=rf"kind own made a {name} without found_inf, which would"):
        make_optimizer(Own(name=name), masters)


def test_an_optimizer_that_can_leave_out_a_step_is_taken() -> None:
    masters = Masters(Layer(), Mesh(Ranks(), torch.device("cpu")))
    for name in ("SGD", "Adagrad", "Adam", "AdamW"):
        make_optimizer(Own(name=name, fused=True), masters)
    make_optimizer(Own(name="Heeding"), masters)
    with pytest.raises(WrongInput, match=r"made a object, which is no torch\.optim\.Optimizer"):
        make_optimizer(Own(name="nothing of torch's"), masters)


def test_groups_have_rates_and_decays_of_their_own() -> None:
    """The first pattern that matches counts, and a decay that is given counts for vectors too."""
    settings = AdamW(lr=LR, weight_decay=DECAY, eps=EPS, betas=BETAS, groups=GROUPS)  # type: ignore[arg-type]
    layer, before = trained(settings)
    for name, weight in before.named_parameters():
        group = GROUPS[0] if name.startswith("linear") else GROUPS[1]
        decay = group.get("weight_decay", usual_decay(name, weight))
        expected = adamw(name, weight.detach(), before, LR * group.get("lr_factor", 1.0), decay)
        torch.testing.assert_close(layer.get_parameter(name).detach(), expected.float())


def test_a_group_of_nothing_is_refused_with_near_names() -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight"]

    def check(*groups: dict[str, Any]) -> None:
        check_groups(AdamW(groups=list(groups)), names)  # type: ignore[arg-type]

    check({"match": "*norm*"}, {"match": "*"})
    with pytest.raises(WrongInput, match=r"0\.match \*embed_token\.\* .*; near are model\.embed"):
        check({"match": "*embed_token.*"})
    with pytest.raises(WrongInput, match=r"groups\.1\.match \*norm\* matches only parameters of"):
        check({"match": "*"}, {"match": "*norm*"})


@pytest.mark.parametrize("count", [1, 7])
def test_stochastic_adamw_is_its_formula_before_it_rounds(count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, gradient, mean = (torch.randn(6, generator=generator) for _ in range(3))
    square = torch.rand(6, generator=generator)
    layer = Layer()
    masters = Masters(layer, Mesh(Ranks(), torch.device("cpu")))
    optimizer = StochasticAdamW(
        [{"params": [master.tensor for master in masters], "weight_decay": DECAY}],
        {"lr": LR, "betas": BETAS, "eps": EPS},
        masters,
        seed=1,
    )
    new, *moments = optimizer.rule(
        optimizer.param_groups[0],
        torch.tensor(float(count)),
        weight.clone(),
        gradient,
        [mean.clone(), square.clone()],
    )
    first = BETAS[0] * mean.double() + (1 - BETAS[0]) * gradient.double()
    second = BETAS[1] * square.double() + (1 - BETAS[1]) * gradient.double() ** 2
    root = (second / (1 - BETAS[1] ** count)) ** 0.5 + EPS
    expected = weight.double() * (1 - LR * DECAY) - LR * first / (1 - BETAS[0] ** count) / root
    for found, right in zip((new, *moments), (expected, first, second), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)


def test_each_shard_draws_the_bits_of_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, step = torch.zeros(8, 6), torch.ones(())
    bits = optimizers.noise_of(3, "weight", weight).bits(step, slice(0, 8), 6)
    monkeypatch.setattr(optimizers, "shard_slices", lambda tensor: (slice(4, 8), slice(2, 6)))
    shard = optimizers.noise_of(3, "weight", weight).bits(step, slice(0, 4), 4)
    assert torch.equal(shard, bits[4:, 2:])
    assert not torch.equal(shard, bits[:4, :4])


@pytest.mark.parametrize(
    "part",
    [
        (slice(2, 4), slice(0, 6), slice(0, 10)),
        (slice(0, 4), slice(3, 6), slice(0, 10)),
        (slice(1, 2), slice(0, 6), slice(4, 7)),
        (slice(0, 4), slice(2, 2), slice(0, 10)),
        (slice(0, 4), slice(0, 6), slice(10, 10)),
    ],
)
def test_each_part_of_experts_draws_the_bits_of_its_own_place(
    part: tuple[slice, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are divided among ranks, and their matrices where there are more ranks."""
    stack, step = torch.zeros(4, 6, 10), torch.ones(())
    bits = optimizers.noise_of(3, "experts", stack).bits(step, slice(0, 4), 60).view(4, 6, 10)
    monkeypatch.setattr(optimizers, "shard_slices", lambda tensor: part)
    experts, *matrix = (one.stop - one.start for one in part)
    noise = optimizers.noise_of(3, "experts", stack)
    found = noise.bits(step, slice(0, experts), math.prod(matrix))
    assert torch.equal(found.view(experts, *matrix), bits[part])
