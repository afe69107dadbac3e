"""`evaluate` over several tasks: what it writes of every item, the base model beside, and what is
refused before anything is measured.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.base.reports import task_of
from ingot.cli.console import show_report
from ingot.config.models.rotary import overridden
from ingot.config.models.source import model_config
from ingot.config.recipe import Recipe
from ingot.config.sections.lora import Lora
from ingot.data.cleaning.documents import read_documents
from ingot.evaluate.evaluate import evaluate
from ingot.models.adapters.lora import add_lora, init_adapter
from ingot.models.adapters.peft import save_adapter
from ingot.models.hf.tensor_names import LORA_LEAVES
from ingot.models.kinds import open_model
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.evaluate.small_models import hellaswag_lines, place_model, with_model, write_lines
from tests.evaluate.small_runs import LABELS, prepared, recipe_of
from tests.evaluate.test_evaluate import refused, report_of, run_evaluate
from tests.ranks import run_ranks


def test_examples_are_the_documents_in_their_order(root: Path) -> None:
    recipe = with_model(root)
    evaluate(recipe)
    table = pq.read_table(recipe.folder.reports / "examples" / "loss.parquet")
    assert table.column_names == ["document", "nats", "targets", "bytes"]
    assert table.column("document").to_pylist() == list(range(table.num_rows))
    assert table.column("bytes").to_pylist() == [
        len(document.text.encode()) for document in read_documents(recipe, "validation")
    ]
    loss = report_of(recipe).metrics["loss/loss"]
    nats, targets = (np.array(table.column(name).to_pylist()) for name in ("nats", "targets"))
    assert nats.sum() / targets.sum() == pytest.approx(loss.value, rel=tolerances.EXACT)


PROMPTED = {"evaluate__prompts": "[the ingot, copper]", "evaluate__sample_tokens": 6}


def test_the_base_stands_beside_and_in_the_examples(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = root / "base"
    recipe = with_model(
        root,
        model__source=str(base),
        model__config="{}",
        evaluate__base="true",
        evaluate__tasks="[{kind: loss, name: held}]",
        **PROMPTED,
    )
    place_model(recipe, base, seed=1)
    evaluate(recipe)
    report = report_of(recipe)
    assert report.base.keys() == report.metrics.keys()
    key = "held/bits_per_byte"
    assert report.base[key].set_fingerprint == report.metrics[key].set_fingerprint
    assert abs(report.base[key].value - report.metrics[key].value) > 0.01
    show_report(recipe.folder)
    out, _ = capfd.readouterr()
    assert f"{report.base[key].value:.4f}" in out
    beside = pq.read_table(recipe.folder.reports / "examples" / "held.parquet")
    assert beside.column_names == ["document", "nats", "targets", "bytes", "base_nats"]
    assert [sample["prompt"] for sample in report.samples] == ["the ingot", "copper"]
    assert "before training" in out
    alone = with_model(
        root, model__source=str(base), model__config="{}", evaluate__model=str(base), **PROMPTED
    )
    evaluate(alone)
    before, own = ([one[part] for one in report.samples] for part in ("base", "completion"))
    assert before == [sample["completion"] for sample in report_of(alone).samples] != own
    assert not any("base" in sample for sample in report_of(alone).samples)
    direct = pq.read_table(alone.folder.reports / "examples" / "loss.parquet")
    assert beside.column("base_nats") == direct.column("nats")
    assert report_of(alone).metrics["loss/loss"].value == report.base["held/loss"].value


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({}, "random weights"),
        ({"model__init": "random"}, "random weights"),
        ({"evaluate__model": "base"}, "it is the model that is evaluated"),
        ({"train__start_from": "runs/other"}, "the weights of runs/other (train.start_from)"),
    ],
)
def test_where_no_base_can_stand_beside_that_is_said(
    root: Path, knobs: dict[str, str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    base = root / "base"
    own = {"model__source": str(base), "model__config": "{}"} if knobs else {}
    own |= {name: str(base) if value == "base" else value for name, value in knobs.items()}
    recipe = with_model(root, evaluate__base="true", **own)
    place_model(recipe, base)
    evaluate(recipe)
    assert report_of(recipe).base == {}
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "no base model" in line]
    assert why in told


def test_the_base_has_the_recipes_configuration_and_the_adapter_that_training_went_on_from(
    root: Path, tmp_path: Path
) -> None:
    base, changed, adapter = root / "base", tmp_path / "changed", tmp_path / "adapter"
    source = {"model__source": str(base), "evaluate__base": "true"}
    recipe = with_model(root, **source, model__config="{rope_theta: 3.0}")
    place_model(recipe, base, seed=1)
    evaluate(recipe)
    shown = report_of(recipe).base["loss/loss"].value
    shutil.copytree(base, changed)
    values = overridden(model_config(base), {"rope_theta": 3.0})
    (changed / "config.json").write_text(json.dumps(values))
    plain, same = (
        report_of(evaluated).metrics["loss/loss"].value
        for evaluated in run_each(root, [base, changed])
    )
    assert shown == same != plain

    model = open_model(base, device=torch.device("cpu"))
    add_lora(model, Lora(rank=2), 0)
    init_adapter(model, 0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.rpartition(".")[2] in LORA_LEAVES:
                weight.normal_(std=0.5)
    save_adapter(model, adapter, base=str(base), kind="decoder")
    lora = {"model__lora": f"{{rank: 2, adapter: {adapter}}}", "model__config": "{}"}
    evaluate(with_model(root, **source, **lora))
    shown = report_of(recipe).base["loss/loss"].value
    (evaluated,) = run_each(root, [adapter])
    assert shown == report_of(evaluated).metrics["loss/loss"].value != plain


def run_each(root: Path, folders: list[Path]) -> Iterator[Recipe]:
    """Evaluate each folder in turn, in the same run folder."""
    for folder in folders:
        recipe = with_model(root, evaluate__model=str(folder))
        evaluate(recipe)
        yield recipe


def test_several_kinds_of_tasks_at_once(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Dealt over two ranks, the report is that of one; of which files items are, one tells."""
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(5))
    (tmp_path / "pairs").mkdir()
    for name in ("dev", "test"):
        write_lines(
            tmp_path / "pairs" / f"{name}.jsonl",
            [{"source": f"the {name}\nmelts", "target": "copper melts"}],
        )
    tasks = (
        f"[{{kind: loss}}, {{kind: hellaswag, source: {items}}}, {{kind: rouge, source: {tmp_path}/pairs,"
        f" split: test, max_tokens: 4}}, {{kind: rouge, name: own, source: {tmp_path}/pairs,"
        " max_tokens: 4}]"
    )
    recipe = with_model(root, evaluate__tasks=tasks)
    outcome = evaluate(recipe)
    alone = report_of(recipe)
    assert [key.partition("/")[0] for key in alone.metrics] == ["loss"] * 3 + ["hellaswag"] * 2 + [
        "rouge"
    ] * 4 + ["own"] * 4
    assert "rouge/rouge1/first_line" in alone.baselines
    assert alone.bits_per_byte == {}
    assert outcome.result.startswith(
        f"{alone.metrics['loss/bits_per_byte'].value:.2f} bits per byte"
    )
    assert len([name for name in outcome.files if name.startswith("reports/examples/")]) == 4
    told = "named after split=validation and are read, the others are not"
    assert capfd.readouterr().err.count(told) == 1
    run_ranks(2, run_evaluate, recipe)
    assert capfd.readouterr().err.count(told) == 1
    together = report_of(recipe)
    assert together.metrics["hellaswag/accuracy_norm"] == alone.metrics["hellaswag/accuracy_norm"]
    assert together.metrics["rouge/rougeL"] == alone.metrics["rouge/rougeL"]


