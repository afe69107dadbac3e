"""The keys of the `.env` of Llama under DDP, with the knob of each that has one."""

from __future__ import annotations

from ingot.config.adopt.read import Given
from ingot.config.adopt.table import (
    Row,
    number,
    texts,
    truth,
    whole,
)

STAGES = ("PRETRAIN", "INSTRUCT", "DPO")
LAYERS = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
"""Meta's names of the linear layers and Hugging Face's."""
STORED = "prepared data lie in the run folder"
OWN_FORMAT = (
    "its checkpoints have a format of their own; give a Hugging Face folder, hf:ORG/NAME, or what"
    " `ingot import` makes of Meta's files as model.source"
)


def positive(given: Given) -> int:
    if (found := whole(given)) < 1:
        raise ValueError("a whole number above 0")
    return found


def targets(given: Given) -> list[str]:
    return [LAYERS.get(name, name) for name in texts(given)]


def stage_rows(stage: str) -> tuple[Row, ...]:
    return (
        Row(f"HF_{stage}_DATASET"),
        Row(f"HF_{stage}_DATASET_NAME"),
        Row(f"HF_{stage}_DATASET_SPLIT", default="train"),
        *(
            Row(f"HF_{stage}_DATASET_{what}", lost=STORED, also=(f"HF_{stage}_{what}",))
            for what in ("TARGET_PATH", "SHARD_PREFIX")
        ),
        Row(f"{stage}_DATALOADER_ROOT_PATH", lost=f"{STORED}; they are made anew from the source"),
        Row(f"{stage}_LOAD_CHECKPOINTS_PATH", lost=OWN_FORMAT),
        Row(f"{stage}_SAVE_CHECKPOINTS_PATH"),
    )


ROWS = (
    *(row for stage in STAGES for row in stage_rows(stage)),
    Row("HF_INSTRUCT_DATASET_SELECTOR_KEY"),
    Row("NUMBER_OF_CPU_PROCESSES", "data.engine.workers", positive),
    Row("HELLASWAG_PATH"),
    Row(
        "SAVE_CHECKPOINTS",
        lost=(
            "a checkpoint is always kept, so that nothing is lost; raise checkpoint.every for fewer"
        ),
        idle=("true", "1", "yes"),
    ),
    Row("WNB_ENABLED", read=truth),
    Row("WNB_PROJECT_NAME"),
    Row("TOKENIZER_CHECKPOINT_PATH"),
    Row("HUGGINGFACE_TOKENIZER"),
    Row("TOTAL_BATCH_SIZE", read=positive),
    Row("MAX_BATCH_SIZE", "train.micro_batch", positive),
    Row("MAX_SEQ_LEN", "data.seq_len", positive),
    Row("MAX_LR", "train.optimizer.lr", number),
    Row("MIN_LR", read=number),
    Row("WARMUP_STEPS", "train.schedule.warmup", whole),
    Row("WEIGHT_DECAY", "train.optimizer.weight_decay", number),
    Row("MAX_STEPS", read=whole, default="-1"),
    Row("EARLY_STOPPING_PATIENCE", read=whole),
    Row(
        "EARLY_STOPPING_PATIENCE_SKIP_STEPS",
        lost="patience counts from the first evaluation on",
        idle=("0", "-1"),
    ),
    Row("IS_INSTRUCT_TRAINING", read=truth),
    Row("IS_DPO_TRAINING", read=truth),
    Row("DPO_BETA", read=number, default="0.1"),
    Row("IS_MODEL_DISTILLATION", read=truth),
    Row("DISTILLATION_TEMPERATURE", read=number),
    Row("TEACHER_MODEL_CHECKPOINT"),
    Row("LORA_ENABLED", read=truth),
    Row("LORA_RANK", read=positive, default="16"),
    Row("LORA_ALPHA", read=number, default="8"),
    Row("LORA_DROPOUT", read=number, default="0.05"),
    Row("LORA_TARGET_MODULES", read=targets, default="wq,wk,wv,wo,w1,w3"),
    Row("VALIDATE_EVERY_X_STEPS", read=whole),
    Row("VAL_STEPS", read=positive),
    Row("HELLASWAG_EVERY_X_STEPS", read=whole),
    Row("HELLASWAG_NUMBER_OF_EXAMPLES", read=whole),
    Row("GENERATE_EVERY_X_STEPS", read=whole),
    Row("MAX_TEST_GEN_LEN", "evaluate.sample_tokens", positive),
    Row("TEST_PRETRAIN_GENERATION_PROMPTS", read=texts),
    Row("TEST_INSTRUCT_GENERATION_PROMPTS", read=texts),
    Row("DIM", read=positive),
    Row("N_LAYERS", read=positive),
    Row("N_HEADS", read=positive),
    Row("N_KV_HEADS", read=positive),
    Row("MULTIPLE_OF", read=positive, default="256"),
    Row("FFN_DIM_MULTIPLIER", read=number),
    Row("NORM_EPS", read=number),
    Row("ROPE_THETA", read=number),
    *(
        Row(flag, lost=OWN_FORMAT)
        for flag in ("--pretrain-checkpoint", "--instruct-checkpoint", "--dpo-checkpoint")
    ),
    Row(
        "--reset-optimizer",
        lost="nothing to do: a run that starts from model.source has a new optimizer",
    ),
    Row("--start-step", "train.start_step", whole),
)
