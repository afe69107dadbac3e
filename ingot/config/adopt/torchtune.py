"""Continued pretraining on Google Cloud: an `.env` of cloud resources, a pipeline's parameters, and
a torchtune YAML.

The three levels come in files of their own, or in one.
"""

from __future__ import annotations

import re

from ingot.config.adopt.read import Given
from ingot.config.adopt.table import (
    Draft,
    Project,
    Row,
    Sheet,
    hub_source,
    number,
    run_name,
    text,
    truth,
    whole,
)

MODELS = {
    "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B",
    "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "qwen2_5_0_5b": "Qwen/Qwen2.5-0.5B",
    "qwen2_5_1_5b_base": "Qwen/Qwen2.5-1.5B",
    "qwen2_5_7b_base": "Qwen/Qwen2.5-7B",
}
"""torchtune's builders and the models of the hub that they build."""
IMAGES = (
    "holds that project's code; build ingot's own with `ingot images build`, or name one in"
    " cloud.images"
)
BY_ITSELF = "not needed: "
FEWEST, MOST = 16, 1024  # permutations that data.clean.fuzzy takes


def last_part(given: Given) -> str:
    """The id at the end of `projects/P/locations/R/tensorboards/ID`, or the id itself."""
    return text(given).rstrip("/").rpartition("/")[2]


def secret_reference(given: Given) -> str:
    """`secret:NAME` of a name, or of `projects/P/secrets/NAME/versions/V`."""
    found = re.fullmatch(
        r"(?:projects/[^/]+/secrets/)?([A-Za-z0-9_-]+)(?:/versions/(?:latest|(\d+)))?", text(given)
    )
    if found is None:
        raise ValueError("the name of a secret in Secret Manager")
    return f"secret:{found[1]}" + (f"/{found[2]}" if found[2] else "")


def bucket_name(given: Given) -> str:
    return text(given).removeprefix("gs://").partition("/")[0]


def similarity(given: Given) -> float:
    distance = number(given)
    if not 0 <= distance < 1:
        raise ValueError("a distance from 0 to below 1")
    return round(1 - distance, 12)


def normal_form(given: Given) -> str:
    form = text(given).lower()
    if form not in ("nfc", "nfd", "nfkc", "nfkd"):
        raise ValueError("NFC, NFD, NFKC or NFKD")
    return form.replace("d", "c")


def dtype(given: Given) -> str:
    known = {"bf16": "bf16", "fp32": "fp32", "fp16": "bf16", "bfloat16": "bf16", "float32": "fp32"}
    if text(given).lower() not in known:
        raise ValueError("bf16 or fp32")
    return known[text(given).lower()]


