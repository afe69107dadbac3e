"""An axolotl YAML."""

from __future__ import annotations

from ingot.adopt.axolotl_data import sources_of, template_of
from ingot.adopt.grpo import begin_grpo, grpo_rows
from ingot.adopt.read import Given, GivenEntry
from ingot.adopt.splits import Sources, put_sources
from ingot.adopt.table import (
    Draft,
    GivenKeys,
    KeyRow,
    Project,
    number,
    text,
    texts,
    truth,
    whole,
)
from ingot.adopt.tuning import (
    COSINE_RATIO,
    NEVER_DROPPED,
    NOT_NEEDED,
    TunerKeys,
    build_adapter,
    build_early_stop,
    build_quantized,
    build_run,
    build_template,
    build_training,
    build_weights,
    flag,
    listed,
    named,
    rows,
    source,
)
from ingot.base.errors import WrongInput

KEYS = TunerKeys(
    batch="micro_batch_size",
    epochs="num_epochs",
    schedule="lr_scheduler",
    optimizer="optimizer",
    rank="lora_r",
    targets="lora_target_modules",
    warmup=0.03,
)
WAYS = ("dpo", "ipo", "simpo", "orpo", "kto", "grpo")
TRACKED = {
    "mlflow": {
        "mlflow_tracking_uri": "uri",
        "mlflow_experiment_name": "experiment",
        "mlflow_run_name": "name",
    },
    "trackio": {
        "trackio_project_name": "project",
        "trackio_run_name": "name",
        "trackio_space_id": "space",
    },
}
"""Trackers beside W&B: its keys -> those of ingot's section."""
NAMING = {"mlflow": "mlflow_experiment_name", "trackio": "trackio_project_name"}
"""Keys that turn a tracker on there whatever `use_` says."""
BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")
"""Names of the strength of every `rl`, whatever it is; the first that is given counts."""
WEIGHTS = {
    "dpo_label_smoothing": ("label_smoothing", ("dpo",)),
    "rpo_alpha": ("sft_weight", ("dpo",)),
    "kto_desirable_weight": ("desirable_weight", ("kto",)),
    "kto_undesirable_weight": ("undesirable_weight", ("kto",)),
}
DOUBLE = "bnb_config_kwargs.bnb_4bit_use_double_quant"
TOO_LONG = {"drop": "drop", "truncate": "right", "raise": "drop"}
"""What axolotl does with rows that are longer than sequence_len -> data.truncate."""


