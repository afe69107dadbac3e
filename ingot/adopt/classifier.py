"""Fine-tuning RoBERTa as a classifier: the flags of its script, including those of Lightning."""

from __future__ import annotations

import re

from ingot.adopt.read import Given
from ingot.adopt.table import (
    Draft,
    GivenKeys,
    KeyRow,
    Project,
    hub_source,
    number,
    run_name,
    text,
    whole,
)

TPU_CORES = 8


def devices(given: Given) -> int:
    """Parse Lightning's `--gpus`: a number, or ids such as `0,1`; 0 for `-1` or `all`."""
    if isinstance(given, tuple):
        return len(given)
    value = text(given)
    if "," in value:
        return len([part for part in value.split(",") if part.strip()])
    if value.lower() in ("-1", "all", "auto"):
        return 0
    if not re.fullmatch("[0-9]{1,4}", value):
        raise ValueError("a number of GPUs, or their numbers with commas between them")
    return max(1, int(value))


def classes(given: Given) -> int:
    if not 2 <= (found := whole(given)) <= 10_000:
        raise ValueError("a number from 2 to 10,000")
    return found


def precision(given: Given) -> str:
    known = {
        "16": "bf16",
        "16-mixed": "bf16",
        "bf16": "bf16",
        "bf16-mixed": "bf16",
        "32": "fp32",
        "32-true": "fp32",
        "64": "fp32",
        "64-true": "fp32",
    }
    if text(given).lower() not in known:
        raise ValueError("16, 32, 64 or bf16")
    return known[text(given).lower()]


def batches(given: Given) -> int | float:
    """A number of batches, or a share of them, as Lightning tells them apart: by the point."""
    words = text(given)
    value = int(words) if re.fullmatch("[0-9]+", words) else number(given)
    if value <= 0 or (isinstance(value, float) and value > 1):
        raise ValueError("a share from 0 to 1 (1.0), or a number of batches")
    return value


ROWS = (
    KeyRow("--job-dir"),
    KeyRow("--train-data-file"),
    KeyRow("--batch-size", "train.micro_batch", whole, default="16"),
    KeyRow("--num-classes", read=classes, default="4"),
    KeyRow("--model-name", default="roberta-large"),
    KeyRow("--pretrained-model-path"),
    KeyRow("--learning-rate", "train.optimizer.lr", number, default="1e-3"),
    KeyRow("--gpus", read=devices),
    KeyRow("--num-nodes", "launch.nodes", whole),
    KeyRow("--tpu-cores", read=whole),
    KeyRow("--accelerator"),
    KeyRow("--precision", "precision.compute", precision),
    KeyRow("--max-epochs", read=whole),
    KeyRow("--accumulate-grad-batches", read=whole, default="1"),
    KeyRow("--gradient-clip-val", read=number),
    KeyRow("--gradient-clip-algorithm", lost="gradients are clipped by their norm", idle=("norm",)),
    KeyRow("--limit-train-batches", read=batches),
    KeyRow("--max-steps", read=whole),
    KeyRow("--log-every-n-steps", "track.every", whole),
)


def _build(sheet: GivenKeys, draft: Draft) -> None:
    draft.put(
        "name", run_name(sheet.get("--model-name").rpartition("/")[2]), sheet.name("--model-name")
    )
    _places(sheet, draft)
    _model(sheet, draft)
    _devices(sheet, draft)
    given = text(sheet.given["--precision"].value).lower() if sheet.has("--precision") else ""
    if given.startswith(("16", "64")):
        draft.note(
            "changed",
            sheet.name("--precision"),
            f"{given} is not offered; {sheet.get('--precision')} is the nearest format that trains"
            " safely",
        )
    _length(sheet, draft)
    if sheet.has("--gradient-clip-val"):  # 0 means no clipping there
        draft.put_from(
            sheet,
            "--gradient-clip-val",
            "train.clip_norm",
            sheet.get("--gradient-clip-val") or None,
        )
    draft.note(
        "fill",
        "train.optimizer, train.schedule",
        "all but the learning rate was inside that script; ingot's own defaults stand",
    )


