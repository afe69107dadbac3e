"""LLaMA-Factory and axolotl: what is trained there is what the recipe says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.data import ValidationShare
from tests.adopt.stand_ins import AXOLOTL, LLAMAFACTORY, TRL, recipe_of

INFO = {
    "elms": {
        "file_name": "elms.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {
            "messages": "talk",
            "chosen": "better",
            "rejected": "worse",
            "tools": "functions",
        },
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


@pytest.mark.parametrize("when", ["evals_per_epoch: 4\n", "eval_steps: 0.2\n", ""])
def test_early_stopping_of_axolotl_waits_for_when_to_evaluate(tmp_path: Path, when: str) -> None:
    text = AXOLOTL.replace("evals_per_epoch: 1\n", when) + "early_stopping_patience: 3\n"
    recipe, notes = recipe_of(tmp_path, ash_yaml=text)
    assert (recipe.train.evaluate_every, recipe.train.early_stop) == (None, None)
    assert (
        "early_stopping_patience: set train.early_stop.patience=3 together with"
        " train.evaluate_every" in notes
    )


@pytest.mark.parametrize(
    ("when", "every"), [("evals_per_epoch: 1\n", "epoch"), ("eval_steps: 50\n", 50)]
)
def test_early_stopping_of_axolotl(tmp_path: Path, when: str, every: str | int) -> None:
    text = AXOLOTL.replace("evals_per_epoch: 1\n", when)
    recipe, _ = recipe_of(tmp_path, ash_yaml=f"{text}early_stopping_patience: 3\n")
    assert recipe.train.early_stop is not None
    assert (recipe.train.evaluate_every, recipe.train.early_stop.patience) == (every, 3)
    recipe, _ = recipe_of(tmp_path, ash_yaml=f"{text}early_stopping_patience: 0\n")
    assert recipe.train.early_stop is None


@pytest.mark.parametrize(
    ("more", "truncate"),
    [
        ("", "drop"),
        ("excess_length_strategy: drop\n", "drop"),
        ("excess_length_strategy: truncate\n", "right"),
        ("excess_length_strategy: raise\n", "drop"),
        ("rl: dpo\n", "drop"),
    ],
)
def test_long_rows_of_axolotl_are_left_out_unless_it_cuts_them(
    tmp_path: Path, more: str, truncate: str
) -> None:
    recipe, notes = recipe_of(tmp_path, ash_yaml=AXOLOTL + more)
    assert recipe.data.truncate == truncate
    assert ("excess_length_strategy: raise: rows that are too long" in notes) == ("raise" in more)
    assert "excess_length_strategy: is not known" not in notes


def test_texts_and_prompts_of_axolotl_are_never_left_out(tmp_path: Path) -> None:
    text = AXOLOTL.replace("type: alpaca", "type: completion")
    assert recipe_of(tmp_path, ash_yaml=text)[0].data.truncate == "right"
    assert recipe_of(tmp_path, ash_yaml=GRPO)[0].data.truncate == "right"
    with pytest.raises(WrongInput, match=r"is 'cut'; it should be one of drop, truncate, raise"):
        recipe_of(tmp_path, ash_yaml=f"{AXOLOTL}excess_length_strategy: cut\n")


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


GRPO = """\
base_model: org/ash-1b
rl: grpo
trl:
  num_generations: 6
  max_completion_length: 300
  beta: 0.04
  temperature: 0.9
  epsilon_high: 0.28
  num_iterations: 2
  top_p: 0.95
  scale_rewards: false
  loss_type: dr_grpo
  mask_truncated_completions: true
  reward_funcs: [my_rewards.correct, think_format_reward]
  reward_weights: [2.0, 1.0]
datasets:
  - path: org/sums
    type: my_rewards.transform
