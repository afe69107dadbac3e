"""Starting from another run's checkpoint, at another step, with a fresh optimizer; keeping and
exporting the best; samples while training.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.environment import Ranks
from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import COMMIT
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed, remove_folder, step_folder
from ingot.config.identity import changes
from ingot.config.models.lineage import read_lineage
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.subject import NotJudged
from ingot.parallel.mesh import Mesh
from ingot.train import evaluation
from ingot.train.evaluation import BestTracker, Measured
from ingot.train.setup import make_setup
from ingot.train.trainer import train
from tests.checkpoints.states import flip_bit
from tests.evaluate.small_runs import prepared, recipe_of
from tests.markers import changed
from tests.small import copy_of, small_recipe
from tests.train.stopping import train_until


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.folder.model / "model.safetensors")


def logged(recipe: Recipe, key: str = "train/loss") -> list[float]:
    return [line[key] for line in read_lines(recipe.folder.metrics) if key in line]


def same(one: Recipe, other: Recipe) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture
def two(prepared_root: Path, tmp_path: Path) -> tuple[Path, Path]:
    return copy_of(prepared_root, tmp_path / "one"), copy_of(prepared_root, tmp_path / "two")


ALONE = Mesh(Ranks(), torch.device("cpu"))
CONSTANT = {"train__schedule": "{kind: constant, warmup: 0}", "precision__export": "fp32"}


@pytest.mark.drawn("another run's state", keep=3)
def test_from_another_runs_checkpoint_with_optimizer_and_step_is_as_if_never_interrupted(
    two: tuple[Path, Path],
) -> None:
    first, second = two
    whole = small_recipe(
        first, name="small", train__steps=8, checkpoint__every=4, checkpoint__keep=2, **CONSTANT
    )
    train(whole)
    onward = small_recipe(
        second,
        train__steps=8,
        train__start_from=str(first / "runs" / "small" / "checkpoints" / "step-00000004"),
        **CONSTANT,
    )
    train(onward)
    assert logged(onward) == logged(whole)[4:]
    assert same(onward, whole)
    assert (read_lineage(onward.folder.model) or {})["start_from"]["step"] == 4


@pytest.mark.drawn("another run's state", keep=3)
def test_a_reset_optimizer_takes_the_weights_alone(two: tuple[Path, Path]) -> None:
    first, second = two
    train(small_recipe(first, train__steps=4, **CONSTANT))
    fresh = small_recipe(
        second,
        train__steps=4,
        train__start_from=str(first / "runs" / "small"),
        train__reset_optimizer=True,
        **CONSTANT,
    )
    train(fresh)
    assert [line["step"] for line in read_lines(fresh.folder.metrics) if "train/loss" in line] == [
        1,
        2,
        3,
        4,
    ], "the schedule begins anew"
    assert logged(fresh)[0] < logged(small_recipe(first))[0], (
        "the weights are those of the other run"
    )
    kept = small_recipe(
        copy_of(second, second.parent / "three"),
        train__steps=8,
        train__start_from=str(first / "runs" / "small"),
        **CONSTANT,
    )
    train(kept)
    assert not same(fresh, kept)


@pytest.mark.drawn("another run's state", keep=3)
def test_a_start_step_moves_schedule_and_data(two: tuple[Path, Path]) -> None:
    first, second = two
    train(small_recipe(first, train__steps=6))
    late = small_recipe(second, train__steps=6, train__start_step=4)
    train(late)
    assert [line["step"] for line in read_lines(late.folder.metrics) if "train/loss" in line] == [
        5,
        6,
    ]
    assert logged(late, "train/lr") == logged(small_recipe(first), "train/lr")[4:]
    with pytest.raises(WrongInput, match=r"begin at step 6 of 6.*train\.start_step"):
        train(small_recipe(second, train__steps=6, train__start_step=6), fresh=True)


def on_other_data(root: Path, origin: Path, **knobs: Any) -> Recipe:
    """A recipe that goes on from the run in `origin` with other rows and the same tokenizer."""
    recipe = small_recipe(
        root,
        tokenizer__source=str(origin / "runs" / "small" / "data" / "tokenizer"),
        tokenizer__vocab_size=None,
        train__start_from=str(origin / "runs" / "small"),
        **{
            "data__validation__fraction": 0.3,
            "train__steps": None,
            "train__epochs": 1,
            **CONSTANT,
            **knobs,
        },
    )
    ingest(recipe)
    prepare(recipe)
    return recipe


@pytest.mark.drawn("another run's state", keep=3)
def test_other_data_is_read_from_its_beginning(
    two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the other run stood in its own data says nothing of this one's."""
    first, second = two
    train(small_recipe(first, train__steps=5, **CONSTANT))
    onward = on_other_data(second, first)
    setup = make_setup(onward, ALONE)
    begin, last, size = setup.begin, setup.last, setup.batch.global_batch
    assert (begin, last) == (5, 5 + len(setup.rows) // size), "a whole pass after the other's steps"
    rows = setup.order.rows(begin * size, (last - begin) * size)
    assert len(set(rows.tolist())) == len(rows) > len(setup.rows) - size
    kept = setup.order.rows((begin + 2) * size, 4).tolist()
    skipping = on_other_data(second, first, data__skip=[[5 * size, 7 * size]])
    assert make_setup(skipping, ALONE).order.rows(begin * size, 4).tolist() == kept
    train(onward)
    assert "in another order; this begins with its first row" in capsys.readouterr().err
    assert len(logged(onward)) == last - begin


@pytest.mark.drawn("another run's state", keep=3)
@pytest.mark.parametrize(
    "knobs", [{"seed": 7}, {"train__global_batch": 8}, {"data__seq_len": 48}], ids=str
)
def test_another_order_of_the_same_data_is_read_from_its_beginning(
    two: tuple[Path, Path], knobs: dict[str, Any]
) -> None:
    """So its first step is that of a stage with a step count of its own, which takes the same
    weights and the first rows.
    """
    first, second = two
    train(small_recipe(first, train__steps=5, **CONSTANT))
    stage = on_other_data(second, first, data__validation__fraction=0.1, **knobs)
    setup = make_setup(stage, ALONE)
    begin, last, size = setup.begin, setup.last, setup.batch.global_batch
    rows = setup.order.rows(begin * size, (last - begin) * size)
    assert len(set(rows.tolist())) == len(rows) > len(setup.rows) - size, "a whole pass"
    losses = []
    for reset, steps in ((False, 6), (True, 1)):
        length = {"train__epochs": None, "train__steps": steps, "train__reset_optimizer": reset}
        one = on_other_data(second, first, data__validation__fraction=0.1, **knobs, **length)
        train(one, fresh=True)
        losses.append(logged(one))
    assert losses[0] == losses[1]


@pytest.mark.drawn("another run's state", keep=3)
def test_a_stage_measured_on_other_documents_goes_on_in_the_order_of_the_first(
    two: tuple[Path, Path],
) -> None:
    """They are other ones for early stopping alone, which they can end."""
    first, second = two
    held_out = [{"source": str(path / "text")} for path in two]
    measured = {"data__validation__fraction": None, "data__validation": held_out[:1]}
    begun = small_recipe(first, train__steps=5, **CONSTANT, **measured)
    ingest(begun)
    prepare(begun)
    train(begun)
    setups = []
    for sources in (held_out[:1], held_out):
        knobs = {**measured, "data__validation": sources, "train__steps": 9, "train__epochs": None}
        onward = make_setup(on_other_data(second, first, **knobs), ALONE)
        assert (onward.begin, onward.data_begin) == (5, 0)
        stopping = {"train__early_stop": "{metric: loss}", "train__evaluate_every": 2}
        setups += [onward, make_setup(on_other_data(second, first, **knobs, **stopping), ALONE)]
    before, before_stopping, now, now_stopping = (setup.identity for setup in setups)
    assert before == now
    assert changes(before_stopping, now_stopping) == [
        f"the held-out data {setups[1].held_out.fingerprint} -> {setups[3].held_out.fingerprint}"
    ]


@pytest.mark.drawn("another run's state", keep=3)
def test_a_third_stage_goes_on_in_the_order_of_the_second(two: tuple[Path, Path]) -> None:
    """Which began behind the steps of the first stage, on data of its own."""
    first, second = two
    whole = copy_of(second, second.parent / "whole")
    train(small_recipe(first, train__steps=5, **CONSTANT))
    at_once = on_other_data(whole, first, train__epochs=None, train__steps=10)
    train(at_once)
    before = on_other_data(second, first, train__epochs=None, train__steps=7)
    train(before)
    third = before.model_copy(
        update={
            "name": "third",
            "train": at_once.train.model_copy(update={"start_from": str(before.folder.root)}),
        }
    )
    shutil.copytree(before.folder.data, third.folder.data)
    train(third)
    assert logged(third) == logged(at_once)[2:]
    assert same(third, at_once)


@pytest.mark.drawn("another run's state", keep=3)
@pytest.mark.parametrize("fraction", [0.1, 0.3], ids=["the same data", "other data"])
def test_where_a_stage_began_stays_when_the_other_run_goes_on(
    two: tuple[Path, Path], fraction: float
) -> None:
    """Behind all that this one is to do, too, and without the checkpoint that it began with."""
    first, second = two
    third = copy_of(second, second.parent / "three")
    train(small_recipe(first, train__steps=4, **CONSTANT))
    whole, broken = (
        on_other_data(
            root,
            first,
            data__validation__fraction=fraction,
            train__epochs=0.14,
            checkpoint__every=1,
            checkpoint__keep=1,
        )
        for root in (second, third)
    )
    train(whole)
    train_until(6, broken)
    onward = {"train__steps": 30, "resume__allow": ["train.steps"], "checkpoint__keep": 1}
    train(small_recipe(first, **onward, **CONSTANT))
    train(broken)
    assert logged(broken) == logged(whole)
    assert same(broken, whole)
    assert (read_lineage(broken.folder.model) or {})["start_from"]["step"] == 4
    assert make_setup(broken, ALONE).begin == 4
    longer = {"train__epochs": None, "train__steps": 40}
    another = on_other_data(third, first, data__validation__fraction=fraction, **longer)
    assert make_setup(another, ALONE).begin == 30, "another training begins with what is there now"


def test_what_cannot_be_started_from_is_refused(two: tuple[Path, Path]) -> None:
    first, second = two
    with pytest.raises(WrongInput, match="holds no checkpoint; give a run folder"):
        train(small_recipe(second, train__start_from=str(first / "runs" / "small")))
    train(small_recipe(first, train__steps=2))
    wider = {
        "hidden_size": 48,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    other = small_recipe(
        second, train__start_from=str(first / "runs" / "small"), model__config=wider
    )
    with pytest.raises(WrongInput, match=r"does not fit this model: .* is wanted.* wrote it$"):
        train(other)


@pytest.mark.drawn("another run's state", keep=3)
def test_an_adapter_goes_on_as_the_one_that_it_was_alone(two: tuple[Path, Path]) -> None:
    """Told before anything is built, with what does go on from the model."""
    first, second = two
    third, run = copy_of(second, second.parent / "three"), str(first / "runs" / "small")
    train(small_recipe(first, train__steps=2))
    base = {"model__source": run, "model__config": None, "train__steps": 3}
    lora = {**base, "model__lora": "{rank: 2}"}
    train(small_recipe(third, **{**lora, "train__steps": 2}))
    whole, adapted = (
        {"train__start_from": str(root / "runs" / "small")} for root in (first, third)
    )
    for knobs, told in (
        (
            {**lora, **whole},
            r"trained with no adapter, .* a model\.lora; .* set model\.source to",
        ),
        (
            {**base, **adapted},
            r"trained with an adapter, .* no model\.lora; .* set model\.source to",
        ),
        ({**lora, **adapted, "model__lora": "{rank: 4}"}, r"another kind \(.*rank 2 -> 4\); undo"),
        ({**lora, **adapted, "model__lora": "{rank: 2, alpha: 8}"}, r"\(.*alpha 32\.0 -> 8\.0\)"),
    ):
        for reset in (False, True):
            with pytest.raises(WrongInput, match=told):
                train(small_recipe(second, **knobs, train__reset_optimizer=reset))
    train(small_recipe(second, **lora, **adapted))
    train(small_recipe(first, train__steps=3))
    with pytest.raises(WrongInput, match=r"another kind \(the weights of model\.source .* -> "):
        train(small_recipe(copy_of(third, third.parent / "four"), **lora, **adapted), fresh=True)


def test_a_checkpoint_to_start_from_that_is_damaged_or_of_another_version_is_refused(
    two: tuple[Path, Path],
) -> None:
    """Starting over would not help: it is another run's."""
    first, second = two
    train(small_recipe(first, train__steps=2))
    onward = small_recipe(second, train__start_from=str(first / "runs" / "small"))
    newest = committed(first / "runs" / "small" / "checkpoints")[0]
    known = newest.commit["identity"]
    for key in ("train.optimizer", "tokenizer"):
        known = {name: value for name, value in known.items() if name != key}
        changed(newest.folder, COMMIT, identity=known)
        with pytest.raises(WrongInput, match=rf"with which {key} .*; take another checkpoint$"):
            train(onward)
    changed(newest.folder, COMMIT, without=("identity",))
    with pytest.raises(WrongInput, match=r"with which tokenizer .*; take another checkpoint$"):
        train(onward)
    flip_bit(next(newest.folder.glob("*.distcp")), -1)
    with pytest.raises(Failed, match=r"is whole; restore one, or take those of another run$"):
        train(onward)


@pytest.mark.drawn("another run's state", keep=3)
def test_the_state_of_another_optimizer_is_not_taken_over(two: tuple[Path, Path]) -> None:
    first, second = two
    train(small_recipe(first, train__steps=2))
    knobs = {
        "train__start_from": str(first / "runs" / "small"),
        "train__optimizer": "{kind: sgd, lr: 0.01, momentum: 0.9}",
    }
    with pytest.raises(WrongInput, match=r"kind adamw, which sgd .*train\.reset_optimizer=true"):
        train(small_recipe(second, **knobs))
    train(small_recipe(second, **knobs, train__reset_optimizer=True))


@pytest.mark.drawn("another run's state", keep=3)
def test_a_training_that_took_over_another_state_is_resumed(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a state of its own, whatever the other run has gone on with since."""
    first, second = two
    train(small_recipe(first, train__steps=2))
    begun = small_recipe(
        second,
        train__start_from=str(first / "runs" / "small"),
        train__optimizer="{kind: sgd, lr: 0.01, momentum: 0.9}",
        checkpoint__every=1,
    )
    with monkeypatch.context() as patch:
        patch.setattr("ingot.train.trainer.check_origin", lambda setup: None)
        train_until(4, begun)
    train(begun)
    assert len(logged(begun)) == 4
    make_setup(begun, ALONE)  # as the verbs about a finished one do
    with pytest.raises(WrongInput, match=r"train\.reset_optimizer=true"):
        train(begun, fresh=True)
    assert committed(begun.folder.checkpoints), "nothing was set aside"


@pytest.mark.drawn("another run's state", keep=3)
def test_the_best_checkpoint_is_kept_and_exported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = iter([3.0, 2.0, 2.5, 2.6, 2.7])
    monkeypatch.setattr(
        "ingot.train.evaluation.validation_losses", lambda *_: {"loss": next(curve)}
    )
    knobs: dict[str, Any] = {
        "train__steps": 10,
        "train__evaluate_every": 2,
        "checkpoint__best": "loss",
        "checkpoint__keep": 1,
        "checkpoint__every": 3,
    }
    best = small_recipe(root, **knobs, precision__export="fp32")
    outcome = train(best)
    assert "the best at step 4 exported" in outcome.result
    assert [found.step for found in committed(best.folder.checkpoints)] == [10, 4]
    assert (read_lineage(best.folder.model) or {})["step"] == 4
    exported = weights(best)
    monkeypatch.undo()
    train(small_recipe(root, **{**knobs, "checkpoint__best": None}, precision__export="fp32"))
    assert not all(torch.equal(value, exported[name]) for name, value in weights(best).items()), (
        "without it the last one is exported"
    )
    train(best)
    assert all(torch.equal(value, exported[name]) for name, value in weights(best).items())
    remove_folder(step_folder(best.folder.checkpoints, 4))
    with pytest.raises(WrongInput, match="the best checkpoint, is gone"):
        train(best)


@pytest.mark.drawn("another run's state", keep=3)
def test_what_was_measured_otherwise_says_nothing_of_the_best(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = iter([2.0, 3.0, 2.5, 2.6])
    monkeypatch.setattr(
        "ingot.train.evaluation.validation_losses", lambda *_: {"loss": next(curve)}
    )
    knobs: dict[str, Any] = {"train__evaluate_every": 2, "checkpoint__every": 2}

    def exported(steps: int, best: str | None, **more: Any) -> tuple[Any, str]:
        recipe = small_recipe(root, **knobs, train__steps=steps, checkpoint__best=best, **more)
        train(recipe)
        return (read_lineage(recipe.folder.model) or {})["step"], capsys.readouterr().err

    assert exported(4, "loss")[0] == 2
    step, told = exported(4, "loss", train__evaluate_rows=8)
    assert (step, "do not count" in told) == (2, False), "nothing else is measured any more"
    longer = {"train__evaluate_rows": 8, "resume__allow": ["train.steps"]}
    step, told = exported(8, "loss", **longer)
    assert step == 6, "not step 2, which other rows found better"
    assert re.search(
        r"checkpoint\.best loss: evaluations up to step 4 do not count"
        r" \(train\.evaluate_rows \d+ -> 8\)\n",
        told,
    )
    step, told = exported(8, "loss/perplexity", **longer, train__evaluate_tasks=["loss"])
    assert step == 8
    assert "(loss was tracked then), so the last step is exported" in told


def test_samples_are_logged_while_training(root: Path) -> None:
    recipe = small_recipe(
        root, train__sample_every=3, evaluate__prompts=["ingot melts"], evaluate__sample_tokens=4
    )
    train(recipe)
    samples = {
        line["step"]: line["samples/0"]
        for line in read_lines(recipe.folder.metrics)
        if "samples/0" in line
    }
    assert list(samples) == [3, 6]
    assert all(sample.startswith("ingot melts -> ") for sample in samples.values())


def test_what_is_measured_and_sampled_while_training_has_no_dropout(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: dict[str, bool] = {}

    def note(name: str) -> None:
        original = getattr(evaluation, name)

        def noted(first: Any, *more: Any) -> Any:
            modes[name] = first.model.training
            return original(first, *more)

        monkeypatch.setattr(evaluation, name, noted)

    note("validation_losses")
    note("complete_prompts")
    train(
        small_recipe(
            root,
            train__steps=1,
            train__evaluate_every=1,
            train__sample_every=1,
            evaluate__prompts=["ingot melts"],
            evaluate__sample_tokens=2,
        )
    )
    assert modes == {"validation_losses": False, "complete_prompts": False}


def test_samples_of_no_prompt_are_no_lines(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipe(root, train__sample_every=1, train__steps=2)
    train(recipe)
    assert all("train/loss" in line for line in read_lines(recipe.folder.metrics))
    assert "warning: train.sample_every: it has no effect" in capsys.readouterr().err


def test_tasks_are_measured_while_training_and_can_stop_it(root: Path) -> None:
    stop = "{metric: loss/perplexity, patience: 1, min_delta: 1e9}"
    recipe = small_recipe(
        root,
        train__steps=12,
        train__evaluate_every=2,
        train__evaluate_tasks=["loss"],
        train__early_stop=stop,
    )
    train(recipe)
    assert len(logged(recipe, "validation/loss/perplexity")) == 2, (
        "the second evaluation is no better by a billion"
    )


@pytest.mark.drawn("another run's state", keep=3)
def test_steps_before_a_metric_that_is_not_measured_are_not_lost(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a package's task nobody knows it before it is measured, as here of texts' `accuracy`.
    Early stopping counts the evaluation when it is done again, and not before.
    """
    knobs: dict[str, Any] = {
        "train__evaluate_every": 3,
        "train__evaluate_tasks": ["loss"],
        "train__early_stop": "{metric: loss, patience: 1}",
    }
    with monkeypatch.context() as unknown:
        unknown.setattr("ingot.config.sections.measured.is_measured", lambda *_: True)
        wrong = small_recipe(root, **knobs, checkpoint__best="loss/accuracy")
    with pytest.raises(WrongInput, match="loss/accuracy is not measured while training"):
        train(wrong)
    right = small_recipe(root, **knobs, checkpoint__best="loss/perplexity")
    assert [found.step for found in committed(right.folder.checkpoints)] == [3]
    train(right)
    assert len(logged(right)) == 6, "no step is done again"
    assert len(logged(right, "validation/loss/perplexity")) == 2, "what was measured is, again"


def test_steps_before_a_reward_that_fails_are_not_lost(tmp_path: Path) -> None:
    """Its server may be down for an hour. The answers of these chats have no number."""

    def on(reward: dict[str, Any]) -> Recipe:
        tasks = [{"kind": "reward", "rewards": [reward], "max_tokens": 2, "limit": 2}]
        knobs = {"train__evaluate_tasks": ["reward"], "train__evaluate_every": 3}
        return recipe_of(tmp_path, "chat", evaluate__tasks=tasks, train__steps=3, **knobs)

    prepared(tmp_path, "chat")
    with pytest.raises(NotJudged, match="numeric failed on 2 of 2 answers"):
        train(on({"kind": "numeric", "tolerance": 0.0}))
    right = on({"kind": "exact"})
    assert [found.step for found in committed(right.folder.checkpoints)] == [3]
    train(right)
    assert len(logged(right)) == 3, "no step is done again"
    assert len(logged(right, "validation/reward/mean")) == 1, "what was not measured is"


@pytest.mark.parametrize(
    ("direction", "values", "best"),
    [("lower", [3, 1, 2], 1), ("higher", [3, 1, 4], 2), ("lower", [float("nan"), 5, 5], 1)],
)
def test_the_tracker_knows_which_way_is_better(
    direction: Any, values: list[float], best: int
) -> None:
    tracker = BestTracker("x")
    for step, value in enumerate(values):
        tracker.see(step, {"x": Measured(value, direction)})
    assert tracker.best_step == best
    again = BestTracker("x")
    again.restore(tracker.state())
    assert again.state() == tracker.state()
    with pytest.raises(WrongInput, match=r"`?y`? is not measured while training"):
        BestTracker("y").see(1, {"x": Measured(1.0)})


def test_the_tracker_counts_what_was_no_better_in_a_row() -> None:
    tracker = BestTracker("loss")
    counts = []
    for number, value in enumerate((3.0, 3.0, 3.1, math.nan, 2.0, 2.5)):
        tracker.see(number, {"loss": Measured(value)})
        counts.append(tracker.worse_in_row)
    assert counts == [0, 1, 2, 3, 0, 1]
