"""What may have changed when a training goes on: samples that it has not come to, and what
`resume.allow` says.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.markers import COMMIT, entry_of, fingerprint, write_marker
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import (
    CommittedCheckpoint,
    committed,
    retain,
    step_folder,
)
from ingot.config.identity import (
    changes,
    content_identity,
    training_identity,
    weights_fingerprint,
    weights_identity,
)
from ingot.config.models.content import content_record
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.train import resume
from ingot.train.earlier import earlier
from ingot.train.trainer import train
from tests.checkpoints.states import flip_bit
from tests.markers import changed
from tests.small import small_recipe
from tests.train.test_run import stop_after

Spans = list[list[int]]
KNOBS_OF_MODELS = (
    r"model\.source",
    r"objective\.teacher",
    r"objective\.reference",
    r"model\.lora\.adapter",
)
"""Where the knobs of `known_by` name it."""


def start(
    monkeypatch: pytest.MonkeyPatch,
    before: dict[str, Any],
    now: dict[str, Any],
    allow: tuple[str, ...] = (),
) -> CommittedCheckpoint | None:
    """Resume at step 10 of 4 samples each, trained with the identity `before`, with `now`."""
    commit = dict.fromkeys(resume.FIELDS) | {"identity": before, "finished": False}
    found = CommittedCheckpoint(Path("step"), 10, commit)
    monkeypatch.setattr(resume, "newest_valid", lambda folder: found)
    return resume.find_start(RunFolder(Path("run")), now, fresh=False, allow=allow)


def test_a_damaged_checkpoint_is_set_aside_by_the_training_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would count as kept, since its size is right: those saved from now on would be deleted for
    it.
    """
    run = RunFolder(tmp_path)

    def save(step: int) -> Path:
        return saved(run, step, identity([]), finished=False)

    save(10)
    flip_bit(save(30) / "weights", 3)
    with pytest.raises(WrongInput, match="of another recipe"):
        resume.find_start(run, identity([], new=1), fresh=False)
    assert (run.checkpoints / "step-00000030").exists(), "nothing was begun"
    found = resume.find_start(run, identity([]), fresh=False)
    assert found is not None
    assert found.step == 10
    assert "is set aside as damaged-step-00000030" in capsys.readouterr().err
    flip_bit(save(30) / "weights", 3)  # again, by the training that went on
    assert resume.find_start(run, identity([]), fresh=False) == found
    save(20)
    assert retain(run.checkpoints, 1) == ["step-00000020"]
    assert sorted(os.listdir(run.checkpoints)) == ["damaged-step-00000030", "step-00000020"]
    save(40)
    assert retain(run.checkpoints, 2) == ["step-00000040", "step-00000020"]
    assert sorted(os.listdir(run.checkpoints)) == ["step-00000020", "step-00000040"]


def saved(
    run: RunFolder, step: int, known: dict[str, Any], *, finished: bool, watched: Any = None
) -> Path:
    """A checkpoint of a training with the identity `known`."""
    folder = step_folder(run.checkpoints, step)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(9))
    about = dict.fromkeys(resume.FIELDS) | {"identity": known, "finished": finished}
    about |= {"step": step, "watched": watched}
    write_marker(folder, COMMIT, about, [entry_of(folder, "weights")])
    return folder


def identity(skipped: Spans, **knobs: Any) -> dict[str, Any]:
    """With the ranges that are left out."""
    return {"train.global_batch": 4, "data.skip": skipped, **knobs}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([], []),
        ([], [[40, 48]]),
        ([], [[100, 120], [60, 61]]),
        ([[8, 16]], [[8, 16], [48, 50]]),
        ([[8, 16], [90, 99]], [[8, 16]]),
    ],
)
def test_what_lies_ahead_is_free(
    monkeypatch: pytest.MonkeyPatch, before: Spans, now: Spans
) -> None:
    assert start(monkeypatch, identity(before), identity(now)) is not None


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([], [[39, 48]]),
        ([], [[0, 4]]),
        ([[8, 16]], []),
        ([[8, 16]], [[8, 17]]),
        ([[8, 16]], [[8, 16], [47, 50]]),
    ],
)
def test_what_was_trained_on_is_refused(
    monkeypatch: pytest.MonkeyPatch, before: Spans, now: Spans
) -> None:
    """After ten steps of 4, with 8 samples skipped, the next sample is number 48 of the
    sequence.
    """
    with pytest.raises(WrongInput, match=r"data\.skip"):
        start(monkeypatch, identity(before), identity(now))


@pytest.mark.parametrize(("before", "now"), [({}, {"new": 1}), ({"new": 1}, {})])
def test_a_knob_that_only_one_of_both_has_is_a_change(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], now: dict[str, Any]
) -> None:
    with pytest.raises(WrongInput, match=r"of another recipe: new .*undo the change"):
        start(monkeypatch, identity([], **before), identity([], **now))


