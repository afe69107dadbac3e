"""Megatron-style pretraining of Llama: the flags of training, of conversion and of preprocessing,
in both of their spellings.
"""

from __future__ import annotations

from collections.abc import Callable

from ingot.adopt.megatron_experts import EXPERT_ROWS, build_experts, degree
from ingot.adopt.read import Given
from ingot.adopt.table import (
    Draft,
    GivenKeys,
    KeyRow,
    Project,
    hub_source,
    number,
    ratio,
    run_name,
    text,
    truth,
    whole,
)

CONVERSION = ("--source", "--output-path", "--model-config-name", "--overwrite")


def one_of(*known: str) -> Callable[[Given], str]:
    def read(given: Given) -> str:
        if text(given).lower() not in known:
            raise ValueError(" or ".join(known))
        return text(given).lower()

    return read


ROWS = (
    KeyRow("--executor", "launch.kind", one_of("local", "slurm"), default="local"),
    KeyRow("--experiment", also=("-E",), default="pretraining"),
    KeyRow("--account", also=("-A",), default="root"),
    KeyRow("--partition", also=("-P",), default="defq"),
    KeyRow("--container-image", also=("-I",)),
    KeyRow("--num-nodes", "launch.nodes", degree, also=("-N",), default="1"),
    KeyRow("--num-gpus", "launch.processes", degree, also=("-G",), default="8"),
    KeyRow("--model-name", also=("-M",)),
    KeyRow("--hf-model-id"),
    KeyRow("--nemo-model"),
    KeyRow("--max-steps", "train.steps", degree),
    KeyRow("--global-batch-size", "train.global_batch", degree, also=("-gbs",), default="2048"),
    KeyRow("--micro-batch-size", "train.micro_batch", degree, also=("-mbs",), default="1"),
    KeyRow("--seq-length", "data.seq_len", degree, default="8192"),
    KeyRow("--fp8", read=truth),
    KeyRow("--tensor-model-parallel-size", "parallel.tensor", degree, also=("-TP",), default="1"),
    KeyRow(
        "--pipeline-model-parallel-size", "parallel.pipeline", degree, also=("-PP",), default="1"
    ),
    KeyRow("--virtual-pipeline-model-parallel-size", read=degree, also=("-VPP",)),
    KeyRow("--context-parallel-size", "parallel.context", degree, also=("-CP",), default="1"),
    KeyRow("--sequence-parallel", "parallel.sequence", truth, also=("-SP",), default="false"),
    KeyRow("--dataset-dir", also=("--dataset-path",)),
    KeyRow("--wandb", read=truth),
    KeyRow("--wandb-project"),
    KeyRow("--wandb-name"),
    KeyRow("--recompute-granularity", read=one_of("full", "selective")),
    KeyRow("--recompute-method", read=one_of("block", "uniform")),
    KeyRow("--recompute-num-layers", read=degree),
    KeyRow("--deterministic-mode", "train.deterministic", truth),
    KeyRow("--cpu-offloading", read=truth),
    KeyRow("--cpu-offloading-layers", lost="the activations of all layers are offloaded"),
    KeyRow("--cpu-offloading-activations", read=truth),
    KeyRow("--cpu-offloading-weights", read=truth),
    KeyRow("--optim-cpu-offloading", read=truth),
    KeyRow("--optim-cpu-offloading-frac", read=number, default="1.0"),
    KeyRow("--optimizer", default="adam"),
    KeyRow("--lr", "train.optimizer.lr", number, default="5e-6"),
    KeyRow("--min-lr", read=number, default="1e-6"),
    KeyRow("--warmup-steps", "train.schedule.warmup", whole, default="50"),
    KeyRow(
        "--constant-steps",
        lost="the cosine ends with the last step, at the least learning rate",
        idle=("0",),
    ),
    KeyRow("--adam-beta1", read=number, default="0.9"),
    KeyRow("--adam-beta2", read=number, default="0.999"),
    KeyRow("--weight-decay", "train.optimizer.weight_decay", number, default="0"),
    KeyRow("--clip-grad", read=number, default="1"),
    *(KeyRow(flag) for flag in CONVERSION),
    KeyRow("--hf-tokenizer", also=("--ht-tokenizer",)),
    KeyRow("--data-prefix"),
    KeyRow("--input-dir"),
    KeyRow("--output-dir"),
    *EXPERT_ROWS,
)


