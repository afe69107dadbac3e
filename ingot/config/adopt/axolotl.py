"""An axolotl YAML."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.adopt.read import GivenEntry
from ingot.config.adopt.table import (
    Draft,
    GivenKeys,
    KeyRow,
    Project,
    hub_source,
    number,
    texts,
    truth,
    whole,
)
from ingot.config.adopt.tuning import (
    NOT_NEEDED,
    TunerKeys,
    build_adapter,
    build_run,
    build_template,
    build_training,
    flag,
    named,
    rows,
    source,
)

KEYS = TunerKeys(
    batch="micro_batch_size",
    epochs="num_epochs",
    schedule="lr_scheduler",
    optimizer="optimizer",
    rank="lora_r",
    targets="lora_target_modules",
)
WAYS = ("dpo", "ipo", "simpo", "orpo", "kto")
ANSWERED = {"field_instruction": "instruction", "field_input": "input", "field_output": "output"}
MESSAGES = {
    "field_messages": "messages",
    "message_field_role": "role",
    "message_field_content": "content",
    "message_property_mappings.role": "role",
    "message_property_mappings.content": "content",
}
FILES = re.compile(r"\.(jsonl?|parquet|csv|tsv|arrow|txt)(\.gz|\.zst)?$")
ROWS = rows(
    KeyRow("base_model", "model.source", source),
    KeyRow("revision_of_model", "model.revision"),
    KeyRow("tokenizer_config", "tokenizer.source", source),
    KeyRow("datasets.*"),
    KeyRow("test_datasets.*"),
    KeyRow("pretraining_dataset.*"),
    KeyRow("chat_template"),
    KeyRow("val_set_size", read=number),
    KeyRow("sequence_len", "data.seq_len", whole, default="512"),
    KeyRow("sample_packing", read=truth),
    KeyRow("adapter"),
    KeyRow("lora_r", read=whole),
    KeyRow("lora_target_modules", read=texts),
    KeyRow("lora_target_linear", read=truth),
    KeyRow("load_in_4bit", read=truth),
    KeyRow("load_in_8bit", read=truth),
    KeyRow("rl"),
    KeyRow("rl_beta", read=number, also=("dpo_beta", "orpo_alpha")),
    KeyRow("micro_batch_size", "train.micro_batch", whole, default="1"),
    KeyRow("eval_batch_size", "evaluate.micro_batch", whole),
    KeyRow("num_epochs", read=number, default="1"),
    KeyRow("lr_scheduler", default="cosine"),
    KeyRow("optimizer", default="adamw_torch_fused"),
    KeyRow("gradient_checkpointing", read=flag),
    KeyRow("torch_compile", "train.compile", truth),
    KeyRow("tensor_parallel_size", "parallel.tensor", whole),
    KeyRow("context_parallel_size", "parallel.context", whole),
    KeyRow("evals_per_epoch", read=whole),
    KeyRow("saves_per_epoch", read=whole),
    KeyRow("early_stopping_patience", "train.early_stop.patience", whole),
    KeyRow("wandb_project"),
    KeyRow("wandb_entity"),
    KeyRow("wandb_name", also=("wandb_run_id",)),
    lost={
        "train_on_inputs": "only what the assistant says is trained",
        "special_tokens.*": "the tokenizer's own special tokens are kept",
        "tokens": "no tokens are added to a tokenizer that a model has",
        "lora_modules_to_save": "an adapter trains linear layers alone",
        "trust_remote_code": "code of a model's repository is never run",
        "group_by_length": f"{NOT_NEEDED}packing leaves little padding",
        "plugins": "plugins of axolotl are not run",
        "hub_model_id": "`ingot push` puts a run on the hub",
        "lora_model_dir": "model.lora.adapter goes on from an adapter",
        "resume_from_checkpoint": f"{NOT_NEEDED}the same command goes on; --fresh begins anew",
        **dict.fromkeys(
            ("model_type", "tokenizer_type", "flash_attention", "sdp_attention"),
            f"{NOT_NEEDED}chosen by itself",
        ),
        **dict.fromkeys(
            ("tf32", "strict", "pad_to_sequence_len", "eval_sample_packing"),
            f"{NOT_NEEDED}done by itself",
        ),
        **dict.fromkeys(
            (
                "dataset_prepared_path",
                "wandb_watch",
                "wandb_log_model",
                "debug",
                "local_rank",
                "dataset_processes",
            ),
            f"{NOT_NEEDED}done by itself",
        ),
    },
)


def _build(sheet: GivenKeys, draft: Draft) -> None:
    build_run(sheet, draft)
    if not sheet.has("base_model"):
        raise WrongInput(f"{sheet.files[0].path} has no base_model; add it")
    _data(sheet, draft)
    build_training(sheet, draft, KEYS)
    if (way := sheet.get("adapter")) in ("lora", "qlora"):
        if sheet.get("lora_target_linear"):
            sheet.given.pop("lora_target_modules", None)
        build_adapter(sheet, draft, KEYS, rank=8, alpha=2.0)
    elif way:
        draft.note("changed", "adapter", f"{way} is not offered; all weights are trained")
    for key, kind in (("load_in_8bit", "int8"), ("load_in_4bit", "nf4")):
        if sheet.get(key):
            draft.put("model.quantize.kind", kind, key)
    if sheet.get("gradient_checkpointing"):
        draft.put("memory.recompute.kind", "full", "gradient_checkpointing")
    for key, knob in (
        ("evals_per_epoch", "train.evaluate_every"),
        ("saves_per_epoch", "checkpoint.every"),
    ):
        if (times := sheet.get(key)) == 1:
            draft.put(knob, "epoch", key)
        elif times:
            draft.note("fill", key, f"{times} an epoch; set {knob} to that many steps")
    track = {name: sheet.get(f"wandb_{name}") for name in ("project", "entity", "name")}
    if track["project"]:
        draft.put("track.wandb", named(track), "wandb_project")


def _listed(sheet: GivenKeys, key: str) -> list[dict[str, GivenEntry]]:
    """The items of a list of mappings, of which each has its entries by key."""
    items: dict[str, dict[str, GivenEntry]] = {}
    for file in sheet.files:
        for entry in file.entries:
            head, _, rest = entry.key.partition(".")
            number, _, name = rest.partition(".")
            if head == key and number.isdecimal() and not entry.empty:
                items.setdefault(number, {})[name] = entry
    return list(items.values())


def _data(sheet: GivenKeys, draft: Draft) -> None:
    rl = sheet.get("rl")
    texts_alone = _listed(sheet, "pretraining_dataset")
    items = texts_alone or _listed(sheet, "datasets")
    if not items:
        raise WrongInput(f"{sheet.files[0].path} lists no `datasets`, each with its path; add them")
    kinds = {str(item["type"].value) for item in items if "type" in item}
    plain = bool(texts_alone) or (bool(kinds) and all(k.startswith("completion") for k in kinds))
    kind = rl if rl in WAYS else "pretrain" if plain else "sft"
    if rl and rl not in WAYS:
        draft.note("fill", "rl", f"{rl} is not carried over (docs/guides/ways.md); {kind} stands")
    draft.put("objective.kind", kind, "rl" if rl in WAYS else "datasets[].type")
    if rl in WAYS and (beta := sheet.get("rl_beta")) is not None:
        draft.put("objective.beta", beta, sheet.name("rl_beta"))
    draft.put("data.train", [_source(item, kind, draft) for item in items], "datasets")
    if held := _listed(sheet, "test_datasets"):
        draft.put("data.validation", [_source(item, kind, draft) for item in held], "test_datasets")
    elif (share := sheet.get("val_set_size")) and share < 1:
        draft.put_from(sheet, "val_set_size", "data.validation.fraction")
    elif share:
        draft.note("fill", "val_set_size", "is a number of rows; set data.validation.fraction")
    if kind in ("sft", "pretrain"):
        packs = bool(sheet.get("sample_packing"))
        draft.put("data.pack", "best_fit" if packs else "none", "sample_packing")
    template = sheet.get("chat_template")
    if template is None and kind == "sft" and kinds and all(k.startswith("alpaca") for k in kinds):
        template = "alpaca"  # as such data are written there
    build_template(draft, "chat_template", template)


def _source(item: dict[str, GivenEntry], kind: str, draft: Draft) -> dict[str, Any]:
    """A data set as a source of a recipe."""
    given = {name: str(entry.value) for name, entry in item.items()}
    path, way = given.get("path", ""), given.get("type", "")
    if not path:
        raise WrongInput(f"{next(iter(item.values())).where}: a data set has no path; add it")
    local = path.startswith((".", "/", "~")) or FILES.search(path)
    if local or given.get("ds_type") or PurePath(path).suffix:
        where = given.get("data_files", path)
    else:
        where = hub_source(path).source + (f":{given['name']}" if "name" in given else "")
    found: dict[str, Any] = {"source": where, "split": given.get("split")}
    if kind == "pretrain":
        return named({**found, "text": given.get("field") or given.get("text_column")})
    columns: dict[str, str] = {}
    if kind == "sft" and way.startswith("alpaca"):
        found["layout"] = "alpaca"
    elif kind == "sft" and way not in ("", "chat_template", "sharegpt"):
        draft.note(
            "fill",
            "datasets[].type",
            f"{way} of {path}: say by layout and columns what its rows hold, and see how they are"
            " written by `ingot show mask`",
        )
    for names in (ANSWERED, MESSAGES):
        columns |= {ours: given[key] for key, ours in names.items() if key in given}
    renamed = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return named({**found, "columns": renamed})


PROJECT = Project(
    "axolotl",
    "an axolotl YAML with base_model, datasets and sequence_len",
    ROWS,
    _build,
)
