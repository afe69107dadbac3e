"""Steps that are not taken: spikes are told on the device, each is recorded, and too many end
training or send it back without their data.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.errors import Failed, Stopped
from ingot.base.heartbeat import beats_of_main
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.evaluate.subject import NotJudged
from ingot.train import step, trainer
from ingot.train.earlier import earlier
from ingot.train.goodput import EventSink
from ingot.train.hooks import SkipHook, TooManySkipped
from ingot.train.optim.averaging import averaged_steps
from ingot.train.step import SPIKE_WARMUP, SpikeDetector
from ingot.train.trainer import train
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe
from tests.train.stopping import asked_to_stop_in


def judged(spikes: SpikeDetector, norm: float, wrong: bool = False) -> bool:
    return bool(spikes.judge(torch.tensor(norm), torch.tensor(wrong)))


def test_a_spike_is_told_by_the_running_mean_of_steps_that_were_taken() -> None:
    spikes = SpikeDetector(3.0, torch.device("cpu"))
    assert not any(
        judged(spikes, norm) for norm in [100.0, *[1.0] * (SPIKE_WARMUP - 1)]
    )  # none is one in the beginning
    mean = spikes.state()["mean"]
    assert mean == pytest.approx((100 + SPIKE_WARMUP - 1) / SPIKE_WARMUP)
    for _ in range(200):
        judged(spikes, 1.0)
    assert judged(spikes, 3.5)
    assert judged(spikes, float("inf"))
    assert spikes.state()["mean"] == pytest.approx(1.0, abs=0.01)
    assert not judged(spikes, 2.5)
    assert judged(spikes, 1.0, wrong=True)
    assert judged(spikes, float("nan"), wrong=True)
    assert spikes.state()["mean"] == pytest.approx(1.075, abs=0.01)


def test_steps_without_a_gradient_make_no_spike_of_the_next_one() -> None:
    """Neither where all begin so, as sparse rewards do, nor later."""
    spikes = SpikeDetector(3.0, torch.device("cpu"))
    norms = [0.0] * 30 + [1.0] * SPIKE_WARMUP + [0.0] * 100 + [1.0]
    assert not any(judged(spikes, norm) for norm in norms)
    assert spikes.state() == {"mean": 1.0, "seen": SPIKE_WARMUP + 1}
    assert judged(spikes, 3.5)


def test_a_resumed_watch_decides_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    norms = (torch.rand(100, generator=generator) * 3).tolist()
    whole, first = SpikeDetector(1.5, torch.device("cpu")), SpikeDetector(1.5, torch.device("cpu"))
    expected = [judged(whole, norm) for norm in norms]
    found = [judged(first, norm) for norm in norms[:37]]
    second = SpikeDetector(1.5, torch.device("cpu"), json.loads(json.dumps(first.state())))
    assert found + [judged(second, norm) for norm in norms[37:]] == expected
    assert any(expected)
    assert second.state() == whole.state()


def poison(monkeypatch: pytest.MonkeyPatch, bad: range, added: float = float("nan")) -> None:
    """The loss of a step that sees a sample whose place in the order lies in `bad` has a gradient
    of `added` in one of the weights.
    """
    original, original_forward, now = step.accumulate_gradients, step.forward, [0.0]

    def accumulate(context: Any, number: int, batches: Any) -> Any:
        order, size = context.control._loader._order, context.samples
        places = [order.place(sample) for sample in range(number * size, (number + 1) * size)]
        now[0] = added if any(place in bad for place in places) else 0.0
        return original(context, number, batches)

    def forward(model: torch.nn.Module, *more: Any) -> Any:
        loss, metrics = original_forward(model, *more)
        return loss + now[0] * next(model.parameters()).sum() if now[0] else loss, metrics

    monkeypatch.setattr(step, "accumulate_gradients", accumulate)
    monkeypatch.setattr(step, "forward", forward)


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.folder.model / "model.safetensors")


def events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(recipe.folder.events) if event["kind"] == kind]


KNOBS: dict[str, Any] = {"train__steps": 12, "checkpoint__every": 2, "train__skip__in_row": 2}


@pytest.mark.drawn("skipped steps", keep=4)
def test_too_many_end_training_and_say_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(20, 28))
    recipe = small_recipe(root, **KNOBS)
    with pytest.raises(
        Failed,
        match=(
            r"not finite in 2 steps in a row, 6 to 7; lower train\.optimizer\.lr, or set"
            r" train\.skip\.then=roll_back"
        ),
    ):
        train(recipe)
    assert [(event["step"], event["cause"]) for event in events(recipe, "skip")] == [
        (6, "not finite"),
        (7, "not finite"),
    ]


@pytest.mark.drawn("skipped steps", keep=4)
def test_the_last_step_counts_as_the_others_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that ends with steps that were not taken has failed, and is told so; one such step
    at its end is recorded, and no earlier loss stands for its own.
    """
    poison(monkeypatch, range(16, 24))
    recipe = small_recipe(root, **{**KNOBS, "train__steps": 6})
    with pytest.raises(Failed, match="not finite in 2 steps in a row, 5 to 6"):
        train(recipe)
    assert not recipe.folder.model.exists()
    recipe = small_recipe(root, **{**KNOBS, "train__steps": 5})
    assert train(recipe, fresh=True).result.endswith(", the last loss not finite")
    assert events(recipe, "skip")[-1]["step"] == 5