def _build(sheet: GivenKeys, draft: Draft) -> None:
    draft.put("name", run_name(sheet.get("--experiment")), sheet.name("--experiment"))
    if not sheet.has("--max-steps"):
        draft.put("train.epochs", 1, "no --max-steps there")
    _slurm(sheet, draft)
    _model(sheet, draft)
    _data(sheet, draft)
    _layout(sheet, draft)
    _memory(sheet, draft)
    _optimizer(sheet, draft)
    build_experts(sheet, draft)
    if sheet.get("--wandb"):
        knobs = {"project": sheet.get("--wandb-project") or "pretraining"}
        if sheet.has("--wandb-name"):
            knobs["name"] = sheet.get("--wandb-name")
        draft.put("track.wandb", knobs, "--wandb, --wandb-project, --wandb-name")
    elif given := [flag for flag in ("--wandb-project", "--wandb-name") if sheet.has(flag)]:
        draft.note("lost", ", ".join(given), "Weights & Biases is off without --wandb")
    if sheet.get("--fp8"):
        draft.put("precision.float8", "tensorwise", "--fp8")
        draft.put(
            "precision.compute", "bf16", "--fp8: all but the large products", sheet.where("--fp8")
        )


def _slurm(sheet: GivenKeys, draft: Draft) -> None:
    if sheet.get("--executor") != "slurm":
        for key in ("--account", "--partition", "--container-image"):
            if sheet.has(key):
                draft.note(
                    "lost",
                    sheet.name(key),
                    "is for --executor slurm; set launch.kind to slurm to use it",
                )
        return
    for key, knob in (
        ("--account", "account"),
        ("--partition", "partition"),
        ("--container-image", "image"),
    ):
        if (value := sheet.get(key)) is not None:
            draft.put(
                f"launch.slurm.{knob}",
                value,
                sheet.name(key) if sheet.has(key) else f"{key}, its default there",
                sheet.where(key),
            )
    draft.put(
        "launch.slurm.gpus",
        sheet.get("--num-gpus"),
        sheet.name("--num-gpus"),
        sheet.where("--num-gpus"),
    )
    if sheet.has("--container-image"):
        draft.put("launch.code", "image", sheet.name("--container-image"))
        draft.note(
            "fill",
            "launch.slurm.image",
            "that image holds NeMo; name one that has ingot installed (images/train)",
        )
    else:
        draft.note(
            "changed",
            "--container-image",
            "an image of NeMo stood for none there; the nodes' own software runs here, with ingot"
            " installed on them",
        )


def _model(sheet: GivenKeys, draft: Draft) -> None:
    given = sheet.get("--hf-model-id") or (sheet.get("--source") if sheet.has("--source") else None)
    source, moved = hub_source(given or "meta-llama/Llama-3.1-8B")
    if moved:
        draft.note(
            "changed", "model.source", f"{moved} is called {source.removeprefix('hf:')} on the hub"
        )
    flag = "--hf-model-id" if sheet.has("--hf-model-id") else "--source"
    draft.put("model.source", source, flag, sheet.where("--hf-model-id", "--source"))
    if not given:
        draft.note("fill", "model.source", "no file has --hf-model-id; Llama 3.1 8B stands for it")
    if sheet.has("--nemo-model"):
        draft.put_from(sheet, "--nemo-model", "model.init", "weights")
        draft.note(
            "changed",
            "--nemo-model",
            "weights come from model.source; if that checkpoint is another, name a Hugging Face"
            " folder of it",
        )
    else:
        draft.put("model.init", "random", "no --nemo-model there", sheet.where("--hf-model-id"))
        draft.note(
            "changed",
            "--hf-model-id",
            "gave the sizes and the tokenizer, and without --nemo-model weights were random:"
            " model.init=weights trains on",
        )
    if sheet.has("--model-name"):
        draft.note(
            "lost", sheet.name("--model-name"), "not needed: the sizes come from model.source"
        )
    if sheet.has(*CONVERSION):
        flags = ", ".join(sheet.name(key) for key in CONVERSION if sheet.has(key))
        overwrite = " --overwrite" if sheet.get("--overwrite") else ""
        draft.note(
            "lost",
            flags,
            f"conversion is a verb: `ingot import SRC DST{overwrite}` (from Hugging Face or Meta),"
            " `ingot export` for the way back",
        )