def test_tasks_whose_names_differ_in_a_slash_alone_keep_their_own_examples(
    root: Path, tmp_path: Path
) -> None:
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(3))
    names = ["sets/own", "sets_own", "sets%2Fown"]
    tasks = [f"{{kind: hellaswag, name: {name}, source: {items}}}" for name in names]
    recipe = with_model(root, evaluate__tasks=f"[{', '.join(tasks)}]")
    written = {name for name in evaluate(recipe).files if name.startswith("reports/examples/")}
    assert len(written) == 3
    assert sorted(task_of(Path(name).name) for name in written) == sorted(names)


def test_tasks_that_do_not_go_by_them_need_no_prepared_rows(root: Path, tmp_path: Path) -> None:
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(3))
    recipe = with_model(root, evaluate__tasks=f"[{{kind: hellaswag, source: {items}}}]")
    shutil.rmtree(recipe.folder.columns)
    assert evaluate(recipe).result.startswith("hellaswag/accuracy ")


def test_what_cannot_be_measured_is_refused_before_anything_is(root: Path, tmp_path: Path) -> None:
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(1))
    for task, words in (
        (f"{{kind: hellaswag, source: {tmp_path / 'none.jsonl'}}}", "no such file"),
        (f"{{kind: choice, source: {items}}}", "no column `question`"),
        ("{kind: classification}", "classification is for models of kind encoder"),
        ("{kind: rouge}", "text documents have no text to write"),
        (
            (
                f"{{kind: rouge, source: {items}, columns: {{source: ctx_a, target: ctx_b}},"
                " beams: 2}"
            ),
            "set it to 1",
        ),
    ):
        assert words in refused(with_model(root, evaluate__tasks=f"[{{kind: loss}}, {task}]"))


