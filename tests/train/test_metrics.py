"""Further metrics of an objective: what a micro-batch does not have of one counts as 0, and names
that could be added up with others, or be taken for theirs, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed
from ingot.config.sections.training import SGD
from ingot.data.batches.loader import Batch
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.validation import _means
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import IGNORE
from ingot.models.parameters import init_weights
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.objectives.forward import PipelinedBatches
from ingot.objectives.protocol import AllSum
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train import evaluation
from ingot.train import step as loop
from ingot.train.assembly import known_metrics
from ingot.train.evaluation import Measured, measured_of
from ingot.train.metrics import LateMetric
from ingot.train.optim.optimizers import make_optimizer
from ingot.train.setup import make_setup
from ingot.train.step import StepContext, StepControl, run_steps
from ingot.train.trainer import train
from tests.evaluate.small_models import write_lines
from tests.ranks import run_ranks
from tests.small import small_recipe, write_documents
from tests.train.stopping import train_until
from tests.train.test_step import CONFIG, ROWS, Watching, global_batch, rows_of

HALF = ROWS // 2
LOWER, UPPER = global_batch(0).labels.split(HALF)
WANTED = sorted({*LOWER.unique().tolist()} & {*UPPER.unique().tolist()} - {IGNORE})
"""Labels that are counted, each as a metric of its own: both halves of the rows have them."""
RARE = WANTED[1]


class Counting(CrossEntropy):
    """Counts some labels; one that a micro-batch does not have is left out if `sparse`."""

    def __init__(self, *, sparse: bool) -> None:
        self._sparse = sparse

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # The last label first, as a dictionary may come in any order.
        counts = {f"is_{label}": (batch.labels == label).sum() for label in reversed(WANTED)}
        return values.sum(), {n: c.float() for n, c in counts.items() if c or not self._sparse}


def counted(steps: Sequence[Batch], micro_batch: int, *, sparse: bool) -> list[dict[str, float]]:
    """The metrics of each step."""
    with running_mesh() as mesh:
        model = Decoder(DecoderConfig.from_hf(CONFIG))
        init_weights(model, 0)
        masters, watching = Masters(model, mesh), Watching()
        optimizer = make_optimizer(SGD(kind="sgd", lr=0.1), masters)
        share = ROWS // mesh.world
        control = StepControl(
            lambda number: rows_of(steps[number], mesh.rank * share, share, micro_batch)
        )
        objective = Counting(sparse=sparse)
        context = StepContext(model, objective, masters, optimizer, mesh, control, hooks=[watching])
        run_steps(context, 0, len(steps))
    return [
        {name: float(value) for name, value in info.outcome.metrics.items()}
        for info in watching.told
    ]


def without(label: int, rows: slice) -> Batch:
    """A batch whose rows do not have a label."""
    batch = global_batch(0)
    labels = batch.labels.clone()
    labels[rows] = torch.where(labels[rows] == label, 60, labels[rows])
    return replace(batch, labels=labels)


def test_a_metric_that_some_micro_batches_lack_is_that_of_all_of_them() -> None:
    steps = [global_batch(0), without(RARE, slice(None))]
    whole, *split = (
        counted(steps, micro_batch, sparse=sparse)
        for micro_batch, sparse in ((ROWS, False), (1, False), (1, True))
    )
    assert all(metrics == whole for metrics in split)
    assert whole[0][f"is_{RARE}"] > 0 == whole[1][f"is_{RARE}"]


def late_on_one_rank() -> tuple[int, str]:
    """The second step brings a metric, on the rank of the upper rows alone."""
    steps = [without(RARE, slice(None)), without(RARE, slice(HALF)), global_batch(0)]
    try:
        counted(steps, 1, sparse=True)
    except LateMetric as late:
        return late.step, str(late)
    return len(steps), ""


def test_a_metric_that_a_later_step_brings_is_refused_on_all_ranks_after_the_step() -> None:
    found = run_ranks(2, late_on_one_rank)
    assert [step for step, _ in found] == [2, 2]
    (_, lower), (_, upper) = found
    assert lower.startswith("step 2 is the first with some metric on another rank")
    assert upper.startswith(f"step 2 is the first with the metric is_{RARE}; the objective's")


def test_a_metric_of_the_last_step_alone_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    names = {name for one in counted([without(RARE, slice(None))], 1, sparse=True) for name in one}
    metrics = counted([without(RARE, slice(None)), global_batch(0)], 1, sparse=True)
    assert [set(one) for one in metrics] == [names, names]
    warned = f"train: warning: step 2 is the first with the metric is_{RARE}; "
    assert capsys.readouterr().err.count(warned) == 1


def bringing(patch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Give the objective a metric `rare`, which only these steps have anything of."""
    original = loop.accumulate_gradients

    def accumulate(context: Any, step: int, batches: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = original(context, step, batches)
        return loss, sums | ({"rare": torch.ones(())} if step + 1 in numbers else {})

    patch.setattr(loop, "accumulate_gradients", accumulate)


def test_a_resumed_run_knows_the_metrics_of_the_attempts_before(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bringing(monkeypatch, 1, 5)
    recipe = small_recipe(root, checkpoint__every=3)
    train_until(4, recipe)
    train(recipe)
    logged = [line["train/rare"] for line in read_lines(recipe.folder.metrics)]
    assert [value > 0 for value in logged] == [True, False, False, False, True, False]


def test_metrics_of_an_objective_with_other_code_are_not_expected() -> None:
    """Else one that it has no more would be logged as 0 to the end."""
    package = "package.objectives.mine"
    commit = {"identity": {package: "mine 1 (abc)", "seed": 0}, "metrics": ["rare"]}
    assert known_metrics({package: "mine 1 (abc)", "seed": 1}, commit) == ["rare"]
    assert not known_metrics({package: "mine 2 (def)", "seed": 0}, commit)
    assert not known_metrics({}, {}), "of a run that begins"


def test_the_steps_before_a_late_metric_are_kept_and_a_mended_objective_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(root, checkpoint__every=3)
    with monkeypatch.context() as patch:
        bringing(patch, 2)
        with pytest.raises(WrongInput, match="step 2 is the first with the metric rare; "):
            train(recipe)
    assert [found.step for found in committed(recipe.folder.checkpoints)] == [2]
    bringing(monkeypatch, *range(7))
    train(recipe)
    lines = read_lines(recipe.folder.metrics)
    assert [line["step"] for line in lines if "train/rare" in line] == [3, 4, 5, 6]


def test_stages_of_a_pipeline_add_up_the_same_way() -> None:
    """What the last stage makes of its micro-batches, one after the other."""
    with running_mesh() as mesh:
        batches = rows_of(global_batch(0), 0, ROWS, 1)
        found = []
        for sparse in (False, True):
            objective = Counting(sparse=sparse)
            work = PipelinedBatches(objective, batches, "fp32", mesh.device, None)
            for number, batch in enumerate(batches):
                work.loss(torch.zeros(batch.labels.shape), number)
            found.append(work.sums()[1])
    assert found[0] == found[1]


def differing_ranks() -> tuple[str, list[dict[str, float]]]:
    refused = ""
    try:
        counted([without(RARE, slice(HALF))], 1, sparse=True)
    except WrongInput as error:
        refused = str(error)
    return refused, counted([global_batch(0)], 1, sparse=True)


def test_ranks_with_different_metrics_are_refused_together() -> None:
    alone = counted([global_batch(0)], ROWS, sparse=False)
    for refused, agreed in run_ranks(2, differing_ranks):
        assert refused.startswith("ranks have different metrics in step 1 (is_")
        assert agreed == alone


def means_of_ranks() -> tuple[str, dict[str, float]]:
    with running_mesh() as mesh:
        own = {"loss": 3.0} | ({} if mesh.is_main else {"margin": 1.0})
        try:
            _means(own, 2.0, mesh)
            refused = ""
        except WrongInput as error:
            refused = str(error)
        # In another order on each rank: they are added up by name.
        values = [("loss", 3.0), ("margin", 1.0)]
        return refused, _means(dict(values if mesh.is_main else reversed(values)), 2.0, mesh)


def test_means_over_validation_rows_are_of_metrics_that_all_ranks_have() -> None:
    for refused, means in run_ranks(2, means_of_ranks):
        assert refused.startswith("ranks have different metrics of the validation rows, loss")
        assert means == {"loss": 1.5, "margin": 0.5}


def test_a_task_whose_metric_is_the_objectives_is_refused_when_its_steps_are_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "validation_losses", lambda *_: {"loss": 1.0, "mine/loss": 2.0})
    recipe = small_recipe(
        root,
        evaluate__tasks=[{"kind": "loss", "name": "mine"}],
        train__evaluate_tasks=["mine"],
        train__evaluate_every=2,
        train__early_stop={"metric": "mine/loss", "patience": 5},
    )
    with pytest.raises(WrongInput, match="a metric mine/loss, which is the objective's; "):
        train(recipe)
    assert [found.step for found in committed(recipe.folder.checkpoints)] == [2]


def test_the_time_of_an_evaluation_is_nobody_elses_metric() -> None:
    assert measured_of(
        {"loss": 2.0}, {"a/loss": (1.0, "lower"), "a/accuracy": (0.5, "higher")}
    ) == {
        "loss": Measured(2.0, "lower"),
        "a/loss": Measured(1.0, "lower"),
        "a/accuracy": Measured(0.5, "higher"),
    }
    with pytest.raises(WrongInput, match="the objective's metric seconds would be logged as"):
        measured_of({"loss": 2.0, "seconds": 1.0}, {})
    with pytest.raises(WrongInput, match="has a metric seconds, which is ingot's own; "):
        measured_of({"loss": 2.0}, {"seconds": (1.0, "lower")})


def test_a_metric_of_one_source_is_tracked_where_it_is_measured(tmp_path: Path) -> None:
    """Else the training ends at its first evaluation."""
    files = [
        write_lines(tmp_path / name, [{"text": f"{name} melts copper {n}."} for n in range(20)])
        for name in ("one.jsonl", "other.jsonl")
    ]
    best = "loss/bits_per_byte/other.jsonl"

    def setup(held_out: Sequence[Path], rows: int, best: str = best) -> object:
        recipe = small_recipe(
            tmp_path,
            name=f"of{len(held_out)}",
            data__train=[{"source": str(files[0])}],
            data__validation__fraction=None,
            data__validation=[{"source": str(file)} for file in held_out],
            train__evaluate_every=2,
            train__evaluate_rows=rows,
            train__evaluate_tasks=["loss"],
            checkpoint__best=best,
        )
        if not recipe.folder.columns.exists():
            ingest(recipe)
            prepare(recipe)
        return make_setup(recipe, Mesh(Ranks(), torch.device("cpu")))

    assert setup(files, 99)
    assert setup(files, 1, "loss/bits_per_byte"), "of all sources"
    with pytest.raises(
        WrongInput, match=rf"best {best} is measured on all \d+ .*evaluate_rows is 1;"
    ):
        setup(files, 1)
    with pytest.raises(WrongInput, match=r"are of one\.jsonl, other\.jsonl; set it to a metric of"):
        setup(files, 99, "loss/bits_per_byte/third.jsonl")
    with pytest.raises(WrongInput, match=r"are of other\.jsonl alone; set it to a metric of them"):
        setup(files[1:], 99)


def test_a_source_of_which_nothing_is_held_out_has_no_metric_of_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "many", tmp_path / "few"]
    write_documents(folders[0], 120)
    write_documents(folders[1], 2, seed=5)
    recipe = small_recipe(
        tmp_path,
        data__train=[{"source": str(folder)} for folder in folders],
        train__evaluate_every=2,
        train__evaluate_rows=99,
        train__evaluate_tasks=["loss"],
        checkpoint__best="loss/bits_per_byte/few",
    )
    ingest(recipe)
    prepare(recipe)
    with pytest.raises(WrongInput, match="are of many alone; set it to a metric of one of these"):
        make_setup(recipe, Mesh(Ranks(), torch.device("cpu")))