def _data(sheet: GivenKeys, draft: Draft) -> None:
    folder, texts, made, prefix = (
        sheet.get(key) for key in ("--dataset-dir", "--input-dir", "--output-dir", "--data-prefix")
    )
    if tokenizer := sheet.get("--hf-tokenizer"):
        draft.put(
            "tokenizer.source",
            hub_source(tokenizer).source,
            sheet.name("--hf-tokenizer"),
            sheet.where("--hf-tokenizer"),
        )
    if folder:
        _columns(sheet, draft, folder, prefix)
        if texts:
            draft.note(
                "lost",
                "--input-dir",
                "the .bin and .idx of --dataset-dir are used as they are; give it as data.train for"
                " ingot to tokenise anew",
            )
        if made and made.rstrip("/") != folder.rstrip("/"):
            draft.note(
                "clash",
                f"--output-dir and {sheet.name('--dataset-dir')}",
                f"{made} is written there and {folder} is read; {folder} is taken",
            )
    else:
        _texts(sheet, draft, texts)
        if made or prefix:
            draft.note(
                "lost",
                "--output-dir, --data-prefix",
                "`ingot prepare` writes the same .bin and .idx into the run folder",
            )


def _columns(sheet: GivenKeys, draft: Draft, folder: str, prefix: str | None) -> None:
    """Train on the .bin and .idx files of a folder."""
    stem = f"{prefix}_text_document" if prefix else "*"
    name = sheet.name("--dataset-dir")
    source = f"megatron:{folder.rstrip('/')}/{stem}"
    draft.put("data.train", [{"source": source}], name, sheet.where("--dataset-dir"))
    if not prefix:
        draft.note(
            "changed",
            name,
            "all .bin and .idx of the folder are read; write the prefix of one for that alone",
        )


def _texts(sheet: GivenKeys, draft: Draft, folder: str | None) -> None:
    """Train on the JSONL files of a folder."""
    source = f"{folder.rstrip('/')}/*.jsonl" if folder else "data/*.jsonl"
    draft.put_from(sheet, "--input-dir", "data.train", [{"source": source, "text": "text"}])
    if not folder:
        draft.note(
            "fill",
            "data.train",
            "no file has --dataset-dir or --input-dir; data/*.jsonl stands for it",
        )


