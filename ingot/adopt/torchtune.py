"""Continued pretraining on Google Cloud: an `.env` of cloud resources, a pipeline's parameters, and
a torchtune YAML.

The three parts may be in separate files, or in one.
"""

from __future__ import annotations

import re

from ingot.adopt.table import Draft, GivenKeys, Project, hub_source, number, run_name
from ingot.adopt.torchtune_data import build_data
from ingot.adopt.torchtune_keys import (
    CLOUD,
    MODELS,
    PIPELINE,
    TRAINING,
    bucket_name,
    last_name,
    last_part,
)

ATTENTION = {"output_proj": "o_proj"}
"""What torchtune calls a layer of attention -> its usual name."""
TORCH_LR = 1e-3
"""The learning rate of torch's optimizers where none is given."""


def _build(sheet: GivenKeys, draft: Draft) -> None:
    _run(sheet, draft)
    _model(sheet, draft)
    build_data(sheet, draft)
    _training(sheet, draft)
    _optimizer(sheet, draft)
    _memory(sheet, draft)
    _tracking(sheet, draft)
    if sheet.has(*(row.key for row in CLOUD)):
        draft.fixed(launch__kind="vertex", pipeline__steps__prepare__launch="dataproc")
        draft.note(
            "fill",
            "launch.machine",
            "type, accelerator and number of the training machines are in none of the files; set"
            " them, and launch.processes",
        )


def _run(sheet: GivenKeys, draft: Draft) -> None:
    folder = sheet.get("output_dir")
    draft.put(
        "name",
        run_name(last_part(folder) if folder else None, "continued"),
        sheet.name("output_dir"),
    )
    if not folder:
        return
    if folder.startswith("gs://"):
        if folder.removeprefix("gs://").strip("/").count("/"):
            draft.put(
                "checkpoint.upload",
                folder.rstrip("/"),
                sheet.name("output_dir"),
                sheet.where("output_dir"),
            )
        draft.note(
            "changed",
            "output_dir",
            "the run lies in runs/ on the machine; checkpoints are copied to the bucket"
            " (checkpoint.upload)",
        )
        bucket = bucket_name(folder)
        if sheet.has("BUCKET_NAME") and sheet.get("BUCKET_NAME") != bucket:
            draft.note(
                "clash",
                "output_dir and BUCKET_NAME",
                f"{sheet.where('output_dir')} names the bucket {bucket},"
                f" {sheet.where('BUCKET_NAME')} the bucket {sheet.get('BUCKET_NAME')}; each is"
                " kept, in checkpoint.upload and cloud.bucket",
            )
    elif "/" in folder.strip("/"):
        draft.put("output", folder.rstrip("/").rpartition("/")[0] or "/", sheet.name("output_dir"))


def _model(sheet: GivenKeys, draft: Draft) -> None:
    component = last_name(sheet, "model._component_")
    builder = re.sub(r"\Aq?[ld]ora_", "", component)
    built, given = MODELS.get(builder), sheet.get("pretrained_hf_model")
    folder = hub_source(_folder(sheet))
    if given:
        key, source = "pretrained_hf_model", hub_source(given).source
    elif folder.moved:  # the folder is called as the model is on the hub
        key, source = "checkpointer.checkpoint_dir, or tokenizer.path", folder.source
    else:
        key, source = "model._component_", f"hf:{built or 'meta-llama/Llama-3.2-1B'}"
    where = sheet.where("pretrained_hf_model", "checkpointer.checkpoint_dir", "model._component_")
    draft.put("model.source", source, key, where)
    if given and built and source.lower() != f"hf:{built}".lower():
        draft.note(
            "clash",
            "pretrained_hf_model and model._component_",
            f"{source} is taken; the builder {builder} is that of {built}",
        )
    if key == "model._component_" and sheet.has("checkpointer.checkpoint_dir"):
        draft.note(
            "fill",
            "checkpointer.checkpoint_dir",
            f"held the weights that training began with; {source} stands for it in model.source",
        )
    if key == "model._component_" and not built:
        draft.note(
            "fill",
            "model.source",
            "no file names a model that is known; Llama 3.2 1B stands for it",
        )
    if builder != component:
        _adapter(sheet, draft, component)
    path = sheet.get("tokenizer.path")
    if path and not path.endswith("original/tokenizer.model"):
        draft.put_from(sheet, "tokenizer.path", "tokenizer.source", path)
    elif path:
        draft.note(
            "changed",
            "tokenizer.path",
            "is the file in the model's own folder; the model's own tokenizer is taken, which has"
            " the same ids",
        )


def _folder(sheet: GivenKeys) -> str:
    """The name of the folder with the model's weights, or with its tokenizer."""
    if folder := last_part(sheet.get("checkpointer.checkpoint_dir") or ""):
        return folder
    parts = (sheet.get("tokenizer.path") or "").removesuffix("/original/tokenizer.model")
    return last_part(parts)


def _adapter(sheet: GivenKeys, draft: Draft, component: str) -> None:
    for key, knob in (("rank", "rank"), ("alpha", "alpha"), ("dropout", "dropout")):
        draft.put_from(sheet, f"model.lora_{key}", f"model.lora.{knob}")
    key = "model.lora_attn_modules"
    targets = [ATTENTION.get(name, name) for name in sheet.get(key) or ()]
    if sheet.get("model.apply_lora_to_mlp"):
        targets += ["gate_proj", "up_proj", "down_proj"]
    if targets:
        draft.put(
            "model.lora.targets", targets, f"{key}, model.apply_lora_to_mlp", sheet.where(key)
        )
    else:
        draft.note("fill", key, "is not given; every linear layer gets an adapter")
    if sheet.get("model.apply_lora_to_output"):
        draft.note("lost", "model.apply_lora_to_output", "the head gets no adapter")
    if sheet.get("model.use_dora") or component.startswith(("dora_", "qdora_")):
        draft.put("model.lora.kind", "dora", "model.use_dora or model._component_")
    if sheet.get("model.quantize_base") or component.startswith("q"):
        draft.put("model.quantize.kind", "nf4", "model.quantize_base or model._component_")


