"""What waits on the host: the same numbers to the last bit, and the device is really rid of it (as
far as a machine without one can tell).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from ingot.base.environment import Ranks
from ingot.config.sections.layout import MemorySettings, Offload
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights, local_tensor, shard_like
from ingot.parallel import masters as parallel_masters
from ingot.parallel import offload
from ingot.parallel.masters import HOST, Masters
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.parallel.offload import OffloadedTensor, offload_activations
from tests.parallel.test_recompute import NLL, assert_same, hub_gradients
from tests.parallel.wrapped_run import MODEL, Case, run_case, run_cases
from tests.ranks import run_ranks
from tests.train.test_step import global_batch

PARTS: tuple[dict[str, Any], ...] = (
    {"activations": True},
    {"optimizer": 0.5},
    {"activations": True, "optimizer": 1.0},
)


@pytest.fixture(autouse=True)
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL_BYTES", 64)


def cases_of(case: Case) -> list[Case]:
    weights: list[dict[str, Any]] = (
        [{"weights": True, "activations": True}] if "shard" in case.parallel else []
    )
    return [case, *(replace(case, memory={"offload": knobs}) for knobs in (*PARTS, *weights))]


def on_ranks(cases: list[Case]) -> list[Any]:
    offload.SMALL_BYTES = 64
    return run_cases(cases)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("adam", "compute", "lora"),
    [(False, "fp32", False), (True, "fp32", False), (True, "bf16", False), (False, "fp32", True)],
)
def test_offloading_gives_the_same_bits(adam: bool, compute: Any, lora: bool) -> None:
    plain, *others = (
        run_case(case) for case in cases_of(Case(adam=adam, compute=compute, lora=lora))
    )
    for other in others:
        assert_same(other, plain)


@pytest.mark.drawn
@pytest.mark.parametrize("layout", [{"shard": 2}, {"tensor": 2}, {"context": 2}, {"pipeline": 2}])
def test_offloading_gives_the_same_bits_on_ranks(layout: dict[str, Any]) -> None:
    model = {**MODEL, "num_hidden_layers": 3}
    cases = cases_of(Case(parallel=layout, adam=True, steps=2, model=model))
    for plain, *others in run_ranks(2, on_ranks, cases, timeout_s=150):
        for other in others:
            assert_same(other, plain)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_models_of_transformers_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = hub_gradients(name, {})
    monkeypatch.setattr(
        "tests.parallel.test_recompute.recompute_layers",
        lambda model, knobs: offload_activations(model),
    )
    found = hub_gradients(name, {})
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def taken(monkeypatch: pytest.MonkeyPatch, layers: int) -> tuple[list[Tensor], Decoder, Tensor]:
    """What went to the host in a forward pass."""
    gone: list[Tensor] = []
    was = OffloadedTensor.__init__
    monkeypatch.setattr(
        OffloadedTensor,
        "__init__",
        lambda self, tensor, road: gone.append(tensor) or was(self, tensor, road),
    )
    model = Decoder(DecoderConfig.from_hf({**MODEL, "num_hidden_layers": layers}))
    init_weights(model, 0)
    offload_activations(model)
    batch = global_batch(0)
    return (
        gone,
        model,
        model(batch.tokens, batch.positions, batch.segments, batch.labels, NLL).sum(),
    )


def test_activations_go_once_and_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, model, loss = taken(monkeypatch, 2)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert not any(tensor.untyped_storage().data_ptr() in weights for tensor in gone)
    half = gone[: len(gone) // 2]
    places = [
        (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        for tensor in half
    ]
    assert len(set(places)) == len(places), "three products save the same input, which goes once"
    # The input of each product, twice that of each norm, queries, keys, values, what came of them,
    # gate and up at the least.
    assert sum(tensor.nbytes for tensor in half) > 10 * 8 * 24 * 32 * 4
    loss.backward()


def test_two_layers_at_most_are_back_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of a layer brings back the one before it, and no other."""
    back: list[int] = []
    was = offload.LayerOffload.fetch

    def fetch(self: offload.LayerOffload) -> None:
        if not self._restored:
            back.append(number[id(self._layer)])
        was(self)

    monkeypatch.setattr(offload.LayerOffload, "fetch", fetch)
    _, model, loss = taken(monkeypatch, 4)
    number = {id(layer): index for index, layer in enumerate(model.model.layers.children())}
    seen: list[list[int]] = []
    for layer in model.model.layers.children():
        layer.register_full_backward_pre_hook(lambda module, gradient: seen.append(list(back)))
    batch = global_batch(0)
    loss = model(batch.tokens, batch.positions, batch.segments, batch.labels, NLL).sum()
    loss.backward()
    assert back == [3, 2, 1, 0]
    assert seen == [[], [3, 2], [3, 2, 1], [3, 2, 1, 0]]


