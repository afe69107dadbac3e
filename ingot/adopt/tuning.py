"""What LLaMA-Factory and axolotl have in common: the arguments of transformers' Trainer, with its
defaults, and adapters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.adopt.read import Given, GivenEntry
from ingot.adopt.table import (
    Draft,
    GivenKeys,
    KeyRow,
    hub_source,
    number,
    ratio,
    run_name,
    text,
    truth,
    whole,
)

NOT_NEEDED = "not needed: "
PUSHED = "`ingot push` puts a run on the hub"
LOST = {
    "trust_remote_code": "code of a model's repository is never run",
    "hub_model_id": PUSHED,
    "resume_from_checkpoint": f"{NOT_NEEDED}the same command goes on; --fresh begins anew",
    "load_best_model_at_end": "checkpoint.best=loss exports the best weights",
}
"""What no tuner's recipe takes along of the Trainer's keys."""
SHARDED = "parallel.shard=auto shares weights, gradients and optimizer over all devices (FSDP2)"
ADAMW = re.compile(r"(paged_|ao_|optimi_)?adamw(_\w+)?")
"""What AdamW is called; `galore_adamw` and `schedule_free_adamw` are others."""
PURE = (
    "the weights had this format there too; here the optimizer changes fp32 weights"
    " (precision.master=stochastic for less memory)"
)
NEVER_DROPPED = {
    **dict.fromkeys(
        ("dpo", "ipo", "simpo", "orpo", "kto"),
        "training on preferences turns all dropout off there, an adapter's too",
    ),
    "grpo": "answers are sampled without dropout",
}
"""Why an adapter has no dropout, by objective.kind."""
TEMPLATES = ("alpaca", "chatml", "hermes", "llama2", "llama3", "mistral", "zephyr")
BUILDERS = {"json": "jsonl", "csv": "csv", "parquet": "parquet", "arrow": "arrow", "text": "text"}
"""What `datasets` calls a format of files, also in the place of a name -> data.train[].format."""
COSINE_RATIO = "cosine_min_lr_ratio"
"""What axolotl reads for the schedule `cosine`, of which transformers knows nothing."""
SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


@dataclass(frozen=True)
class TunerKeys:
    """What a tuner calls the keys that `build_training` reads; by default as transformers'
    TrainingArguments, which know no adapters.
    """

    batch: str = "per_device_train_batch_size"
    epochs: str = "num_train_epochs"
    schedule: str = "lr_scheduler_type"
    optimizer: str = "optim"
    rank: str = ""
    targets: str = ""
    full: bool = False
    """Whether products are those of fp32 unless a key says otherwise."""
    warmup: float = 0
    """The share of the steps that warms up where no key says how many, up to 100 steps."""


def source(given: Given) -> str:
    """A model of the hub, or a folder."""
    name = text(given)
    return name if Path(name).is_dir() else hub_source(name).source


def flag(given: Given) -> bool:
    """`auto`, which stands for whatever the device can do, counts as true, and so do ways of doing
    it (`full`, `offload`).
    """
    return text(given).lower() in ("auto", "full", "offload", "offload_disk") or truth(given)


def trainer_rows(*, optimizer: str) -> tuple[KeyRow, ...]:
    """The rows of the keys that `TunerKeys` names by default, with the Trainer's defaults."""
    return (
        KeyRow("per_device_train_batch_size", "train.micro_batch", whole, default="8"),
        KeyRow("per_device_eval_batch_size", "evaluate.micro_batch", whole),
        KeyRow("num_train_epochs", read=number, default="3"),
        KeyRow("lr_scheduler_type", default="linear"),
        KeyRow("optim", default=optimizer),
    )


