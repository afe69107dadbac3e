"""Every layout gives what one process gives: losses, gradient norms, updated weights; each rank
holds its share; and faults are seen.

A case is a few steps of the real train_state (`ingot.verify.layout.steps`): packed rows, targets unequal
over ranks down to none, accumulation, clipping that acts, a vocabulary that nothing divides, plain
gradient descent with a rate of 1.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.config.sections.training import SGD, AdamW, Muon, OptimizerSettings
from ingot.verify.layout.modes import (
    AXES,
    HUB_MODES,
    MODES,
    Layout,
    layout,
    mode_pairs,
)
from ingot.verify.layout.proof import LayoutResult
from tests.objectives import ways
from tests.parallel import faults
from tests.parallel.products import PRODUCTS, all_layouts
from tests.parallel.proving import Proving, recipe_of
from tests.small import copy_of

FEATURES: dict[str, set[str]] = {
    "llama": {"untied"},
    "tied": {"tied", "biases"},
    "qwen3": {"untied", "normed queries"},
    "mistral": {"untied", "windows"},
    "qwen2": {"tied", "biases", "windows"},
    "lora": {"untied", "adapter"},
}
"""What of a model could go wrong when it is spread."""


def combinations() -> Iterator[tuple[str, ...]]:
    """Each mode alone, and each two that are about different knobs and can go together."""
    yield from ((mode,) for mode in MODES)
    for one, other in itertools.combinations(MODES, 2):
        apart = MODES[one].keys().isdisjoint(MODES[other])
        if apart and {one, other} != {"zero bubble", "selective"}:
            yield one, other


def covering(seed: int = 0, larger: int = 1) -> dict[str, list[Layout]]:
    """Few cases in which every mode meets every feature of a model (a pairwise covering array,
    picked greedily), and a seeded sample of the products of three modes and more.
    """
    chosen: dict[str, list[Layout]] = {model: [] for model in FEATURES}
    candidates = [(model, modes) for model in FEATURES for modes in combinations()]
    missing = {(mode, feature) for mode in MODES for feature in set().union(*FEATURES.values())}
    together: set[tuple[str, ...]] = set()

    def worth(case: tuple[str, tuple[str, ...]]) -> float:
        """New pairs for each process; among equals two modes that have not met."""
        model, modes = case
        new = missing & set(itertools.product(modes, FEATURES[model]))
        return (len(new) + (0.1 if modes not in together else 0)) / (1 + of(modes).processes)

    def of(modes: tuple[str, ...]) -> Layout:
        return layout(**{name: value for mode in modes for name, value in MODES[mode].items()})

    while missing:
        model, modes = max(candidates, key=worth)
        chosen[model].append(of(modes))
        missing -= set(itertools.product(modes, FEATURES[model]))
        together.add(modes)
    for knobs in random.Random(seed).sample(PRODUCTS, larger):
        chosen["llama"].append(layout(**knobs))
    return chosen


QUICK = covering()
"""What CI tries."""
FULL: dict[str, list[Layout]] = {
    "llama": all_layouts(),
    "tied": all_layouts(),
    "lora": [
        *(layout(**knobs) for knobs in (*MODES.values(), *PRODUCTS)),
        *mode_pairs(("shard", "tensor", "1f1b", "ring")),
    ],
    **{
        model: [
            *(layout(**knobs) for knobs in MODES.values()),
            *mode_pairs(("tensor", "1f1b", "ring", "ulysses")),
        ]
        for model in ("qwen3", "mistral", "qwen2")
    },
}
"""What there is: all of the table on tied and untied models, parts of it on the others."""
HUB_WAYS = ("seq2seq", "classify", "mlm", "span_corruption", "reward")
WAYS: list[tuple[str, dict[str, Any]]] = [
    *(
        (way, knobs)
        for way in ("sft", "distill")
        for knobs in ({"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2})
    ),
    ("dpo", {"tensor": 2, "sequence": False}),
    ("dpo", {"shard": 2, "tensor": 2}),
    ("dpo-lora", {"shard": 2}),
    ("dpo-lora", {"tensor": 2}),
    *(
        (way, knobs)
        for way in ("dpo", "ipo", "simpo", "orpo", "kto")
        for knobs in ({"shard": 2}, {"tensor": 2}, {"context": 2})
    ),
    *((way, MODES[mode]) for way in HUB_WAYS for mode in HUB_MODES),
]


SHORT_WAYS: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"context": 2}),
    ("distill", {"tensor": 2}),
    ("distill", {"pipeline": 2}),
    ("dpo", {"context": 2}),
    ("dpo", {"tensor": 2, "sequence": False}),
    ("dpo-lora", {"shard": 2}),
    ("ipo", {"shard": 2}),
    ("simpo", {"shard": 2}),
    ("orpo", {"context": 2}),
    ("kto", {"shard": 2}),
    ("kto", {"context": 2}),
    ("seq2seq", MODES["shard"]),
    ("classify", MODES["replicate"]),
    ("mlm", MODES["shard"]),
    ("span_corruption", MODES["shard"]),
    ("reward", MODES["shard"]),
]
"""Of these, one case for each thing that an objective does over ranks: sums over rows and over the
vocabulary, a teacher's states, the models of transformers.
"""


def cases(models: dict[str, list[Layout]], *marks: Any) -> list[Any]:
    """Ordered by the number of processes, so that few are there at a time. Whole copies are few and
    short: marks are for the others.
    """
    found = sorted(
        ((model, one) for model, layouts in models.items() for one in layouts),
        key=lambda case: case[1].processes,
    )
    return [
        pytest.param(model, one, id=f"{model}: {one.name}", marks=() if copies else marks)
        for model, one in found
        for copies in [one.processes == one.parallel.replicate]
    ]


@pytest.fixture(scope="module")
def proving() -> Iterator[Proving]:
    made = Proving()
    with made.prover:
        yield made


@pytest.fixture(scope="module")
def texts(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(prepared_root, tmp_path_factory.mktemp("layouts") / "root")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ways.make_ready(tmp_path_factory.mktemp("ways") / "root", ())


def prove(proving: Proving, texts: Path, model: str, one: Layout) -> LayoutResult:
    return proving.prover.finding(proving.reference(recipe_of(texts, model)), one)


def check(found: LayoutResult) -> None:
    if found.trace:
        pytest.fail(f"{found.summary}\n{found.trace}")
    assert found.holds, found.summary


@pytest.mark.parametrize(("model", "one"), cases(QUICK, pytest.mark.drawn(keep=4)))
def test_a_layout_equals_one_process(
    model: str, one: Layout, proving: Proving, texts: Path
) -> None:
    check(prove(proving, texts, model, one))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[pytest.mark.drawn] * (mode != "shard"))
        for mode in MODES
        if "tensor" not in mode
    ],
)
def test_a_base_in_few_bits_equals_one_process(mode: str, proving: Proving, texts: Path) -> None:
    recipe = recipe_of(texts, "lora", model__quantize="{kind: nf4, double: true}")
    check(proving.prover.finding(proving.reference(recipe), layout(**MODES[mode])))


@pytest.mark.drawn("DoRA over layouts")
@pytest.mark.parametrize(
    "mode", ["shard", "tensor", "tensor alone", "1f1b", "zero bubble", "ring", "selective", "both"]
)
def test_the_norms_of_dora_are_those_of_whole_rows(
    mode: str, proving: Proving, texts: Path
) -> None:
    """A layer that is split by its inputs has parts of each row on every rank."""
    knobs = {"shard": 2, "tensor": 2} if mode == "both" else MODES[mode]
    check(prove(proving, texts, "dora", layout(**knobs)))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "one"), cases(FULL))
def test_all_layouts_equal_one_process(
    model: str, one: Layout, proving: Proving, texts: Path
) -> None:
    found = prove(proving, texts, model, one)
    if found.holds is None:
        assert found.reason.startswith("parallel."), found.summary
        assert one.parallel.schedule == "zero_bubble", found.summary
    else:
        check(found)


@pytest.mark.parametrize(
    ("way", "knobs"),
    [
        pytest.param(
            way,
            knobs,
            id=f"{way}: {layout(**knobs).name}",
            marks=[
                pytest.mark.drawn("a way of training over layouts", keep=2)
                if (way, knobs) in SHORT_WAYS
                else pytest.mark.slow
            ],
        )
        for way, knobs in WAYS
    ],
)
def test_every_way_of_training_equals_one_process(
    way: str, knobs: dict[str, Any], proving: Proving, documents: Path
) -> None:
    ways.prepare_way(documents, way)
    reference = proving.reference(ways.recipe_of(documents, way))
    check(proving.prover.finding(reference, layout(**knobs)))


OPTIMIZERS: dict[str, OptimizerSettings] = {
    # Eps as large as a gradient: what is nothing but rounding stays small.
    "adamw": AdamW(lr=0.002, eps=1e-3, weight_decay=0.1),
    "momentum": SGD(kind="sgd", lr=0.02, momentum=0.9, weight_decay=0.1),
    # What is nothing but rounding in a gradient of low rank would be made as large as the rest.
    "muon": Muon(kind="muon", lr=0.0005, eps=1e-3, compute="fp32"),
}
"""Beside plain descent, which all else here is proved with."""


def whole_runs() -> list[tuple[str, dict[str, Any], str]]:
    """Objective, layout and optimizer: all of them."""
    return [
        (way, MODES[mode], optimizer)
        for way in ("pretrain", *dict.fromkeys(way for way, _ in WAYS))
        for mode in (HUB_MODES if way in HUB_WAYS else MODES)
        for optimizer in OPTIMIZERS
        if not (ways.SOURCES.get(way) in ("preferences", "rated") and "pipeline" in MODES[mode])
        and not (optimizer == "muon" and way.endswith("lora"))
    ]


def pairwise(seed: int = 0) -> list[tuple[str, dict[str, Any], str]]:
    """Few of them, in which every optimizer meets every axis of a layout and every objective."""
    found = [case for case in whole_runs() if set(case[1].values()) <= {2, "1f1b", False}]
    random.Random(seed).shuffle(found)
    found.sort(key=lambda case: layout(**case[1]).processes)
    chosen: list[tuple[str, dict[str, Any], str]] = []

    def pairs(case: tuple[str, dict[str, Any], str]) -> set[tuple[str, str]]:
        way, knobs, optimizer = case
        axes = [axis for axis in AXES if axis in knobs] or ["recompute"]
        return {(optimizer, met) for met in (way, *axes)}

    missing = set().union(*(pairs(case) for case in found))
    while missing:
        chosen.append(max(found, key=lambda case: len(missing & pairs(case))))
        missing -= pairs(chosen[-1])
    return chosen


PAIRWISE = pairwise()


def marks_of(case: tuple[str, dict[str, Any], str]) -> list[pytest.MarkDecorator]:
    if case not in PAIRWISE:
        return [pytest.mark.slow]
    if case[0] == "pretrain" and case[-1] == "adamw":
        return []
    return [pytest.mark.drawn(f"{case[-1]} over layouts", keep=2 if case[-1] == "adamw" else 1)]


@pytest.mark.parametrize(
    ("way", "knobs", "optimizer"),
    [
        pytest.param(
            *case, id=f"{case[0]}: {layout(**case[1]).name}: {case[2]}", marks=marks_of(case)
        )
        for case in whole_runs()
    ],
)
def test_an_optimizer_sees_the_same_in_every_layout(
    way: str, knobs: dict[str, Any], optimizer: str, proving: Proving, documents: Path
) -> None:
    """An optimizer that takes this rank's shard of a matrix for the matrix gives other weights."""
    ways.prepare_way(documents, way)
    reference = proving.reference(ways.recipe_of(documents, way), OPTIMIZERS[optimizer])
    check(proving.prover.finding(reference, layout(**knobs)))