sequence_len: 1024
micro_batch_size: 4
gradient_accumulation_steps: 2
adapter: lora
lora_dropout: 0.05
output_dir: ./outputs/sums
"""


def test_rewards_and_groups_of_axolotl(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, ash_yaml=GRPO)
    found = recipe.objective.model_dump()
    assert {
        key: found[key] for key in ("kind", "group", "max_answer_tokens", "kl", "clip_high")
    } == {
        "kind": "grpo",
        "group": 6,
        "max_answer_tokens": 300,
        "kl": 0.04,
        "clip_high": 0.28,
    }
    assert (found["temperature"], found["updates"], found["scale"]) == (0.9, 2, "none")
    assert (found["normalise"], found["overlong"], found["kl_estimator"]) == ("fixed", "mask", "k3")
    mine, thinks = found["rewards"]
    assert (mine["kind"], mine["function"], mine["weight"]) == ("python", "my_rewards:correct", 2.0)
    assert thinks["kind"] == "regex"
    assert re.search(thinks["pattern"], "<think>\nwhy\n</think>\nso", re.DOTALL)
    assert not re.search(thinks["pattern"], "so <think>why</think>", re.DOTALL)
    assert recipe.train.global_batch == 12, "answers: 8 are not whole groups of 6"
    assert recipe.model.lora is not None
    assert recipe.model.lora.dropout == 0
    for line in (
        "my_rewards.correct: took lists and gave a list",
        "train.global_batch is 12 (8 is not whole groups of 6)",
        "lora_dropout: 0 here",
        "trl.top_p: answers are drawn from the whole distribution",
        "my_rewards.transform of org/sums: say by layout and columns",
    ):
        assert line in notes
    with pytest.raises(WrongInput, match=r"names no trl\.reward_funcs"):
        recipe_of(tmp_path, ash_yaml=GRPO.replace("reward_funcs", "reward_fns"))
    with pytest.raises(
        WrongInput, match=r"ash.yaml:2: rl ppo is not offered.*grpo is in the place"
    ):
        recipe_of(tmp_path, ash_yaml=GRPO.replace("rl: grpo", "rl: ppo"))


@pytest.mark.parametrize(
    ("data", "layout", "columns", "note"),
    [
        ("type: chat_template\n    field_messages: talk", "auto", {"messages": "talk"}, ""),
        (
            "type: sharegpt\n    field_messages: talk\n    message_property_mappings:\n"
            "      role: who\n      content: text",
            "sharegpt",
            {"conversations": "talk", "from": "who", "value": "text"},
            "",
        ),
        (
            "type: alpaca_chat.load_qa",
            "alpaca",
            {"instruction": "question", "output": "answer"},
            "alpaca_chat.load_qa: what it writes around instruction and answer",
        ),
        (
            "type: oasst",
            "alpaca",
            {"instruction": "INSTRUCTION", "output": "RESPONSE"},
            "oasst: what it writes around instruction and answer",
        ),
        (
            "type:\n      field_instruction: ask\n      field_output: say\n      format: '[I] {input}'",
            "alpaca",
            {"instruction": "ask", "output": "say"},
            "datasets[].type.format: how a row is written is the chat template's here",
        ),
        ("type: input_output", "auto", {}, "input_output: rows of pieces with labels of their own"),
        ("type: context_qa", "auto", {}, "context_qa of org/rows: say by layout and columns"),
        (
            "type: chat_template\n    roles_to_train: [user]",
            "auto",
            {},
            "datasets[].roles_to_train: what the assistant says is trained",
        ),
        ("type: chat_template\n    roles_to_train: [assistant]", "auto", {}, ""),
    ],
)
def test_types_of_data_sets_of_axolotl(
    tmp_path: Path, data: str, layout: str, columns: dict[str, str], note: str
) -> None:
    text = f"base_model: org/ash-1b\nsequence_len: 64\ndatasets:\n  - path: org/rows\n    {data}\n"
    recipe, notes = recipe_of(tmp_path, ash_yaml=text)
    (source,) = recipe.data.train
    assert (source.layout, source.columns) == (layout, columns)
    assert note in notes
    assert bool(note) == ("datasets[]" in notes)


def test_preferences_and_several_files_of_axolotl(tmp_path: Path) -> None:
    text = (
        "base_model: org/ash-1b\nsequence_len: 64\nrl: dpo\ndatasets:\n  - path: org/pairs\n"
        "    type: chatml.intel\n  - path: json\n    ds_type: json\n    type:\n"
        "      field_prompt: ask\n      field_chosen: good\n      field_rejected: bad\n"
        "    data_files: [a.jsonl, b.jsonl]\n"
    )
    recipe, _ = recipe_of(tmp_path, ash_yaml=text)
    renamed = {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    assert [(one.source, one.columns) for one in recipe.data.train] == [
        ("hf:org/pairs", {"prompt": "question"}),
        ("a.jsonl", renamed),
        ("b.jsonl", renamed),
    ]


def test_a_yaml_of_trl(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, fir_yaml=TRL)
    (source,) = recipe.data.train
    assert (source.source, source.split) == ("hf:org/sums:main", "train")
    assert source.columns == {"prompt": "question"}
    found = recipe.objective.model_dump()
    assert (found["kind"], found["group"], found["kl"], found["scale"]) == (
        "grpo",
        4,
        0.01,
        "deviation",
    )
    assert [one["kind"] for one in found["rewards"]] == ["numeric", "python"]
    assert found["rewards"][1]["function"] == "my.rewards:tidy"
    assert (found["max_answer_tokens"], recipe.data.seq_len) == (300, 500)
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.alpha, recipe.model.lora.dropout) == (
        32,
        64,
        0,
    )
    assert (recipe.train.global_batch, recipe.train.optimizer.lr) == (8, 2e-6)
    for line in (
        "use_vllm: ingot's own decoder samples",
        "system_prompt: no system prompt is added",
    ):
        assert line in notes
    assert "Unknown keys" not in notes


@pytest.mark.parametrize(
    ("more", "dropout"),
    [
        ("", 0.05),
        ("lora_dropout: 0\n", 0.0),
        ("lora_dropout: 0.1\n", 0.1),
        ("num_generations: 4\nreward_funcs: [judge.right]\n", 0.0),
    ],
    ids=["its default", "none", "given", "of rewards"],
)
def test_the_dropout_that_trl_has_unless_given_is_carried(
    tmp_path: Path, more: str, dropout: float
) -> None:
    text = "model_name_or_path: org/fir-1b\ndataset_name: org/rows\nuse_peft: true\n"
    recipe, _ = recipe_of(tmp_path, fir_yaml=text + more)
    assert recipe.model.lora is not None
    assert recipe.model.lora.dropout == dropout


def test_a_list_of_one_loss_is_that_loss_and_of_several_none_is_chosen(tmp_path: Path) -> None:
    text = "model_name_or_path: org/fir-1b\ndataset_name: org/rows\nloss_type: "
    assert recipe_of(tmp_path, fir_yaml=f"{text}[ipo]\n")[0].objective.kind == "ipo"
    with pytest.raises(
        WrongInput, match=r"fir\.yaml:3: loss_type .*one of sigmoid, bco_pair, since"
    ):
        recipe_of(tmp_path, fir_yaml=f"{text}[sigmoid, bco_pair]\n")


def test_a_limit_of_prompts_alone_that_is_not_carried_is_told(tmp_path: Path) -> None:
    text = "model_name_or_path: org/fir-1b\ndataset_name: org/rows\nbeta: 0.1\nmax_length: 64\n"
    told = "max_prompt_length: data.seq_len is of prompt and answer together"
    assert told in recipe_of(tmp_path, fir_yaml=f"{text}max_prompt_length: 16\n")[1]
    assert told not in recipe_of(tmp_path, fir_yaml=text)[1]
    assert told not in recipe_of(tmp_path, fir_yaml=TRL)[1], "of rewards, it is part of the row"
    both, remarks = recipe_of(tmp_path, fir_yaml=f"{text}max_completion_length: 16\n")
    assert (both.objective.kind, both.data.seq_len) == ("dpo", 64)
    assert "max_completion_length: data.seq_len is of prompt and answer together" in remarks
    alone = text.replace("max_length: 64", "max_completion_length: 64\nloss_type: sigmoid")
    assert recipe_of(tmp_path, fir_yaml=alone)[0].objective.kind == "dpo"


@pytest.mark.parametrize(
    ("more", "kind", "rate"),
    [
        ("packing: true\n", "sft", 2e-5),
        ("beta: 0.2\n", "dpo", 1e-6),
        ("loss_type: ipo\nlearning_rate: 0.5\n", "ipo", 0.5),
        ("desirable_weight: 1.5\n", "kto", 1e-6),
        ("center_rewards_coefficient: 0.01\n", "reward", 1e-4),
    ],
)
def test_the_command_of_trl_is_told_by_its_keys(
    tmp_path: Path, more: str, kind: str, rate: float
) -> None:
    text = "model_name_or_path: org/fir-1b\ndataset_name: org/rows\nmax_length: 64\n"
    recipe, notes = recipe_of(tmp_path, fir_yaml=text + more)
    assert (recipe.objective.kind, recipe.train.optimizer.lr, recipe.data.seq_len) == (
        kind,
        rate,
        64,
    )
    assert ("which of TRL's commands reads it" in notes) == (kind == "sft")
    with pytest.raises(WrongInput, match=r"fir.yaml:4: PPO with a value model is not offered"):
        recipe_of(tmp_path, fir_yaml=f"{text}vf_coef: 0.1\n")