def rows(*own: KeyRow, lost: dict[str, str]) -> tuple[KeyRow, ...]:
    """The rows of a tuner: its own, those of the Trainer, and keys that are not carried over, those
    of `LOST` among them.
    """
    return (
        *own,
        KeyRow("output_dir"),
        KeyRow("gradient_accumulation_steps", read=whole, default="1"),
        KeyRow("max_steps", read=whole),
        KeyRow("learning_rate", "train.optimizer.lr", number, default="5e-5"),
        KeyRow("weight_decay", "train.optimizer.weight_decay", number, default="0.0"),
        KeyRow("adam_beta1", read=number, default="0.9"),
        KeyRow("adam_beta2", read=number, default="0.999"),
        KeyRow("adam_epsilon", "train.optimizer.eps", number),
        KeyRow("max_grad_norm", read=number),
        KeyRow("warmup_ratio", read=number),
        KeyRow("warmup_steps", read=number),
        KeyRow("lr_scheduler_kwargs.min_lr_rate", read=number),
        KeyRow("lr_scheduler_kwargs.min_lr", read=number),
        KeyRow("lora_alpha", read=number),
        KeyRow("lora_dropout", read=number),
        KeyRow("use_dora", read=truth, also=("peft_use_dora",)),
        KeyRow("use_rslora", read=truth, also=("peft_use_rslora",)),
        KeyRow("loraplus_lr_ratio", read=number),
        KeyRow("neftune_noise_alpha", "model.neftune_alpha", number),
        KeyRow("bf16", read=flag, also=("pure_bf16",)),
        KeyRow(
            "fp16",
            read=truth,
            changed="half precision is bf16 here, which needs no scaling of the loss",
            idle=("false",),
        ),
        KeyRow("seed", "seed", whole, default="42"),
        KeyRow("logging_steps", "track.every", whole),
        KeyRow("save_steps", read=number),
        KeyRow("save_strategy"),
        KeyRow("save_total_limit", "checkpoint.keep", whole),
        KeyRow("eval_steps", read=number),
        KeyRow("eval_strategy", also=("evaluation_strategy",)),
        KeyRow("deepspeed"),
        KeyRow("fsdp"),
        KeyRow("fsdp_config"),
        KeyRow("fsdp_config.*"),
        *(
            KeyRow(key, lost=why, idle=("false", "none", "0", "0.0"))
            for key, why in {**LOST, **lost}.items()
        ),
    )


def build_run(sheet: GivenKeys, draft: Draft) -> None:
    """Where it is kept."""
    parts = [part for part in (sheet.get("output_dir") or "").split("/") if part not in ("", ".")]
    remark = sheet.name("output_dir")
    draft.put("name", run_name("-".join(parts[-2:]) or None, "tuned"), remark)


def build_tracking(sheet: GivenKeys, draft: Draft, project: str) -> None:
    """The trackers that the Trainer reports to; W&B and Trackio in the trainer's own `project`."""
    for tracker in ("wandb", "mlflow", "trackio"):
        if tracker in (sheet.get("report_to") or ()):
            own = {} if tracker == "mlflow" else {"project": project}
            about = named({**own, "name": sheet.get("run_name")})
            draft.put(f"track.{tracker}", about, sheet.name("report_to"))


def build_weights(
    sheet: GivenKeys, draft: Draft, kind: str, read: Mapping[str, tuple[str, Sequence[str]]]
) -> None:
    """Keys that a loss alone reads -> its knob, and the kinds of objective that have it."""
    for key, (knob, kinds) in read.items():
        if sheet.has(key) and kind in kinds:
            draft.put_from(sheet, key, f"objective.{knob}")
        elif sheet.get(key):
            draft.note("lost", key, f"{kind} has no objective.{knob}")


def build_quantized(sheet: GivenKeys, draft: Draft, kind: str, key: str, double: str) -> None:
    """Frozen weights of `kind`, as `key` says; `double`: the key that says how scales are kept."""
    draft.put("model.quantize.kind", kind, key)
    if kind == "nf4":
        remark = double if sheet.has(double) else f"{double}, its default there"
        draft.put("model.quantize.double", sheet.get(double), remark, sheet.where(double))


def build_early_stop(sheet: GivenKeys, draft: Draft, key: str) -> None:
    """A recipe stops early only where it says in steps or epochs when to evaluate."""
    if not (patience := sheet.get(key)):
        return
    knob = "train.early_stop.patience"
    if "evaluate_every" in draft.values.tree["train"]:
        draft.put_from(sheet, key, knob)
    else:
        draft.note("fill", key, f"set {knob}={patience} together with train.evaluate_every")


