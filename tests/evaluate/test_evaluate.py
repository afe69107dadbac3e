"""`evaluate` from a model folder to the report: the figures, the files, and what it refuses."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.reports import EvaluationReport, VerbOutcome, read_report
from ingot.base.storage import atomic_folder
from ingot.config.models.weights import model_hash
from ingot.config.recipe import Recipe
from ingot.data.cleaning.documents import read_documents
from ingot.evaluate import evaluate as evaluate_module
from ingot.evaluate.evaluate import evaluate, model_folder
from ingot.pipeline.steps import step_named
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.evaluate.small_models import (
    hellaswag_lines,
    place_model,
    with_model,
    write_lines,
)
from tests.evaluate.test_bigram import Direct
from tests.ranks import run_ranks
from tests.small import small_recipe

FULL = {
    "evaluate__tasks": "[{kind: loss, baselines: [gzip, xz, bigram]}]",
    "evaluate__prompts": "[the ingot, copper]",
    "evaluate__sample_tokens": 6,
}


def report_of(recipe: Recipe) -> EvaluationReport:
    return read_report(recipe.folder.reports / "evaluate.json")


def test_report_and_files(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = with_model(root, **FULL)
    outcome = evaluate(recipe)
    report = report_of(recipe)
    assert report == read_report(recipe.folder.model / "evaluate.json")
    assert set(report.metrics) == {"loss/loss", "loss/perplexity", "loss/bits_per_byte"}
    assert set(report.baselines) == {"gzip -9", "xz -9", "bigram"}
    assert report.model_hash == model_hash(recipe.folder.model)
    assert report.tokenizer_hash == load_tokenizer(recipe.folder.tokenizer).identity()
    assert [sample["prompt"] for sample in report.samples] == ["the ingot", "copper"]
    out, err = capfd.readouterr()
    bits = report.metrics["loss/bits_per_byte"]
    assert out == "", "a reader that leaves would end it before its record is written"
    assert f"evaluate: {recipe.folder.model}, loss, fp32" in err
    assert (
        outcome.result == f"{bits.value:.2f} bits per byte, perplexity"
        f" {report.metrics['loss/perplexity'].value:.1f}"
    )
    assert set(outcome.files) == {
        "reports/evaluate.json",
        "model/evaluate.json",
        "reports/examples/loss.parquet",
    }


@pytest.mark.parametrize("name", ["model.safetensors", "ingot.json", "evaluate.json", "README.md"])
def test_a_model_that_another_run_replaces_meanwhile_has_no_report(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are of the model that was opened, the hash is of the one that lies there at the
    end. What nothing is read of may change.
    """
    recipe = with_model(root, **FULL)
    model, complete = recipe.folder.model, evaluate_module.complete_prompts

    def replacing(*given: Any) -> Any:
        with atomic_folder(model) as new:
            shutil.copytree(model, new, dirs_exist_ok=True)
            (new / name).write_bytes(b"{}")
        return complete(*given)

    monkeypatch.setattr(evaluate_module, "complete_prompts", replacing)
    if name in ("model.safetensors", "ingot.json"):
        with pytest.raises(Failed, match=r"model was changed while it was measured.*again"):
            evaluate(recipe)
        assert not (recipe.folder.reports / "evaluate.json").exists()
    else:
        evaluate(recipe)