def test_a_checkpoint_of_another_version_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    with monkeypatch.context() as other:
        other.setattr(resume, "FIELDS", ("identity",))
        saved(run, 2, identity([]), finished=False)
    with pytest.raises(WrongInput, match=r"step-00000002 does not say run_id, due, .* --fresh"):
        resume.find_start(run, identity([]), fresh=False)
    with pytest.raises(WrongInput, match=r"recipe: data\.skip \[\] -> .*; undo the change"):
        start(monkeypatch, {"train.global_batch": 4}, identity([[0, 4]]))


def test_one_of_another_version_is_refused_before_anything_is_read_of_it(root: Path) -> None:
    """What was left out so far is, before anything else; `rollout` a training on rewards alone."""
    train(small_recipe(root, train__steps=2))
    run = small_recipe(root).folder
    changed(committed(run.checkpoints)[0].folder, COMMIT, without=("left_out", "run_id"))
    for steps in (2, 3):
        with pytest.raises(WrongInput, match=r"does not say run_id, left_out, .* --fresh"):
            train(small_recipe(root, train__steps=steps))


def test_one_of_another_version_is_not_brought_back(tmp_path: Path) -> None:
    """The training that lies there now stays, and nothing is moved."""
    run, now, before = RunFolder(tmp_path), identity([], of="now"), identity([], of="before")
    aside = RunFolder(earlier(run) / fingerprint(before))
    saved(aside, 2, before, finished=True)
    newest = saved(run, 3, now, finished=True)
    with pytest.raises(WrongInput, match=r"step-00000002 does not say rollout, so another version"):
        resume.find_start(run, before, fresh=False, reads=(*resume.FIELDS, "rollout"))
    assert [found.folder for found in committed(run.checkpoints)] == [newest]
    again = resume.find_start(run, before, fresh=False)
    assert again is not None
    assert again.step == 2


def test_early_stopping_comes_and_goes_with_what_it_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """How models are measured is no part of a training that nothing stops."""
    measured: dict[str, Any] = {
        "train__evaluate_every": 2,
        "train__evaluate_tasks": ["loss"],
        "train__average": "{evaluate: true}",
    }
    stop = "{metric: loss/perplexity}"
    plain = training_identity(small_recipe(tmp_path, **measured))
    stopped = training_identity(small_recipe(tmp_path, **measured, train__early_stop=stop))
    assert len(stopped) > len(plain) + 3
    for before, now in ((plain, stopped), (stopped, plain)):
        assert start(monkeypatch, before, now, ("train.early_stop",)) is not None
        with pytest.raises(WrongInput, match=r"the change by resume\.allow=\[train\.early_stop"):
            start(monkeypatch, before, now)
    otherwise = {**stopped, "train.evaluate_every": 3}
    with pytest.raises(WrongInput, match=r"train\.evaluate_every 2 -> 3; undo the change"):
        start(monkeypatch, stopped, otherwise, ("train.early_stop",))


def known_by(root: Path, path: Path) -> list[dict[str, Any]]:
    """The identities of trainings that start or learn from the model or adapter in `path`."""
    kinds: list[dict[str, Any]] = [
        {"model__source": path, "model__config": None},
        {"objective": f"{{kind: distill, teacher: {path}}}"},
        {"objective": f"{{kind: dpo, reference: {path}}}"},
        {"model__lora": f"{{adapter: {path}}}"},
    ]
    return [content_identity(small_recipe(root, **knobs)) for knobs in kinds]


def test_an_exported_model_under_another_path_makes_the_same_training(tmp_path: Path) -> None:
    """Another model under the same path another one."""
    config = {"model_type": "llama"}
    for name, held in (("base", b"one"), ("moved", b"one"), ("other", b"other")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "adapter_config.json").write_text('{"r": 4}')
        (folder / "model.safetensors").write_bytes(held)
        record = content_record(folder, {"weight": held.hex()})
        (folder / "ingot.json").write_text(json.dumps({"content": record}))
    base, moved, other = (
        known_by(tmp_path, tmp_path / name) for name in ("base", "moved", "other")
    )
    assert base == moved
    for before, now in zip(base, other, strict=True):
        named = r"[a-z.]+ \w+ -> \w+; the weights of [a-z.]+ \w+ -> \w+"
        assert re.fullmatch(named, "; ".join(changes(before, now)))
    (tmp_path / "moved" / "adapter_config.json").write_text('{"r": 8}')
    assert known_by(tmp_path, tmp_path / "moved")[3] != base[3], "an adapter is its settings, too"


