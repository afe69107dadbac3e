"""A YAML that TRL's commands read (`trl grpo --config FILE`): which command is told by its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingot.adopt.grpo import begin_grpo, grpo_rows
from ingot.adopt.read import Given
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
    NEVER_DROPPED,
    NOT_NEEDED,
    PUSHED,
    TunerKeys,
    build_adapter,
    build_quantized,
    build_run,
    build_tracking,
    build_training,
    build_weights,
    named,
    rows,
    source,
    trainer_rows,
)
from ingot.base.errors import WrongInput

KEYS = TunerKeys(rank="lora_r", targets="lora_target_modules")
RATES = {"sft": 2e-5, "pretrain": 2e-5, "reward": 1e-4}
"""TRL's learning rates unless given; 1e-6 for all others."""
TEXTS = ("nll", "chunked_nll", "dft")
"""Losses of SFT."""
ALPHA = 32.0
"""TRL's `lora_alpha` unless given, whatever the rank."""
TARGETS = ("q_proj", "v_proj")
"""What PEFT adapts of most decoders unless told."""
PREFERENCES = {"sigmoid": "dpo", "ipo": "ipo"}
OF_GRPO = ("num_generations", "reward_funcs", "reward_weights")
OF_OTHERS = (
    "max_length",
    "desirable_weight",
    "undesirable_weight",
    "center_rewards_coefficient",
)
OF_RLOO = ("normalize_advantages", "reward_clip_range")
RLOO = {"num_generations": "2", "beta": "0.05"}
"""What TRL's RLOO has unless given, where its GRPO has something else."""
OF_GRPO_ALONE = ("loss_type", "scale_rewards")
OF_PPO = ("num_ppo_epochs", "vf_coef", "cliprange_value", "value_model_path")
WEIGHTS = {
    "label_smoothing": ("label_smoothing", ("dpo",)),
    "rpo_alpha": ("sft_weight", ("dpo",)),
}
CUT = {"keep_start": "right", "keep_end": "left"}
"""What TRL keeps of a row that is too long -> data.truncate."""


def kept_end(given: Given) -> str:
    """One of the names that TRL has for it."""
    if (name := text(given)) not in CUT:
        raise ValueError(f"one of {', '.join(CUT)}")
    return CUT[name]


ROWS = rows(
    KeyRow("model_name_or_path", "model.source", source),
    KeyRow("model_revision", "model.revision"),
    KeyRow("dataset_name"),
    KeyRow("dataset_config"),
    KeyRow("dataset_train_split", default="train"),
    KeyRow("dataset_test_split"),
    KeyRow("dataset_text_field"),
    KeyRow("dataset_prompt_column"),
    KeyRow("max_length", read=whole, default="1024", null="no limit"),
    KeyRow("max_prompt_length", read=whole, default="512", null="no limit"),
    KeyRow("assistant_only_loss", read=truth),
    KeyRow("completion_only_loss", read=truth),
    KeyRow("packing", read=truth),
    KeyRow("use_peft", read=truth),
    KeyRow("lora_r", read=whole),
    KeyRow("lora_target_modules", read=texts),
    KeyRow("disable_dropout", read=truth, default="true"),
    KeyRow("load_in_4bit", read=truth),
    KeyRow("load_in_8bit", read=truth),
    KeyRow("use_bnb_nested_quant", read=truth, default="false"),
    *trainer_rows(optimizer="adamw_torch_fused"),
    KeyRow("gradient_checkpointing", read=truth, default="true"),
    KeyRow("torch_compile", "train.compile", truth),
    KeyRow("report_to", read=texts),
    KeyRow("run_name"),
    KeyRow("desirable_weight", read=number),
    KeyRow("undesirable_weight", read=number),
    *(KeyRow(key, read=number) for key in WEIGHTS),
    KeyRow("truncation_mode", read=kept_end),
    KeyRow("center_rewards_coefficient", read=number),
    *(KeyRow(key) for key in (*OF_PPO, *OF_RLOO)),
    *grpo_rows("", most="512"),
    lost={
        "system_prompt": "no system prompt is added to rows that have none",
        "activation_offloading": "memory.offload.activations, in the place of memory.recompute",
        "router_aux_loss_coef": "train.experts.aux_loss is over sequences, that there over batches",
        "chat_template_path": "tokenizer.template names a template or a file",
        "lora_modules_to_save": "an adapter trains linear layers alone",
        "push_to_hub": PUSHED,
        "torch_dtype": f"{NOT_NEEDED}weights are float32, compute is as they fit",
        **dict.fromkeys(
            (
                "attn_implementation",
                "dataset_num_proc",
                "padding_free",
                "precompute_ref_log_probs",
                "overwrite_output_dir",
                "logging_first_step",
                "log_level",
                "do_train",
            ),
            f"{NOT_NEEDED}done by itself",
        ),
    },
)
# The commands have learning rates of their own.
ROWS = (*(row for row in ROWS if row.key != "learning_rate"), KeyRow("learning_rate", read=number))