def test_bits_per_byte_are_over_the_bytes_of_the_held_out_documents(root: Path) -> None:
    recipe = with_model(root)
    evaluate(recipe)
    metrics = report_of(recipe).metrics
    texts = [document.text for document in read_documents(recipe, "validation")]
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    targets = sum(len(tokenizer.encode_document(text)) - 1 for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert metrics["loss/bits_per_byte"].n == len(texts)
    expected = metrics["loss/loss"].value * targets / math.log(2) / size
    assert metrics["loss/bits_per_byte"].value == pytest.approx(expected, rel=tolerances.EXACT)


def test_the_bigram_is_that_of_the_training_split(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_model(root, evaluate__tasks="[{kind: loss, baselines: [bigram]}]")
    evaluate(recipe)
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    monkeypatch.setattr("tests.evaluate.test_bigram.V", tokenizer.vocab_size)

    def pairs(split: Any) -> list[tuple[int, int]]:
        documents = [
            tokenizer.encode_document(document.text) for document in read_documents(recipe, split)
        ]
        return [pair for ids in documents for pair in itertools.pairwise(ids)]

    training, held_out = np.array(pairs("train")).T, pairs("validation")
    direct = Direct((training[0], training[1]))
    nll = -sum(math.log(direct.probability(*pair)) for pair in held_out)
    size = sum(len(document.text.encode()) for document in read_documents(recipe, "validation"))
    assert report_of(recipe).baselines == {
        "bigram": pytest.approx(nll / math.log(2) / size, rel=tolerances.EXACT)
    }


def test_the_same_again_gives_the_same_outputs_and_another_model_does_not(root: Path) -> None:
    recipe = with_model(root)
    first = evaluate(recipe)
    assert evaluate(recipe) == first
    place_model(recipe, recipe.folder.model, seed=1)
    assert evaluate(recipe).outputs != first.outputs


def run_evaluate(recipe: Recipe) -> VerbOutcome:
    return evaluate(recipe)


def test_two_processes_report_what_one_does(root: Path) -> None:
    recipe = with_model(root, **FULL)
    evaluate(recipe)
    alone = report_of(recipe)
    shutil.rmtree(recipe.folder.reports)
    one, two = run_ranks(2, run_evaluate, recipe)
    assert one == two
    together = report_of(recipe)
    assert together.baselines == alone.baselines
    assert together.samples == alone.samples
    for key, metric in alone.metrics.items():
        other = together.metrics[key]
        assert (other.n, other.set_fingerprint) == (metric.n, metric.set_fingerprint)
        for name in ("value", "ci_low", "ci_high"):
            assert getattr(other, name) == pytest.approx(
                getattr(metric, name), rel=tolerances.SPLIT_LOSS
            )


def test_several_tasks_have_names_of_their_own(root: Path) -> None:
    recipe = with_model(
        root, evaluate__tasks="[{kind: loss, name: a}, {kind: loss, name: b, baselines: [gzip]}]"
    )
    evaluate(recipe)
    report = report_of(recipe)
    assert report.metrics["a/loss"] == report.metrics["b/loss"]
    assert set(report.baselines) == {"gzip -9"}


def test_another_model_is_read_and_left_as_it_is(root: Path) -> None:
    other = root / "other"
    recipe = with_model(root, other, evaluate__model=str(other))
    before = sorted(path.name for path in other.iterdir())
    outcome = evaluate(recipe)
    assert sorted(path.name for path in other.iterdir()) == before
    assert set(outcome.files) == {"reports/evaluate.json", "reports/examples/loss.parquet"}
    assert report_of(recipe).model_hash == model_hash(other)


def test_without_a_trained_model_the_source_is_evaluated(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = root / "base"
    recipe = with_model(root, base, model__source=str(base), model__config="{}")
    evaluate(recipe)
    assert report_of(recipe).model_hash == model_hash(base)
    assert str(base) in capfd.readouterr().err


def refused(recipe: Recipe, kind: type[IngotError] = WrongInput) -> str:
    with pytest.raises(kind) as error:
        evaluate(recipe)
    assert not (recipe.folder.reports / "evaluate.json").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_model_yet(root: Path) -> None:
    assert "run `ingot train` first" in refused(small_recipe(root))
    base = root / "base"
    recipe = with_model(
        root, base, model__source=str(base), model__init="random", model__config="{}"
    )
    assert "run `ingot train` first" in refused(recipe)


def test_no_prepared_data(root: Path) -> None:
    recipe = with_model(root)
    shutil.rmtree(recipe.folder.columns)
    assert "run `ingot prepare`" in refused(recipe)


def test_without_tasks_the_loss_is_measured(root: Path) -> None:
    recipe = with_model(root, evaluate__tasks="[]")
    evaluate(recipe)
    assert set(report_of(recipe).metrics) == {"loss/loss", "loss/perplexity", "loss/bits_per_byte"}


def test_a_model_with_another_tokenizer(root: Path) -> None:
    recipe = with_model(root)
    file = recipe.folder.model / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:-1]
    file.write_text(json.dumps(content), encoding="utf-8")
    message = refused(recipe)
    assert str(recipe.folder.model) in message
    assert "was prepared with" in message


def test_a_model_without_a_tokenizer(root: Path) -> None:
    recipe = with_model(root)
    for file in recipe.folder.model.glob("tokenizer*"):
        file.unlink()
    assert str(recipe.folder.model) in refused(recipe)


def test_a_model_that_is_not_whole_is_not_taken_for_none(root: Path) -> None:
    """Its base would be measured in its place, and told of as this run's own."""
    recipe = with_model(root)
    base = shutil.copytree(recipe.folder.model, root / "base")
    (recipe.folder.model / "config.json").unlink()
    tuned = small_recipe(root, model__source=str(base), model__config=None)
    assert "model is not as it was exported (config.json is missing)" in refused(tuned)
    assert "model.source" not in step_named("evaluate").knobs(tuned)
    shutil.rmtree(recipe.folder.model)
    assert model_folder(tuned) == base


def test_a_model_with_fewer_positions_or_embeddings(root: Path) -> None:
    recipe = with_model(root, data__seq_len=160)
    assert "data.seq_len 160 exceeds the 128 positions" in refused(recipe)
    shutil.rmtree(recipe.folder.model)
    recipe = small_recipe(root)
    place_model(recipe, recipe.folder.model)
    config = recipe.folder.model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 300}))
    weights = load_file(recipe.folder.model / "model.safetensors")
    cut = {
        name: (
            tensor[:300].clone()
            if name in ("lm_head.weight", "model.embed_tokens.weight")
            else tensor
        )
        for name, tensor in weights.items()
    }
    save_file(cut, recipe.folder.model / "model.safetensors")
    assert "its model only 300" in refused(recipe)