CLOUD = (
    Row("PROJECT_ID", "cloud.project"),
    Row("PROJECT_NUMBER", lost=f"{BY_ITSELF}the project's id says which one it is"),
    Row("REGION", "cloud.region"),
    Row("REPOSITORY", "cloud.repository", last_part),
    Row("SERVICE_ACCOUNT", "cloud.service_account"),
    Row("SUBNETWORK", "cloud.subnetwork", last_part),
    Row("HF_SECRET_NAME", "cloud.secrets.HF_TOKEN", secret_reference),
    Row("TENSORBOARD", "cloud.tensorboard", last_part),
    Row("BUCKET_NAME", "cloud.bucket", bucket_name),
    Row("SPARK_RUNTIME_VERSION", "pipeline.spark.version"),
    Row("PYTHON_VERSION", lost=f"{BY_ITSELF}ingot's images have their own Python"),
    Row("CUDA_VERSION", lost=f"{BY_ITSELF}ingot's training image has its own CUDA"),
    Row(
        "PYTHON_IMAGE", lost=IMAGES, also=("PYTHON_IMAGE_NAME", "PYTHON_IMAGE_URI", "IMAGE_PYTHON")
    ),
    Row("CUDA_IMAGE", lost=IMAGES, also=("CUDA_IMAGE_NAME", "CUDA_IMAGE_URI", "IMAGE_CUDA")),
    Row("SPARK_IMAGE", lost=IMAGES, also=("SPARK_IMAGE_NAME", "SPARK_IMAGE_URI", "IMAGE_SPARK")),
)
PIPELINE = (
    Row("pretrained_hf_model"),
    Row("source_query"),
    Row("normal_form", "data.clean.normalize", normal_form),
    Row("ngram_len", "data.clean.fuzzy.ngram", whole, default="5"),
    Row("minhash_perm", read=whole, default="2"),
    Row("sim_threshold", read=similarity, default="0.2"),
    Row("train_config"),
)
SHUFFLED = "ingot always shuffles, the same way in every run of a seed"
TRAINING = (
    Row("output_dir"),
    Row("tokenizer._component_", lost=f"{BY_ITSELF}the model's own tokenizer is taken"),
    Row("tokenizer.path"),
    Row("tokenizer.max_seq_len", "data.seq_len", whole, default="4096"),
    Row("dataset._component_", lost=f"{BY_ITSELF}what is read is told by data.train"),
    Row(
        "dataset.packed",
        "data.pack",
        lambda given: "best_fit" if truth(given) else "none",
        changed=(
            "rows are packed by best_fit, whole documents that do not see each other; data.pack=cut"
            " cuts one stream instead"
        ),
        idle=("false",),
    ),
    Row("seed", "seed", whole),
    Row("shuffle", lost=SHUFFLED, idle=("true",)),
    Row("model._component_"),
    *(
        Row(
            f"checkpointer.{key}",
            lost=f"{BY_ITSELF}weights come from model.source, checkpoints lie in the run folder",
        )
        for key in (
            "_component_",
            "checkpoint_dir",
            "checkpoint_files",
            "recipe_checkpoint",
            "output_dir",
            "model_type",
            "safe_serialization",
        )
    ),
    Row(
        "checkpointer",
        lost=f"{BY_ITSELF}weights come from model.source, checkpoints lie in the run folder",
    ),
    Row(
        "resume_from_checkpoint",
        lost=f"{BY_ITSELF}the same command goes on from the newest checkpoint; --fresh begins anew",
        idle=("false",),
    ),
    Row("batch_size", "train.micro_batch", whole, default="8"),
    Row("gradient_accumulation_steps", read=whole, default="8"),
    Row("epochs", read=whole, default="2"),
    Row("max_steps_per_epoch", read=whole),
    Row("optimizer._component_", default="torch.optim.AdamW"),
    Row("optimizer.lr", "train.optimizer.lr", number, default="2e-5"),
    Row(
        "optimizer.weight_decay",
        "train.optimizer.weight_decay",
        number,
        default="0.01",
        changed="matrices only decay here, never norms and biases",
        idle=("0", "0.0"),
    ),
    Row("optimizer.betas"),
    Row("optimizer.eps", "train.optimizer.eps", number),
    Row("optimizer.fused", lost="ingot's AdamW is always the fused one", idle=("true",)),
    Row("lr_scheduler._component_"),
    Row("lr_scheduler.num_warmup_steps", read=whole),
    Row("clip_grad_norm", read=number),
    Row("loss", lost=f"{BY_ITSELF}cross-entropy, computed in chunks"),
    Row("loss._component_", lost=f"{BY_ITSELF}cross-entropy, computed in chunks"),
    Row("enable_activation_checkpointing", read=truth),
    Row("enable_activation_offloading", read=truth),
    Row("compile", "train.compile", truth),
    Row(
        "optimizer_in_bwd",
        lost=(
            "the step follows the whole backward pass here; memory.offload.optimizer saves memory"
            " instead"
        ),
        idle=("false",),
    ),
    Row(
        "dtype",
        "precision.compute",
        dtype,
        default="bf16",
        changed=(
            "there the weights had this format too; here the optimizer changes fp32 weights"
            " (precision.master=stochastic for less memory)"
        ),
        idle=("fp32",),
    ),
    Row("metric_logger._component_"),
    Row("metric_logger.project"),
    Row("metric_logger.log_dir", lost="metrics lie in the run folder"),
    Row("log_every_n_steps", "track.every", whole),
    Row("log_peak_memory_stats", "track.gpu", truth),
    Row("profiler._component_", lost="torch's profiler, by train.profile"),
    Row("profiler.enabled", read=truth),
    Row("profiler.wait_steps", read=whole),
    Row("profiler.warmup_steps", read=whole),
    Row("profiler.active_steps", read=whole),
    Row(
        "fsdp_cpu_offload",
        "memory.offload.weights",
        truth,
        changed="runs on more than one GPU only",
        idle=("false",),
    ),
    Row("device", lost=f"{BY_ITSELF}the machine's own is taken"),
)


def _build(sheet: Sheet, draft: Draft) -> None:
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


def _run(sheet: Sheet, draft: Draft) -> None:
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


def _model(sheet: Sheet, draft: Draft) -> None:
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
        draft.put("tokenizer.source", path, "tokenizer.path", sheet.where("tokenizer.path"))
    elif path:
        draft.note(
            "changed",
            "tokenizer.path",
            "is the file in the model's own folder; the model's own tokenizer is taken, which has"
            " the same ids",
        )


def _data(sheet: Sheet, draft: Draft) -> None:
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


def _training(sheet: Sheet, draft: Draft) -> None:
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


def _optimizer(sheet: Sheet, draft: Draft) -> None:
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
    draft.put(
        "train.clip_norm",
        sheet.get("clip_grad_norm"),
        "clip_grad_norm",
        sheet.where("clip_grad_norm"),
    )


def _memory(sheet: Sheet, draft: Draft) -> None:
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


def _tracking(sheet: Sheet, draft: Draft) -> None:
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
