"""LLaMA-Factory and axolotl: what is trained there is what the recipe says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.data import ValidationShare
from tests.config.adopt.stand_ins import AXOLOTL, LLAMAFACTORY, recipe_of

INFO = {
    "elms": {
        "file_name": "elms.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "chosen": "better", "rejected": "worse", "tools": "functions"},
        "tags": {"role_tag": "role", "content_tag": "content"},
    },
    "other": {"hf_hub_url": "org/pairs", "ranking": True, "columns": {"prompt": "question"}},
}


def test_a_llamafactory_yaml_with_its_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    recipe, notes = recipe_of(tmp_path, elm_yaml=LLAMAFACTORY)
    assert (recipe.name, recipe.model.source) == ("lora-dpo", "hf:org/elm-1b-instruct")
    lora = recipe.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets) == (16, 32.0, ["q_proj", "v_proj"])
    chosen = recipe.objective.model_dump()
    assert (chosen["kind"], chosen["beta"], chosen["margin"]) == ("simpo", 0.2, 0.5)
    elms, other = recipe.data.train
    assert (elms.source, elms.layout) == ("data/elms.json", "sharegpt")
    assert elms.columns == {
        "conversations": "talk",
        "chosen": "better",
        "rejected": "worse",
        "tools": "functions",
        "from": "role",
        "value": "content",
    }
    assert (other.source, other.layout) == ("hf:org/pairs", "alpaca")
    assert other.columns == {"instruction": "question"}
    train = recipe.train
    assert (train.micro_batch, train.global_batch, train.epochs) == (2, 16, 2.5)
    assert (train.optimizer.lr, train.schedule.kind, train.schedule.warmup) == (5e-6, "cosine", 0.1)
    assert (train.schedule.min_ratio, train.clip_norm) == (0.0, 1.0)
    assert (recipe.data.seq_len, recipe.data.validation) == (1024, ValidationShare(fraction=0.1))
    assert (recipe.parallel.shard, recipe.memory.recompute.kind) == ("auto", "full")
    assert (recipe.checkpoint.every, recipe.track.every, recipe.seed) == (50, 5, 42)
    assert recipe.tokenizer.template is None
    assert "qwen: the model's own chat template is taken" in notes
    assert "unheard_of: is not known" in notes


def test_a_llamafactory_yaml_alone_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = LLAMAFACTORY.replace("stage: dpo", "stage: sft").replace(
        "template: qwen", "template: llama3"
    )
    recipe, notes = recipe_of(tmp_path, elm_yaml=text)
    assert recipe.objective.kind == "sft"
    assert (recipe.data.pack, recipe.tokenizer.template) == ("none", "llama3")
    assert [each.source for each in recipe.data.train] == ["data/elms.json", "data/other.json"]
    assert "data/dataset_info.json is not there to say what elms, other are" in notes
    with pytest.raises(WrongInput, match=r"elm.yaml:5: stage ppo is not offered"):
        recipe_of(tmp_path, elm_yaml=LLAMAFACTORY.replace("stage: dpo", "stage: ppo"))


def test_an_axolotl_yaml(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, ash_yaml=AXOLOTL)
    assert (recipe.name, recipe.model.source) == ("outputs-ash", "hf:org/ash-1b")
    lora, quantize = recipe.model.lora, recipe.model.quantize
    assert lora is not None
    assert quantize is not None
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (32, 16.0, 0.05, "all-linear")
    assert quantize.kind == "nf4"
    answers, mine = recipe.data.train
    assert (answers.source, answers.layout, answers.split) == ("hf:org/answers", "alpaca", "train")
    assert (mine.source, mine.columns) == ("data/mine.jsonl", {"instruction": "question"})
    assert (recipe.objective.kind, recipe.tokenizer.template) == ("sft", "alpaca")
    assert (recipe.data.pack, recipe.data.seq_len) == ("best_fit", 2048)
    train = recipe.train
    assert (train.micro_batch, train.global_batch, train.epochs) == (2, 8, 3)
    assert (train.schedule.kind, train.schedule.warmup) == ("constant", 10)
    assert (train.evaluate_every, recipe.parallel.shard) == ("epoch", "auto")
    assert recipe.track.wandb is not None
    assert recipe.track.wandb.project == "trees"
    assert "saves_per_epoch: 4 an epoch; set checkpoint.every" in notes
    assert "paged_adamw_8bit: its state is float32 here" in notes
    assert "secret" not in notes, "a padding token is none"


def test_preferences_and_texts_of_axolotl(tmp_path: Path) -> None:
    text = AXOLOTL.replace("alpaca", "chat_template.default")
    recipe, _ = recipe_of(tmp_path, ash_yaml=f"{text}rl: dpo\nrl_beta: 0.3\n")
    chosen = recipe.objective.model_dump()
    assert (chosen["kind"], chosen["beta"], recipe.data.train[0].layout) == ("dpo", 0.3, "auto")
    assert recipe.tokenizer.template is None
    text = AXOLOTL.replace("type: alpaca", "type: completion")
    recipe, _ = recipe_of(tmp_path, ash_yaml=text)
    assert recipe.objective.kind == "pretrain"
    with pytest.raises(WrongInput, match="lists no `datasets`"):
        recipe_of(tmp_path, ash_yaml="base_model: a/b\nsequence_len: 8\nlora_r: 4\n")