def test_numbers_that_are_not_finite(root: Path) -> None:
    recipe = with_model(root)
    file = recipe.folder.model / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, file)
    assert "not finite" in refused(recipe, Failed)
    assert not (recipe.folder.model / "evaluate.json").exists()


def test_raw_documents_that_changed_since(root: Path) -> None:
    recipe = with_model(root, evaluate__tasks="[{kind: loss, baselines: [gzip]}]")
    shutil.rmtree(recipe.folder.raw)
    assert "run `ingot ingest`" in refused(recipe)


def test_a_prompt_without_room_for_an_answer(root: Path) -> None:
    message = refused(with_model(root, evaluate__prompts=f"[{'ingot melts ' * 200}]"))
    assert message.startswith("evaluate.prompts, 'ingot melts ")
    assert "128 positions" in message


def test_a_model_is_measured_on_items_of_its_own_without_any_documents(root: Path) -> None:
    model = with_model(root).folder.model
    items = write_lines(root / "items.jsonl", hellaswag_lines(4))
    tasks = [{"kind": "hellaswag", "source": str(items)}]
    values = {"name": "apart", "output": str(root / "other")}
    given = {**values, "evaluate": {"model": str(model), "tasks": tasks}}
    evaluate(Recipe.model_validate(given))
    report = report_of(Recipe.model_validate(given))
    assert set(report.metrics) == {"hellaswag/accuracy", "hellaswag/accuracy_norm"}
    with pytest.raises(WrongInput, match=r"^evaluate\.tasks is empty, and the loss needs held-out"):
        evaluate(Recipe.model_validate({**values, "evaluate": {"model": str(model)}}))
