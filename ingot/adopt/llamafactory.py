"""A LLaMA-Factory YAML, with what its `dataset_info.json` says of the data sets where that is found
in `dataset_dir`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.adopt.splits import Sources, put_sources
from ingot.adopt.table import Draft, GivenKeys, KeyRow, Project, number, texts, truth, whole
from ingot.adopt.tuning import (
    NEVER_DROPPED,
    NOT_NEEDED,
    TunerKeys,
    build_adapter,
    build_early_stop,
    build_quantized,
    build_run,
    build_template,
    build_tracking,
    build_training,
    build_weights,
    named,
    rows,
    source,
    trainer_rows,
)
from ingot.base.errors import WrongInput
from ingot.base.exact_json import as_object

KEYS = TunerKeys(rank="lora_rank", targets="lora_target")
STAGES = {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
PREFERENCES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
WEIGHTS = {
    "dpo_label_smoothing": ("label_smoothing", ("dpo",)),
    "kto_chosen_weight": ("desirable_weight", ("kto",)),
    "kto_rejected_weight": ("undesirable_weight", ("kto",)),
}
REFERRING = ("dpo", "ipo", "kto")
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
"""What dataset_info.json calls a column -> ingot's usual name."""
LAYOUTS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
SPOKEN = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
"""What dataset_info.json calls a role -> its names that are known here."""
ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
INFO = frozenset(
    ("hf_hub_url", "file_name", "subset", "split", "formatting", "ranking", "columns", "tags")
) | {*ELSEWHERE}
"""What of a data set in dataset_info.json is read, or told by itself."""
UNREAD = {
    "num_samples": "data.train[].fraction takes a share, not the first rows",
    "folder": "every file of a data set on the hub is read",
    "revision": "a data set is taken as it is now",
}
SYSTEMS = {"zephyr": "You are Zephyr, a helpful assistant."}
"""Templates that begin with a system turn there where a row has none, and not here."""
ROWS = rows(
    KeyRow("model_name_or_path", "model.source", source),
    KeyRow("model_revision", "model.revision"),
    KeyRow("stage", default="sft"),
    KeyRow("finetuning_type", default="lora"),
    KeyRow("lora_rank", read=whole),
    KeyRow("lora_target", read=texts),
    KeyRow("quantization_bit", read=whole),
    KeyRow("double_quantization", read=truth, default="true"),
    KeyRow("dataset", read=texts),
    KeyRow("eval_dataset", read=texts),
    KeyRow("dataset_dir", default="data"),
    KeyRow("template"),
    KeyRow("cutoff_len", "data.seq_len", whole, default="2048"),
    KeyRow("val_size", read=number),
    KeyRow("packing", read=truth),
    KeyRow("neat_packing", read=truth),
    *trainer_rows(optimizer="adamw_torch"),
    KeyRow("disable_gradient_checkpointing", read=truth),
    KeyRow("pref_loss", default="sigmoid"),
    KeyRow("pref_beta", read=number, default="0.1"),
    KeyRow("pref_ftx", read=number, default="0"),
    *(KeyRow(key, read=number) for key in WEIGHTS),
    KeyRow("ref_model", read=source),
    KeyRow("simpo_gamma", read=number, default="0.5"),
    KeyRow("early_stopping_steps", read=whole),
    KeyRow("report_to", read=texts),
    KeyRow("run_name"),
    lost={
        "max_samples": "the first rows of each data set there; data.fraction takes a share here",
        "train_on_prompt": "only what the assistant says is trained",
        "mask_history": "every answer of a chat is trained, not the last alone",
        "freeze_trainable_layers": "all weights are trained, or an adapter",
        "adapter_name_or_path": "model.lora.adapter goes on from an adapter",
        "moe_aux_loss_coef": "train.experts.aux_loss is over sequences, that there over batches",
        "streaming": f"{NOT_NEEDED}rows are read from disk as they are needed",
        "predict_with_generate": "`ingot evaluate` and evaluate.prompts generate",
        "do_eval": "train.evaluate_every says when",
        "do_predict": "`ingot evaluate` does that",
        "enable_liger_kernel": "fused kernels of other packages are not used",
        "use_unsloth": "fused kernels of other packages are not used",
        **dict.fromkeys(
            ("flash_attn", "ddp_timeout", "overwrite_cache", "overwrite_output_dir", "do_train"),
            f"{NOT_NEEDED}done by itself",
        ),
        **dict.fromkeys(
            ("preprocessing_num_workers", "dataloader_num_workers", "plot_loss", "save_only_model"),
            f"{NOT_NEEDED}done by itself",
        ),
    },
)