def build_training(sheet: GivenKeys, draft: Draft, keys: TunerKeys, multiple: int = 1) -> None:
    """Batch, length, optimizer, schedule, precision, layout. A batch is rounded up to a multiple of
    `multiple`.
    """
    times = "gradient_accumulation_steps"
    given = sheet.get(keys.batch) * sheet.get(times)
    batch = -(-given // multiple) * multiple
    rounded = "" if batch == given else f" ({given} is not whole groups of {multiple})"
    both = f"{keys.batch} x {times}"
    draft.put("train.global_batch", batch, both, sheet.where(keys.batch, times))
    draft.note(
        "changed",
        f"{keys.batch}, {times}",
        f"were per device; train.global_batch is {batch}{rounded}, of one. On N devices set it to"
        f" {batch} x N for the same training",
    )
    if (steps := sheet.get("max_steps")) and steps > 0:
        draft.put_from(sheet, "max_steps", "train.steps")
    else:
        draft.put_from(sheet, keys.epochs, "train.epochs")
    _optimizer(sheet, draft, keys)
    _schedule(sheet, draft, keys)
    _precision(sheet, draft, keys)
    given = next((key for key in ("deepspeed", "fsdp", "fsdp_config.*") if sheet.has(key)), None)
    if given and "shard" not in draft.values.tree.get("parallel", {}):
        draft.put("parallel.shard", "auto", given.removesuffix(".*"))
        draft.note("changed", given.removesuffix(".*"), SHARDED)
    for steps_key, way, knob in (
        ("save_steps", "save_strategy", "checkpoint.every"),
        ("eval_steps", "eval_strategy", "train.evaluate_every"),
    ):
        if sheet.get(way) == "epoch":
            draft.put_from(sheet, way, knob)
        elif (every := sheet.get(steps_key)) and every >= 1:
            draft.put_from(sheet, steps_key, knob, int(every))
        elif every:
            draft.note("lost", steps_key, f"is a share of the training; set {knob} to steps")


def _precision(sheet: GivenKeys, draft: Draft, keys: TunerKeys) -> None:
    half, scaled = sheet.get("bf16"), sheet.get("fp16")
    if half or scaled:
        draft.put("precision.compute", "bf16", "bf16" if half else "fp16")
    elif half is False or keys.full:
        remark = "bf16" if half is False else "bf16, which is not given"
        draft.put("precision.compute", "fp32", remark)
        if half is None:
            about = (
                "is not given, nor fp16, and products are those of fp32 there without them;"
                " precision.compute=bf16 is several times as fast on an accelerator"
            )
            draft.note("fill", "bf16", about)
    if half and (sheet.name("bf16") == "pure_bf16" or sheet.given["bf16"].value == "full"):
        draft.note("changed", sheet.name("bf16"), PURE)


def _optimizer(sheet: GivenKeys, draft: Draft, keys: TunerKeys) -> None:
    betas = [sheet.get("adam_beta1"), sheet.get("adam_beta2")]
    draft.put("train.optimizer.betas", betas, "the Trainer's, unless given")
    if (norm := sheet.get("max_grad_norm")) is not None:
        # The Trainer does not clip to a norm of 0.
        draft.put_from(sheet, "max_grad_norm", "train.clip_norm", norm if norm > 0 else None)
    elif "max_grad_norm" in sheet.nulls:
        about = "has no value, with which transformers does not clip: train.clip_norm=null"
        draft.note("fill", "max_grad_norm", about)
    if not ADAMW.fullmatch(kind := sheet.get(keys.optimizer)):
        about = f"{kind} is not offered; AdamW with the same learning rate stands for it"
        draft.note("changed", keys.optimizer, about)
    elif "bit" in kind or "fp8" in kind:
        draft.note("changed", keys.optimizer, f"{kind}: its state is float32 here, and larger")


def _schedule(sheet: GivenKeys, draft: Draft, keys: TunerKeys) -> None:
    kind = sheet.get(keys.schedule)
    if kind not in SCHEDULES:
        draft.note("changed", keys.schedule, f"{kind} is not offered; cosine stands for it")
    draft.put("train.schedule.kind", SCHEDULES.get(kind, "cosine"), keys.schedule)
    _warmup(sheet, draft, keys)
    lowest, remark = _lowest(sheet, draft, kind)
    if lowest is None and "min_lr" in kind:
        draft.note("fill", keys.schedule, f"{kind}: set train.schedule.min_ratio to its minimum")
    draft.put("train.schedule.min_ratio", lowest or 0.0, remark)


def _warmup(sheet: GivenKeys, draft: Draft, keys: TunerKeys) -> None:
    given = [key for key in ("warmup_steps", "warmup_ratio") if sheet.has(key)]
    key = next(filter(sheet.get, given), "")
    steps = sheet.get(key) if key else 0 if given else keys.warmup
    remark = "warmup_steps or warmup_ratio" if given else "warmup_steps, its default there"
    if sheet.get(keys.schedule) == "constant":
        if key:
            draft.note("lost", key, "not needed: constant never warms up there, and does not here")
        steps, remark = 0, "constant never warms up there"
    elif not given and keys.warmup:
        draft.note(
            "changed",
            "warmup_steps",
            f"is not given: {keys.warmup:g} of all steps, of which 100 at most warm up there; here"
            " all of them. Set train.schedule.warmup=100 where that is less",
        )
    where = sheet.where("warmup_steps", "warmup_ratio")
    whole_steps = int(steps) if steps >= 1 else steps
    draft.put("train.schedule.warmup", whole_steps, remark, where)


def _lowest(sheet: GivenKeys, draft: Draft, kind: str) -> tuple[float | None, str]:
    """The learning rate at the end as a share of the peak, if a key says it that this kind of
    schedule reads; and which one.
    """
    share, rate = "lr_scheduler_kwargs.min_lr_rate", "lr_scheduler_kwargs.min_lr"
    read = (share, rate) if "min_lr" in kind else (COSINE_RATIO,) if kind == "cosine" else ()
    given = list(filter(sheet.has, (COSINE_RATIO, share, rate)))
    for key in given:
        if key not in read:
            draft.note("lost", key, f"{NOT_NEEDED}the schedule {kind} does not read it there")
    peak = draft.values.tree["train"]["optimizer"]["lr"]
    key = next((key for key in given if key in read), "")
    if key == rate and peak > 0:
        return ratio(sheet.get(rate), peak), f"{rate} of learning_rate"
    return (sheet.get(key), key) if key and key != rate else (None, "to zero there")


def build_adapter(
    sheet: GivenKeys,
    draft: Draft,
    keys: TunerKeys,
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    undropped: str | None = None,
) -> None:
    """An adapter; `rank`, `alpha` (twice the rank where it is None), `dropout` and `targets` (all
    linear layers where it is empty) are the trainer's unless given. `undropped`: why there is no
    dropout, whatever the key says.
    """
    rank = sheet.get(keys.rank) or rank
    for key, knob, usual in (
        (keys.rank, "rank", rank),
        ("lora_alpha", "alpha", 2.0 * rank if alpha is None else alpha),
        ("lora_dropout", "dropout", dropout),
    ):
        given = sheet.get(key)
        remark = key if sheet.has(key) else f"{key}, its default there"
        value = usual if given is None else given
        if undropped and knob == "dropout":
            if value:
                draft.note("changed", key, f"0 here: {undropped}")
            value, remark = 0.0, undropped
        draft.put(f"model.lora.{knob}", value, remark)
    targets = sheet.get(keys.targets) or targets
    every = not targets or list(targets) in (["all"], ["all-linear"])
    remark = keys.targets if sheet.has(keys.targets) else f"{keys.targets}, which is not given"
    draft.put("model.lora.targets", "all-linear" if every else list(targets), remark)
    for key, kind in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if sheet.get(key):
            draft.put("model.lora.kind", kind, key)
    if ratio := sheet.get("loraplus_lr_ratio"):
        draft.put("model.lora.plus_ratio", ratio, "loraplus_lr_ratio")


def build_template(draft: Draft, key: str, name: str | None) -> None:
    """How turns are written: a template that ingot has too, or else the model's own."""
    if name in TEMPLATES:
        draft.put("tokenizer.template", name, key)
    elif name:
        draft.note(
            "changed",
            key,
            f"{name}: the model's own chat template is taken; tokenizer.template names another"
            f" one ({', '.join(TEMPLATES)}, or a file)",
        )


def listed(sheet: GivenKeys, key: str) -> list[dict[str, GivenEntry]]:
    """The items of a list of mappings, or of one mapping or path alone, each with its entries by
    key.
    """
    items: dict[str, dict[str, GivenEntry]] = {}
    for file in sheet.files:
        for entry in file.entries:
            head, _, rest = entry.key.partition(".")
            number, _, name = rest.partition(".")
            if head != key or entry.empty:
                continue
            if number.isdecimal():
                items.setdefault(number, {})[name] = entry
            elif rest or isinstance(entry.value, str):
                items.setdefault("", {})[rest or "path"] = entry
    return list(items.values())


def named(values: dict[str, Any]) -> dict[str, Any]:
    """Without what is not given."""
    return {name: value for name, value in values.items() if value not in (None, "", {}, [])}