def _length(sheet: GivenKeys, draft: Draft) -> None:
    """Set the length of training: epochs, steps, or epochs of a given number of batches."""
    epochs, steps = sheet.get("--max-epochs"), sheet.get("--max-steps") or -1
    limit = sheet.get("--limit-train-batches") or 1.0
    accumulated = max(1, sheet.get("--accumulate-grad-batches"))
    if steps > 0:
        draft.put_from(sheet, "--max-steps", "train.steps", steps)
        if epochs is not None:
            about = "--max-steps is given too, and says here how long is trained"
            draft.note("changed", sheet.name("--max-epochs"), about)
    elif isinstance(limit, int):
        made = -(-limit // accumulated) * (epochs or 1)
        draft.put_from(sheet, "--limit-train-batches", "train.steps", made)
        about = f"{limit} batches in each of {epochs or 1} epochs are {made} steps in all"
        draft.note("changed", sheet.name("--limit-train-batches"), about)
    elif epochs is not None:
        draft.put_from(sheet, "--max-epochs", "train.epochs", epochs)
    else:
        draft.note("fill", "train.epochs", "no --max_epochs is given; one epoch is trained")
    if isinstance(limit, float) and limit < 1:
        draft.put_from(sheet, "--limit-train-batches", "data.fraction", limit)
        about = "the same share of the documents in each epoch, chosen by a hash of them"
        draft.note("changed", sheet.name("--limit-train-batches"), about)


def _places(sheet: GivenKeys, draft: Draft) -> None:
    job, file = sheet.get("--job-dir"), sheet.get("--train-data-file")
    if job and job.startswith("gs://"):
        if job.removeprefix("gs://").strip("/").count("/"):
            draft.put("checkpoint.upload", job.rstrip("/"), sheet.name("--job-dir"))
        draft.put(
            "cloud.bucket",
            job.removeprefix("gs://").partition("/")[0],
            sheet.name("--job-dir"),
            sheet.where("--job-dir"),
        )
        draft.note(
            "changed",
            sheet.name("--job-dir"),
            "the run lies in runs/ on the machine; checkpoints are copied to the bucket"
            " (checkpoint.upload)",
        )
        draft.note(
            "fill",
            "launch.kind",
            "the run starts on this machine; for a job on Google Cloud add"
            " recipes/places/vertex.yaml",
        )
    elif job:
        draft.put("output", job, sheet.name("--job-dir"))
    draft.put(
        "data.train",
        [{"source": file or "data/labelled.csv"}],
        sheet.name("--train-data-file"),
        sheet.where("--train-data-file"),
    )
    if not file:
        draft.note(
            "fill", "data.train", "no --train-data-file is given; data/labelled.csv stands for it"
        )
    draft.note(
        "fill",
        "data.train",
        "the columns `text` and `label` are expected; other names go into `columns` ({text: body}),"
        " or `names` without a header",
    )


def _model(sheet: GivenKeys, draft: Draft) -> None:
    name, path = sheet.get("--model-name"), sheet.get("--pretrained-model-path")
    source, moved = hub_source(name)
    draft.put(
        "model.source",
        path or source,
        sheet.name("--pretrained-model-path" if path else "--model-name"),
        sheet.where("--model-name"),
    )
    if path:
        draft.note("fill", "model.source", f"{path} must be a Hugging Face folder on this machine")
    elif moved:
        draft.note(
            "changed",
            sheet.name("--model-name"),
            f"{moved} is called {source.removeprefix('hf:')} on the hub now",
        )
    number_of = sheet.get("--num-classes")
    draft.put("objective.kind", "classify", "fixed there")
    draft.put(
        "objective.labels",
        [str(label) for label in range(number_of)],
        sheet.name("--num-classes"),
        sheet.where("--num-classes"),
    )
    draft.note(
        "fill",
        "objective.labels",
        "the classes are called by their numbers; give them names, in that order",
    )


def _devices(sheet: GivenKeys, draft: Draft) -> None:
    gpus = sheet.get("--gpus")
    nodes = sheet.get("--num-nodes") or 1
    rows = sheet.get("--batch-size")
    accelerator = (sheet.get("--accelerator") or "").lower()
    cores = sheet.get("--tpu-cores") or (TPU_CORES if accelerator == "tpu" else 0)
    processes = gpus or cores or 1
    accumulated = max(1, sheet.get("--accumulate-grad-batches"))
    batch = rows * processes * nodes * accumulated
    draft.put(
        "launch.processes",
        processes,
        sheet.name("--gpus" if gpus is not None else "--tpu-cores"),
        sheet.where("--gpus", "--tpu-cores"),
    )
    if gpus == 0:
        draft.note(
            "fill",
            "launch.processes",
            f"{sheet.name('--gpus')} asked for all GPUs; set it to how many there are, and"
            " train.global_batch likewise",
        )
    if cores:
        draft.put("launch.kind", "tpu", sheet.name("--tpu-cores"))
        draft.note(
            "fill",
            "launch.tpu",
            "the type of the TPU VM is not said there; set launch.tpu.type and cloud.zone",
        )
    draft.put(
        "train.global_batch",
        batch,
        "batch size x devices x nodes" + (" x accumulated batches" if accumulated > 1 else ""),
        sheet.where("--batch-size"),
    )
    draft.note(
        "changed",
        sheet.name("--batch-size"),
        f"was per device: train.micro_batch is {rows}, train.global_batch {batch}",
    )
    if accelerator in ("dp", "horovod", "ddp2", "ddp_spawn"):
        draft.note(
            "changed",
            sheet.name("--accelerator"),
            f"{accelerator} is not offered; the devices share the batch as under ddp",
        )
    elif accelerator not in ("", "ddp", "ddp_cpu", "gpu", "cpu", "tpu", "auto"):
        draft.note(
            "lost",
            sheet.name("--accelerator"),
            f"{accelerator} is not known; the devices share the batch (ddp)",
        )


PROJECT = Project(
    "a RoBERTa classifier",
    "flags such as --job-dir, --train-data-file, --num_classes, --max_epochs",
    ROWS,
    _build,
)
