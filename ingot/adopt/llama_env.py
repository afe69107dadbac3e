"""Llama in pure PyTorch under DDP: an `.env` for pretraining, instruction tuning, LoRA, DPO and
distillation, and a few flags.
"""

from __future__ import annotations

from typing import Any

from ingot.adopt.llama_env_keys import OWN_FORMAT, ROWS, STAGES, stage_rows
from ingot.adopt.table import (
    Draft,
    GivenKeys,
    Project,
    hub_source,
    ratio,
    run_name,
)


def _build(sheet: GivenKeys, draft: Draft) -> None:
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
    _start(sheet, draft)
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


def _objective(sheet: GivenKeys, draft: Draft) -> str:
    """Set the objective; returns the stage whose data and paths apply."""
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
        draft.put_from(sheet, "DPO_BETA", "objective.beta")
        stage = "DPO"
    elif asked[0] == "IS_MODEL_DISTILLATION":
        stage = "INSTRUCT" if len(asked) > 1 else "PRETRAIN"
        _distill(sheet, draft, stage)
    else:
        draft.put("objective.kind", "sft", asked[0], where)
        stage = "INSTRUCT"
    return stage


def _distill(sheet: GivenKeys, draft: Draft, stage: str) -> None:
    draft.put_from(sheet, "IS_MODEL_DISTILLATION", "objective.kind", "distill")
    teacher = hub_source(sheet.get("TEACHER_MODEL_CHECKPOINT") or "meta-llama/Llama-3.2-3B").source
    draft.put(
        "objective.teacher",
        teacher,
        sheet.name("TEACHER_MODEL_CHECKPOINT"),
        sheet.where("TEACHER_MODEL_CHECKPOINT"),
    )
    if not teacher.startswith("hf:"):
        draft.note(
            "fill",
            "objective.teacher",
            "must be a Hugging Face folder, a run folder or hf:ORG/NAME; the checkpoints of that"
            " project are neither",
        )
    elif not sheet.has("TEACHER_MODEL_CHECKPOINT"):
        draft.note("fill", "objective.teacher", "no file names one; Llama 3.2 3B stands for it")
    if (temperature := sheet.get("DISTILLATION_TEMPERATURE")) is not None:
        draft.put_from(sheet, "DISTILLATION_TEMPERATURE", "objective.temperature", temperature)
    draft.put(
        "objective.documents", "chat" if stage == "INSTRUCT" else "text", "IS_INSTRUCT_TRAINING"
    )


def _data(sheet: GivenKeys, draft: Draft, stage: str) -> None:
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
    rows = {row.key for other in STAGES if other != stage for row in stage_rows(other)} | {
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


def _model(sheet: GivenKeys, draft: Draft) -> None:
    """Set the sizes, on top of a Llama 3 preset: untied, plain rotary positions."""
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
            draft.put_from(sheet, key, f"model.config.{name}", value)
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
    """The width of the feed-forward layer as in Meta's reference code: two thirds of 4 * dim, times
    the multiplier, rounded up to a multiple of `multiple_of`.
    """
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * -(-width // multiple_of)


def _tokenizer(sheet: GivenKeys, draft: Draft) -> None:
    path, hub = sheet.get("TOKENIZER_CHECKPOINT_PATH"), sheet.get("HUGGINGFACE_TOKENIZER")
    if hub and hub.lower() in ("true", "false", "1", "0"):
        hub = path if hub.lower() in ("true", "1") else None  # a switch for the path
    if hub:
        draft.put_from(sheet, "HUGGINGFACE_TOKENIZER", "tokenizer.source", hub_source(hub).source)
        if path and path != hub:
            draft.note(
                "clash",
                "TOKENIZER_CHECKPOINT_PATH and HUGGINGFACE_TOKENIZER",
                "both name a tokenizer; the second is taken",
            )
    elif path:
        draft.put_from(sheet, "TOKENIZER_CHECKPOINT_PATH", "tokenizer.source", path)
    else:
        draft.put("tokenizer.source", "hf:unsloth/Llama-3.2-1B", "Llama 3's, no file names one")
    if draft.values.tree["objective"]["kind"] in ("sft", "dpo"):
        draft.put("tokenizer.template", "llama3", "Llama 3's, fixed there")


def _lora(sheet: GivenKeys, draft: Draft) -> None:
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


def _training(sheet: GivenKeys, draft: Draft) -> None:
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
        draft.put_from(sheet, "MAX_STEPS", "train.steps", steps)
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


def _start(sheet: GivenKeys, draft: Draft) -> None:
    """A start step continues from a checkpoint, whose format only that project can read."""
    if not sheet.has("--start-step"):
        return
    dropped = [
        row.key for row in sheet.rows.values() if row.lost == OWN_FORMAT and sheet.has(row.key)
    ]
    if dropped:
        about = f"counts from {sheet.name(dropped[0])}, which is not carried over; begins at 0 here"
        draft.note("lost", sheet.name("--start-step"), about)
    else:
        draft.put_from(sheet, "--start-step", "train.start_step")


def _watching(sheet: GivenKeys, draft: Draft) -> None:
    every = sheet.get("VALIDATE_EVERY_X_STEPS") or 0
    patience = sheet.get("EARLY_STOPPING_PATIENCE") or 0
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
        draft.put_from(sheet, "VALIDATE_EVERY_X_STEPS", "train.evaluate_every", every)
        draft.fixed(checkpoint__best="loss")
        draft.note(
            "changed",
            "checkpoints",
            "were saved on a better validation loss only; the best is kept here beside the newest"
            " (checkpoint.every)",
        )
        if hellaswag:
            draft.put_from(sheet, "HELLASWAG_EVERY_X_STEPS", "train.evaluate_tasks", ["hellaswag"])
            if sheet.get("HELLASWAG_EVERY_X_STEPS") != every:
                draft.note(
                    "changed",
                    "HELLASWAG_EVERY_X_STEPS",
                    f"HellaSwag is scored at each evaluation, every {every} steps; a `limit` makes"
                    " it cheaper",
                )
        if patience > 0:
            draft.put_from(
                sheet, "EARLY_STOPPING_PATIENCE", "train.early_stop", {"patience": patience}
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


def _prompts(sheet: GivenKeys, draft: Draft, stage: str) -> None:
    key, other = ("PRETRAIN", "INSTRUCT") if stage == "PRETRAIN" else ("INSTRUCT", "PRETRAIN")
    prompts = sheet.get(f"TEST_{key}_GENERATION_PROMPTS")
    if prompts:
        draft.put_from(sheet, f"TEST_{key}_GENERATION_PROMPTS", "evaluate.prompts", prompts)
    if sheet.has(f"TEST_{other}_GENERATION_PROMPTS"):
        draft.note("lost", f"TEST_{other}_GENERATION_PROMPTS", "are the prompts of another stage")
    if (every := sheet.get("GENERATE_EVERY_X_STEPS") or 0) > 0:
        draft.put_from(sheet, "GENERATE_EVERY_X_STEPS", "train.sample_every", every)


PROJECT = Project(
    "Llama with DDP",
    "an .env with TOTAL_BATCH_SIZE, MAX_LR, IS_INSTRUCT_TRAINING, DIM, N_LAYERS and the like",
    ROWS,
    _build,
)
