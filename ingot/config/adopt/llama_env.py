"""Llama in pure PyTorch under DDP: an `.env` for pretraining, instruction tuning, LoRA, DPO and
distillation, and a few flags.
"""

from __future__ import annotations

from typing import Any

from ingot.config.adopt.read import Given
from ingot.config.adopt.table import (
    Draft,
    Project,
    Row,
    Sheet,
    hub_source,
    number,
    ratio,
    run_name,
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


def _stage_rows(stage: str) -> tuple[Row, ...]:
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
    *(row for stage in STAGES for row in _stage_rows(stage)),
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


def _build(sheet: Sheet, draft: Draft) -> None:
    stage = _objective(sheet, draft)
    draft.put(
        "name",
        run_name(sheet.get("WNB_PROJECT_NAME"), f"llama-{draft.values.tree['objective']['kind']}"),
        sheet.name("WNB_PROJECT_NAME"),
    )
    _data(sheet, draft, stage)
    _model(sheet, draft)
    _tokenizer(sheet, draft)
    _lora(sheet, draft)
    _training(sheet, draft)
    _watching(sheet, draft)
    _prompts(sheet, draft, stage)
    draft.fixed(
        train__optimizer__betas=[0.9, 0.95],
        train__clip_norm=1.0,
        train__schedule__kind="cosine",
        checkpoint__keep=2,
    )
    if sheet.get("WNB_ENABLED"):
        draft.put(
            "track.wandb",
            {"project": sheet.get("WNB_PROJECT_NAME") or "llama"},
            "WNB_ENABLED, WNB_PROJECT_NAME",
        )
    if folder := sheet.get(f"{stage}_SAVE_CHECKPOINTS_PATH"):
        draft.put("output", folder, f"{stage}_SAVE_CHECKPOINTS_PATH")
    draft.note(
        "fill",
        "launch.processes",
        "the number of GPUs was said to torchrun; set it (and launch.nodes), or one process trains",
    )


def _objective(sheet: Sheet, draft: Draft) -> str:
    """The way of training; the stage whose data and paths count comes back."""
    asked = [
        key
        for key in ("IS_DPO_TRAINING", "IS_MODEL_DISTILLATION", "IS_INSTRUCT_TRAINING")
        if sheet.get(key)
    ]
    if "IS_DPO_TRAINING" in asked and len(asked) > 1:
        draft.note(
            "clash",
            " and ".join(asked),
            "are all true; preference tuning (dpo) is taken, and runs on what the earlier training"
            " made",
        )
    where = sheet.where(*asked)
    if not asked:
        draft.put("objective.kind", "pretrain", "neither instruction nor preference tuning there")
        stage = "PRETRAIN"
    elif asked[0] == "IS_DPO_TRAINING":
        draft.put("objective.kind", "dpo", asked[0], where)
        draft.put("objective.beta", sheet.get("DPO_BETA"), "DPO_BETA", sheet.where("DPO_BETA"))
        stage = "DPO"
    elif asked[0] == "IS_MODEL_DISTILLATION":
        stage = "INSTRUCT" if len(asked) > 1 else "PRETRAIN"
        _distill(sheet, draft, stage)
    else:
        draft.put("objective.kind", "sft", asked[0], where)
        stage = "INSTRUCT"
    return stage


def _distill(sheet: Sheet, draft: Draft, stage: str) -> None:
    draft.put(
        "objective.kind", "distill", "IS_MODEL_DISTILLATION", sheet.where("IS_MODEL_DISTILLATION")
    )
    teacher = sheet.get("TEACHER_MODEL_CHECKPOINT")
    draft.put(
        "objective.teacher",
        teacher or "hf:meta-llama/Llama-3.2-3B",
        sheet.name("TEACHER_MODEL_CHECKPOINT"),
        sheet.where("TEACHER_MODEL_CHECKPOINT"),
    )
    draft.note(
        "fill",
        "objective.teacher",
        "must be a Hugging Face folder, a run folder or hf:ORG/NAME; the checkpoints of that"
        " project are neither",
    )
    if (temperature := sheet.get("DISTILLATION_TEMPERATURE")) is not None:
        draft.put(
            "objective.temperature",
            temperature,
            "DISTILLATION_TEMPERATURE",
            sheet.where("DISTILLATION_TEMPERATURE"),
        )
    draft.put(
        "objective.documents", "chat" if stage == "INSTRUCT" else "text", "IS_INSTRUCT_TRAINING"
    )


def _data(sheet: Sheet, draft: Draft, stage: str) -> None:
    key = f"HF_{stage}_DATASET"
    given, subset, split = sheet.get(key), sheet.get(f"{key}_NAME"), sheet.get(f"{key}_SPLIT")
    if given:
        source: dict[str, Any] = {
            "source": (
                hub_source(given).source + (f":{subset}" if subset and subset != "default" else "")
            )
        }
        if split != "train":
            source["split"] = split
        column = sheet.get("HF_INSTRUCT_DATASET_SELECTOR_KEY") if stage == "INSTRUCT" else None
        if column and column not in ("messages", "conversations"):
            source |= {"layout": "messages", "columns": {"messages": column}}
        if split and "[" in split:
            draft.note(
                "fill",
                f"{key}_SPLIT",
                "shares of a split are told by `fraction` here; give the split's name alone",
            )
    else:
        source = {
            "source": {
                "PRETRAIN": "data/texts.jsonl",
                "INSTRUCT": "data/chats.jsonl",
                "DPO": "data/pairs.jsonl",
            }[stage]
        }
        draft.note("fill", "data.train", f"no file has {key}; {source['source']} stands for it")
    draft.put("data.train", [source], f"{key} and its _NAME, _SPLIT", sheet.where(key))
    rows = {row.key for other in STAGES if other != stage for row in _stage_rows(other)} | {
        "HF_INSTRUCT_DATASET_SELECTOR_KEY"
    }
    for other in sorted(rows & set(sheet.given)):
        if not sheet.rows[other].lost and not (
            stage == "INSTRUCT" and other == "HF_INSTRUCT_DATASET_SELECTOR_KEY"
        ):
            draft.note(
                "lost",
                sheet.name(other),
                "belongs to another stage; adopt once more with that stage's IS_..._TRAINING for a"
                " recipe of its own",
            )


def _model(sheet: Sheet, draft: Draft) -> None:
    """The sizes, over a preset of Llama 3: untied, plain rotary positions."""
    draft.put("model.source", "preset:llama-8b", "Llama's form, with the sizes below")
    dim, heads = sheet.get("DIM"), sheet.get("N_HEADS")
    sizes = {
        "hidden_size": ("DIM", dim),
        "num_hidden_layers": ("N_LAYERS", sheet.get("N_LAYERS")),
        "num_attention_heads": ("N_HEADS", heads),
        "num_key_value_heads": (
            "N_KV_HEADS" if sheet.has("N_KV_HEADS") else "N_HEADS",
            sheet.get("N_KV_HEADS") or heads,
        ),
        "rms_norm_eps": ("NORM_EPS", sheet.get("NORM_EPS")),
        "max_position_embeddings": ("MAX_SEQ_LEN", sheet.get("MAX_SEQ_LEN")),
    }
    for name, (key, value) in sizes.items():
        if value is not None:
            draft.put(f"model.config.{name}", value, key, sheet.where(key))
    if dim is not None:
        width = feed_forward(dim, sheet.get("MULTIPLE_OF"), sheet.get("FFN_DIM_MULTIPLIER"))
        draft.put(
            "model.config.intermediate_size",
            width,
            "Meta's rule of DIM, MULTIPLE_OF, FFN_DIM_MULTIPLIER",
            sheet.where("FFN_DIM_MULTIPLIER", "DIM"),
        )
        if heads and (dim % heads or heads % (sheet.get("N_KV_HEADS") or heads)):
            draft.note(
                "fill",
                "DIM, N_HEADS, N_KV_HEADS",
                f"{dim}, {heads} and {sheet.get('N_KV_HEADS') or heads} do not divide; no model has"
                " these sizes",
            )
    theta = sheet.get("ROPE_THETA")
    draft.put(
        "model.config.rope_parameters",
        {"rope_type": "default", "rope_theta": 10_000.0 if theta is None else theta},
        "ROPE_THETA" if theta is not None else "Meta's own rotary base",
        sheet.where("ROPE_THETA"),
    )
    if draft.values.tree["objective"]["kind"] != "pretrain":
        draft.note(
            "fill",
            "model.source",
            "the sizes alone are random weights; set model.source to the model that is tuned (a"
            " Hugging Face folder or hf:ORG/NAME) and remove model.config",
        )


def feed_forward(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """The width of the feed-forward layer in Meta's reference code: two thirds of 4 dim, times the
    multiplier, rounded up to a multiple.
    """
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * -(-width // multiple_of)


def _tokenizer(sheet: Sheet, draft: Draft) -> None:
    path, hub = sheet.get("TOKENIZER_CHECKPOINT_PATH"), sheet.get("HUGGINGFACE_TOKENIZER")
    if hub and hub.lower() in ("true", "false", "1", "0"):
        hub = path if hub.lower() in ("true", "1") else None  # a switch that says what the path is
    if hub:
        draft.put(
            "tokenizer.source",
            hub_source(hub).source,
            "HUGGINGFACE_TOKENIZER",
            sheet.where("HUGGINGFACE_TOKENIZER"),
        )
        if path and path != hub:
            draft.note(
                "clash",
                "TOKENIZER_CHECKPOINT_PATH and HUGGINGFACE_TOKENIZER",
                "both name a tokenizer; the second is taken",
            )
    elif path:
        draft.put(
            "tokenizer.source",
            path,
            "TOKENIZER_CHECKPOINT_PATH",
            sheet.where("TOKENIZER_CHECKPOINT_PATH"),
        )
    else:
        draft.put("tokenizer.source", "hf:unsloth/Llama-3.2-1B", "Llama 3's, no file names one")
    if draft.values.tree["objective"]["kind"] in ("sft", "dpo"):
        draft.put("tokenizer.template", "llama3", "Llama 3's, fixed there")


def _lora(sheet: Sheet, draft: Draft) -> None:
    if not sheet.get("LORA_ENABLED"):
        return
    names = {
        "rank": "LORA_RANK",
        "alpha": "LORA_ALPHA",
        "dropout": "LORA_DROPOUT",
        "targets": "LORA_TARGET_MODULES",
    }
    for knob, key in names.items():
        remark = sheet.name(key) if sheet.has(key) else f"{key}, its default there"
        draft.put(f"model.lora.{knob}", sheet.get(key), remark, sheet.where(key))


def _training(sheet: Sheet, draft: Draft) -> None:
    tokens, length = sheet.get("TOTAL_BATCH_SIZE"), sheet.get("MAX_SEQ_LEN")
    if tokens is not None and length is not None:
        rows = max(1, round(tokens / length))
        draft.put(
            "train.global_batch",
            rows,
            "TOTAL_BATCH_SIZE / MAX_SEQ_LEN",
            sheet.where("TOTAL_BATCH_SIZE"),
        )
        rounded = "" if rows * length == tokens else f", rounded: {rows * length:,} tokens a step"
        draft.note(
            "changed",
            "TOTAL_BATCH_SIZE",
            f"was in tokens; train.global_batch is in rows: {tokens:,} / {length:,} ="
            f" {rows}{rounded}",
        )
    elif tokens is not None:
        draft.note(
            "fill",
            "train.global_batch",
            "TOTAL_BATCH_SIZE is in tokens, and MAX_SEQ_LEN is not given; set it to tokens /"
            " data.seq_len",
        )
    steps = sheet.get("MAX_STEPS")
    if steps > 0:
        draft.put("train.steps", steps, "MAX_STEPS", sheet.where("MAX_STEPS"))
    else:
        draft.put(
            "train.epochs",
            1,
            (
                "MAX_STEPS, which left it to the data"
                if sheet.has("MAX_STEPS")
                else "MAX_STEPS, its default there"
            ),
        )
    most, least = sheet.get("MAX_LR"), sheet.get("MIN_LR")
    if most and least is not None:
        draft.put(
            "train.schedule.min_ratio",
            min(1.0, max(0.0, ratio(least, most))),
            "MIN_LR / MAX_LR",
            sheet.where("MIN_LR"),
        )
        if least > most:
            draft.note(
                "clash", "MIN_LR and MAX_LR", "the learning rate would rise; it stays at MAX_LR"
            )
    elif least is not None:
        draft.note(
            "lost",
            "MIN_LR",
            "is told as a share of the learning rate here, and MAX_LR is not given",
        )


def _watching(sheet: Sheet, draft: Draft) -> None:
    every, patience = (
        sheet.get("VALIDATE_EVERY_X_STEPS") or 0,
        sheet.get("EARLY_STOPPING_PATIENCE") or 0,
    )
    hellaswag = (sheet.get("HELLASWAG_EVERY_X_STEPS") or 0) > 0
    tasks: list[dict[str, Any]] = [{"kind": "loss"}]
    if hellaswag:
        limit, path = sheet.get("HELLASWAG_NUMBER_OF_EXAMPLES") or 0, sheet.get("HELLASWAG_PATH")
        tasks.append(
            {
                "kind": "hellaswag",
                **({"source": path} if path else {}),
                **({"limit": limit} if limit > 0 else {}),
            }
        )
        draft.put(
            "evaluate.tasks",
            tasks,
            "HELLASWAG_EVERY_X_STEPS and its kin",
            sheet.where("HELLASWAG_PATH", "HELLASWAG_EVERY_X_STEPS"),
        )
    if every > 0:
        draft.put(
            "train.evaluate_every",
            every,
            "VALIDATE_EVERY_X_STEPS",
            sheet.where("VALIDATE_EVERY_X_STEPS"),
        )
        draft.fixed(checkpoint__best="loss")
        draft.note(
            "changed",
            "checkpoints",
            "were saved on a better validation loss only; the best is kept here beside the newest"
            " (checkpoint.every)",
        )
        if hellaswag:
            draft.put(
                "train.evaluate_tasks",
                ["hellaswag"],
                "HELLASWAG_EVERY_X_STEPS",
                sheet.where("HELLASWAG_EVERY_X_STEPS"),
            )
            if sheet.get("HELLASWAG_EVERY_X_STEPS") != every:
                draft.note(
                    "changed",
                    "HELLASWAG_EVERY_X_STEPS",
                    f"HellaSwag is scored at each evaluation, every {every} steps; a `limit` makes"
                    " it cheaper",
                )
        if patience > 0:
            draft.put(
                "train.early_stop",
                {"patience": patience},
                "EARLY_STOPPING_PATIENCE",
                sheet.where("EARLY_STOPPING_PATIENCE"),
            )
    elif patience > 0 or hellaswag:
        draft.note(
            "lost",
            "EARLY_STOPPING_PATIENCE, HELLASWAG_EVERY_X_STEPS",
            "need evaluations while training; set train.evaluate_every",
        )
    if steps := sheet.get("VAL_STEPS"):
        rows = steps * (sheet.get("MAX_BATCH_SIZE") or 1)
        draft.put(
            "train.evaluate_rows", rows, "VAL_STEPS x MAX_BATCH_SIZE", sheet.where("VAL_STEPS")
        )
        draft.note(
            "changed",
            "VAL_STEPS",
            f"were batches of each GPU; train.evaluate_rows is {rows} rows in all, on N GPUs set it"
            f" to {rows} x N",
        )


def _prompts(sheet: Sheet, draft: Draft, stage: str) -> None:
    key, other = ("PRETRAIN", "INSTRUCT") if stage == "PRETRAIN" else ("INSTRUCT", "PRETRAIN")
    prompts = sheet.get(f"TEST_{key}_GENERATION_PROMPTS")
    if prompts:
        draft.put(
            "evaluate.prompts",
            prompts,
            f"TEST_{key}_GENERATION_PROMPTS",
            sheet.where(f"TEST_{key}_GENERATION_PROMPTS"),
        )
    if sheet.has(f"TEST_{other}_GENERATION_PROMPTS"):
        draft.note("lost", f"TEST_{other}_GENERATION_PROMPTS", "are the prompts of another stage")
    if (every := sheet.get("GENERATE_EVERY_X_STEPS") or 0) > 0:
        draft.put(
            "train.sample_every",
            every,
            "GENERATE_EVERY_X_STEPS",
            sheet.where("GENERATE_EVERY_X_STEPS"),
        )


PROJECT = Project(
    "Llama with DDP",
    "an .env with TOTAL_BATCH_SIZE, MAX_LR, IS_INSTRUCT_TRAINING, DIM, N_LAYERS and the like",
    ROWS,
    _build,
)