def too_long(given: Given) -> str:
    """One of the names that axolotl has for it."""
    name = text(given).lower()
    if name not in TOO_LONG:
        raise ValueError(f"one of {', '.join(TOO_LONG)}")
    return name


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
    KeyRow("excess_length_strategy", read=too_long, default="drop"),
    KeyRow("sample_packing", read=truth),
    KeyRow("adapter"),
    KeyRow("lora_r", read=whole),
    KeyRow("lora_target_modules", read=texts),
    KeyRow("lora_target_linear", read=truth),
    KeyRow("load_in_4bit", read=truth),
    KeyRow("load_in_8bit", read=truth),
    KeyRow(DOUBLE, read=truth, default="true"),
    KeyRow("rl"),
    *(KeyRow(key, read=number) for key in BETAS if key != "trl.beta"),
    *(KeyRow(key, read=number) for key in WEIGHTS),
    KeyRow("dpo_norm_loss", read=truth),
    KeyRow("simpo_gamma", read=number, default="0.5"),
    KeyRow("cpo_alpha", read=number, default="1.0"),
    *grpo_rows("trl."),
    KeyRow("micro_batch_size", "train.micro_batch", whole, default="1"),
    KeyRow("eval_batch_size", "evaluate.micro_batch", whole),
    KeyRow("num_epochs", read=number, default="1"),
    KeyRow("lr_scheduler", default="cosine"),
    KeyRow(COSINE_RATIO, read=number),
    KeyRow("optimizer", default="adamw_torch_fused"),
    KeyRow("gradient_checkpointing", read=flag),
    KeyRow("torch_compile", "train.compile", truth),
    KeyRow("tensor_parallel_size", "parallel.tensor", whole),
    KeyRow("context_parallel_size", "parallel.context", whole, also=("sequence_parallel_degree",)),
    KeyRow("expert_parallel_size", "parallel.expert", whole),
    KeyRow("dp_shard_size", "parallel.shard", whole),
    KeyRow("dp_replicate_size", "parallel.replicate", whole),
    KeyRow("evals_per_epoch", read=whole),
    KeyRow("saves_per_epoch", read=whole),
    KeyRow("early_stopping_patience", read=whole),
    KeyRow("wandb_project"),
    KeyRow("wandb_entity"),
    KeyRow("wandb_name", also=("wandb_run_id",)),
    KeyRow("use_tensorboard", "track.tensorboard", truth),
    *(KeyRow(key) for keys in TRACKED.values() for key in keys),
    *(KeyRow(f"use_{tracker}", read=truth) for tracker in TRACKED),
    lost={
        "train_on_inputs": "only what the assistant says is trained",
        "special_tokens.*": "the tokenizer's own special tokens are kept",
        "tokens": "no tokens are added to a tokenizer that a model has",
        "lora_modules_to_save": "an adapter trains linear layers alone",
        "group_by_length": f"{NOT_NEEDED}packing leaves little padding",
        "plugins": "plugins of axolotl are not run",
        "lora_model_dir": "model.lora.adapter goes on from an adapter",
        "activation_offloading": "memory.offload.activations, in the place of memory.recompute",
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
                "use_wandb",
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
    multiple = _data(sheet, draft)
    build_training(sheet, draft, KEYS, multiple)
    if (way := sheet.get("adapter")) in ("lora", "qlora"):
        _adapter(sheet, draft)
    elif way:
        draft.note("changed", "adapter", f"{way} is not offered; all weights are trained")
    for key, kind in (("load_in_8bit", "int8"), ("load_in_4bit", "nf4")):
        if sheet.get(key):
            build_quantized(sheet, draft, kind, key, DOUBLE)
    if sheet.get("gradient_checkpointing"):
        draft.put("memory.recompute.kind", "full", "gradient_checkpointing")
        if str(way := sheet.given["gradient_checkpointing"].value).startswith("offload"):
            about = f"{way}: activations are computed again here, and none are kept elsewhere"
            draft.note("changed", "gradient_checkpointing", about)
    for key, knob in (
        ("evals_per_epoch", "train.evaluate_every"),
        ("saves_per_epoch", "checkpoint.every"),
    ):
        if (times := sheet.get(key)) == 1:
            draft.put(knob, "epoch", key)
        elif times:
            draft.note("fill", key, f"{times} an epoch; set {knob} to that many steps")
    build_early_stop(sheet, draft, "early_stopping_patience")
    track = {name: sheet.get(f"wandb_{name}") for name in ("project", "entity", "name")}
    if track["project"]:
        draft.put("track.wandb", named(track), "wandb_project")
    for tracker, keys in TRACKED.items():
        use = f"use_{tracker}"
        given = list(filter(sheet.has, (use, *keys)))
        if (given and sheet.get(use) is not False) or sheet.has(NAMING[tracker]):
            section = named({knob: sheet.get(key) for key, knob in keys.items()})
            draft.put(f"track.{tracker}", section, given[0])


def _adapter(sheet: GivenKeys, draft: Draft) -> None:
    every = sheet.get("lora_target_linear")
    if every:
        sheet.given.pop("lora_target_modules", None)
    build_adapter(sheet, draft, KEYS, rank=8, undropped=NEVER_DROPPED.get(sheet.get("rl")))
    for key, knob in (("lora_r", "model.lora.rank"), ("lora_alpha", "model.lora.alpha")):
        if not sheet.has(key):
            value = draft.values.tree["model"]["lora"][knob.rpartition(".")[2]]
            draft.put(knob, value, f"{key}, which is not given")
            about = f"is not given, and axolotl has no default; {value:g} stands for it: {knob}"
            draft.note("fill", key, about)
    if every:
        draft.put("model.lora.targets", "all-linear", "lora_target_linear")
    elif not sheet.has("lora_target_modules"):
        about = "is not given, nor lora_target_linear; every linear layer gets an adapter"
        draft.note("fill", "lora_target_modules", about)


def _long_rows(sheet: GivenKeys, draft: Draft) -> None:
    """They are left out there unless it is said otherwise; here their ends would be cut off."""
    key = "excess_length_strategy"
    remark = key if sheet.has(key) else f"{key}, its default there"
    draft.put("data.truncate", TOO_LONG[sheet.get(key)], remark, sheet.where(key))
    if sheet.get(key) == "raise":
        draft.note("changed", key, "raise: rows that are too long are left out and counted here")


def _data(sheet: GivenKeys, draft: Draft) -> int:
    """Objective and data; returns what a batch is to be a multiple of."""
    rl = sheet.get("rl")
    if rl and rl not in WAYS:
        raise WrongInput(
            f"{sheet.where('rl')}: rl {rl} is not offered; those that are: {', '.join(WAYS)}"
            f"{', of which grpo is in the place of ppo' if 'ppo' in rl else ''}"
            " (docs/guides/ways.md)"
        )
    texts_alone = listed(sheet, "pretraining_dataset")
    items = texts_alone or listed(sheet, "datasets")
    if not items:
        raise WrongInput(f"{sheet.files[0].path} lists no `datasets`, each with its path; add them")
    kinds = {str(item["type"].value) for item in items if "type" in item}
    plain = bool(texts_alone) or (bool(kinds) and all(k.startswith("completion") for k in kinds))
    kind = rl or ("pretrain" if plain else "sft")
    multiple = 1
    beta = _beta(sheet, draft)
    if kind == "grpo":
        multiple = begin_grpo(sheet, draft, "trl.", beta)
    else:
        draft.put("objective.kind", kind, "rl" if rl else "datasets[].type")
    if rl and kind != "grpo" and beta:
        draft.put_from(sheet, beta, "objective.beta")
    elif rl and kind != "grpo":
        draft.put("objective.beta", 0.1, "rl_beta, its default there")
    if kind == "simpo":
        draft.put_from(sheet, "simpo_gamma", "objective.margin")
        draft.put_from(sheet, "cpo_alpha", "objective.sft_weight")
    build_weights(sheet, draft, kind, WEIGHTS)
    if kind == "dpo" and sheet.has("dpo_norm_loss"):
        draft.put_from(sheet, "dpo_norm_loss", "objective.normalize_length")
    train, held_out = (
        Sources(
            [each for item in given for each in sources_of(item, kind, draft)],
            f"{key}[].split",
            key,
        )
        for given, key in ((items, "datasets"), (listed(sheet, "test_datasets"), "test_datasets"))
    )
    put_sources(draft, train, held_out if held_out.given else None)
    share = None if sheet.has("test_datasets.*") else sheet.get("val_set_size")
    if share and share < 1:
        draft.put_from(sheet, "val_set_size", "data.validation.fraction")
    elif share:
        draft.note("fill", "val_set_size", "is a number of rows; set data.validation.fraction")
    if kind not in ("pretrain", "grpo"):  # axolotl splits texts over rows, and keeps prompts
        _long_rows(sheet, draft)
    if kind in ("sft", "pretrain"):
        packs = bool(sheet.get("sample_packing"))
        draft.put("data.pack", "best_fit" if packs else "none", "sample_packing")
    _template(sheet, draft, items, kind)
    return multiple


def _beta(sheet: GivenKeys, draft: Draft) -> str:
    """The key that says how strong the loss of preferences is, or the KL of rewards; empty for
    none.
    """
    given = [key for key in BETAS if sheet.has(key)]
    for key in given[1:]:
        if (other := sheet.get(key)) != (value := sheet.get(given[0])):
            about = f"say {value:g} and {other:g}; the first of them counts there, and here"
            draft.note("clash", f"{given[0]} and {key}", about)
    return given[0] if given else ""


def _template(
    sheet: GivenKeys, draft: Draft, items: list[dict[str, GivenEntry]], kind: str
) -> None:
    """Some types write their rows there without any chat template."""
    chosen = sheet.get("chat_template")
    own = {template_of(item, kind) for item in items}
    first = min((name for name in own if name), default=None)
    if first is not None and own == {first}:
        if chosen not in (None, first):
            about = f"{chosen} does not write rows of {first} there; the template {first} does here"
            draft.note("changed", "chat_template", about)
        draft.put("tokenizer.template", first, "datasets[].type")
        return
    if first is not None and own - {None} != {chosen}:
        draft.note(
            "changed",
            "datasets[].type",
            f"{first} stands beside others, and one template is for all data sets here, which"
            " writes those rows too: tokenizer.template",
        )
    build_template(draft, "chat_template", chosen)


PROJECT = Project(
    "axolotl",
    "an axolotl YAML with base_model, datasets and sequence_len",
    ROWS,
    _build,
)