@pytest.mark.parametrize("recorded", [True, False])
def test_a_model_that_differs_in_a_small_tensor_is_another_one(
    recorded: bool, tmp_path: Path
) -> None:
    """Its fingerprint is the same: between the samples of a large file is room for a tensor."""
    at = 200_000
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(16 << 20)
            file.seek(at)
            file.write(name.encode())
        if recorded:
            record = content_record(folder, {"norm": name})
            (folder / "ingot.json").write_text(json.dumps({"content": record}))
    assert len({weights_fingerprint(tmp_path / name) for name in ("one", "two")}) == 1
    one, two = (known_by(tmp_path, tmp_path / name) for name in ("one", "two"))
    for before, now, knob in zip(one, two, KNOBS_OF_MODELS, strict=True):
        assert re.fullmatch(rf"{knob} \S+ -> \S+", "; ".join(changes(before, now)))


def test_a_configuration_that_weights_are_drawn_by_is_a_part_of_the_training(
    tmp_path: Path,
) -> None:
    drawn = {"model__source": tmp_path, "model__init": "random", "model__config": None}
    found = []
    for width in (32, 64):
        config = {"model_type": "llama", "hidden_size": width}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(content_identity(small_recipe(tmp_path, **drawn)))
    assert changes(*found) == ["model.config.hidden_size 32 -> 64"]
    override = drawn | {"model__config": "{hidden_size: 64}"}
    assert content_identity(small_recipe(tmp_path, **override)) == found[1]