def _training(sheet: GivenKeys, draft: Draft) -> None:
    rows, times = sheet.get("batch_size"), sheet.get("gradient_accumulation_steps")
    draft.put(
        "train.global_batch",
        rows * times,
        "batch_size x gradient_accumulation_steps",
        sheet.where("batch_size", "gradient_accumulation_steps"),
    )
    draft.note(
        "changed",
        "batch_size, gradient_accumulation_steps",
        f"were per device; train.global_batch is {rows * times}, of one. On N devices set it to"
        f" {rows * times} x N for the same training",
    )
    epochs, most = sheet.get("epochs"), sheet.get("max_steps_per_epoch")
    if most:
        draft.put(
            "train.steps",
            epochs * most,
            "epochs x max_steps_per_epoch",
            sheet.where("max_steps_per_epoch"),
        )
        draft.note(
            "changed",
            "max_steps_per_epoch",
            "steps are counted over the whole training; an epoch that is longer is not broken off",
        )
    else:
        draft.put("train.epochs", epochs, sheet.name("epochs"), sheet.where("epochs"))
    draft.fixed(parallel__shard="auto")


def _optimizer(sheet: GivenKeys, draft: Draft) -> None:
    kind = last_name(sheet, "optimizer._component_")
    if kind != "AdamW":
        draft.note(
            "changed",
            "optimizer._component_",
            f"{kind} is not offered; AdamW with the same learning rate stands for it, whose best"
            " one may differ",
        )
    if sheet.has("optimizer.lr"):
        draft.put_from(sheet, "optimizer.lr", "train.optimizer.lr")
    elif sheet.has("optimizer._component_"):
        draft.put("train.optimizer.lr", TORCH_LR, "optimizer.lr, torch's own unless given")
    else:
        draft.put("train.optimizer.lr", 2e-5, "optimizer.lr, its default there")
    betas = (
        sheet.given["optimizer.betas"].value if sheet.has("optimizer.betas") else ("0.9", "0.999")
    )
    try:
        first, second = (
            number(part)
            for part in (betas if isinstance(betas, tuple) else betas.strip("[]()").split(","))
        )
    except ValueError:
        first, second = 0.9, 0.999
        draft.note("lost", "optimizer.betas", "are not two numbers; torch's own stand for them")
    draft.put(
        "train.optimizer.betas",
        [first, second],
        "optimizer.betas" if sheet.has("optimizer.betas") else "torch's own",
        sheet.where("optimizer.betas"),
    )
    scheduler = last_name(sheet, "lr_scheduler._component_")
    known = {
        "get_cosine_schedule_with_warmup": "cosine",
        "get_linear_schedule_with_warmup": "linear",
        "": "constant",
    }
    if scheduler not in known:
        draft.note(
            "changed",
            "lr_scheduler._component_",
            f"{scheduler} is not offered; a constant learning rate stands for it",
        )
    remark = "lr_scheduler" if scheduler else "no lr_scheduler there"
    draft.put("train.schedule.kind", known.get(scheduler, "constant"), remark)
    draft.put(
        "train.schedule.warmup",
        sheet.get("lr_scheduler.num_warmup_steps") or 0,
        remark,
        sheet.where("lr_scheduler.num_warmup_steps"),
    )
    if scheduler:
        draft.put("train.schedule.min_ratio", 0.0, "to zero there")
    draft.put_from(sheet, "clip_grad_norm", "train.clip_norm")


def _memory(sheet: GivenKeys, draft: Draft) -> None:
    again = sheet.get("enable_activation_checkpointing")
    offloaded = sheet.get("enable_activation_offloading")
    if again is not None:
        draft.put(
            "memory.recompute.kind", "full" if again else "none", "enable_activation_checkpointing"
        )
    if offloaded and again:
        draft.note(
            "lost",
            "enable_activation_offloading",
            "activations are either computed again or offloaded here; the first is kept",
        )
    elif offloaded is not None:
        draft.put("memory.offload.activations", offloaded, "enable_activation_offloading")


def _tracking(sheet: GivenKeys, draft: Draft) -> None:
    logger = last_name(sheet, "metric_logger._component_")
    if logger == "WandBLogger":
        draft.put(
            "track.wandb",
            {"project": sheet.get("metric_logger.project") or "torchtune"},
            "metric_logger",
        )
    elif logger not in ("", "TensorBoardLogger", "DiskLogger", "StdoutLogger"):
        draft.note(
            "lost",
            "metric_logger._component_",
            f"{logger} is not offered; metrics go to metrics.jsonl and TensorBoard",
        )
    if sheet.get("profiler.enabled"):
        begin = (
            (sheet.get("profiler.wait_steps") or 0) + (sheet.get("profiler.warmup_steps") or 0) + 1
        )
        draft.put(
            "train.profile",
            {"begin": begin, "end": begin + max(1, sheet.get("profiler.active_steps") or 1) - 1},
            "profiler",
        )


PROJECT = Project(
    "continued pretraining on Google Cloud",
    "an .env with PROJECT_ID and BUCKET_NAME, or a torchtune YAML with model, tokenizer and"
    " batch_size",
    (*CLOUD, *PIPELINE, *TRAINING),
    _build,
)
