"""What holds for every way of training: it learns, any split of the work gives one number, it
resumes bit for bit, and its model opens.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.environment import Ranks
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import Mesh
from ingot.train.setup import make_setup
from ingot.train.trainer import train
from tests import tolerances
from tests.objectives.ways import WAYS, make_ready, prepare_way, recipe_of
from tests.ranks import run_ranks
from tests.train.stopping import train_until

PROVED = "sft-lora"
"""The way that is proved in full without `-m slow`: masked labels, an adapter, and dropout whose
masks depend on the sample alone.
"""
SPLIT = (
    *("pretrain-best-fit", "dpo", "simpo", "kto", "reward"),
    *("distill-chats", "seq2seq", "classify", "mlm", "mlm-packed", "span_corruption"),
)
"""One way for each other objective, and for each other layout of rows."""
ANOTHER = pytest.mark.drawn("another way that resumes")
WHOLE = [pytest.param(way, marks=[pytest.mark.slow] * (way != PROVED)) for way in WAYS]
SGD = {
    "train__optimizer": "{kind: sgd, lr: 0.2}",
    "train__clip_norm": 0.5,
    "precision__export": "fp32",
    "train__steps": 3,
}


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ready(tmp_path_factory.mktemp("ways") / "root", ())


def apart(ready: Path, target: Path, way: str, **knobs: Any) -> Recipe:
    """The recipe of a way in a folder of its own, prepared as in `ready`; what it names there stays
    there.
    """
    prepare_way(ready, way)
    recipe = recipe_of(ready, way, output=str(target / "runs"), **knobs)
    if not recipe.folder.data.exists():
        shutil.copytree(ready / "runs" / way / "data", recipe.folder.data)
    return recipe


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.folder.model / "model.safetensors")


def logged(recipe: Recipe, key: str = "train/loss") -> list[float]:
    return [line[key] for line in read_lines(recipe.folder.metrics) if key in line]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return float(
        (difference / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5
    )


def on_ranks(ready: str, target: str, way: str) -> None:
    train(apart(Path(ready), Path(target), way, train__micro_batch=1, **SGD))


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("way", ["kto", "seq2seq", "span_corruption", "mlm"])
def test_tokens_that_are_asked_for_are_told_as_those_that_are_read(
    way: str, ready: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of what KTO reads is prompts with another answer; spans and masks are no text of the
    columns, and nothing is told of them.
    """
    recipe = apart(ready, tmp_path, way, train__steps=None, train__epochs=1)
    setup = make_setup(recipe, Mesh(Ranks(), torch.device("cpu")))
    asked = setup.last * setup.batch.global_batch * recipe.data.seq_len
    train(apart(ready, tmp_path, way, train__steps=None, train__tokens=asked))
    told = re.search(r"hold about (\S+) tokens of text", capsys.readouterr().err)
    assert (told is None) == (way in ("span_corruption", "mlm"))
    if told is not None:
        read = sum(logged(recipe, "train/tokens_per_step"))
        assert int(told[1].replace(",", "")) == pytest.approx(read, rel=0.05)


@pytest.mark.drawn(keep=4)
@pytest.mark.parametrize("way", SPLIT)
def test_unequal_micro_batches_give_the_same_numbers(way: str, ready: Path, tmp_path: Path) -> None:
    """Rows of 4 as 3 and 1, padded to different lengths and with different numbers of targets: a
    loss that is averaged over a micro-batch, or padding that is counted, gives other numbers.
    """
    whole, parted = (
        apart(
            ready,
            tmp_path / str(size),
            way,
            **{**SGD, "train__steps": 2, "train__micro_batch": size},
        )
        for size in (4, 3)
    )
    train(whole)
    train(parted)
    for key in ("train/loss", "train/grad_norm"):
        assert logged(parted, key) == pytest.approx(logged(whole, key), rel=tolerances.SPLIT_LOSS)
    assert distance(weights(parted), weights(whole)) < tolerances.SPLIT_WEIGHTS


@pytest.mark.parametrize("way", WHOLE)
def test_any_split_of_the_work_gives_the_same_numbers(
    way: str, ready: Path, tmp_path: Path
) -> None:
    """Micro-batches of 4, 3 and 1, and two ranks: loss, gradient norm and weights, with clipping,
    unequal target counts and padding.
    """
    whole = apart(ready, tmp_path / "whole", way, train__micro_batch=4, **SGD)
    train(whole)
    before = None
    for name, micro_batch in (("three", 3), ("one", 1)):
        parted = apart(ready, tmp_path / name, way, train__micro_batch=micro_batch, **SGD)
        train(parted)
        before = parted
        assert logged(parted) == pytest.approx(logged(whole), rel=tolerances.SPLIT_LOSS)
        assert logged(parted, "train/grad_norm") == pytest.approx(
            logged(whole, "train/grad_norm"), rel=tolerances.SPLIT_LOSS
        )
        assert distance(weights(parted), weights(whole)) < tolerances.SPLIT_WEIGHTS
    (tmp_path / "ranks").mkdir()
    shared = apart(ready, tmp_path / "ranks", way, train__micro_batch=1, **SGD)
    run_ranks(2, on_ranks, str(ready), str(tmp_path / "ranks"), way)
    assert before is not None
    assert logged(shared) == pytest.approx(logged(whole), rel=tolerances.SPLIT_LOSS)
    assert distance(weights(shared), weights(whole)) < tolerances.SPLIT_WEIGHTS


@pytest.mark.parametrize(
    ("way", "more"),
    [
        *(
            pytest.param(way, {}, id=way, marks=[pytest.mark.slow] * (way != PROVED))
            for way in WAYS
        ),
        pytest.param(
            "pretrain", {"train__optimizer__kind": "muon"}, id="pretrain-muon", marks=ANOTHER
        ),
        # The models of transformers have a dropout of their own.
        pytest.param(
            "seq2seq",
            {"model__config": {"dropout_rate": 0.2}},
            id="seq2seq-dropout",
            marks=ANOTHER,
        ),
        pytest.param(
            "classify",
            {"model__config": {"hidden_dropout_prob": 0.2}},
            id="classify-dropout",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_learns_and_resumes_bit_for_bit(
    way: str, more: dict[str, Any], ready: Path, tmp_path: Path
) -> None:
    knobs = {
        "train__steps": 24,
        "train__evaluate_every": 12,
        "train__optimizer__lr": 0.01,
        "checkpoint__every": 9,
        **more,
    }
    whole = apart(ready, tmp_path / "whole", way, **knobs)
    train(whole)
    curve = logged(whole)
    assert sum(curve[-4:]) < sum(curve[:4]), curve
    assert len(logged(whole, "validation/loss")) == 2
    broken = apart(ready, tmp_path / "broken", way, **knobs)
    train_until(13, broken)
    train(broken)
    assert logged(broken) == logged(whole)
    assert logged(broken, "validation/loss") == logged(whole, "validation/loss")
    found, wanted = weights(broken), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