def test_every_short_case_is_one_of_the_table() -> None:
    assert all(case in WAYS for case in SHORT_WAYS)
    assert {way for way, _ in SHORT_WAYS} == {way for way, _ in WAYS}


def test_the_cases_are_what_they_should_be(proving: Proving, texts: Path) -> None:
    """Uneven targets down to none, packed rows, clipping that acts, several micro-batches, weights
    that move, an adapter that is awake.
    """
    reference = proving.reference(recipe_of(texts, "lora"))
    crew = proving.prover._crew(2)
    laid_out = reference.small_run.laid_out(layout(replicate=2), texts / "looked-at")
    ranks = crew.run_named("looking", 60.0, faults.looked_at, laid_out)
    first, second = (rank["targets"] for rank in ranks)
    assert 0 in first
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert all(rank["micro_batches"] > 1 for rank in ranks)
    assert any(rank["documents"] > 1 for rank in ranks)
    clip_norm = reference.small_run.small.train.clip_norm
    assert clip_norm is not None
    assert min(reference.single_process.norms) > clip_norm
    for name, piece in reference.single_process.weights[0].items():
        assert float(piece.values.abs().sum()) > 0, name
        assert not piece.values.equal(reference.single_process.weights[-1][name].values), (
            f"{name} did not move"
        )