def _build(sheet: GivenKeys, draft: Draft) -> None:
    build_run(sheet, draft)
    for key in ("model_name_or_path", "dataset_name"):
        if not sheet.has(key):
            raise WrongInput(f"{sheet.files[0].path} has no {key}; add it")
    kind, multiple = _objective(sheet, draft)
    _data(sheet, draft, kind)
    given = sheet.get("learning_rate")
    rate = RATES.get(kind, 1e-6) if given is None else given
    draft.put("train.optimizer.lr", rate, "learning_rate, or what the command has")
    build_training(sheet, draft, KEYS, multiple)
    if sheet.get("use_peft"):
        never = NEVER_DROPPED | {"reward": NEVER_DROPPED["dpo"]}
        undropped = never.get(kind) if kind == "grpo" or sheet.get("disable_dropout") else None
        # The command's default is in force with GRPO; where it is turned off there, too, nothing
        # changes.
        usual = 0.0 if undropped and kind != "grpo" else 0.05
        build_adapter(
            sheet,
            draft,
            KEYS,
            rank=16,
            alpha=ALPHA,
            dropout=usual,
            targets=TARGETS,
            undropped=undropped,
        )
        if not sheet.has("lora_target_modules"):
            draft.note(
                "changed",
                "lora_target_modules",
                f"is not given: {' and '.join(TARGETS)}, as PEFT adapts Llama, Qwen, Mistral and"
                " Gemma then; see what it does with another model",
            )
    for key, quantized in (("load_in_8bit", "int8"), ("load_in_4bit", "nf4")):
        if sheet.get(key):
            build_quantized(sheet, draft, quantized, key, "use_bnb_nested_quant")
    if sheet.get("gradient_checkpointing"):
        draft.put("memory.recompute.kind", "full", "gradient_checkpointing, its default there")
    build_tracking(sheet, draft, "trl")


def _objective(sheet: GivenKeys, draft: Draft) -> tuple[str, int]:
    """The kind, and what a batch is to be a multiple of."""
    if any(sheet.has(key) for key in OF_PPO):
        raise WrongInput(
            f"{sheet.where(*OF_PPO)}: PPO with a value model is not offered; grpo is in its place"
            " (docs/guides/ways.md)"
        )
    # Preferences may have a limit of answers, too.
    sampled = sheet.has("max_completion_length") and not sheet.has(*OF_OTHERS)
    if sheet.has(*OF_GRPO) or (sampled and sheet.get("loss_type") not in (*PREFERENCES, "kto")):
        _rloo(sheet, draft)
        return "grpo", begin_grpo(sheet, draft, "")
    loss = sheet.get("loss_type")
    if loss == "kto" or sheet.has("desirable_weight", "undesirable_weight"):
        kind = "kto"
    elif sheet.has("center_rewards_coefficient"):
        kind = "reward"
    elif sheet.has("beta", *WEIGHTS) or loss not in (None, *TEXTS):
        kind = PREFERENCES.get(loss, "dpo")
        if loss is not None and loss not in PREFERENCES:
            draft.note("changed", "loss_type", f"{loss} is not offered; dpo stands for it")
    elif sheet.has("dataset_text_field"):
        kind = "pretrain"
        draft.note(
            "changed",
            "dataset_text_field",
            "SFT of plain texts is objective.kind=pretrain; if rows are chats, set it to sft",
        )
    else:
        kind = "sft"
        draft.note(
            "fill",
            "objective.kind",
            "the file does not say which of TRL's commands reads it, and sft is taken",
        )
    draft.put("objective.kind", kind, "by the keys that are given")
    if kind == "sft":
        _trained(sheet, draft)
    if loss == "dft":
        draft.note("changed", "loss_type", "dft is not offered; cross-entropy stands for it")
    if kind in ("dpo", "ipo", "kto") and sheet.has("beta"):
        draft.put_from(sheet, "beta", "objective.beta")
    build_weights(sheet, draft, kind, WEIGHTS)
    if kind == "reward":
        draft.put_from(sheet, "center_rewards_coefficient", "objective.center")
    for key in ("desirable_weight", "undesirable_weight"):
        if kind == "kto" and sheet.has(key):
            draft.put_from(sheet, key, f"objective.{key}")
    return kind, 1