@pytest.mark.drawn("skipped steps", keep=4)
def test_going_back_from_the_last_step(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(16, 24))
    recipe = small_recipe(
        root, **{**KNOBS, "train__steps": 6}, train__skip__then="roll_back", track__every=1
    )
    train(recipe)
    assert [event["samples"] for event in events(recipe, "roll_back")] == [[16, 24]]
    lines = list(read_lines(recipe.folder.metrics))
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(line["train/loss"] is not None for line in lines)


@pytest.mark.drawn("skipped steps", keep=4)
def test_one_that_is_not_taken_is_recorded_and_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(20, 24))
    recipe = small_recipe(root, **KNOBS)
    train(recipe)
    assert [event["step"] for event in events(recipe, "skip")] == [6]
    lines = list(read_lines(recipe.folder.metrics))
    assert [line["train/skipped_steps"] for line in lines] == [0.0] * 5 + [1.0] * 7
    assert lines[5]["train/loss"] is None


@pytest.mark.drawn("skipped steps", keep=4)
def test_skipped_steps_are_counted_on_after_a_resume(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.train.test_run import stop_after

    poison(monkeypatch, range(8, 12))
    recipe = small_recipe(root, **KNOBS)
    stop_after(recipe, 7, monkeypatch)
    train(recipe)
    assert [line["train/skipped_steps"] for line in read_lines(recipe.folder.metrics)] == [
        0.0
    ] * 2 + [1.0] * 10


@pytest.mark.drawn("skipped steps", keep=4)
def test_a_spike_is_skipped_where_that_is_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(4 * 24, 4 * 25), added=1e6)
    recipe = small_recipe(root, **{**KNOBS, "train__steps": 26, "train__skip__spike": 20})
    train(recipe)
    (skip,) = events(recipe, "skip")
    assert skip["step"] == 25
    assert skip["cause"].startswith("spike, gradient norm ")


