"""Continued pretraining on Google Cloud: an `.env` of cloud resources, a pipeline's parameters, and
a torchtune YAML.

The three parts may be in separate files, or in one.
"""

from __future__ import annotations

from ingot.adopt.table import (
    Draft,
    GivenKeys,
    Project,
    hub_source,
    number,
    run_name,
    text,
)
from ingot.adopt.torchtune_keys import (
    CLOUD,
    FEWEST,
    MODELS,
    MOST,
    PIPELINE,
    TRAINING,
    bucket_name,
    last_part,
)


def _build(sheet: GivenKeys, draft: Draft) -> None:
    _run(sheet, draft)
    _model(sheet, draft)
    _data(sheet, draft)
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
    builder = (sheet.get("model._component_") or "").rpartition(".")[2]
    built, given = MODELS.get(builder), sheet.get("pretrained_hf_model")
    source = (
        hub_source(given).source
        if given
        else f"hf:{built}"
        if built
        else "hf:meta-llama/Llama-3.2-1B"
    )
    draft.put(
        "model.source",
        source,
        "pretrained_hf_model" if given else "model._component_",
        sheet.where("pretrained_hf_model", "model._component_"),
    )
    if given and built and source.lower() != f"hf:{built}".lower():
        draft.note(
            "clash",
            "pretrained_hf_model and model._component_",
            f"{source} is taken; the builder {builder} is that of {built}",
        )
    if not given and not built:
        draft.note(
            "fill",
            "model.source",
            "no file names a model that is known; Llama 3.2 1B stands for it",
        )
    if builder.startswith(("lora_", "qlora_", "dora_")):
        draft.note(
            "lost",
            "model._component_",
            f"{builder} trains an adapter; set model.lora, or all weights are trained",
        )
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


def _data(sheet: GivenKeys, draft: Draft) -> None:
    query = sheet.get("source_query")
    draft.put(
        "data.train",
        [{"source": f"bigquery:{query}" if query else "data/my.jsonl", "text": "text"}],
        sheet.name("source_query"),
    )
    if not query:
        draft.note(
            "fill",
            "data.train",
            "no file has source_query, the SQL that gives id and text; data/my.jsonl stands for it",
        )
    draft.fixed(data__clean__exact=True)
    alike = sheet.get("sim_threshold")
    draft.put(
        "data.clean.fuzzy.similarity", alike, "1 - sim_threshold", sheet.where("sim_threshold")
    )
    draft.note(
        "changed",
        "sim_threshold",
        f"was a distance there, in spite of its name ({round(1 - alike, 12):g}; 0.2 unless given);"
        f" here the similarity 1 - x = {alike:g}, from which on documents are duplicates",
    )
    count = sheet.get("minhash_perm")
    if FEWEST <= count <= MOST:
        draft.put("data.clean.fuzzy.permutations", count, "minhash_perm")
    else:
        draft.put("data.clean.fuzzy.permutations", 128, f"in place of minhash_perm {count}")
        draft.note(
            "changed",
            "minhash_perm",
            f"{count} is not within {FEWEST} to {MOST}; 128 finds candidates more surely, and the"
            " exact sets decide",
        )
    if (form := sheet.get("normal_form")) and text(
        sheet.given["normal_form"].value
    ).lower().endswith("d"):
        draft.note(
            "changed",
            "normal_form",
            f"the decomposed forms are not offered; {form} is the same text, composed",
        )
    config = sheet.get("train_config")
    if config and not any(file.path.endswith(last_part(config)) for file in sheet.files):
        draft.note(
            "fill",
            "train_config",
            f"names {config}; give that file too (`ingot adopt FILE {last_part(config)}`)",
        )


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
    kind = sheet.get("optimizer._component_").rpartition(".")[2]
    if kind != "AdamW":
        draft.note(
            "changed",
            "optimizer._component_",
            f"{kind} is not offered; AdamW with the same learning rate stands for it, whose best"
            " one may differ",
        )
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
    scheduler = (sheet.get("lr_scheduler._component_") or "").rpartition(".")[2]
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
    again, offloaded = (
        sheet.get("enable_activation_checkpointing"),
        sheet.get("enable_activation_offloading"),
    )
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
    logger = (sheet.get("metric_logger._component_") or "").rpartition(".")[2]
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
