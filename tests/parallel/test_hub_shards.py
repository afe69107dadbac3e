"""Models of transformers with their weights sharded, and with copies of that: the numbers of one
process, ties and unread embeddings included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ingot.config.sections.layout import Parallel
from ingot.config.sections.training import SGD
from ingot.data.batches.loader import Batch
from ingot.models.hf.models import Encoder, HFModel
from ingot.models.native.head import IGNORE
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.apply import WrapSettings, apply_wrappers, finish_wrapping, make_masters
from ingot.parallel.mesh import running_mesh
from ingot.train.optim.optimizers import make_optimizer
from tests import tolerances
from tests.exhaustive import EXHAUSTIVE
from tests.models.hf.shrunk import EOS
from tests.models.hf.test_types import CASES, made
from tests.models.hf.tiny import ALL, LABELS, VOCAB, drawn
from tests.ranks import run_ranks
from tests.train.stepping import one_step
from tests.train.test_step import distance

ROWS, SOURCE, TARGET = 4, 12, 7
COPIED = ("t5", "bart", "bart-untied", "bert", "modernbert")
SHARDED = tuple(ALL) if EXHAUSTIVE else COPIED
TWICE = COPIED if EXHAUSTIVE else ("t5", "bart-untied", "bert")
"""On four ranks: both kinds, a tie, and embeddings that nobody reads."""
Layouts = dict[str, dict[str, int]]


def batch_of(step: int, *, classes: bool, end: int | None = None) -> Batch:
    """Rows of unequal lengths, with unequally many targets; `end`: the last token of each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(5, VOCAB, (ROWS, SOURCE), generator=generator)
    lengths = torch.tensor([[12], [3], [9], [5]])
    if end is not None:
        tokens = tokens.scatter(1, lengths - 1, end)
    segments = (torch.arange(SOURCE) < lengths).long()
    if classes:
        labels = torch.randint(0, len(LABELS), (ROWS,), generator=generator)
        labels[1] = IGNORE
    else:
        labels = torch.randint(5, VOCAB, (ROWS, TARGET), generator=generator)
        labels[torch.arange(TARGET) >= torch.tensor([[7], [2], [4], [1]])] = IGNORE
    return Batch(tokens, labels, torch.arange(SOURCE).repeat(ROWS, 1), segments, torch.arange(ROWS))


def rows(batch: Batch, first: int, count: int) -> Batch:
    return Batch(
        *(
            getattr(batch, name)[first : first + count]
            for name in ("tokens", "labels", "positions", "segments", "rows")
        )
    )


def named(name: str) -> HFModel:
    """One of `tests.models.hf.tiny`, or `KIND:CASE` of `tests.models.hf.test_types`."""
    kind, _, case = name.rpartition(":")
    return made(kind, case) if kind else drawn(name)  # type: ignore[arg-type]


def train_a_little(
    name: str, layout: dict[str, int]
) -> tuple[list[float], list[float], dict[str, Tensor], float]:
    """Losses, norms and weights of two steps, and this rank's share of the trained numbers."""
    with running_mesh(Parallel(**layout)) as mesh:
        model, how, objective = named(name), WrapSettings(Parallel(**layout)), CrossEntropy()
        trained = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        apply_wrappers(model, mesh, how)
        masters = make_masters(model, mesh, how)
        optimizer = make_optimizer(SGD(kind="sgd", lr=0.2), masters)
        module = finish_wrapping(model.train(), mesh)
        share = ROWS // mesh.data.world
        losses, norms = [], []
        for step in range(2):
            end = EOS if ":" in name else None
            whole = batch_of(step % 2, classes=isinstance(model, Encoder), end=end)
            batches = [rows(whole, mesh.data.rank * share + place, 1) for place in range(share)]
            outcome = one_step(module, objective, batches, masters, optimizer, mesh, clip_norm=0.5)
            losses.append(float(outcome.loss))
            norms.append(float(outcome.grad_norm))
        weights = {
            parameter: _whole(tensor.detach()) for parameter, tensor in model.named_parameters()
        }
        return losses, norms, weights, sum(master.tensor.numel() for master in masters) / trained


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def several(names: Sequence[str], layout: dict[str, int]) -> dict[str, Any]:
    with running_mesh():
        return {name: train_a_little(name, layout) for name in names}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return several(SHARDED, {})


@pytest.mark.drawn("hub shards")
@pytest.mark.parametrize(
    ("names", "layout"),
    [(SHARDED, {"shard": 2}), (TWICE, {"replicate": 2, "shard": 2})],
    ids=["shard", "shard-replicate"],
)
def test_sharded_equals_one_process(
    names: tuple[str, ...], layout: dict[str, int], alone: dict[str, Any]
) -> None:
    unread = {
        name
        for name in names
        for key, parameter in drawn(name).named_parameters()
        if key.endswith("shared.weight") and not parameter.requires_grad
    }
    assert unread, "an embedding that nobody reads is among them"
    ranks = run_ranks(2 * layout.get("replicate", 1), several, names, layout, timeout_s=200)
    for name in names:
        losses, norms, weights, _ = alone[name]
        start = dict(drawn(name).named_parameters())
        for found in (rank[name] for rank in ranks):
            assert found[0] == pytest.approx(losses, rel=tolerances.SPLIT_LOSS), name
            assert found[1] == pytest.approx(norms, rel=tolerances.SPLIT_LOSS), name
            assert distance(found[2], weights) < tolerances.SPLIT_WEIGHTS, name
            assert 0.4 < found[3] < 0.6, f"{name}: each rank holds a half"
            frozen = [key for key, parameter in start.items() if not parameter.requires_grad]
            assert all(torch.equal(found[2][key], start[key].detach()) for key in frozen)


APART = ("encoder:xlnet", "encoder:albert", "seq2seq:mbart")
"""Layers that are used twice, embeddings that are shared, parameters that nobody reads."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(APART, marks=pytest.mark.drawn("hub shards")),
        *(
            pytest.param((f"{kind}:{case}",), id=f"{kind}:{case}", marks=pytest.mark.slow)
            for kind, case in CASES
        ),
    ],
)
def test_each_proved_type_sharded_equals_one_process(names: tuple[str, ...]) -> None:
    wanted = several(names, {})
    for rank in run_ranks(2, several, names, {"shard": 2}, timeout_s=200):
        for name in names:
            (losses, norms, weights, _), found = wanted[name], rank[name]
            assert found[0] == pytest.approx(losses, rel=tolerances.SPLIT_LOSS), name
            assert found[1] == pytest.approx(norms, rel=tolerances.SPLIT_LOSS), name
            assert distance(found[2], weights) < tolerances.SPLIT_WEIGHTS, name