def test_a_reward_that_was_edited_meanwhile_is_another_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The values of two functions must not be mixed in silence; it may be meant."""
    file = tmp_path / "reward.py"
    reward = {"kind": "python", "function": f"{file}:score"}
    recipe = small_recipe(tmp_path, objective={"kind": "grpo", "group": 4, "rewards": [reward]})
    plain = training_identity(recipe)
    file.write_text("score = len", encoding="utf-8")
    before = plain | weights_identity(recipe)
    assert start(monkeypatch, before, plain | weights_identity(recipe)) is not None
    file.write_text("score = abs", encoding="utf-8")
    now = plain | weights_identity(recipe)
    with pytest.raises(WrongInput, match=rf"in {file} .*by resume\.allow=\[objective\.rewards"):
        start(monkeypatch, before, now)
    assert start(monkeypatch, before, now, ("objective.rewards",)) is not None


UNFINISHED: dict[str, Any] = {"train__steps": 8, "checkpoint__every": 2}


@pytest.mark.drawn("changes before a resume", keep=3)
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {
                "model__config": (
                    "{num_hidden_layers: 1, hidden_size: 32, intermediate_size: 48,"
                    " num_attention_heads: 4, num_key_value_heads: 2}"
                )
            },
            r"model\.config\.num_hidden_layers 2 -> 1; undo the change to go on",
        ),
        ({"seed": 3}, r"seed 0 -> 3; undo the change to go on"),
        ({"train__global_batch": 8}, r"train\.global_batch 4 -> 8; undo the change to go on"),
        (
            {"train__optimizer__lr": 0.02},
            (
                r"train\.optimizer\.lr 0\.01 -> 0\.02; go on with the change by"
                r" resume\.allow=\[train\.optimizer\]"
            ),
        ),
        (
            {"train__steps": 9, "train__clip_norm": 2},
            r"resume\.allow=\[train\.steps,train\.clip_norm\]",
        ),
        ({"train__steps": 9, "seed": 4}, r"undo the change to go on"),
        ({"train__steps": 2}, r"^4 steps are done, the recipe asks for 2 only; raise train\.steps"),
        ({"train__optimizer": "{kind: muon}"}, r"^\S+ has the state of .* muon cannot take over;"),
        (
            {"train__steps": 9, "train__clip_norm": 2, "resume__allow": "[train.steps]"},
            r"train\.clip_norm 1\.0 -> 2\.0",
        ),
    ],
)
def test_a_change_is_refused_by_name_with_the_ways_on(
    changed: dict[str, Any], named: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(small_recipe(root, **UNFINISHED), 5, monkeypatch)
    with pytest.raises(WrongInput, match=rf"{named}.* or start over with --fresh"):
        train(small_recipe(root, **UNFINISHED | changed))


@pytest.mark.drawn("changes before a resume", keep=3)
@pytest.mark.parametrize(
    ("knob", "named"),
    [
        ({"tokenizer__vocab_size": 300}, r"tokenizer \w+ -> \w+"),
        ({"data__fraction": 0.9}, r"data \w+ -> \w+"),
    ],
)
def test_other_data_or_another_tokenizer_is_refused(
    knob: dict[str, Any], named: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(small_recipe(root, **UNFINISHED), 5, monkeypatch)
    changed = small_recipe(root, **UNFINISHED | knob)
    ingest(changed)
    prepare(changed)
    with pytest.raises(
        WrongInput, match=rf"{named}.*undo the change to go on, or start over with --fresh"
    ):
        train(changed)


@pytest.mark.drawn("changes before a resume", keep=3)
def test_the_state_of_another_optimizer_is_not_taken_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(small_recipe(root, **UNFINISHED), 5, monkeypatch)
    other = small_recipe(
        root,
        **UNFINISHED,
        train__optimizer="{kind: muon}",
        resume__allow="[train.optimizer]",
    )
    with pytest.raises(
        WrongInput,
        match=r"kind adamw, which muon cannot take over; .* train\.start_from=\S+runs/small",
    ):
        train(other)


@pytest.mark.drawn("changes before a resume", keep=3)
def test_what_is_meant_may_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(small_recipe(root, **UNFINISHED), 5, monkeypatch)
    train(
        small_recipe(
            root, **UNFINISHED, train__optimizer__lr=0.02, resume__allow="[train.optimizer]"
        )
    )
    recipe = small_recipe(
        root,
        **UNFINISHED | {"train__steps": 10},
        train__optimizer__lr=0.02,
        resume__allow="[train.steps]",
    )
    train(recipe)
    changes = [event for event in read_lines(recipe.folder.events) if event["kind"] == "changed"]
    assert [(event["step"], event["cause"]) for event in changes] == [
        (4, "train.optimizer.lr 0.01 -> 0.02"),
        (8, "train.steps 8 -> 10"),
    ]
    assert committed(recipe.folder.checkpoints)[0].step == 10
    assert [line["step"] for line in read_lines(recipe.folder.metrics)] == list(range(1, 11))


ADAM = {"train.optimizer": {"kind": "adamw", "lr": 0.01}}
FASTER = {"train.optimizer": {"kind": "adamw", "lr": 0.02}}
STOPS = {"train.early_stop": {"metric": "loss", "patience": 2}, "train.evaluate_every": 5}
PATIENT = {"train.early_stop": {"metric": "loss", "patience": 3}}
BY_ANOTHER = {"train.early_stop": {"metric": "accuracy", "patience": 2}}
MEANT = ("train.optimizer", "train.steps", "train.early_stop", "train.average")


@pytest.mark.parametrize(
    ("before", "now", "last", "goes_on"),
    [
        (ADAM, FASTER, 10, False),
        (ADAM | {"train.steps": 10}, FASTER | {"train.steps": 12}, 12, True),
        (ADAM | STOPS, FASTER | STOPS, 12, False),
        (ADAM | STOPS, FASTER, 12, True),
        (ADAM | STOPS, FASTER, 10, False),
        (ADAM | STOPS, ADAM, 10, True),
        (ADAM | STOPS | {"train.steps": 12}, FASTER | STOPS | {"train.steps": 14}, 14, False),
        (ADAM | STOPS, FASTER | STOPS | PATIENT, 12, True),
        (ADAM | STOPS, FASTER | STOPS | BY_ANOTHER, 12, True),
        (ADAM, ADAM | STOPS, 10, True),
        (ADAM | {"train.average.decay": 0.9}, ADAM, 10, True),
        (ADAM, ADAM | {"train.average.decay": 0.9}, 10, False),
    ],
)
def test_what_would_have_needed_a_further_step_is_another_training_once_it_is_over(
    before: dict[str, Any], now: dict[str, Any], last: int, goes_on: bool, tmp_path: Path
) -> None:
    """After 10 steps, by their number or by early stopping. It would be exported as it is, as the
    model of a recipe that nobody trained.
    """
    run = RunFolder(tmp_path)
    seen = {"early_stop": {"metric": "loss", "worse_in_row": 2}}
    watched = seen if "train.early_stop" in before else None
    saved(run, 10, identity([], **before), finished=True, watched=watched)
    known = identity([], **now)
    told = resume.resumable(run, known, MEANT, last=last)
    found = resume.find_start(run, known, fresh=False, allow=MEANT, last=last)
    assert (found is not None) == (told is not None) == goes_on
    assert len(committed(run.checkpoints)) == goes_on, "otherwise it is set aside"


@pytest.mark.drawn("changes before a resume", keep=3)
def test_fewer_steps_than_are_done_are_refused(root: Path) -> None:
    train(small_recipe(root, **UNFINISHED))
    with pytest.raises(
        WrongInput, match=r"8 steps are done, the recipe asks for 7 only; raise train\.steps"
    ):
        train(small_recipe(root, **UNFINISHED | {"train__steps": 7}, resume__allow="[train.steps]"))
