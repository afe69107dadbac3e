"""The keys of the `.env` of Llama under DDP, and the knob of each that has one."""

from __future__ import annotations

from ingot.adopt.read import Given
from ingot.adopt.table import (
    KeyRow,
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


def stage_rows(stage: str) -> tuple[KeyRow, ...]:
    return (
        KeyRow(f"HF_{stage}_DATASET"),
        KeyRow(f"HF_{stage}_DATASET_NAME"),
        KeyRow(f"HF_{stage}_DATASET_SPLIT", default="train"),
        *(
            KeyRow(f"HF_{stage}_DATASET_{what}", lost=STORED, also=(f"HF_{stage}_{what}",))
            for what in ("TARGET_PATH", "SHARD_PREFIX")
        ),
        KeyRow(
            f"{stage}_DATALOADER_ROOT_PATH", lost=f"{STORED}; they are made anew from the source"
        ),
        KeyRow(f"{stage}_LOAD_CHECKPOINTS_PATH", lost=OWN_FORMAT),
        KeyRow(f"{stage}_SAVE_CHECKPOINTS_PATH"),
    )


ROWS = (
    *(row for stage in STAGES for row in stage_rows(stage)),
    KeyRow("HF_INSTRUCT_DATASET_SELECTOR_KEY"),
    KeyRow("NUMBER_OF_CPU_PROCESSES", "data.engine.workers", positive),
    KeyRow("HELLASWAG_PATH"),
    KeyRow(
        "SAVE_CHECKPOINTS",
        lost=(
            "a checkpoint is always kept, so that nothing is lost; raise checkpoint.every for fewer"
        ),
        idle=("true", "1", "yes"),
    ),
    KeyRow("WNB_ENABLED", read=truth),
    KeyRow("WNB_PROJECT_NAME"),
    KeyRow("TOKENIZER_CHECKPOINT_PATH"),
    KeyRow("HUGGINGFACE_TOKENIZER"),
    KeyRow("TOTAL_BATCH_SIZE", read=positive),
    KeyRow("MAX_BATCH_SIZE", "train.micro_batch", positive),
    KeyRow("MAX_SEQ_LEN", "data.seq_len", positive),
    KeyRow("MAX_LR", "train.optimizer.lr", number),
    KeyRow("MIN_LR", read=number),
    KeyRow("WARMUP_STEPS", "train.schedule.warmup", whole),
    KeyRow("WEIGHT_DECAY", "train.optimizer.weight_decay", number),
    KeyRow("MAX_STEPS", read=whole, default="-1"),
    KeyRow("EARLY_STOPPING_PATIENCE", read=whole),
    KeyRow(
        "EARLY_STOPPING_PATIENCE_SKIP_STEPS",
        lost="patience counts from the first evaluation on",
        idle=("0", "-1"),
    ),
    KeyRow("IS_INSTRUCT_TRAINING", read=truth),
    KeyRow("IS_DPO_TRAINING", read=truth),
    KeyRow("DPO_BETA", read=number, default="0.1"),
    KeyRow("IS_MODEL_DISTILLATION", read=truth),
    KeyRow("DISTILLATION_TEMPERATURE", read=number),
    KeyRow("TEACHER_MODEL_CHECKPOINT"),
    KeyRow("LORA_ENABLED", read=truth),
    KeyRow("LORA_RANK", read=positive, default="16"),
    KeyRow("LORA_ALPHA", read=number, default="8"),
    KeyRow("LORA_DROPOUT", read=number, default="0.05"),
    KeyRow("LORA_TARGET_MODULES", read=targets, default="wq,wk,wv,wo,w1,w3"),
    KeyRow("VALIDATE_EVERY_X_STEPS", read=whole),
    KeyRow("VAL_STEPS", read=positive),
    KeyRow("HELLASWAG_EVERY_X_STEPS", read=whole),
    KeyRow("HELLASWAG_NUMBER_OF_EXAMPLES", read=whole),
    KeyRow("GENERATE_EVERY_X_STEPS", read=whole),
    KeyRow("MAX_TEST_GEN_LEN", "evaluate.sample_tokens", positive),
    KeyRow("TEST_PRETRAIN_GENERATION_PROMPTS", read=texts),
    KeyRow("TEST_INSTRUCT_GENERATION_PROMPTS", read=texts),
    KeyRow("DIM", read=positive),
    KeyRow("N_LAYERS", read=positive),
    KeyRow("N_HEADS", read=positive),
    KeyRow("N_KV_HEADS", read=positive),
    KeyRow("MULTIPLE_OF", read=positive, default="256"),
    KeyRow("FFN_DIM_MULTIPLIER", read=number),
    KeyRow("NORM_EPS", read=number),
    KeyRow("ROPE_THETA", read=number),
    *(
        KeyRow(flag, lost=OWN_FORMAT)
        for flag in ("--pretrain-checkpoint", "--instruct-checkpoint", "--dpo-checkpoint")
    ),
    KeyRow(
        "--reset-optimizer",
        lost="nothing to do: a run that starts from model.source has a new optimizer",
    ),
    KeyRow("--start-step", read=whole),
)
