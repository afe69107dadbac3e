"""How long ranks wait for one that is silent: longer than it may be, so that the supervisor is the
first to find it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ingot.config.recipe import Recipe
from ingot.evaluate.evaluate import evaluate
from ingot.parallel.mesh import running_mesh
from ingot.train.trainer import train
from tests.ranks import run_ranks
from tests.small import small_recipe


def timeouts(start_s: float) -> list[timedelta]:
    """Those of the process groups of a mesh and its side channel."""
    asked = list[timedelta]()

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            asked.extend([options["timeout"]] if "timeout" in options else [])
            return call(*arguments, **options)

        return noted

    with (
        mock.patch.object(dist, "init_process_group", noting(dist.init_process_group)),
        mock.patch.object(dist, "new_group", noting(dist.new_group)),
        running_mesh(start_s=start_s) as mesh,
    ):
        mesh.side_channel()
    return asked


def test_ranks_wait_for_another_one_longer_than_it_may_be_silent() -> None:
    """Rank 0 verifies every byte of the newest checkpoint while they wait."""
    assert run_ranks(2, timeouts, 7200.0) == [[timedelta(minutes=125)] * 2] * 2


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
