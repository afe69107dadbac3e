"""A vocabulary that is split over ranks, whose number does not divide it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ingot.config.sections.layout import Parallel
from ingot.models.native.head import LogitsView
from ingot.parallel.mesh import running_mesh
from ingot.parallel.tensor import VocabParallelHead, VocabParallelView
from tests import tolerances
from tests.ranks import run_ranks

LOGITS = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 5
LABELS = torch.tensor([0, 3, 4, 6, 2])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_slice_begins_where_torch_cuts(world: int) -> None:
    parts = torch.arange(10).chunk(world)
    for rank, part in enumerate(parts):
        mesh = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda: world)
        assert VocabParallelHead(cast("Any", mesh), 10).first == int(part[0])


def values(view: LogitsView) -> list[torch.Tensor]:
    found = [view.logsumexp(), view.gather(LABELS), view.log_probability(LABELS)]
    return [*found, view.log_probabilities(2.0)]


def _of_rank() -> list[torch.Tensor]:
    with running_mesh(Parallel(tensor=2)) as mesh:
        rank, group = mesh.tensor.rank, mesh.tensor.group
        assert group is not None
        return values(VocabParallelView(LOGITS.chunk(2, dim=1)[rank], group, 4 * rank))


def test_every_rank_finds_what_the_whole_vocabulary_says() -> None:
    *whole, softened = values(LogitsView(LOGITS))
    ranks = run_ranks(2, _of_rank)
    for found in ranks:
        for mine, wanted in zip(found[:-1], whole, strict=True):
            assert torch.allclose(mine, wanted, atol=tolerances.NLL_FP32)
    parts = torch.cat([found[-1] for found in ranks], dim=1)
    assert torch.allclose(parts, softened, atol=tolerances.NLL_FP32)