def _trained(sheet: GivenKeys, draft: Draft) -> None:
    """TRL trains questions too, unless it is told not to; of prompt and completion the latter."""
    if sheet.get("assistant_only_loss") or sheet.get("completion_only_loss"):
        return
    every = sheet.get("completion_only_loss") is False
    rows = "every row" if every else "a row that is not of prompt and completion"
    draft.note(
        "changed",
        "completion_only_loss" if every else "assistant_only_loss",
        f"is not true: all of {rows} is trained there, with what is asked; here only what the"
        " assistant says",
    )


def _rloo(sheet: GivenKeys, draft: Draft) -> None:
    """TRL's RLOO reads most of the keys of its GRPO."""
    if sheet.has(*OF_RLOO):
        name = sheet.name(next(filter(sheet.has, OF_RLOO)))
        draft.note("changed", name, "RLOO is not offered; GRPO with the same rewards stands for it")
        sheet.rows |= {key: replace(sheet.rows[key], default=usual) for key, usual in RLOO.items()}
    elif not sheet.has(*OF_GRPO_ALONE):
        draft.note(
            "fill",
            "objective.kind",
            "`trl grpo` and `trl rloo` read these keys, and grpo is taken; RLOO has another loss",
        )


def _data(sheet: GivenKeys, draft: Draft, kind: str) -> None:
    where = source(sheet.get("dataset_name"))
    if sheet.has("dataset_config"):
        where += f":{sheet.get('dataset_config')}"
    asked = sheet.get("dataset_prompt_column")
    texts_in = sheet.get("dataset_text_field")
    if texts_in is not None and kind != "pretrain":
        draft.note("lost", "dataset_text_field", f"{kind} does not train on plain texts")
    found: dict[str, Any] = {}
    if asked not in (None, "prompt"):
        found["columns"] = {"prompt": asked}
    if kind == "pretrain":
        found["text"] = texts_in
    train, held_out = (
        Sources(
            [named({"source": where, "split": sheet.get(key), **found})],
            key,
            "dataset_name",
            sheet.where("dataset_name"),
        )
        for key in ("dataset_train_split", "dataset_test_split")
    )
    put_sources(draft, train, held_out if sheet.has("dataset_test_split") else None)
    if kind == "grpo":
        length = sheet.get("max_prompt_length") + sheet.get("max_completion_length")
        draft.put("data.seq_len", length, "max_prompt_length and max_completion_length")
        draft.note(
            "fill",
            "dataset_name",
            "rows are to have the right answer, which rewards compare with, as `completion` beside"
            " `prompt`; another column is named by data.train[].columns={completion: NAME}",
        )
    else:
        draft.put_from(sheet, "max_length", "data.seq_len")
        if sheet.has("truncation_mode") and kind == "pretrain":
            about = f"{NOT_NEEDED}texts that are too long go on in the next row here"
            draft.note("lost", "truncation_mode", about)
        elif sheet.has("truncation_mode"):
            draft.put_from(sheet, "truncation_mode", "data.truncate")
        for key in filter(sheet.has, ("max_prompt_length", "max_completion_length")):
            draft.note(
                "lost",
                key,
                "data.seq_len is of prompt and answer together; data.truncate=left cuts prompts"
                " where both are longer",
            )
    if kind in ("sft", "pretrain"):
        draft.put("data.pack", "best_fit" if sheet.get("packing") else "none", "packing")


PROJECT = Project(
    "TRL",
    "a TRL YAML with model_name_or_path, dataset_name and what its command reads",
    ROWS,
    _build,
)
