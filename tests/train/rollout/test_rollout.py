"""A training on rewards from prompts to weights: the sampler's numbers are the trainer's, any split
gives one number, and what was killed goes on bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base import progress
from ingot.base.errors import WrongInput
from ingot.base.markers import COMMIT
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed
from ingot.config.length import rows_come_to
from ingot.config.recipe import Recipe
from ingot.data.batches.prompts import PromptReader
from ingot.data.batches.rows import Rows, open_rows
from ingot.data.columns.manifest import read_prepared
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.parallel.mesh import running_mesh
from ingot.plan.ranges import Range
from ingot.plan.run_cost import planned_steps
from ingot.tokenizers.load import load_tokenizer
from ingot.train.optim.schedules import Recurrence
from ingot.train.rollout import sampling
from ingot.train.setup import make_setup
from ingot.train.trainer import train
from tests import tolerances
from tests.markers import changed
from tests.ranks import run_ranks
from tests.train.rollout.digits import OBJECTIVE, apart, digits_recipe, odd, odd_known, write_pairs
from tests.train.stopping import train_until

SGD = {"train__optimizer": "{kind: sgd, lr: 0.5}", "train__clip_norm": None}
UNEVEN = {**SGD, "train__global_batch": 20}
"""Five prompts, which two ranks do not share evenly."""
RATIO = tolerances.FIRST_RATIO


def logged(recipe: Recipe, key: str) -> list[float]:
    return [line[key] for line in read_lines(recipe.folder.metrics) if key in line]


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.folder.model / "model.safetensors")


def told(recipe: Recipe) -> list[Any]:
    return list(read_lines(recipe.folder.samples))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return float(
        (difference / sum(float(value.double().square().sum()) for value in other.values())) ** 0.5
    )


def test_the_first_ratio_is_one_and_later_ones_are_not(ready: Path, tmp_path: Path) -> None:
    """Every even step is the second on the same answers. The temperature is part of the policy: if
    either side forgot it, the ratio would be far from 1.
    """
    recipe = apart(ready, tmp_path, {"updates": 2, "temperature": 0.7}, track__every=1)
    train(recipe)
    errors = logged(recipe, "train/policy/ratio_error")
    assert len(errors) == 4
    assert max(errors[::2]) < RATIO
    assert min(errors[1::2]) > 100 * RATIO
    lines = list(read_lines(recipe.folder.metrics))
    rollouts = [line for line in lines if "reward/mean" in line]
    assert rollouts[0]["reward/mean"] == rollouts[1]["reward/mean"]
    assert {"reward/exact", "reward/other", "rollout/equal_groups", "rollout/answer_tokens"} <= set(
        rollouts[0]
    )


def test_samples_are_written_and_the_mean_reward_is_shown(
    ready: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    recipe = apart(ready, tmp_path, train__steps=2, track__every=1)
    train(recipe)
    assert f"reward {logged(recipe, 'reward/mean')[-1]:.3f}  tokens/s" in capsys.readouterr().err
    lines = told(recipe)
    assert [line["step"] for line in lines] == [1, 1, 2, 2]
    for line in lines:
        assert line["reference"] == max(line["prompt"].split())
        assert len(line["answers"]) == 4
        for one in line["answers"]:
            right = one["answer"].strip() == line["reference"]
            assert one["reward"] == right + 0.5 * odd(one["answer"])


@pytest.mark.parametrize("every", [2, 9])
def test_samples_of_an_early_end_are_written_once(every: int, ready: Path, tmp_path: Path) -> None:
    recipe = apart(
        ready,
        tmp_path,
        train__steps=9,
        train__evaluate_every=1,
        train__early_stop="{patience: 1, min_delta: 1e9}",
        track__every=every,
    )
    train(recipe)
    assert [line["step"] for line in told(recipe)] == [1, 1, 2, 2]
    assert len(logged(recipe, "reward/mean")) == 2


def test_a_prompt_is_what_is_served(ready: Path) -> None:
    recipe = digits_recipe(ready)
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    rows = open_rows(recipe.folder.columns, "train", 32, pack="none", pad_last=False)
    assert isinstance(rows, Rows)
    for prompt in PromptReader(rows, tokenizer).prompts(list(range(len(rows)))):
        one, other = prompt.text.split()
        assert prompt.reference == max(one, other)
        assert prompt.ids == tokenizer.encode_chat([{"role": "user", "content": prompt.text}])


KILLED = {"updates": 3, "sample_again": 1}


def test_what_was_killed_goes_on_bit_for_bit(ready: Path, tmp_path: Path) -> None:
    """The checkpoint of step 4 lies inside of the second rollout of three updates, whose answers
    the weights of then no longer give.
    """
    knobs: dict[str, Any] = {"train__steps": 8, "checkpoint__every": 4, "track__every": 1}
    whole = apart(ready, tmp_path / "whole", KILLED, **knobs)
    train(whole)
    broken = apart(ready, tmp_path / "broken", KILLED, **knobs)
    train_until(6, broken)
    newest = next(iter(committed(broken.folder.checkpoints)))
    assert newest.step == 4
    assert newest.commit["rollout"]["number"] == 1
    train(broken)
    found, wanted = weights(broken), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for key in ("train/loss", "train/policy/ratio_error", "reward/mean", "rollout/groups"):
        assert logged(broken, key) == logged(whole, key)
    assert told(broken) == told(whole)


def test_a_checkpoint_that_says_nothing_of_its_answers_is_of_another_version(
    ready: Path, tmp_path: Path
) -> None:
    recipe = apart(ready, tmp_path, train__steps=3, checkpoint__every=1)
    train_until(2, recipe)
    for found in committed(recipe.folder.checkpoints):
        changed(found.folder, COMMIT, without=("rollout",))
    with pytest.raises(WrongInput, match=r"does not say rollout, so another version .* --fresh"):
        train(recipe)


@pytest.mark.parametrize("epochs", [None, 2])
@pytest.mark.parametrize(
    "settings", [{}, {"updates": 4}, {"sample_again": 2}, {"updates": 3, "sample_again": 1}]
)
def test_an_epoch_is_a_pass_over_the_prompts(
    settings: dict[str, Any], epochs: int | None, ready: Path
) -> None:
    """However many steps take the same answers, and however many sets a step may draw."""
    recipe = digits_recipe(ready, settings, train__steps=None, train__epochs=epochs)
    with running_mesh() as mesh:
        setup = make_setup(recipe, mesh)
    updates, sets = settings.get("updates", 1), 1 + settings.get("sample_again", 0)
    each = sets * recipe.train.global_batch // OBJECTIVE["group"]
    passed, all_rows = each * setup.last / updates, (epochs or 1) * len(setup.rows)
    assert all_rows - each / updates < passed <= all_rows
    ends = Recurrence("epoch", len(setup.rows) * recipe.objective.samples_per_row, 16)
    due = [step for step in range(1, setup.last + 1) if ends.is_due(step)]
    assert (len(due), due[-1]) == (epochs or 1, setup.last)
    assert planned_steps(recipe, Range.exactly(float(len(setup.rows)))) == Range.exactly(
        float(setup.last)
    )


@pytest.mark.parametrize(
    ("settings", "rows"),
    [({}, 4), ({"group": 16}, 1), ({"updates": 3, "sample_again": 1}, 8), ({"staleness": 1}, 8)],
)
def test_a_step_has_come_to_all_prompts_that_are_answered(
    settings: dict[str, Any], rows: int, ready: Path
) -> None:
    """All of the rollout that it lies inside of, and of those that are sampled ahead."""
    assert rows_come_to(digits_recipe(ready, settings), 1) == rows


def test_prompts_that_were_come_to_are_left_out_no_more(ready: Path, tmp_path: Path) -> None:
    """Those are rows, of which a step has several answers each."""
    knobs: dict[str, Any] = {"train__steps": 2, "checkpoint__every": 1}
    train_until(1, apart(ready, tmp_path, **knobs))
    behind, ahead = (
        digits_recipe(tmp_path, **knobs, data__skip=[[place, place + 2]]) for place in (3, 4)
    )
    with pytest.raises(WrongInput, match=r"of another recipe: data\.skip"):
        train(behind)
    train(ahead)


def test_groups_that_teach_nothing_make_room_for_others(ready: Path, tmp_path: Path) -> None:
    """Sets of four prompts, until four groups have unequal rewards or four sets are done; told is
    what was sampled, those left out included.
    """
    settings = {"sample_again": 3, "updates": 2, "rewards": [{"kind": "odd"}]}
    recipe = apart(ready, tmp_path, settings, track__every=1)
    train(recipe)
    groups, equal = logged(recipe, "rollout/groups"), logged(recipe, "rollout/equal_groups")
    assert groups[0] == groups[1]
    assert groups[2] == groups[3]
    for count, share in zip(groups, equal, strict=True):
        assert count in (4, 8, 12, 16)
        assert count == 16 or count * (1 - share) >= 4 - 1e-9
    assert max(groups) > 4


def test_each_rollout_has_sets_of_its_own(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all of them are drawn each time: the next one goes on behind the last."""
    drawn, original = list[int](), sampling.AnswerSampler.task

    def task(sampler: Any, number: int) -> Any:
        drawn.append(number)
        return original(sampler, number)

    monkeypatch.setattr(sampling.AnswerSampler, "task", task)
    settings = {"sample_again": 1, "rewards": [{"kind": "exact"}]}
    train(apart(ready, tmp_path, settings, train__steps=3))
    assert drawn == [0, 1, 2, 3, 4, 5]