def _layout(sheet: GivenKeys, draft: Draft) -> None:
    virtual = sheet.get("--virtual-pipeline-model-parallel-size")
    stages = sheet.get("--pipeline-model-parallel-size")
    if virtual and stages > 1:
        draft.put("parallel.virtual", virtual, sheet.name("--virtual-pipeline-model-parallel-size"))
    elif virtual and virtual > 1:
        draft.note(
            "lost",
            sheet.name("--virtual-pipeline-model-parallel-size"),
            "means nothing without a pipeline",
        )
    world = sheet.get("--num-nodes") * sheet.get("--num-gpus")
    copy = stages * sheet.get("--tensor-model-parallel-size") * sheet.get("--context-parallel-size")
    batch, micro = sheet.get("--global-batch-size"), sheet.get("--micro-batch-size")
    if world % copy:
        draft.note(
            "clash",
            "nodes, GPUs and parallel sizes",
            f"{world} GPUs do not divide by tensor x pipeline x context = {copy}; change one of"
            " them",
        )
    elif batch % (micro * (world // copy)):
        draft.note(
            "clash",
            "--global-batch-size and --micro-batch-size",
            f"{batch} is no multiple of {micro} x {world // copy} (micro-batch x data parallel)",
        )


def _memory(sheet: GivenKeys, draft: Draft) -> None:
    kind, method, layers = (
        sheet.get(f"--recompute-{what}") for what in ("granularity", "method", "num-layers")
    )
    if kind:
        draft.put_from(sheet, "--recompute-granularity", "memory.recompute.kind", kind)
    if kind == "full":
        if not (method and layers):
            draft.note(
                "changed",
                "--recompute-granularity",
                "full needed its method and number of layers; uniform and 1 stand for what is not"
                " given",
            )
        draft.put("memory.recompute.method", method or "uniform", "--recompute-method")
        draft.put("memory.recompute.layers", layers or 1, "--recompute-num-layers")
    elif method or layers:
        draft.note(
            "lost",
            "--recompute-method, --recompute-num-layers",
            "are for --recompute-granularity full",
        )
    offloads = sheet.get("--cpu-offloading")
    wanted = [
        key
        for key in ("--cpu-offloading-activations", "--cpu-offloading-weights")
        if sheet.get(key)
    ]
    if wanted and not offloads:
        draft.note("lost", ", ".join(wanted), "did nothing without --cpu-offloading")
    elif offloads and kind:
        draft.note(
            "clash",
            "--cpu-offloading and --recompute-granularity",
            "exclude each other, there and here; activations are computed again",
        )
    elif offloads and not wanted:
        draft.note("lost", "--cpu-offloading", "names neither activations nor weights")
    elif "--cpu-offloading-activations" in wanted:
        draft.put("memory.offload.activations", True, "--cpu-offloading-activations")
    if offloads and "--cpu-offloading-weights" in wanted:
        draft.note(
            "lost",
            "--cpu-offloading-weights",
            "weights are offloaded by sharding here: set parallel.shard above 1, and"
            " memory.offload.weights",
        )
    if sheet.get("--optim-cpu-offloading"):
        share = "--optim-cpu-offloading-frac"
        draft.put(
            "memory.offload.optimizer",
            sheet.get(share),
            share,
            sheet.where(share, "--optim-cpu-offloading"),
        )


def _optimizer(sheet: GivenKeys, draft: Draft) -> None:
    kind = sheet.get("--optimizer").lower()
    if kind not in ("adam", "adamw", "sgd"):
        draft.note("changed", "--optimizer", f"{kind} is not offered; AdamW stands for it")
    if kind == "sgd":
        draft.put("train.optimizer.kind", "sgd", "--optimizer")
    else:
        remark = (
            "--adam-beta1, --adam-beta2"
            if sheet.has("--adam-beta1", "--adam-beta2")
            else "its default there"
        )
        draft.put(
            "train.optimizer.betas",
            [sheet.get("--adam-beta1"), sheet.get("--adam-beta2")],
            remark,
            sheet.where("--adam-beta1", "--adam-beta2"),
        )
    draft.put("train.schedule.kind", "cosine", "fixed there")
    most, least = sheet.get("--lr"), sheet.get("--min-lr")
    if most > 0:
        draft.put(
            "train.schedule.min_ratio",
            min(1.0, max(0.0, ratio(least, most))),
            "--min-lr / --lr",
            sheet.where("--min-lr", "--lr"),
        )
    if least > most:
        draft.note("clash", "--min-lr and --lr", "the learning rate would rise; it stays at --lr")
    draft.put_from(sheet, "--clip-grad", "train.clip_norm", sheet.get("--clip-grad") or None)


PROJECT = Project(
    "Megatron-style pretraining",
    "flags such as --hf-model-id, --dataset-dir, --global-batch-size, -TP, --recompute-granularity",
    ROWS,
    _build,
)