def _build(sheet: GivenKeys, draft: Draft) -> None:
    build_run(sheet, draft)
    kind = _objective(sheet, draft)
    _data(sheet, draft, kind)
    build_training(sheet, draft, _keys(sheet))
    build_template(draft, "template", template := sheet.get("template"))
    if template in SYSTEMS and sheet.get("stage") != "pt":
        about = f"{template} begins a chat that has no system turn with {SYSTEMS[template]!r} there"
        draft.note("changed", "template", f"{about}; here with none")
    if not sheet.has("model_name_or_path"):
        raise WrongInput(
            f"{sheet.files[0].path} has no model_name_or_path; add it, or give the file that has it"
        )
    way = sheet.get("finetuning_type")
    if way == "lora":
        if sheet.get("lora_alpha") == 0:  # counts as not given there
            sheet.given.pop("lora_alpha")
        build_adapter(sheet, draft, KEYS, rank=8, undropped=NEVER_DROPPED.get(kind))
    elif way != "full":
        draft.note("changed", "finetuning_type", f"{way} is not offered; all weights are trained")
    if bits := sheet.get("quantization_bit"):
        kinds = {4: "nf4", 8: "int8"}
        given = ("quantization_bit", "double_quantization")
        build_quantized(sheet, draft, kinds.get(bits, "nf4"), *given)
        if bits not in kinds:
            draft.note("changed", "quantization_bit", f"{bits} are not offered; 4 stand for them")
    if not sheet.get("disable_gradient_checkpointing"):
        draft.put("memory.recompute.kind", "full", "gradient checkpointing, its default there")
    build_early_stop(sheet, draft, "early_stopping_steps")
    build_tracking(sheet, draft, "llamafactory")


def _keys(sheet: GivenKeys) -> TunerKeys:
    """Without bf16 and fp16, weights that are trained become fp32 there, and so do products where
    these are all weights. Those beside an adapter have the format of the model's files.
    """
    full = sheet.get("finetuning_type") == "full"
    if not full and sheet.get("bf16") is False:
        sheet.given.pop("bf16")
    return replace(KEYS, full=full)


def _objective(sheet: GivenKeys, draft: Draft) -> str:
    stage, loss = sheet.get("stage"), sheet.get("pref_loss")
    if stage not in STAGES:
        raise WrongInput(
            f"{sheet.where('stage')}: stage {stage} is not offered; those that are:"
            f" {', '.join(STAGES)}, and grpo in the place of ppo (docs/guides/ways.md)"
        )
    kind = STAGES[stage]
    if kind == "dpo":
        kind = PREFERENCES.get(loss, "dpo")
        if loss not in PREFERENCES:
            draft.note("changed", "pref_loss", f"{loss} is not offered; dpo stands for it")
    draft.put("objective.kind", kind, "pref_loss" if stage == "dpo" else "stage")
    if kind in ("dpo", "ipo", "simpo", "orpo", "kto"):
        draft.put_from(sheet, "pref_beta", "objective.beta")
    if kind == "simpo":
        draft.put_from(sheet, "simpo_gamma", "objective.margin")
    build_weights(sheet, draft, kind, WEIGHTS | {"ref_model": ("reference", REFERRING)})
    if sheet.get("pref_ftx") > 0 and kind in ("dpo", "simpo"):
        draft.put_from(sheet, "pref_ftx", "objective.sft_weight")
    elif sheet.get("pref_ftx") > 0 and kind in ("ipo", "orpo", "kto"):
        about = "more cross-entropy of the preferred answer is added there, and to dpo or simpo"
        draft.note("lost", "pref_ftx", f"{about} alone here, not to {kind}")
    return kind