def on_ranks(ready: str, target: str) -> None:
    with odd_known():
        train(apart(Path(ready), Path(target), {"kl": 0.1}, train__micro_batch=5, **UNEVEN))


def test_any_split_of_the_work_gives_the_same_numbers(ready: Path, tmp_path: Path) -> None:
    """One rank with one micro-batch of all answers to five prompts, and two ranks with several: the
    same answers, losses and weights.
    """
    whole = apart(ready, tmp_path / "whole", {"kl": 0.1}, train__micro_batch=20, **UNEVEN)
    train(whole)
    shared = apart(ready, tmp_path / "ranks", {"kl": 0.1}, train__micro_batch=5, **UNEVEN)
    run_ranks(2, on_ranks, str(ready), str(tmp_path / "ranks"))
    assert told(shared) == told(whole)
    assert logged(shared, "reward/mean") == logged(whole, "reward/mean")
    for key in ("train/loss", "train/grad_norm", "train/policy/kl"):
        assert logged(shared, key) == pytest.approx(
            logged(whole, key), rel=tolerances.SPLIT_LOSS, abs=tolerances.SPLIT_LOSS
        )
    assert distance(weights(shared), weights(whole)) < tolerances.SPLIT_WEIGHTS


@pytest.mark.drawn
@pytest.mark.parametrize("normalise", ["tokens", "answers"])
def test_the_other_divisors_are_those_of_the_whole_step(
    normalise: str, ready: Path, tmp_path: Path
) -> None:
    norms = []
    for size in (16, 3):
        recipe = apart(
            ready,
            tmp_path / str(size),
            {"normalise": normalise},
            train__micro_batch=size,
            train__steps=2,
            **SGD,
        )
        train(recipe)
        norms.append(logged(recipe, "train/grad_norm"))
    assert norms[0] == pytest.approx(norms[1], rel=tolerances.SPLIT_LOSS)
    assert max(norms[0]) > 0


