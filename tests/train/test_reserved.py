"""Memory of Adam's state that is taken before the first step: the state is torch's own, and exists
for the same weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ingot.base.environment import Ranks
from ingot.checkpoints.state import training_tensors
from ingot.config.sections.training import SGD, AdamW
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.train.build import build_train_state
from ingot.train.optim.eager import MOMENTS, reserve_state
from ingot.train.optim.optimizers import make_optimizer
from ingot.train.setup import make_setup
from tests.small import small_recipe

ALONE = Mesh(Ranks(), torch.device("cpu"))


class Two(nn.Module):
    """A matrix that is stored by columns, and a vector that gets its first gradient later."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.early = nn.Parameter(torch.randn(5, 3, generator=generator).t())
        self.late = nn.Parameter(torch.randn(4, generator=generator))


def stepped(*, reserved: bool) -> list[dict[str, Tensor]]:
    """Weights and state, as a checkpoint has them, after each of four steps; the third is not
    taken.
    """
    model, found = Two(), []
    masters = Masters(model, ALONE)
    optimizer = make_optimizer(AdamW(lr=0.1), masters)
    places: dict[Tensor, dict[str, int]] = {}
    if reserved:
        for weight, moments in reserve_state(optimizer).items():
            # What the memory holds must not matter.
            places[weight] = {n: m.fill_(torch.nan).data_ptr() for n, m in moments.items()}
        assert set(places) == {model.early, model.late}
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        model.early.grad = torch.randn(5, 3, generator=generator).t()
        if step:
            model.late.grad = torch.randn(4, generator=generator)
        optimizer.found_inf = torch.tensor(float(step == 2))  # type: ignore[attr-defined]
        optimizer.step()
        tensors = training_tensors(masters, optimizer)
        found.append({name: tensor.clone() for name, tensor in tensors.items()})
        for weight in places if step else ():
            state = optimizer.state[weight]
            assert {name: state[name].data_ptr() for name in MOMENTS} == places[weight]
    return found


def test_the_state_is_torchs_bit_for_bit_and_only_that_of_weights_with_a_gradient() -> None:
    plain, ours = stepped(reserved=False), stepped(reserved=True)
    assert not any(name.startswith("optimizer.late") for name in ours[0])
    assert any(name.startswith("optimizer.late") for name in ours[1])
    for before, now in zip(plain, ours, strict=True):
        assert list(before) == list(now)
        for name, tensor in before.items():
            assert torch.equal(tensor, now[name]), name
            assert tensor.stride() == now[name].stride(), name


def test_a_state_that_is_there_is_kept_and_other_optimizers_have_none_reserved() -> None:
    model = Two()
    masters = Masters(model, ALONE)
    optimizer = make_optimizer(AdamW(lr=0.1), masters)
    model.early.grad = torch.ones(3, 5)
    optimizer.step()
    state = dict(optimizer.state[model.early])
    assert set(reserve_state(optimizer)) == {model.late}
    optimizer.step()
    assert all(optimizer.state[model.early][name] is tensor for name, tensor in state.items())
    assert model.late not in optimizer.state
    assert not reserve_state(make_optimizer(SGD(kind="sgd", lr=0.1), masters))


def test_a_training_begins_with_memory_reserved_and_no_state(prepared_root: Path) -> None:
    setup = make_setup(small_recipe(prepared_root), ALONE)
    state = build_train_state(setup, None, None, ALONE)
    assert not state.optimizer.state
    assert not reserve_state(state.optimizer).keys() - {one.tensor for one in state.masters}
    assert len(state.optimizer._optimizer_step_pre_hooks) == 2
