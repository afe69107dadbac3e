"""Llama with DDP: stages, batches in tokens, Meta's names and Meta's rule of the feed-forward
width.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ingot.adopt.llama_env import feed_forward
from ingot.adopt.llama_env_keys import LAYERS
from ingot.base.errors import WrongInput
from ingot.models.hf.tensor_names import LINEAR_FROM_META
from tests.adopt.stand_ins import LLAMA, recipe_of


def changed(**values: str) -> str:
    """The stand-in with other values; what is new is added."""
    text = LLAMA
    for key, value in values.items():
        text, count = re.subn(rf"(?m)^{key}=.*$", f"{key}={value}", text)
        text += "" if count else f"{key}={value}\n"
    return text


def test_pretraining(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, l_env=LLAMA)
    train = recipe.train
    assert (recipe.name, recipe.output, recipe.objective.kind) == (
        "alder-run",
        "./out/pretrain",
        "pretrain",
    )
    assert (recipe.data.train[0].source, recipe.data.seq_len) == ("hf:org/pages:sample-10BT", 1024)
    assert recipe.data.engine.kind == "local"
    assert recipe.data.engine.workers == 6
    assert (train.global_batch, train.micro_batch, train.steps) == (512, 8, 1200)
    assert (
        train.optimizer.lr,
        train.schedule.kind,
        train.schedule.min_ratio,
        train.schedule.warmup,
    ) == (6e-4, "cosine", 0.1, 100)
    assert train.early_stop is not None
    assert train.early_stop.patience == 4
    assert (
        train.evaluate_every,
        train.evaluate_rows,
        train.evaluate_tasks,
        train.sample_every,
    ) == (50, 80, ["hellaswag"], 100)
    hellaswag = recipe.tasks[1]
    assert hellaswag.kind == "hellaswag"
    assert (hellaswag.source, hellaswag.limit) == ("./hellaswag.jsonl", 500)
    assert (recipe.evaluate.prompts, recipe.evaluate.sample_tokens) == (
        ["Once upon a time", "The forest"],
        32,
    )
    assert recipe.track.wandb is not None
    assert recipe.track.wandb.project == "alder run"
    assert (recipe.tokenizer.source, recipe.model.lora) == ("hf:org/tokenizer", None)
    for told in (
        "524,288 / 1,024 = 512",
        "HF_INSTRUCT_DATASET: belongs to another stage",
        "HF_PRETRAIN_TARGET_PATH: prepared data lie in the run folder",
        "PRETRAIN_LOAD_CHECKPOINTS_PATH: its checkpoints have a format of their own",
        "TEST_INSTRUCT_GENERATION_PROMPTS: are the prompts of another",
    ):
        assert told in notes


def test_its_fixed_values_are_explicit(tmp_path: Path) -> None:
    recipe, _ = recipe_of(tmp_path, l_env=LLAMA)
    assert recipe.train.optimizer.kind == "adamw"
    assert recipe.train.optimizer.betas == (0.9, 0.95)
    assert (recipe.train.clip_norm, recipe.checkpoint.keep, recipe.checkpoint.best) == (
        1.0,
        2,
        "loss",
    )


def test_the_sizes_of_the_model(tmp_path: Path) -> None:
    recipe, _ = recipe_of(tmp_path, l_env=LLAMA)
    assert recipe.model.config == {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    }


@pytest.mark.parametrize(
    ("dim", "multiple_of", "multiplier", "width"),
    [
        (4096, 1024, 1.3, 14_336),  # Llama 3 8B
        (4096, 256, None, 11_008),  # Llama 2 7B
        (8192, 4096, 1.3, 28_672),  # Llama 3 70B
        (2048, 256, 1.5, 8192),  # Llama 3.2 1B
    ],
)
def test_the_width_of_metas_published_models(
    dim: int, multiple_of: int, multiplier: float | None, width: int
) -> None:
    assert feed_forward(dim, multiple_of, multiplier) == width


def test_metas_names_are_those_of_the_models_room() -> None:
    assert LAYERS == LINEAR_FROM_META


def test_instruction_tuning_with_lora(tmp_path: Path) -> None:
    text = changed(
        IS_INSTRUCT_TRAINING="true",
        LORA_ENABLED="true",
        LORA_TARGET_MODULES='["wq","wv","w2"]',
        MAX_STEPS="-1",
        HF_INSTRUCT_DATASET_SELECTOR_KEY="turns",
        HF_INSTRUCT_DATASET_SPLIT="train_sft",
    )
    recipe, notes = recipe_of(tmp_path, l_env=text)
    source = recipe.data.train[0]
    assert (source.source, source.split, source.layout, source.columns) == (
        "hf:org/chats",
        "train_sft",
        "messages",
        {"messages": "turns"},
    )
    assert recipe.objective.kind == "sft"
    assert recipe.train.epochs == 1
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.alpha, recipe.model.lora.dropout) == (
        32,
        8,
        0.05,
    )
    assert recipe.model.lora.targets == ["q_proj", "v_proj", "down_proj"]
    assert recipe.evaluate.prompts == ["Who are you?"]
    assert "model.source: the sizes alone are random weights" in notes
    assert "HF_PRETRAIN_DATASET: belongs to another stage" in notes
    assert "SELECTOR_KEY: belongs" not in notes


def test_preference_tuning(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path,
        l_env=changed(
            IS_DPO_TRAINING="1",
            IS_INSTRUCT_TRAINING="1",
            DPO_BETA="0.2",
            HF_DPO_DATASET="org/pairs",
        ),
    )
    assert recipe.objective.kind == "dpo"
    assert recipe.objective.beta == 0.2
    assert recipe.data.train[0].source == "hf:org/pairs"
    assert (
        "IS_DPO_TRAINING and IS_INSTRUCT_TRAINING: are all true; preference tuning (dpo) is taken"
        in notes
    )


def test_distillation(tmp_path: Path) -> None:
    text = changed(
        IS_MODEL_DISTILLATION="true",
        IS_INSTRUCT_TRAINING="true",
        DISTILLATION_TEMPERATURE="3",
        TEACHER_MODEL_CHECKPOINT="./teacher",
    )
    recipe, notes = recipe_of(tmp_path, l_env=text)
    assert recipe.objective.kind == "distill"
    assert (recipe.objective.temperature, recipe.objective.teacher, recipe.objective.documents) == (
        3.0,
        "./teacher",
        "chat",
    )
    assert "Contradictions" not in notes
    text = changed(IS_MODEL_DISTILLATION="true", TEACHER_MODEL_CHECKPOINT="./teacher")
    objective = recipe_of(tmp_path, l_env=text)[0].objective
    assert objective.kind == "distill"
    assert objective.documents == "text"


def test_a_teacher_of_the_hub_is_named_as_one(tmp_path: Path) -> None:
    text = changed(IS_MODEL_DISTILLATION="true", TEACHER_MODEL_CHECKPOINT="meta-llama/Llama-3.2-3B")
    recipe, notes = recipe_of(tmp_path, l_env=text)
    assert recipe.objective.teacher == "hf:meta-llama/Llama-3.2-3B"
    assert "objective.teacher:" not in notes, "there is nothing to say of it"


def test_a_batch_that_does_not_divide_is_rounded_and_told(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, l_env=changed(TOTAL_BATCH_SIZE="10000"))
    assert recipe.train.global_batch == 10
    assert "10,000 / 1,024 = 10, rounded: 10,240 tokens a step" in notes


def test_without_validation_there_is_no_early_stop_and_no_best(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, l_env=changed(VALIDATE_EVERY_X_STEPS="-1"))
    assert (recipe.train.early_stop, recipe.checkpoint.best, recipe.train.evaluate_tasks) == (
        None,
        None,
        [],
    )
    assert "need evaluations while training" in notes


@pytest.mark.parametrize(
    ("path", "hub", "source", "told"),
    [
        ("./tokenizer.model", "", "./tokenizer.model", ""),
        ("org/tok", "true", "hf:org/tok", ""),
        ("./tok.model", "false", "./tok.model", ""),
        ("./tok.model", "org/tok", "hf:org/tok", "both name a tokenizer"),
        ("", "", "hf:unsloth/Llama-3.2-1B", ""),
    ],
)
def test_which_tokenizer(path: str, hub: str, source: str, told: str, tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path, l_env=changed(TOKENIZER_CHECKPOINT_PATH=path, HUGGINGFACE_TOKENIZER=hub)
    )
    assert recipe.tokenizer.source == source
    assert told in notes


def test_flags(tmp_path: Path) -> None:
    recipe, notes = recipe_of(
        tmp_path,
        l_env=LLAMA,
        l_args="--pretrain_checkpoint out/a.pt --reset-optimizer --start-step 40",
    )
    assert recipe.train.start_step is None, "what it counts from is not carried over"
    assert "--start-step: counts from PRETRAIN_LOAD_CHECKPOINTS_PATH, which is not" in notes
    assert "--pretrain_checkpoint: its checkpoints have a format of their own" in notes
    assert "--reset-optimizer: nothing to do" in notes


def test_a_step_to_start_at_without_a_checkpoint_is_kept(tmp_path: Path) -> None:
    text = changed(PRETRAIN_LOAD_CHECKPOINTS_PATH="")
    recipe, notes = recipe_of(tmp_path, l_env=text, l_args="--start-step 40")
    assert (recipe.train.start_step, "--start-step" in notes) == (40, False)


def test_learning_rates_that_contradict_each_other(tmp_path: Path) -> None:
    recipe, notes = recipe_of(tmp_path, l_env=changed(MIN_LR="1"))
    assert recipe.train.schedule.min_ratio == 1.0
    assert "MIN_LR and MAX_LR: the learning rate would rise" in notes


def test_sizes_that_no_model_has_are_told(tmp_path: Path) -> None:
    assert "1024, 16 and 5 do not divide" in recipe_of(tmp_path, l_env=changed(N_KV_HEADS="5"))[1]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("TOTAL_BATCH_SIZE", "0", "it should be a whole number above 0"),
        ("IS_DPO_TRAINING", "perhaps", "it should be true or false"),
        ("LORA_ENABLED", "", ""),
        ("DIM", "1e999", "it should be a finite number"),
        ("TEST_PRETRAIN_GENERATION_PROMPTS", "[1]", "it should be a list of texts"),
    ],
)
def test_values_that_cannot_be_are_refused(key: str, value: str, says: str, tmp_path: Path) -> None:
    if not says:
        recipe_of(tmp_path, l_env=changed(**{key: value}))
        return
    with pytest.raises(WrongInput) as refused:
        recipe_of(tmp_path, l_env=changed(**{key: value}))
    assert f"{key} is" in str(refused.value)
    assert says in str(refused.value)
