"""Fine-tuning T5 on a cluster of virtual machines and serving it: a JSON file of seventeen keys,
and command-line options.
"""

from __future__ import annotations

import re
from typing import Any

from ingot.adopt.read import Given
from ingot.adopt.table import (
    Draft,
    GivenKeys,
    KeyRow,
    Project,
    hub_source,
    run_name,
    text,
    truth,
    whole,
)

BRINGS_ITS_OWN = re.compile(r"(a2|a3|a4|a4x|g2|g4)-")
"""Machine types that include their accelerators."""


def zone(given: Given) -> str:
    if not re.fullmatch(r"[a-z]+(-[a-z0-9]+)+-[a-z]", text(given)):
        raise ValueError("a zone, such as us-central1-c")
    return text(given)


def count(given: Given) -> int:
    if not 0 < (found := whole(given)) <= 100_000:
        raise ValueError("a number from 1 to 100,000")
    return found


def accelerators(given: Given) -> int:
    if not 0 <= (found := whole(given)) <= 1000:
        raise ValueError("a number from 0 to 1000")
    return found


def option(key: str) -> tuple[str, ...]:
    """A key's spelling as a command-line option."""
    return (f"--{key.replace('_', '-')}",)


ROWS = (
    KeyRow("dataset"),
    KeyRow("dataset_subset", default="default"),
    KeyRow("document_column"),
    KeyRow("summary_column"),
    KeyRow("cluster_prefix", lost="machines are named after the run"),
    KeyRow("zone", "cloud.zone", zone),
    KeyRow("node_count", "launch.nodes", count, default="1"),
    KeyRow("model_checkpoint"),
    KeyRow("machine_type", "launch.machine.type"),
    KeyRow("gpu_type"),
    KeyRow("gpu_count", read=accelerators, default="1"),
    KeyRow("batch_size", "train.micro_batch", count, default="8"),
    KeyRow("epochs", "train.epochs", count, default="1"),
    KeyRow("model_display_name"),
    KeyRow("deploy_machine_type", "serve.machine.type"),
    KeyRow("deploy_gpu_type"),
    KeyRow("deploy_gpu_count", read=accelerators, default="0"),
    KeyRow("project", "cloud.project", also=option("project")),
    KeyRow("pipeline_root", also=option("pipeline_root")),
    KeyRow("config", lost="names the JSON; give that file too", also=option("config"), idle=("",)),
    KeyRow("enable_caching", "pipeline.cache", truth, also=option("enable_caching")),
    KeyRow("override_deploy", read=truth, also=option("override_deploy")),
    KeyRow(
        "verify",
        lost="is an option of the verb here: ingot deploy NAME --verify",
        also=option("verify"),
        idle=("false",),
    ),
    KeyRow(
        "verify_payload",
        lost="`ingot deploy NAME --verify` sends serve.prompt",
        also=option("verify_payload"),
    ),
    KeyRow(
        "verify_result",
        lost="`ingot deploy NAME --verify` compares with the model's own answer",
        also=option("verify_result"),
    ),
    KeyRow(
        "image_tag",
        lost=(
            "is of that project's images; build ingot's own with `ingot images build`, or name one"
            " in cloud.images"
        ),
        also=option("image_tag"),
    ),
)


def _build(sheet: GivenKeys, draft: Draft) -> None:
    name = sheet.get("model_display_name")
    draft.put_from(sheet, "model_display_name", "name", run_name(name, "t5"))
    draft.put("registry.kind", "vertex", "fixed there")
    if name:
        draft.put_from(sheet, "model_display_name", "registry.name", run_name(name))
    _model(sheet, draft)
    _data(sheet, draft)
    _machines(sheet, draft)
    _fixed(draft)
    if sheet.has("zone"):
        draft.put_from(sheet, "zone", "cloud.region", sheet.get("zone").rpartition("-")[0])
    root = sheet.get("pipeline_root")
    if root:
        draft.put_from(sheet, "pipeline_root", "pipeline.root", root)
        draft.put_from(
            sheet, "pipeline_root", "cloud.bucket", root.removeprefix("gs://").partition("/")[0]
        )
    if missing := [
        f"cloud.{key}"
        for key, given in (("project", sheet.has("project")), ("bucket", root))
        if not given
    ]:
        draft.note(
            "fill",
            ", ".join(missing),
            "stood on that project's command line (--project, --pipeline_root); set it before a"
            " launch",
        )
    if sheet.get("override_deploy"):
        draft.put("gate.override", "deploy", "override_deploy")


def _model(sheet: GivenKeys, draft: Draft) -> None:
    given = sheet.get("model_checkpoint")
    source, moved = hub_source(given or "google-t5/t5-small")
    draft.put_from(sheet, "model_checkpoint", "model.source", source)
    if not given:
        draft.note("fill", "model.source", "no file has model_checkpoint; T5 small stands for it")
    if moved:
        draft.note(
            "changed",
            "model_checkpoint",
            f"{moved} is called {source.removeprefix('hf:')} on the hub now",
        )
    if source.startswith("gs://"):
        draft.note(
            "fill",
            "model.source",
            "a model in a bucket must be copied to a folder first; give the folder",
        )