@pytest.mark.drawn("skipped steps", keep=4)
def test_going_back_leaves_the_data_of_the_bad_steps_out(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The result is bit for bit that of a training which never had this data. Later commands go on
    from it, and know of it; so do those after a training of another recipe.
    """
    other = small_recipe(copy_of(root, tmp_path / "other"), **KNOBS, data__skip="[[20, 28]]")
    train(other)
    poison(monkeypatch, range(20, 28))
    recipe = small_recipe(root, **KNOBS, train__skip__then="roll_back")
    train(recipe)
    (event,) = events(recipe, "roll_back")
    assert (event["step"], event["samples"]) == (4, [20, 28])
    assert events(recipe, "start")[1]["step"] == 4
    expected = weights(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(recipe).items())
    steps = [line["step"] for line in read_lines(recipe.folder.metrics)]
    assert steps == list(range(1, 13))
    train(recipe)
    assert len(events(recipe, "roll_back")) == 1
    train(small_recipe(root, **{**KNOBS, "train__steps": 1}))
    train(recipe)
    assert events(recipe, "start")[-1]["step"] == 12
    longer = small_recipe(
        root,
        **{**KNOBS, "train__steps": 14},
        train__skip__then="roll_back",
        resume__allow="[train.steps]",
    )
    train(longer)
    assert len(events(recipe, "roll_back")) == 1
    assert committed(recipe.folder.checkpoints)[0].commit["left_out"] == [[20, 28]]


@pytest.mark.drawn("skipped steps", keep=4)
def test_going_back_to_the_first_step_leaves_them_out_where_a_model_lies_already(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose checkpoints were removed. What is left out would be set aside with its logs each time,
    and training would go back for ever.
    """
    made = small_recipe(root, **KNOBS | {"train__steps": 2})
    train(made)
    logged = made.folder.metrics.read_text()
    shutil.rmtree(made.folder.checkpoints)
    poison(monkeypatch, range(20, 28))
    monkeypatch.setattr(
        trainer,
        "roll_back",
        mock.Mock(
            wraps=trainer.roll_back,
            side_effect=[mock.DEFAULT, AssertionError("it went back again")],
        ),
    )
    recipe = small_recipe(root, **KNOBS | {"checkpoint__every": 100}, train__skip__then="roll_back")
    train(recipe)
    (event,) = events(recipe, "roll_back")
    assert (event["step"], event["samples"]) == (0, [20, 28])
    (aside,) = earlier(recipe.folder).iterdir()
    assert (aside / "metrics.jsonl").read_text() == logged


@pytest.mark.drawn("skipped steps", keep=4)
def test_going_back_shortens_epochs_as_leaving_out_does(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No row is taken from another pass instead, and a pass ends, and is measured, where it does
    without them. The rate is constant: steps before were taken by the schedule of a longer training.
    """
    knobs: dict[str, Any] = {
        **KNOBS,
        "train__steps": None,
        "train__epochs": 2,
        "train__global_batch": 24,
        "train__evaluate_every": "epoch",
        "train__schedule__kind": "constant",
    }
    other = small_recipe(copy_of(root, tmp_path / "other"), **knobs, data__skip="[[48, 96]]")
    train(other)
    poison(monkeypatch, range(48, 96))
    recipe = small_recipe(root, **knobs, train__skip__then="roll_back")
    train(recipe)
    assert [event["samples"] for event in events(recipe, "roll_back")] == [[48, 96]]
    assert len(measured(other)) == 2
    assert measured(recipe) == measured(other)
    expected = weights(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(recipe).items())


@pytest.mark.drawn("skipped steps", keep=4)
def test_a_pass_that_ends_where_training_went_back_to_is_finished(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint says so, though no step comes after it; and which step's loss is told is."""
    poison(monkeypatch, range(7 * 24, 9 * 24))
    knobs: dict[str, Any] = {"train__epochs": 1, "train__steps": None, "train__global_batch": 24}
    recipe = small_recipe(
        root,
        **{**KNOBS, **knobs, "checkpoint__every": 7, "track__every": 10},
        train__skip__then="roll_back",
    )
    assert re.fullmatch(r"7 steps, loss 5\.\d{3} at step 1", train(recipe).result)
    found = committed(recipe.folder.checkpoints)[0]
    assert found.commit["left_out"] == [[7 * 24, 9 * 24]]
    assert found.commit["finished"]
    train(small_recipe(root))  # set aside, as a finished one is


@pytest.mark.drawn("skipped steps", keep=4)
def test_going_back_may_take_as_long_as_a_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is read for minutes is no hang: its phase is not that of a step."""
    poison(monkeypatch, range(20, 28))
    recipe = small_recipe(root, **KNOBS, train__skip__then="roll_back")
    seen = list[str]()

    def look(*args: Any) -> None:
        seen.extend(beat.phase for beat in beats_of_main(recipe.folder.heartbeats))

    monkeypatch.setattr("ingot.train.trainer.fetch_missing", look)
    train(recipe)
    assert seen == ["loading", "loading"]


@pytest.mark.drawn("skipped steps", keep=4)
def test_who_dies_while_it_goes_back_has_lost_the_steps_behind_the_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(20, 28))
    recipe = small_recipe(root, **KNOBS, train__skip__then="roll_back")
    look = mock.Mock(side_effect=[None, KeyboardInterrupt, None])
    monkeypatch.setattr("ingot.train.trainer.fetch_missing", look)
    with pytest.raises(KeyboardInterrupt):
        train(recipe)
    train(recipe)
    (event,) = events(recipe, "lost")
    assert (event["step"], event["steps"]) == (4, 3)


@pytest.mark.drawn("skipped steps", keep=4)
def test_going_back_leaves_the_same_out_with_a_best_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One saved at a bad step, since it was due to be evaluated and is the best, would stand
    between the bad steps and the one to go back to.
    """
    best = {**KNOBS, "train__evaluate_every": 6, "checkpoint__best": "loss"}
    other = small_recipe(copy_of(root, tmp_path / "other"), **best, data__skip="[[20, 28]]")
    train(other)
    poison(monkeypatch, range(20, 28))
    recipe = small_recipe(root, **best, train__skip__then="roll_back")
    train(recipe)
    assert [event["samples"] for event in events(recipe, "roll_back")] == [[20, 28]]
    assert measured(recipe) == measured(other)
    expected = weights(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(recipe).items())


def measured(recipe: Recipe) -> dict[int, float]:
    """The held-out loss by step."""
    name = "validation/loss"
    return {line["step"]: line[name] for line in read_lines(recipe.folder.metrics) if name in line}


@pytest.mark.drawn("skipped steps", keep=4)
def test_an_evaluation_waits_for_a_step_that_is_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also for one after a resume; not beyond the end."""
    poison(monkeypatch, range(20, 28))
    knobs = {**KNOBS, "train__skip__in_row": 3, "train__evaluate_every": 6}
    whole = small_recipe(copy_of(root, tmp_path / "whole"), **knobs)
    train(whole)
    assert list(measured(whole)) == [8, 12]
    recipe = small_recipe(root, **knobs)
    with monkeypatch.context() as patch:
        asked_to_stop_in(6, patch)
        with pytest.raises(Stopped):
            train(recipe)
    assert not measured(recipe)
    train(recipe)
    assert measured(recipe) == measured(whole)
    short = small_recipe(root, **{**knobs, "train__steps": 6})
    train(short, fresh=True)
    assert list(measured(short)) == [6]


@pytest.mark.drawn("skipped steps", keep=4)
def test_a_checkpoint_that_waits_is_made_by_the_next_attempt(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a signal had saved in its place is none of those whose mean is exported."""
    poison(monkeypatch, range(20, 24))
    average = {"train__average": "{kind: last, checkpoints: 3}", "checkpoint__keep": 3}
    knobs = {**KNOBS, **average, "train__steps": 9}
    whole = small_recipe(copy_of(root, tmp_path / "whole"), **knobs)
    train(whole)
    recipe = small_recipe(root, **knobs)
    with monkeypatch.context() as patch:
        asked_to_stop_in(6, patch)
        with pytest.raises(Stopped):
            train(recipe)
    newest = committed(recipe.folder.checkpoints)[0]
    assert (newest.step, newest.commit["due"], newest.commit["waiting"]) == (6, False, True)
    train(recipe)
    for one in (whole, recipe):
        averaged = averaged_steps(one.train.average, one.folder.checkpoints, 9)
        assert averaged == [9, 8, 7], "none of step 6, and step 7 in its place"
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(recipe).items())


@pytest.mark.drawn("skipped steps", keep=4)
def test_a_signal_does_not_pass_over_too_many(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came with the last of them: no checkpoint may stand behind them."""
    poison(monkeypatch, range(20, 28))
    recipe = small_recipe(root, **KNOBS)
    asked_to_stop_in(7, monkeypatch)
    with pytest.raises(Failed, match="not finite in 2 steps in a row, 6 to 7"):
        train(recipe)
    assert committed(recipe.folder.checkpoints)[0].step == 4


@pytest.mark.drawn("skipped steps", keep=4)
def test_a_refused_evaluation_does_not_pass_over_too_many(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the last step, which was not taken, is done all the same; its judge may be down."""
    poison(monkeypatch, range(16, 24))
    recipe = small_recipe(root, **{**KNOBS, "train__steps": 6}, train__evaluate_every=6)
    down = mock.Mock(side_effect=NotJudged("the judge is down"))
    monkeypatch.setattr("ingot.train.evaluation.validation_losses", down)
    with pytest.raises(Failed, match="not finite in 2 steps in a row, 5 to 6"):
        train(recipe)
    down.assert_called_once()
    assert committed(recipe.folder.checkpoints)[0].step == 4


@pytest.mark.drawn("skipped steps", keep=4)
def test_what_a_checkpoint_has_passed_is_not_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal had one made between the bad steps: left out before it, as much of what comes after
    it would be passed over.
    """
    poison(monkeypatch, range(20, 32))
    knobs = {**KNOBS, "train__skip__in_row": 3, "train__skip__then": "roll_back"}
    recipe = small_recipe(root, **knobs)
    with monkeypatch.context() as patch:
        asked_to_stop_in(6, patch)
        with pytest.raises(Stopped):
            train(recipe)
    train(recipe)
    (event,) = events(recipe, "roll_back")
    assert (event["step"], event["samples"]) == (6, [24, 32])


@pytest.mark.drawn("skipped steps", keep=4)
def test_a_signal_leaves_going_back_to_the_next_attempt(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A large checkpoint is read for longer than there may be time."""
    other = small_recipe(copy_of(root, tmp_path / "other"), **KNOBS, data__skip="[[20, 28]]")
    train(other)
    poison(monkeypatch, range(20, 28))
    recipe = small_recipe(root, **KNOBS, train__skip__then="roll_back")
    look = mock.Mock(return_value=None)
    with monkeypatch.context() as patch:
        asked_to_stop_in(7, patch)
        patch.setattr("ingot.train.trainer.fetch_missing", look)
        with pytest.raises(Stopped, match="with checkpoint 4 committed"):
            train(recipe)
    look.assert_called_once()
    told = [(event["kind"], event["step"]) for event in read_lines(recipe.folder.events)]
    assert told[-2:] == [("roll_back", 4), ("stop", 4)]
    train(recipe)
    assert len(events(recipe, "roll_back")) == 1
    expected = weights(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(recipe).items())


@pytest.mark.drawn("skipped steps", keep=4)
def test_it_goes_back_so_often_and_no_more(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(20, 400))
    recipe = small_recipe(root, **KNOBS, train__skip__then="roll_back", train__skip__rollbacks=2)
    with pytest.raises(
        Failed,
        match=r"training went back 2 times \(train\.skip\.rollbacks\) and comes to bad steps again",
    ):
        train(recipe)
    assert [event["samples"] for event in events(recipe, "roll_back")] == [[20, 28], [28, 36]]


@pytest.mark.drawn("skipped steps", keep=4)
def test_before_the_first_checkpoint_it_goes_back_to_the_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(8))
    recipe = small_recipe(root, **{**KNOBS, "checkpoint__every": 50}, train__skip__then="roll_back")
    train(recipe)
    assert [event["samples"] for event in events(recipe, "roll_back")] == [[0, 8]]
    assert not (recipe.folder.root / "earlier").exists()


@pytest.mark.drawn("skipped steps", keep=4)
def test_a_fresh_start_knows_nothing_of_what_was_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        poison(patch, range(20, 28))
        recipe = small_recipe(root, **KNOBS, train__skip__then="roll_back")
        train(recipe)
    with_gap = weights(recipe)
    train(recipe, fresh=True)
    assert any(not torch.equal(tensor, with_gap[name]) for name, tensor in weights(recipe).items())
    assert not (recipe.folder.root / "left_out.json").exists()


def train_poisoned(root: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, range(20, 28))
        recipe = small_recipe(root, **KNOBS, train__skip__then="roll_back", train__micro_batch=1)
        train(recipe)
    return [event["samples"] for event in events(recipe, "roll_back")]


@pytest.mark.drawn("skipped steps", keep=4)
def test_two_ranks_go_back_together(root: Path) -> None:
    assert run_ranks(2, train_poisoned, root) == [[[20, 28]]] * 2


def outcome(skipped: float) -> step.StepOutcome:
    return step.StepOutcome(*(torch.tensor(value) for value in (1.0, 1.0, skipped)))


def test_only_steps_in_a_row_are_too_many(tmp_path: Path) -> None:
    hook = SkipHook(2, EventSink(tmp_path / "events.jsonl", None, is_main=False))
    for number, skipped in enumerate((1.0, 0.0, 1.0, 0.0)):
        hook.judge(number, outcome(skipped))
    hook.judge(4, outcome(1.0))
    with pytest.raises(TooManySkipped) as bad:
        hook.judge(5, outcome(1.0))
    assert (bad.value.first, bad.value.last) == (4, 5)


def test_a_checkpoint_says_how_many_were_skipped_right_before_it(tmp_path: Path) -> None:
    """Its own step is not judged yet, and counts."""
    hook, rows = SkipHook(9, EventSink(tmp_path / "events.jsonl", None, is_main=False)), []
    for number, skipped in enumerate((1.0, 1.0, 0.0, 1.0), start=1):
        counts = step.BatchCounts(1, 1, 1)
        hook.after_step(step.StepInfo(number, 1, counts, outcome(skipped), 0.1))
        rows.append(hook.row)
    assert rows == [1, 2, 0, 1]


@pytest.mark.drawn("skipped steps", keep=4)
def test_steps_in_a_row_are_counted_on_after_a_resume(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that is often taken away would otherwise never learn that nothing is learnt."""
    poison(monkeypatch, range(16, 400))
    recipe = small_recipe(root, **{**KNOBS, "train__skip__in_row": 4})
    with monkeypatch.context() as patch:
        asked_to_stop_in(6, patch)
        with pytest.raises(Stopped):
            train(recipe)
    with pytest.raises(Failed, match="not finite in 4 steps in a row, 5 to 8"):
        train(recipe)