CAUGHT_BY: dict[str, tuple[str, dict[str, Any]]] = {
    "divided_twice": ("llama", {"shard": 2}),
    "averages_taken_for_sums": ("llama", {"replicate": 2}),
    "averaging_shards": ("llama", {"shard": 2}),
    "norm_of_this_rank": ("llama", {"tensor": 2}),
    "norm_without_the_last_group": ("llama", {"shard": 2, "tensor": 2}),
    "partial_taken_for_whole": ("llama", {"tensor": 2}),
    "twins_apart": ("tied", {"pipeline": 2}),
    "positions_anew": ("llama", {"context": 2}),
    "segments_whole": ("llama", {"context": 2, "context_by": "ulysses"}),
    "rows_counted_twice": ("llama", {"context": 2}),
    "one_rank_s_vocabulary": ("llama", {"tensor": 2}),
    "nothing_sharded": ("llama", {"shard": 2}),
}
"""Each planted fault, and a case of the table that it does not get past."""


def with_fault(proving: Proving, texts: Path, fault: str) -> LayoutResult:
    model, knobs = CAUGHT_BY[fault]
    return proving.prover.finding(
        proving.reference(recipe_of(texts, model)), layout(**knobs), faults.measure_with, fault
    )


@pytest.mark.drawn
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_planted_fault_is_seen(fault: str, proving: Proving, texts: Path) -> None:
    found = with_fault(proving, texts, fault)
    assert found.difference is not None, found.summary
    assert found.holds is False
    wrong = {word.split()[0] for word in found.beyond}
    assert wrong == {"share"} if fault == "nothing_sharded" else "weights" in wrong, found.summary


def test_a_fault_does_not_outlive_its_case(proving: Proving, texts: Path) -> None:
    """The same processes go on with the next case, which must not be caught for the one before."""
    assert with_fault(proving, texts, "norm_of_this_rank").holds is False
    model, knobs = CAUGHT_BY["norm_of_this_rank"]
    check(prove(proving, texts, model, layout(**knobs)))