def test_a_prompt_that_comes_again_is_answered_with_other_numbers(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[bytes] = []
    original = sampling.answer_draws

    def noted(*given: Any) -> Any:
        found = original(*given)
        drawn.extend(row.tobytes() for row in found)
        return found

    monkeypatch.setattr(sampling, "answer_draws", noted)
    train(apart(ready, tmp_path, train__steps=3))
    assert len(set(drawn)) == len(drawn) == 48


def test_a_reference_that_is_where_training_starts_is_not_left_at_once(
    ready: Path, tmp_path: Path
) -> None:
    recipe = apart(
        ready,
        tmp_path,
        {"kl": 0.1, "updates": 2, "temperature": 0.7},
        train__steps=2,
        track__every=1,
    )
    train(recipe)
    first, second = logged(recipe, "train/policy/kl")
    assert abs(first) < RATIO
    assert abs(second) > 0


@pytest.mark.parametrize(
    ("objective", "knobs", "words"),
    [
        ({"group": 3}, {}, "global_batch 16 counts answers"),
        ({}, {"parallel": "auto"}, "parallel auto"),
        ({}, {"train__compile": True}, r"train\.compile"),
        ({}, {"model__lora": {"rank": 2, "dropout": 0.1}}, r"lora\.dropout"),
        ({"reference": "hf:a/b"}, {}, "never asked while kl is 0"),
        ({"kl_estimator": "k3"}, {}, "estimates nothing while kl is 0"),
        ({"top_p": 0.9}, {}, "top_p"),
        ({"rewards": []}, {}, "rewards"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    objective: dict[str, Any], knobs: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(WrongInput, match=words):
        digits_recipe(tmp_path, objective, **knobs)


def test_a_start_between_two_steps_on_the_same_answers_is_refused(
    ready: Path, tmp_path: Path
) -> None:
    recipe = apart(ready, tmp_path, {"updates": 2}, train__start_step=3)
    with pytest.raises(WrongInput, match=r"not there; set train\.start_step to 2"):
        train(recipe)


def test_a_prompt_without_room_for_an_answer_is_refused_before_the_first_step(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are drawn: how long an answer may be is no knob of the data. A preparation
    that knows it says so, and leaves what was prepared before.
    """
    recipe = apart(ready, tmp_path, {"max_answer_tokens": 30})
    before = read_prepared(recipe.folder.columns)
    monkeypatch.delattr("ingot.train.trainer.build_train_state")
    with pytest.raises(WrongInput, match=r"exceed data\.seq_len 32"):
        train(recipe)
    ingest(recipe)
    with pytest.raises(WrongInput, match=r"exceed data\.seq_len 32"):
        prepare(recipe)
    assert read_prepared(recipe.folder.columns) == before


def test_chats_that_are_too_long_are_refused_and_left_out_where_asked(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_pairs(root)
    with (root / "pairs.jsonl").open("a") as file:
        for number in range(20):
            turns = ("user", f"{number % 10} 0"), ("assistant", "7" * 40 + str(number))
            chat = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": chat}) + "\n")
    recipe = digits_recipe(root, train__steps=1)
    ingest(recipe)
    with pytest.raises(WrongInput, match=r"raise data\.seq_len, or .* data\.truncate=drop"):
        prepare(recipe)
    shorter = digits_recipe(root, train__steps=1, data__truncate="drop")
    prepare(shorter)
    train(shorter)


def test_an_adapter_is_trained_on_rewards(ready: Path, tmp_path: Path) -> None:
    """The reference is the base without its adapter, which at first gives the same numbers."""
    base = apart(ready, tmp_path / "base", train__steps=1)
    train(base)
    recipe = digits_recipe(
        tmp_path / "base",
        {"kl": 0.1},
        name="adapted",
        model__source=str(base.folder.root),
        model__config=None,
        model__lora={"rank": 2},
        tokenizer__source=str(base.folder.model),
        tokenizer__vocab_size=None,
        train__steps=2,
    )
    ingest(recipe)
    prepare(recipe)
    train(recipe)
    assert max(logged(recipe, "train/policy/ratio_error")) < RATIO
    assert abs(logged(recipe, "train/policy/kl")[0]) < RATIO
    assert json.loads((recipe.folder.adapter / "adapter_config.json").read_text())["r"] == 2
