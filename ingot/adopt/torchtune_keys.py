"""The keys of cloud resources, pipelines and torchtune, and the knob of each that has one."""

from __future__ import annotations

import re

from ingot.adopt.read import Given
from ingot.adopt.table import (
    GivenKeys,
    KeyRow,
    number,
    text,
    texts,
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
"""torchtune's model builders -> the hub's models that they build."""
IMAGES = (
    "holds that project's code; build ingot's own with `ingot images build`, or name one in"
    " cloud.images"
)
BY_ITSELF = "not needed: "
FEWEST, MOST = 16, 1024  # limits of the permutations of data.clean.fuzzy


def last_part(given: Given) -> str:
    """The id at the end of `projects/P/locations/R/tensorboards/ID`, or the id itself."""
    return text(given).rstrip("/").rpartition("/")[2]


def last_name(sheet: GivenKeys, key: str) -> str:
    """What a component is called, without its modules; empty if it is not given."""
    return str(sheet.get(key) or "").rpartition(".")[2]


def secret_reference(given: Given) -> str:
    """`secret:NAME` from a name, or from `projects/P/secrets/NAME/versions/V`."""
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
    KeyRow("PROJECT_ID", "cloud.project"),
    KeyRow("PROJECT_NUMBER", lost=f"{BY_ITSELF}the project's id says which one it is"),
    KeyRow("REGION", "cloud.region"),
    KeyRow("REPOSITORY", "cloud.repository", last_part),
    KeyRow("SERVICE_ACCOUNT", "cloud.service_account"),
    KeyRow("SUBNETWORK", "cloud.subnetwork", last_part),
    KeyRow("HF_SECRET_NAME", "cloud.secrets.HF_TOKEN", secret_reference),
    KeyRow("TENSORBOARD", "cloud.tensorboard", last_part),
    KeyRow("BUCKET_NAME", "cloud.bucket", bucket_name),
    KeyRow("SPARK_RUNTIME_VERSION", "pipeline.spark.version"),
    KeyRow("PYTHON_VERSION", lost=f"{BY_ITSELF}ingot's images have their own Python"),
    KeyRow("CUDA_VERSION", lost=f"{BY_ITSELF}ingot's training image has its own CUDA"),
    KeyRow(
        "PYTHON_IMAGE", lost=IMAGES, also=("PYTHON_IMAGE_NAME", "PYTHON_IMAGE_URI", "IMAGE_PYTHON")
    ),
    KeyRow("CUDA_IMAGE", lost=IMAGES, also=("CUDA_IMAGE_NAME", "CUDA_IMAGE_URI", "IMAGE_CUDA")),
    KeyRow("SPARK_IMAGE", lost=IMAGES, also=("SPARK_IMAGE_NAME", "SPARK_IMAGE_URI", "IMAGE_SPARK")),
)
PIPELINE = (
    KeyRow("pretrained_hf_model"),
    KeyRow("source_query"),
    KeyRow("normal_form", "data.clean.normalize", normal_form),
    KeyRow("ngram_len", read=whole, default="5"),
    KeyRow("minhash_perm", read=whole, default="2"),
    KeyRow("sim_threshold", read=similarity, default="0.2"),
    KeyRow("train_config"),
)
SHUFFLED = "ingot always shuffles, the same way in every run of a seed"
TRAINING = (
    KeyRow("output_dir"),
    KeyRow("tokenizer._component_", lost=f"{BY_ITSELF}the model's own tokenizer is taken"),
    KeyRow("tokenizer.path"),
    KeyRow("tokenizer.max_seq_len", "data.seq_len", whole, default="4096", null="no limit"),
    KeyRow("dataset.*"),
    KeyRow("dataset._component_"),
    KeyRow("dataset.source"),
    KeyRow("dataset.name"),
    KeyRow("dataset.data_files", read=texts),
    KeyRow("dataset.split"),
    KeyRow("dataset.column"),
    KeyRow("dataset.train_on_input", read=truth),
    KeyRow(
        "dataset.packed",
        "data.pack",
        lambda given: "best_fit" if truth(given) else "none",
        changed=(
            "rows are packed by best_fit, whole documents that do not see each other; data.pack=cut"
            " cuts one stream instead"
        ),
        idle=("false",),
    ),
    KeyRow("seed", "seed", whole),
    KeyRow("shuffle", lost=SHUFFLED, idle=("true",)),
    KeyRow("model._component_"),
    KeyRow("model.lora_attn_modules", read=texts),
    KeyRow("model.apply_lora_to_mlp", read=truth),
    KeyRow("model.apply_lora_to_output", read=truth),
    KeyRow("model.lora_rank", read=whole, default="8"),
    KeyRow("model.lora_alpha", read=number, default="16"),
    KeyRow("model.lora_dropout", read=number, default="0"),
    KeyRow("model.use_dora", read=truth),
    KeyRow("model.quantize_base", read=truth),
    KeyRow("checkpointer.checkpoint_dir"),
    *(
        KeyRow(
            f"checkpointer.{key}",
            lost=f"{BY_ITSELF}weights come from model.source, checkpoints lie in the run folder",
        )
        for key in (
            "_component_",
            "checkpoint_files",
            "recipe_checkpoint",
            "output_dir",
            "model_type",
            "safe_serialization",
        )
    ),
    KeyRow(
        "checkpointer",
        lost=f"{BY_ITSELF}weights come from model.source, checkpoints lie in the run folder",
    ),
    KeyRow(
        "resume_from_checkpoint",
        lost=f"{BY_ITSELF}the same command goes on from the newest checkpoint; --fresh begins anew",
        idle=("false",),
    ),
    KeyRow("batch_size", "train.micro_batch", whole, default="8"),
    KeyRow("gradient_accumulation_steps", read=whole, default="8"),
    KeyRow("epochs", read=whole, default="2"),
    KeyRow("max_steps_per_epoch", read=whole),
    KeyRow("optimizer._component_", default="torch.optim.AdamW"),
    KeyRow("optimizer.lr", read=number),
    KeyRow(
        "optimizer.weight_decay",
        "train.optimizer.weight_decay",
        number,
        default="0.01",
        changed="matrices only decay here, never norms and biases",
        idle=("0", "0.0"),
    ),
    KeyRow("optimizer.betas"),
    KeyRow("optimizer.eps", "train.optimizer.eps", number),
    KeyRow("optimizer.fused", lost="ingot's AdamW is always the fused one", idle=("true",)),
    KeyRow("lr_scheduler._component_"),
    KeyRow("lr_scheduler.num_warmup_steps", read=whole),
    KeyRow("clip_grad_norm", read=number),
    KeyRow("loss._component_", also=("loss",)),
    KeyRow("loss.beta", read=number),
    KeyRow("loss.tau", read=number),
    KeyRow("loss.gamma", read=number),
    KeyRow("loss.label_smoothing", read=number),
    KeyRow("enable_activation_checkpointing", read=truth),
    KeyRow("enable_activation_offloading", read=truth),
    KeyRow("compile", "train.compile", truth),
    KeyRow(
        "optimizer_in_bwd",
        lost=(
            "the step follows the whole backward pass here; memory.offload.optimizer saves memory"
            " instead"
        ),
        idle=("false",),
    ),
    KeyRow(
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
    KeyRow("metric_logger._component_"),
    KeyRow("metric_logger.project"),
    KeyRow("metric_logger.log_dir", lost="metrics lie in the run folder"),
    KeyRow("log_every_n_steps", "track.every", whole),
    KeyRow("log_peak_memory_stats", "track.gpu", truth),
    KeyRow("profiler._component_", lost="torch's profiler, by train.profile"),
    KeyRow("profiler.enabled", read=truth),
    KeyRow("profiler.wait_steps", read=whole),
    KeyRow("profiler.warmup_steps", read=whole),
    KeyRow("profiler.active_steps", read=whole),
    KeyRow(
        "fsdp_cpu_offload",
        "memory.offload.weights",
        truth,
        changed="runs on more than one GPU only",
        idle=("false",),
    ),
    KeyRow("device", lost=f"{BY_ITSELF}the machine's own is taken"),
)