def _data(sheet: GivenKeys, draft: Draft, kind: str) -> None:
    folder = Path(sheet.get("dataset_dir"))
    known = _dataset_info(folder)
    if not (names := sheet.get("dataset")):
        raise WrongInput(f"{sheet.files[0].path} names no `dataset`; add it")
    train, held_out = (
        Sources(
            [_source(name, folder, known, kind, draft) for name in sheet.get(key) or ()],
            "split",
            key,
            sheet.where(key),
        )
        for key in ("dataset", "eval_dataset")
    )
    put_sources(draft, train, held_out if sheet.has("eval_dataset") else None)
    share = sheet.get("val_size")
    if share and not sheet.has("eval_dataset"):
        if share < 1:
            draft.put_from(sheet, "val_size", "data.validation.fraction")
        else:
            draft.note("fill", "val_size", "is a number of rows; set data.validation.fraction")
    if kind in ("sft", "pretrain") and (kind == "sft" or sheet.has("packing")):
        packs = bool(sheet.get("packing") or sheet.get("neat_packing"))
        draft.put("data.pack", "best_fit" if packs else "none", "packing")
    packed = sheet.get("packing") if sheet.has("packing") else kind == "pretrain"
    if packed and not sheet.get("neat_packing"):
        about = "documents in one row see each other there, without neat_packing; never here"
        draft.note("changed", "packing", about)
    if kind != "pretrain":
        draft.note(
            "changed",
            "cutoff_len",
            "what is asked and the answer are cut in proportion there; here the end is:"
            " data.truncate",
        )
    if not known:
        draft.note(
            "fill",
            "dataset",
            f"{folder}/dataset_info.json is not there to say what {', '.join(names)} are: give"
            " their files, and layout and columns where they are not the usual ones",
        )


def _dataset_info(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return as_object(found)


def _text(value: Any) -> str | None:
    """The value if it is a text, else none."""
    return value if isinstance(value, str) else None


def _source(
    name: str, folder: Path, known: dict[str, Any], kind: str, draft: Draft
) -> dict[str, Any]:
    """A data set as a source of a recipe."""
    info = known.get(name)
    if not isinstance(info, dict):
        if known:
            draft.note("fill", "dataset", f"dataset_info.json does not have {name}; give its file")
        return {"source": f"{folder}/{name}.json"}
    where = _place(name, info, folder, draft)
    columns, tags = as_object(info.get("columns")), as_object(info.get("tags"))
    split = _text(info.get("split"))
    if kind == "pretrain":
        _left_out(name, info, ("prompt",), (), draft)
        return named({"source": where, "split": split, "text": columns.get("prompt")})
    layout = LAYOUTS.get(str(info.get("formatting")), "alpaca")
    usual = {**COLUMNS, "messages": "messages" if layout == "messages" else "conversations"}
    role, said = ("role", "content") if layout == "messages" else ("from", "value")
    renamed = {usual[key]: column for key, column in columns.items() if key in usual}
    renamed |= {role: tags.get("role_tag", role), said: tags.get("content_tag", said)}
    spoken = [tag for tag, names in SPOKEN.items() if tags.get(tag) in names]
    _left_out(name, info, usual, ("role_tag", "content_tag", *spoken), draft)
    draft.note(
        "changed",
        "columns",
        "those that dataset_info.json does not name are left out there; here rows that have system,"
        " tools, history or input keep them",
    )
    return named(
        {
            "source": where,
            "split": split,
            "layout": layout,
            "columns": {usual: theirs for usual, theirs in renamed.items() if usual != theirs},
        }
    )


def _place(name: str, info: dict[str, Any], folder: Path, draft: Draft) -> str:
    """The hub, which comes before a file there, too."""
    if hub := info.get("hf_hub_url"):
        return f"hf:{hub}" + (f":{info['subset']}" if info.get("subset") else "")
    others = [key for key in ELSEWHERE if key in info]
    if others or not info.get("file_name"):
        about = f"reads {' or '.join(others)}" if others else "is neither a file nor on the hub"
        draft.note("fill", "dataset", f"{name} {about}; give its file")
    if "file_name" in info and "subset" in info:
        draft.note("lost", "dataset", f"subset of {name}, which is a file, is not read")
    return f"{folder}/{info.get('file_name') or f'{name}.json'}"


def _left_out(
    name: str,
    info: dict[str, Any],
    columns: Collection[str],
    tags: Collection[str],
    draft: Draft,
) -> None:
    """Tells what dataset_info.json says of a data set and is not read."""
    for key in sorted(info.keys() - INFO):
        why = f": {UNREAD[key]}" if key in UNREAD else ""
        draft.note("lost", key, f"of {name} is not read{why}")
    for part, known in (("columns", columns), ("tags", tags)):
        for key in sorted(as_object(info.get(part)).keys() - set(known)):
            draft.note("lost", f"{part}.{key}", f"of {name} is not read")
    if "hf_hub_url" in info and "file_name" in info:
        draft.note("lost", "file_name", f"of {name}: hf_hub_url comes before it there, and here")
    if str(info.get("formatting", "alpaca")) not in LAYOUTS:
        about = f"{info['formatting']} of {name} is not known; it is read as alpaca"
        draft.note("changed", "formatting", about)


PROJECT = Project(
    "LLaMA-Factory",
    "a LLaMA-Factory YAML with model_name_or_path, stage and dataset",
    ROWS,
    _build,
)
