"""Whatever tensors an optimizer keeps come back as they were; what cannot is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from ingot.base.errors import WrongInput
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.store import newest_valid
from ingot.config.sections.layout import Parallel
from ingot.models.device import Compute
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import running_mesh
from tests.checkpoints.states import ALONE, CONFIG, assert_equal, state_of, train
from tests.checkpoints.test_layouts import train_state
from tests.ranks import run_ranks
from tests.saving import save_checkpoint


class OfManyShapes(optim.Optimizer):
    """Its update depends on state of other shapes and types than the weights'."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state["norms"] = torch.zeros(5, dtype=torch.float64)
                state["signs"] = torch.zeros(weight.shape, dtype=torch.uint8)
                state["rows"] = torch.zeros(weight.shape[:1])
                state["taken"] = torch.zeros((), dtype=torch.int64)
            state["taken"] += 1
            state["norms"][int(state["taken"]) % 5] = weight.grad.norm()
            state["signs"] += weight.grad > 0
            state["rows"] += weight.grad.flatten(1).sum(1) if weight.ndim > 1 else weight.grad
            rate = 1e-2 * state["norms"].sum() / state["taken"]
            weight -= rate.float() * state["signs"] * (1 + state["rows"].sum().tanh())


Make = Callable[[list[Tensor]], optim.Optimizer]
KINDS: dict[str, Make] = {
    "NAdam": optim.NAdam,
    "Adafactor": optim.Adafactor,
    "OfManyShapes": lambda weights: OfManyShapes(weights, {}),
}


def fresh(seed: int, make: Make) -> tuple[Masters, optim.Optimizer]:
    model = Decoder(DecoderConfig.from_hf(CONFIG))
    init_weights(model, seed)
    masters = Masters(model, ALONE)
    return masters, make([master.tensor for master in masters])


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_any_shape_and_type_comes_back_and_goes_on(kind: str, tmp_path: Path) -> None:
    masters, optimizer = fresh(0, KINDS[kind])
    for step in range(3):
        train(masters, optimizer, step)
    save_checkpoint(tmp_path, 3, masters, optimizer, {}, ALONE)
    again, resumed = fresh(1, KINDS[kind])
    found = newest_valid(tmp_path)
    assert found is not None
    load_checkpoint(found, again, resumed, ALONE)
    for step in range(3, 6):
        assert_equal(state_of(masters, optimizer), state_of(again, resumed))
        train(masters, optimizer, step)
        train(again, resumed, step)
    assert_equal(state_of(masters, optimizer), state_of(again, resumed))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("n", 3, r"optimizer state model\.norm\.weight\.n is of type int; make it a tensor"),
        ("seen", [torch.zeros(2)], r"model\.norm\.weight\.seen is of type list; make it a tensor"),
        ("a.b", torch.zeros(2), r"model\.norm\.weight\.a\.b has a key that is no name without"),
        (7, torch.zeros(2), r"model\.norm\.weight\.7 has a key that is no name without"),
    ],
)
def test_state_that_a_checkpoint_cannot_keep_is_refused(key: Any, value: Any, words: str) -> None:
    masters, optimizer = fresh(0, optim.SGD)
    weight = next(master.tensor for master in masters if master.name == "model.norm.weight")
    optimizer.state[weight] = {"momentum": torch.zeros_like(weight), key: value}
    with pytest.raises(WrongInput, match=words):
        training_tensors(masters, optimizer)
    optimizer.state[weight] = {}
    training_tensors(masters, optimizer)
    stranger = torch.zeros(1)
    optimizer.state[stranger] = {}
    training_tensors(masters, optimizer)
    for kept in ({"n": torch.zeros(())}, torch.ones(3), 0):
        optimizer.state[stranger] = kept
        with pytest.raises(WrongInput, match="state of what is no trained parameter"):
            training_tensors(masters, optimizer)


def test_values_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted by what is printed of them, all were fetched from their device, at each save."""

    def printed(tensor: Tensor) -> str:
        raise AssertionError("a tensor was printed")

    masters, optimizer = fresh(0, KINDS["NAdam"])
    train(masters, optimizer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "__repr__", printed)
        names = list(training_tensors(masters, optimizer))
    assert "optimizer.model.norm.weight.exp_avg" in names


def refused_of(layout: dict[str, int], compute: Compute = "fp32") -> str:
    with running_mesh(Parallel(**layout)) as mesh:
        _, masters, optimizer = train_state("257", layout, mesh, compute)
        for master in masters:
            optimizer.state[master.tensor] = {"step": torch.zeros(())}
        training_tensors(masters, optimizer)
        for master in masters:
            optimizer.state[master.tensor]["norms"] = torch.zeros(5)
        try:
            training_tensors(masters, optimizer)
        except WrongInput as error:
            return str(error)
        return ""


def test_state_of_another_shape_than_a_shard_is_refused() -> None:
    for words in run_ranks(2, refused_of, {"shard": 2}):
        assert "norms is [5], and" in words
        assert "which is divided among ranks" in words


def test_state_of_any_shape_is_kept_where_each_rank_has_the_whole_weights() -> None:
    """In bf16, too, where FSDP adds up the gradients of replicas."""
    assert run_ranks(2, refused_of, {"replicate": 2}, "bf16") == ["", ""]