def test_nothing_goes_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        gone, _, _ = taken(monkeypatch, 2)
    assert not gone


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(size) for size in (50, 10, 20, 20))


@pytest.mark.parametrize(
    ("share", "away"), [(0.0, 0), (0.2, 0), (0.3, 1), (0.5, 1), (0.6, 2), (0.75, 3), (1.0, 4)]
)
def test_as_large_a_share_of_the_optimizer_as_was_asked_for(share: float, away: int) -> None:
    model = Sizes()
    masters = list(Masters(model, Mesh(Ranks(), HOST), on_host=share))
    apart = [master.tensor is not master.parameter for master in masters]
    assert apart == [True] * away + [False] * (4 - away)
    assert all(
        master.tensor.data_ptr() != master.parameter.data_ptr()
        for master in masters
        if master.tensor is not master.parameter
    )


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_both_ends_of_a_pipeline_keep_what_they_share_in_one_place(share: float) -> None:
    """They sum its gradient: one on the host and one on a GPU would wait for each other."""
    alone = Mesh(Ranks(), HOST)
    first, last = (
        Masters(nn.ModuleDict(parts), alone, shared=["embedding.weight"], on_host=share)
        for parts in (
            {"embedding": nn.Linear(10, 10, bias=False), "layers": Sizes()},
            {
                "norm": nn.Linear(3, 3),
                "layers": Sizes(),
                "embedding": nn.Linear(10, 10, bias=False),
            },
        )
    )
    places = {"embedding.weight" in masters.on_host for masters in (first, last)}
    assert places == {share == 1}


def test_what_is_on_the_host_is_published() -> None:
    model = Sizes()
    masters = Masters(model, Mesh(Ranks(), HOST), on_host=1.0)
    for master in masters:
        master.parameter.grad = torch.full_like(master.parameter, 3.0)
    masters.collect()
    assert all(master.parameter.grad is None for master in masters)
    masters.scale(torch.tensor(0.5))
    for master in masters:
        assert master.tensor.grad is not None
        with torch.no_grad():
            master.tensor.sub_(master.tensor.grad)
    assert all((master.parameter == 1).all() for master in masters)
    masters.publish()
    assert all((master.parameter == -0.5).all() for master in masters)


@pytest.mark.parametrize("working", [torch.bfloat16, torch.float32])
def test_a_master_on_the_host_leaves_its_parameter_on_the_device(
    working: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the host is a device without contents, and nothing can be copied back from there: what
    would have been left there is seen without a GPU.
    """
    monkeypatch.setattr(parallel_masters, "HOST", torch.device("meta"))
    with pytest.raises(NotImplementedError, match="out of meta"):
        Masters(Sizes(), Mesh(Ranks(), HOST), working=working, on_host=1.0)


def shares_memory() -> bool:
    with running_mesh() as mesh:
        assert mesh.weights is not None
        like = distribute_tensor(torch.zeros(5, 3), mesh.weights["replicate"], [Shard(0)])
        part = torch.ones_like(local_tensor(like))
        whole = shard_like(like, part)
        return whole.shape == like.shape and local_tensor(whole).data_ptr() == part.data_ptr()


def test_a_spread_part_is_the_part_itself() -> None:
    """A checkpoint that is loaded into a copy would be lost."""
    assert run_ranks(2, shares_memory) == [True, True]


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(
        ValidationError, match=r"memory\.offload\.weights takes the whole optimizer along"
    ):
        MemorySettings(offload=Offload(weights=True, optimizer=0.5))
    with pytest.raises(
        ValidationError,
        match=r"memory\.offload\.activations keeps what memory\.recompute\.kind=full",
    ):
        MemorySettings(**{"offload": {"activations": True}, "recompute": {"kind": "full"}})
