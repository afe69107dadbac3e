"""Whole runs of every way of training with weights spread over ranks: the numbers of one process,
resumed bit for bit, exported the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.runfolder import RunFolder
from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import running_mesh
from ingot.train.trainer import train
from tests import tolerances
from tests.exhaustive import some_of
from tests.objectives.test_every_way import SGD, apart, distance, logged, weights
from tests.objectives.ways import make_ready
from tests.ranks import run_ranks
from tests.train.stopping import train_until

WITHOUT_DROPOUT = {"model__lora": {"rank": 4, "alpha": 8, "kind": "dora"}}
BF16 = {"precision__compute": "bf16"}
Layout = dict[str, int]
Case = tuple[str, Layout, dict[str, Any]]
QUICK: list[Case] = some_of(
    [
        ("pretrain", {"shard": 2}, {}),
        ("sft-lora", {"tensor": 2}, WITHOUT_DROPOUT),
        ("dpo", {"tensor": 2}, {}),
        ("seq2seq", {"shard": 2}, {}),
    ],
    2,
    "whole runs over ranks",
)
# Sequence-to-sequence models and encoders of transformers are sharded and copied only.
SLOW: list[Case] = [
    ("pretrain", {"tensor": 2}, {}),
    ("sft-lora", {"shard": 2}, {}),
    ("sft-lora", {"pipeline": 2}, WITHOUT_DROPOUT),
    ("dpo", {"shard": 2}, {}),
    ("dpo", {"context": 2}, {}),
    ("dpo-lora", {"shard": 2}, {}),
    ("distill", {"shard": 2}, {}),
    ("distill", {"tensor": 2}, {}),
    ("distill", {"context": 2}, {}),
    ("distill", {"pipeline": 2}, {}),
    ("classify", {"shard": 2}, {}),
    ("reward", {"shard": 2}, {}),
    ("reward-lora", {"shard": 2}, {}),
    ("pretrain", {"shard": 2, "tensor": 2}, {}),
    ("pretrain", {"pipeline": 2, "shard": 2}, {}),
    ("dpo", {"shard": 2, "tensor": 2}, {}),
    ("distill", {"shard": 2, "tensor": 2}, {}),
    ("seq2seq", {"replicate": 2, "shard": 2}, {}),
    ("classify", {"replicate": 2, "shard": 2}, {}),
]
RESUMED: list[Case] = [("pretrain", {"shard": 2}, {})]
RESUMED_SLOW: list[Case] = [
    ("pretrain", {"pipeline": 2}, {}),
    ("pretrain", {"tensor": 2}, {}),
    ("sft-lora", {"shard": 2}, {}),
    ("pretrain", {"shard": 2}, BF16),
    ("pretrain", {"shard": 2, "tensor": 2}, {}),
    ("pretrain", {"pipeline": 2, "shard": 2}, {}),
    ("dpo", {"tensor": 2}, {}),
    ("distill", {"context": 2}, {}),
]
ADAM = {"train__steps": 4, "checkpoint__every": 2, "precision__export": "fp32"}


def told(way: str, layout: Layout, more: dict[str, Any]) -> str:
    return "-".join(
        [
            way,
            *(f"{axis}{degree}" for axis, degree in layout.items()),
            *(["bf16"] if more == BF16 else []),
        ]
    )


def world_of(layout: Layout) -> int:
    return int(torch.tensor(list(layout.values())).prod())


def recipe_for(ready: Path, target: Path, way: str, layout: Layout, **knobs: Any) -> Recipe:
    return apart(
        ready,
        target,
        way,
        **{f"parallel__{axis}": degree for axis, degree in layout.items()},
        **knobs,
    )


def trained(ready: str, target: str, cases: list[Case], resumed: list[Case]) -> None:
    """On each rank: all cases of one world one after the other."""
    with running_mesh():
        for way, layout, more in cases:
            train(
                recipe_for(
                    Path(ready),
                    Path(target) / told(way, layout, more),
                    way,
                    layout,
                    train__micro_batch=1,
                    **{**SGD, **more},
                )
            )
        for way, layout, more in resumed:
            for name in ("whole", "broken"):
                recipe = recipe_for(
                    Path(ready),
                    Path(target) / f"{told(way, layout, more)}-{name}",
                    way,
                    layout,
                    train__micro_batch=1,
                    **{**ADAM, **more},
                )
                if name == "broken":
                    train_until(3, recipe)
                train(recipe)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ready(tmp_path_factory.mktemp("ways") / "root")


Spread = Callable[[Case], Path]


@pytest.fixture(scope="module")
def spread(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Spread:
    """Where a case was trained; all cases as quick as it that want as many ranks are trained with
    it, by the same processes.
    """
    target, done = tmp_path_factory.mktemp("spread"), set[tuple[bool, int]]()

    def of(case: Case) -> Path:
        quick, world = case in QUICK or case in RESUMED, world_of(case[1])
        if (quick, world) not in done:
            both = (QUICK, RESUMED) if quick else (SLOW, RESUMED_SLOW)
            mine, again = ([one for one in cases if world_of(one[1]) == world] for cases in both)
            for name in [told(*one) for one in mine] + [
                f"{told(*one)}-{end}" for one in again for end in ("whole", "broken")
            ]:
                (target / name).mkdir()
            for way, layout, more in mine:
                apart(ready, target / told(way, layout, more), way)
            for way, layout, more in again:
                for end in ("whole", "broken"):
                    apart(ready, target / f"{told(way, layout, more)}-{end}", way)
            run_ranks(world, trained, str(ready), str(target), mine, again, timeout_s=300)
            done.add((quick, world))
        return target / told(*case)

    return of


@pytest.fixture(scope="module")
def alone(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Recipe]:
    """The same trained by one process."""
    made: dict[tuple[str, bool], Recipe] = {}

    def of(case: Case) -> Recipe:
        way, _, more = case
        if (way, bool(more)) not in made:
            made[way, bool(more)] = apart(
                ready,
                tmp_path_factory.mktemp("alone"),
                way,
                train__micro_batch=1,
                **{**SGD, **more},
            )
            train(made[way, bool(more)])
        return made[way, bool(more)]

    return of


def params(quick: list[Case], slow: list[Case], *ways: str) -> list[Any]:
    return [
        *(pytest.param(case, id=told(*case)) for case in quick if case[0] in ways or not ways),
        *(
            pytest.param(case, id=told(*case), marks=pytest.mark.slow)
            for case in slow
            if case[0] in ways or not ways
        ),
    ]


@pytest.mark.drawn("training over ranks")
@pytest.mark.parametrize("case", params(QUICK, SLOW))
def test_it_gives_the_numbers_of_one_process(
    case: Case, ready: Path, spread: Spread, alone: Callable[[Case], Recipe]
) -> None:
    way, layout, more = case
    found, wanted = recipe_for(ready, spread(case), way, layout, **{**SGD, **more}), alone(case)
    assert logged(found) == pytest.approx(logged(wanted), rel=tolerances.SPLIT_LOSS)
    assert logged(found, "train/grad_norm") == pytest.approx(
        logged(wanted, "train/grad_norm"), rel=tolerances.SPLIT_LOSS
    )
    assert distance(weights(found), weights(wanted)) < tolerances.SPLIT_WEIGHTS
    assert committed(found.folder.checkpoints)[0].commit["layout"] == " x ".join(
        f"{axis} {layout[axis]}"
        for axis in ("pipeline", "replicate", "shard", "context", "tensor")
        if axis in layout
    )


@pytest.mark.parametrize("case", params(RESUMED, RESUMED_SLOW))
def test_it_resumes_bit_for_bit(case: Case, ready: Path, spread: Spread) -> None:
    way, _, more = case
    trained_in = spread(case)
    broken, whole = (
        apart(ready, trained_in.with_name(f"{trained_in.name}-{end}"), way, **{**ADAM, **more})
        for end in ("broken", "whole")
    )
    assert logged(broken) == logged(whole)
    found, wanted = weights(broken), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def exported(folder: RunFolder) -> dict[str, bytes]:
    files = [
        file
        for part in (folder.model, folder.adapter)
        for file in sorted(part.glob("*"))
        if file.is_file()
    ]
    return {str(file.relative_to(folder.root)): file.read_bytes() for file in files}


@pytest.mark.parametrize("case", params(QUICK, SLOW, "pretrain", "sft-lora", "seq2seq"))
def test_one_process_exports_the_same_bytes_from_its_checkpoint(
    case: Case, ready: Path, spread: Spread
) -> None:
    """The recipe is finished, so that all which is left to do is to load the checkpoint and to
    export it.
    """
    way, _, more = case
    recipe = apart(ready, spread(case), way, **{**SGD, **more})
    there = exported(recipe.folder)
    steps = [found.step for found in committed(recipe.folder.checkpoints)]
    train(recipe)
    assert [found.step for found in committed(recipe.folder.checkpoints)] == steps
    assert exported(recipe.folder) == there
    assert len(there) >= (9 if way == "sft-lora" else 6)
