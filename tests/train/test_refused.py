"""What does not fit together is refused before anything is trained: teachers, references, adapters,
labels that are all masked.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.config.degrees import Degrees
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.parallel.mesh import Mesh
from ingot.train.setup import make_setup
from ingot.train.trainer import train
from tests.evaluate.small_models import hellaswag_lines, write_lines
from tests.evaluate.small_runs import recipe_of as rated_recipe
from tests.evaluate.small_runs import records
from tests.markers import changed
from tests.models.hf.tiny import SEQ2SEQ
from tests.models.tiny import make_reference
from tests.objectives.ways import recipe_of, write_all
from tests.small import copy_of, small_recipe
from tests.train.test_run import stop_after


def refused(recipe: Recipe) -> str:
    with pytest.raises(WrongInput) as caught:
        train(recipe)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def teacher(root: Path, name: str, **config: Any) -> Path:
    """A tiny model with the tokenizer of the run in it."""
    folder = make_reference(root / name, **{"vocab_size": 320, **config})
    for file in (root / "runs" / "small" / "data" / "tokenizer").iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "manifest.json":
            shutil.copy(file, folder / file.name)
    return folder


def distilling(root: Path, folder: Path | str, **knobs: Any) -> Recipe:
    """Prepared as for pretraining: only what `train` looks at is changed."""
    recipe = small_recipe(root, objective={"kind": "distill", "teacher": str(folder)}, **knobs)
    changed(recipe.folder.columns, "manifest.json", objective="distill")
    return recipe


@pytest.mark.drawn
@pytest.mark.parametrize("knob", ["model.source", "objective.teacher"])
def test_weights_that_were_trained_again_meanwhile_make_another_training(
    knob: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = teacher(root, "learnt-from")

    def recipe(steps: int) -> Recipe:
        knobs: dict[str, Any] = {"train__steps": steps, "checkpoint__every": 2}
        if knob == "objective.teacher":
            return distilling(root, folder, **knobs)
        return small_recipe(root, **knobs, model__source=str(folder), model__config={})

    stop_after(recipe(8), 5, monkeypatch)
    train(recipe(8))  # a training whose models are as they were goes on
    weights = folder / "model.safetensors"
    tensors = {name: tensor + 1e-3 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    train(recipe(8))
    assert (root / "runs/small/earlier").exists(), "not trained again"
    stop_after(recipe(9), 5, monkeypatch)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, weights)
    assert f"the weights of {knob} " in refused(recipe(9))


def test_a_teacher_must_speak_the_students_language(root: Path, tmp_path: Path) -> None:
    wider = teacher(root, "wider", vocab_size=333)
    assert "has a vocabulary of 333 tokens, the student" in refused(
        distilling(
            root,
            wider,
            model__config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 320,
            },
        )
    )
    short = teacher(root, "short", max_position_embeddings=16)
    assert "exceeds the 16 positions of objective.teacher" in refused(distilling(root, short))
    other = teacher(root, "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "is not the student's, so their distributions are over other tokens" in refused(
        distilling(root, other)
    )
    assert "objective.teacher nowhere is neither a folder nor hf:ORG/NAME" in refused(
        distilling(root, "nowhere")
    )


def test_a_model_must_read_the_ids_that_were_prepared_with_its_tokenizer(root: Path) -> None:
    base = teacher(root, "base")
    recipe = small_recipe(
        root,
        name="onward",
        model__source=str(base),
        model__config=None,
        tokenizer__source=None,
        tokenizer__vocab_size=None,
    )
    ingest(recipe)
    prepare(recipe)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted((one for one in vocab if one.isalpha()), key=len)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "another tokenizer than when the data was prepared; run `ingot prepare`" in refused(
        recipe
    )


def test_a_student_from_nothing_takes_the_teachers_vocabulary(root: Path) -> None:
    """Teachers are padded beyond their tokenizer now and then; a student drawn for them is as
    wide.
    """
    train(distilling(root, teacher(root, "padded", vocab_size=333), train__steps=1))
    assert (
        json.loads((root / "runs" / "small" / "model" / "config.json").read_text())["vocab_size"]
        == 333
    )


def test_an_adapter_needs_weights_that_are_kept(root: Path) -> None:
    assert "model.lora trains an adapter of weights that are kept" in refused(
        small_recipe(root, model__lora={})
    )
    base = teacher(root, "base")
    said = refused(
        small_recipe(
            root,
            model__source=str(base),
            model__config=None,
            model__lora={"targets": ["nothing_like_it"]},
            tokenizer__source=str(base),
            tokenizer__vocab_size=None,
        )
    )
    assert "nothing_like_it" in said
    assert "q_proj" in said


def preferences(root: Path, answer: str, worse: str, count: int = 40) -> Path:
    lines = [
        {"prompt": f"Which way {number}?", "chosen": answer, "rejected": worse}
        for number in range(count)
    ]
    path = root / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_reference_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = preferences(tmp_path, "left", "right")
    knobs: dict[str, Any] = {
        "data__train": [{"source": str(source)}],
        "tokenizer__template": "chatml",
        "tokenizer__vocab_size": 300,
        "data__seq_len": 96,
        "data__validation__fraction": 0.2,
    }
    recipe = small_recipe(tmp_path, objective={"kind": "dpo"}, **knobs)
    ingest(recipe)
    prepare(recipe)
    small = make_reference(tmp_path / "reference", vocab_size=97)
    assert "has 97 ids and 128 positions, the data need" in refused(
        small_recipe(tmp_path, objective={"kind": "dpo", "reference": str(small)}, **knobs)
    )
    broken = make_reference(tmp_path / "broken", vocab_size=300)
    from_nan = small_recipe(
        tmp_path, objective={"kind": "dpo", "reference": str(_poisoned(broken))}, **knobs
    )
    assert "log-probabilities that are not finite" in refused(from_nan)


def _poisoned(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_layers_are_left_out_at_random_in_one_process_only(tmp_path: Path) -> None:
    """Ranks that leave out others wait for each other, or train unlike layers together."""
    write_all(tmp_path)
    bart = tmp_path / "bart"
    bart.mkdir()
    config = {**SEQ2SEQ["bart"], "encoder_layerdrop": 0.1, "decoder_layerdrop": 0.0}
    (bart / "config.json").write_text(json.dumps(config))
    recipe = recipe_of(
        tmp_path, "seq2seq", model__source=str(bart), model__init="random", model__config=None
    )
    ingest(recipe)
    prepare(recipe)
    two = Mesh(Ranks(0, 2), torch.device("cpu"), Degrees(replicate=2))
    with pytest.raises(WrongInput, match=r"encoder_layerdrop 0\.1 leaves layers .* at random"):
        make_setup(recipe, two)
    make_setup(recipe, Mesh(Ranks(), torch.device("cpu")))


def test_preferences_without_room_for_an_answer_are_refused(tmp_path: Path) -> None:
    source = preferences(tmp_path, "left " * 30, "right " * 30)
    recipe = small_recipe(
        tmp_path,
        objective={"kind": "dpo"},
        data__train=[{"source": str(source)}],
        tokenizer__template="chatml",
        tokenizer__vocab_size=300,
        data__seq_len=16,
        data__validation__fraction=0.2,
    )
    ingest(recipe)
    with pytest.raises(WrongInput, match="none can be learnt from"):
        prepare(recipe)


@pytest.mark.parametrize(
    ("good", "metric", "why"),
    [
        ((40, 20), "loss/accuracy", r"all of the first 4 .* are good; raise train\.evaluate_rows"),
        ((60, 0), "loss/accuracy", r"all of the \d+ .* are good; give data\.validation"),
        ((0, 60), "loss/perplexity", r"none of the \d+ .* is good; give data\.validation"),
        ((60, 0), "loss/bits_per_byte/bad.jsonl", r"of bad\.jsonl none of the \d+ .* is good"),
    ],
)
def test_a_tracked_metric_that_answers_rated_alike_do_not_tell_is_refused(
    good: tuple[int, int], metric: str, why: str, tmp_path: Path
) -> None:
    """Before the steps up to the first evaluation are paid for. The good answers come first; the
    objective's own loss is measured on either kind, as is that of good ones where there are any.
    """
    rated = [*[True] * good[0], *[False] * good[1]]
    lines = [one | {"label": label} for one, label in zip(records("rated"), rated, strict=True)]
    write_lines(tmp_path / "rated.jsonl", lines)
    knobs: dict[str, Any] = {"train__evaluate_every": 2, "train__evaluate_tasks": ["loss"]}
    if "first" in why:
        knobs["train__evaluate_rows"] = 4
    if "bad.jsonl" in metric:
        write_lines(tmp_path / "bad.jsonl", [one | {"label": False} for one in lines])
        sources = [{"source": str(tmp_path / name)} for name in ("rated.jsonl", "bad.jsonl")]
        knobs["data__train"] = json.dumps(sources)

    def tracking(metric: str) -> Recipe:
        return rated_recipe(tmp_path, "rated", **knobs, checkpoint__best=metric)

    ingest(tracking(metric))
    prepare(tracking(metric))
    here = Mesh(Ranks(), torch.device("cpu"))
    with pytest.raises(WrongInput, match=rf"best {metric} is not measured: {why}"):
        make_setup(tracking(metric), here)
    for told in ("loss", *["loss/perplexity"] * bool(good[0])):
        make_setup(tracking(told), here)


def test_a_batch_without_a_target_ends_training_in_words(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without one are left out when rows are planned; should a batch have none all the same,
    no loss of 0.0 is told.
    """
    monkeypatch.setattr(
        "ingot.objectives.cross_entropy.CrossEntropy.targets", lambda self, batch: 0
    )
    assert "has not one target" in refused(small_recipe(copy_of(root, root.parent / "other")))


def test_it_trains_with_nothing_held_out_and_measures_no_loss_then(root: Path) -> None:
    none = {"data__validation__fraction": None, "data__validation": []}
    recipe = small_recipe(root, train__steps=2, **none)
    ingest(recipe)
    prepare(recipe)
    said = refused(small_recipe(root, train__steps=2, train__evaluate_every=1, **none))
    assert said.startswith("train.evaluate_every needs held-out documents")
    items = write_lines(root / "items.jsonl", hellaswag_lines(2))
    tasks = [{"kind": "hellaswag", "source": str(items)}]
    own = {"evaluate__tasks": tasks, "train__evaluate_tasks": ["hellaswag"]}
    train(small_recipe(root, train__steps=2, train__evaluate_every=1, **own, **none))
    measured = recipe.folder.metrics.read_text()
    assert "validation/hellaswag/accuracy" in measured
    assert "validation/loss" not in measured, "no loss on training rows under that name"
