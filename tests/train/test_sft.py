"""Supervised fine-tuning from chats to a model that is measured and served, and the template that
travels with it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.reports import read_report
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.evaluate import evaluate
from ingot.serve.native.model import load
from ingot.serve.predict import predict
from ingot.tokenizers.load import PREPARED, load_tokenizer
from ingot.train.trainer import train
from tests.small import small_recipe


def recipe_of(root: Path, **knobs: Any) -> Recipe:
    given = {
        "objective__kind": "sft",
        "data__train": [{"source": str(root / "chats.jsonl")}],
        "tokenizer__template": "chatml",
        "tokenizer__vocab_size": 400,
        "data__seq_len": 64,
        "data__validation__fraction": 0.2,
        **knobs,
    }
    return small_recipe(root, **given)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on chats, up to the exported model."""
    root = tmp_path_factory.mktemp("sft")
    with (root / "chats.jsonl").open("w") as stream:
        for number in range(80):
            asked = {"role": "user", "content": f"How hot is furnace {number}?"}
            stream.write(
                json.dumps(
                    {
                        "messages": [
                            asked,
                            {"role": "assistant", "content": "As hot as copper needs."},
                        ]
                    }
                )
                + "\n"
            )
    recipe = recipe_of(root)
    ingest(recipe)
    prepare(recipe)
    train(recipe)
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_text_that_fills_rows_in_part_is_told_beside_the_tokens_asked_for(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(root)
    rows = open_rows(recipe.folder.columns, "train", 64, pack="best_fit", pad_last=False)
    asked = 4 * 64 * len(rows)  # four whole passes
    train(recipe_of(root, train__steps="null", train__tokens=asked), fresh=True)
    said = (
        r"warning: train\.tokens (\S+) counts places of rows, which hold about (\S+) tokens of text"
    )
    told = re.search(
        said + r" in these (\S+) steps; for so many of text set it to (\S+)\n",
        capsys.readouterr().err,
    )
    assert told is not None
    of_tokens, text, steps, instead = (int(number.replace(",", "")) for number in told.groups())
    each = [line["train/tokens_per_step"] for line in read_lines(recipe.folder.metrics)]
    assert (of_tokens, steps, text) == (asked, len(each), sum(each))
    assert instead * text / asked == pytest.approx(asked, abs=1)


def test_the_report_counts_what_the_assistant_says(root: Path) -> None:
    recipe = recipe_of(root)
    evaluate(recipe)
    report = read_report(recipe.folder.reports / "evaluate.json")
    rows = open_rows(recipe.folder.columns, "validation", 64, pack="best_fit", pad_last=True)
    chats = sum(int(rows.row(index).segments.max()) for index in range(len(rows)))
    targets = sum(int((rows.row(index).labels != IGNORE).sum()) for index in range(len(rows)))
    loss, bits = report.metrics["loss/loss"], report.metrics["loss/bits_per_byte"]
    assert loss.n == bits.n == chats
    said = len(b"As hot as copper needs.")
    assert bits.value == pytest.approx(
        loss.value * targets / 0.6931471805599453 / (said * chats), rel=1e-6
    )


def test_the_model_knows_its_template_and_where_to_stop(root: Path) -> None:
    recipe = recipe_of(root)
    tokenizer = load_tokenizer(recipe.folder.model)
    lineage = json.loads((recipe.folder.model / "ingot.json").read_text())
    assert lineage["objective"] == "sft"
    assert lineage["template"] == tokenizer.template_identity is not None
    assert lineage["tokenizer"] == tokenizer.identity()
    generation = json.loads((recipe.folder.model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.token_id("<|im_end|>")
    assert load(recipe.folder.model).eos == {tokenizer.token_id("<|im_end|>")}


def test_another_template_is_refused_unless_told(root: Path) -> None:
    recipe = recipe_of(root)
    template = recipe.folder.model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> "))
    with pytest.raises(
        WrongInput,
        match=r"is not the one that the model was trained with .* set evaluate\.any_template=true",
    ):
        evaluate(recipe)
    evaluate(recipe_of(root, evaluate__any_template=True))
    with pytest.raises(WrongInput, match=r"set serve\.any_template=true"):
        load(recipe.folder.model)
    with pytest.raises(WrongInput, match="chat template"):
        predict(recipe.folder.model, "How hot?", chat=True)
    assert load(recipe.folder.model, any_template=True).tokenizer.template == template.read_text()
    assert isinstance(predict(recipe.folder.model, "How hot?", max_tokens=2), str), (
        "a plain prompt needs no template"
    )


def test_data_prepared_with_another_template_are_refused(root: Path) -> None:
    recipe = recipe_of(root, tokenizer__template="alpaca", data__seq_len=160)
    ingest(recipe)
    prepare(recipe)
    with pytest.raises(WrongInput, match=r"is not the one that .* was prepared with"):
        evaluate(recipe)


def test_a_finished_training_is_done_again_with_another_template(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(root, tokenizer__template="alpaca", data__seq_len=160)
    ingest(recipe)
    prepare(recipe)
    train(recipe)
    assert "the recipe changed since the last training" in capfd.readouterr().err


def test_baselines_mean_nothing_for_chats(root: Path) -> None:
    with pytest.raises(WrongInput, match=r"baselines gzip are for objective\.kind pretrain"):
        evaluate(recipe_of(root, evaluate__tasks="[{kind: loss, baselines: [gzip]}]"))


def test_columns_of_another_template_are_not_trained_on(root: Path) -> None:
    recipe = recipe_of(root)
    template = recipe.folder.tokenizer / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> "))
    with pytest.raises(
        WrongInput, match=r"template\.jinja has .* were written; run `ingot prepare --again`"
    ):
        train(recipe)
    (recipe.folder.tokenizer / PREPARED).unlink()
    with pytest.raises(
        WrongInput,
        match=(
            r"was prepared with another tokenizer than .* holds now: other chat template; run"
            r" `ingot prepare --again`"
        ),
    ):
        train(recipe)
