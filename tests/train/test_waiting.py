"""How long ranks wait for one that is silent: longer than it may be, so that the supervisor is the
first to find it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Parallel
from ingot.evaluate.evaluate import evaluate
from ingot.parallel.mesh import running_mesh
from ingot.train.trainer import train
from tests.ranks import run_ranks
from tests.small import small_recipe


def timeouts(start_s: float, layout: dict[str, int]) -> set[timedelta]:
    """Those of all process groups of a mesh and of its side channel."""
    with running_mesh(Parallel(**layout), start_s=start_s) as mesh:
        groups = [dist.group.WORLD, mesh.side_channel().group]
        for part in mesh.parts.values():
            groups += [part.group, part.side_channel().group]
        for weights in (mesh.weights, mesh.experts):
            groups += weights.get_all_groups() if weights is not None else []
        cpu = torch.device("cpu")
        return {group._get_backend(cpu).options._timeout for group in groups if group is not None}


@pytest.mark.parametrize("layout", [{"tensor": 2, "expert": 2}, {"pipeline": 2}])
def test_ranks_wait_for_another_one_longer_than_it_may_be_silent(layout: dict[str, int]) -> None:
    """Rank 0 verifies every byte of the newest checkpoint while they wait; and a rank that shares
    a tensor, a stage or experts with it may load for as long.
    """
    assert run_ranks(4, timeouts, 7200.0, layout) == [{timedelta(minutes=125)}] * 4


def test_a_time_that_stands_for_never_is_none_that_is_over() -> None:
    """Nanoseconds of centuries do not fit into the numbers of gloo."""
    assert run_ranks(2, timeouts, 1e10, {}) == [{timedelta(days=365, minutes=5)}] * 2


class Asked(Exception):
    pass


@pytest.mark.parametrize("verb", [train, evaluate])
def test_the_knob_of_the_recipe_says_how_long(
    verb: Callable[[Recipe], Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(*layout: Any, start_s: float) -> None:
        raise Asked(start_s)

    monkeypatch.setattr(f"{verb.__module__}.running_mesh", noted)
    with pytest.raises(Asked, match="7200"):
        verb(small_recipe(root, launch__start_s=7200))