def test_an_adapter_is_measured_on_its_base(root: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base, adapter = root / "base", root / "adapter"
    recipe = with_model(root, base, evaluate__model=str(adapter))
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(0)
    tuned = get_peft_model(
        model,
        LoraConfig(
            r=4,
            target_modules=["q_proj", "down_proj"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        ),
    )
    tuned.save_pretrained(adapter)
    evaluate(recipe)
    found = report_of(recipe)
    merged = root / "merged"
    tuned.merge_and_unload().save_pretrained(merged)
    load_tokenizer(base).save(merged)
    evaluate(with_model(root, base, evaluate__model=str(merged)))
    expected, alone = report_of(recipe), "loss/loss"
    assert found.metrics[alone].value == pytest.approx(
        expected.metrics[alone].value, rel=tolerances.NLL_FP32
    )
    evaluate(with_model(root, base, evaluate__model=str(base)))
    assert abs(report_of(recipe).metrics[alone].value - found.metrics[alone].value) > 0.01
    assert len({found.model_hash, expected.model_hash, report_of(recipe).model_hash}) == 3


def test_a_classifier_of_other_classes_is_refused_and_is_no_base(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the same classes in another order every number would be wrong, and look right."""
    recipe = prepared(tmp_path / "root", "labelled")
    assert evaluate(recipe).result.endswith(
        f"classification/accuracy {report_of(recipe).metrics['classification/accuracy'].value:.4f}"
    )
    base = tmp_path / "base"
    shutil.copytree(recipe.folder.model, base)
    named = json.loads((base / "config.json").read_text())
    for names, words in (
        (LABELS[::-1], "tells good, fair, bad apart, objective.labels are bad, fair, good"),
        ([*LABELS, "best"], "best apart"),
    ):
        changed = {
            **named,
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
        }
        (base / "config.json").write_text(json.dumps(changed))
        with pytest.raises(WrongInput, match=words):
            evaluate(recipe_of(tmp_path / "root", "labelled", evaluate__model=str(base)))
        evaluate(
            recipe_of(
                tmp_path / "root",
                "labelled",
                model__source=str(base),
                model__config="{}",
                evaluate__base="true",
            )
        )
        assert words in capfd.readouterr().err
        assert report_of(recipe).base == {}
    (base / "config.json").write_text(
        json.dumps({**named, "id2label": {str(number): f"LABEL_{number}" for number in range(3)}})
    )
    evaluate(
        recipe_of(
            tmp_path / "root",
            "labelled",
            model__source=str(base),
            model__config="{}",
            evaluate__base="true",
        )
    )
    assert (
        report_of(recipe).base["classification/f1"].value
        == report_of(recipe).metrics["classification/f1"].value
    )


def test_a_head_for_several_classes_at_once_is_in_nobodys_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where another head is what is measured: that of the run's own model, or of an adapter."""
    root, base, adapter = tmp_path / "root", tmp_path / "base", tmp_path / "adapter"
    recipe = prepared(root, "labelled")
    shutil.copytree(recipe.folder.model, base)
    (base / "ingot.json").unlink(missing_ok=True)
    model = open_model(base, device=torch.device("cpu"))
    add_lora(model, Lora(rank=2), 0)
    init_adapter(model, 0)
    save_adapter(model, adapter, base=str(base), kind="encoder")
    values = json.loads((base / "config.json").read_text())
    values["problem_type"] = "multi_label_classification"
    (base / "config.json").write_text(json.dumps(values))
    source = {"model__source": str(base), "model__config": "{}", "evaluate__base": "true"}
    for knobs in (source, {"evaluate__model": str(adapter)}):
        evaluate(recipe_of(root, "labelled", **knobs))
        assert report_of(recipe).base == {}
    told = capfd.readouterr().err
    assert "no base model beside: " in told
    assert "with 3 outputs is not supported" in told
    with pytest.raises(WrongInput, match="with 3 outputs is not supported"):
        evaluate(recipe_of(root, "labelled", evaluate__model=str(base)))