def _data(sheet: GivenKeys, draft: Draft) -> None:
    given, subset = sheet.get("dataset"), sheet.get("dataset_subset")
    source, moved = hub_source(given or "EdinburghNLP/xsum")
    if moved:
        draft.note(
            "changed", "dataset", f"{moved} is called {source.removeprefix('hf:')} on the hub now"
        )
    if not given:
        draft.note("fill", "data.train", "no file has dataset; XSum stands for it")
    if source.startswith("hf:") and subset != "default":
        source = f"{source}:{subset}"
    columns = {
        "source": sheet.get("document_column") or "document",
        "target": sheet.get("summary_column") or "summary",
    }
    draft.put(
        "data.train",
        [{"source": source, "columns": columns}],
        "dataset, dataset_subset, document_column, summary_column",
        sheet.where("dataset"),
    )
    draft.put(
        "data.validation",
        [{"source": source, "split": "validation", "columns": columns}],
        "the same, split validation",
        sheet.where("dataset"),
    )


def _machines(sheet: GivenKeys, draft: Draft) -> None:
    nodes = sheet.get("node_count")
    devices = max(1, sheet.get("gpu_count"))
    rows = sheet.get("batch_size")
    draft.put("launch.kind", "gce", "a cluster of virtual machines there")
    draft.put_from(sheet, "gpu_count", "launch.processes", devices)
    draft.put(
        "train.global_batch",
        rows * nodes * devices,
        "batch_size x gpu_count x node_count",
        sheet.where("batch_size"),
    )
    draft.note(
        "changed",
        "batch_size",
        f"was per GPU: train.micro_batch is {rows}, train.global_batch {rows} x {devices} x {nodes}"
        f" = {rows * nodes * devices}",
    )
    _accelerator(sheet, draft, "launch", "machine_type", "gpu_type", "gpu_count")
    _accelerator(
        sheet, draft, "serve", "deploy_machine_type", "deploy_gpu_type", "deploy_gpu_count"
    )
    if nodes * devices > 1:
        draft.put(
            "parallel.shard", nodes * devices, "ZeRO-3, fixed there", sheet.where("gpu_count")
        )
        draft.put(
            "memory.offload.weights",
            True,
            "ZeRO-3 with parameters and optimizer offloaded, fixed there",
        )
    else:
        draft.put(
            "memory.offload.optimizer",
            1.0,
            "ZeRO-3 with parameters and optimizer offloaded, fixed there",
        )
        draft.note(
            "changed",
            "gpu_count x node_count",
            "one GPU has nothing to share: the optimizer is offloaded, the weights stay on the GPU",
        )


def _accelerator(
    sheet: GivenKeys, draft: Draft, section: str, machine_key: str, type_key: str, count_key: str
) -> None:
    """Set the accelerators of a machine, unless its type includes them."""
    machine, accelerator, number = sheet.get(machine_key), sheet.get(type_key), sheet.get(count_key)
    if machine and BRINGS_ITS_OWN.match(machine):
        draft.note(
            "changed",
            f"{type_key}, {count_key}",
            f"{machine} brings its accelerators, and {section}.machine does not name them",
        )
        own = re.search(r"-(\d+)g", machine)
        if own and sheet.has(count_key) and int(own[1]) != number:
            draft.note(
                "clash",
                f"{machine_key} and {count_key}",
                f"{machine} has {own[1]} accelerators, {count_key} says {number}",
            )
        return
    if accelerator and number:
        draft.put_from(sheet, type_key, f"{section}.machine.accelerator", accelerator)
        draft.put_from(sheet, count_key, f"{section}.machine.accelerators", number)


def _fixed(draft: Draft) -> None:
    draft.fixed(
        data__seq_len=256,
        data__target_len=30,
        objective__kind="seq2seq",
        objective__prefix="",
        train__optimizer__lr=5.6e-5,
        train__optimizer__weight_decay=0.01,
        checkpoint__keep=10,
        precision__compute="bf16",
        gate__metric=["rouge/rouge1", "rouge/rouge2", "rouge/rougeL"],
    )
    draft.put(
        "evaluate.tasks",
        [{"kind": "loss"}, {"kind": "rouge", "limit": None, "max_tokens": 30}],
        "ROUGE of all validation pairs there",
    )
    own: dict[str, Any] = {
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "schedule.kind": "linear",
        "schedule.warmup": 0,
        "schedule.min_ratio": 0.0,
    }
    for knob, value in own.items():
        draft.put(f"train.{knob}", value, "transformers' own")
    draft.put("train.evaluate_every", "epoch", "once an epoch there")
    draft.note(
        "changed", "ROUGE", "was times 100; it is a share of 1 here, which matters to gate.margin"
    )


PROJECT = Project(
    "a T5 pipeline on Google Cloud",
    "a JSON with dataset, model_checkpoint, machine_type and the like (seventeen keys)",
    ROWS,
    _build,
)
