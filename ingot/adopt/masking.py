"""The flags of transformers' examples that train on what is hidden of texts: `run_mlm.py`, and
`run_t5_mlm_flax.py`, which is told by the length of its spans or by the name of its model.
"""

from __future__ import annotations

from dataclasses import replace

from ingot.adopt.read import File
from ingot.adopt.table import Draft, GivenKeys, KeyRow, Project, number, texts, truth, whole
from ingot.adopt.tuning import (
    NOT_NEEDED,
    PUSHED,
    TunerKeys,
    build_run,
    build_tracking,
    build_training,
    rows,
    source,
    trainer_rows,
)
from ingot.base.errors import WrongInput

KEYS = TunerKeys()
SPAN = "mean_noise_span_length"
OF_ADAPTERS = (
    *("lora_alpha", "lora_dropout", "use_dora", "use_rslora", "loraplus_lr_ratio"),
    "neftune_noise_alpha",
)


def _as_flags(row: KeyRow) -> KeyRow:
    """The row of a key, also spelt as on a command line."""
    flags = (f"--{key.replace('_', '-')}" for key in (row.key, *row.also))
    return replace(row, also=(*row.also, *flags))


ROWS = tuple(
    _as_flags(row)
    for row in rows(
        KeyRow("model_name_or_path"),
        KeyRow("config_name"),
        KeyRow("model_type"),
        KeyRow("tokenizer_name"),
        KeyRow("model_revision", "model.revision"),
        KeyRow("dataset_name"),
        KeyRow("dataset_config_name"),
        KeyRow("train_file"),
        KeyRow("validation_file"),
        KeyRow("validation_split_percentage", read=number, default="5"),
        KeyRow("max_seq_length", read=whole),
        KeyRow("dtype", also=("torch_dtype",)),
        KeyRow("mlm_probability", read=number, default="0.15"),
        KeyRow(SPAN, read=number),
        *trainer_rows(optimizer="adamw_torch"),
        KeyRow(
            "adafactor",
            read=truth,
            changed="AdamW stands for it, with the same learning rate; 1e-4 to 1e-3 is usual then",
            idle=("false",),
        ),
        KeyRow("torch_compile", "train.compile", truth),
        KeyRow("gradient_checkpointing", read=truth),
        KeyRow("report_to", read=texts),
        KeyRow("run_name"),
        lost={
            "config_overrides": "`model.config={NAME: VALUE}` overrides a configuration",
            "max_train_samples": "data.fraction trains on a share of the documents",
            "max_eval_samples": "data.validation.fraction holds out a smaller share",
            "push_to_hub": PUSHED,
            **dict.fromkeys(
                ("line_by_line", "pad_to_max_length"),
                f"{NOT_NEEDED}a row holds one document or a piece of one, a batch is as long as its"
                " longest row",
            ),
            **dict.fromkeys(
                (
                    *("do_train", "do_eval", "overwrite_output_dir", "overwrite_cache"),
                    *("cache_dir", "use_fast_tokenizer", "preprocessing_num_workers", "streaming"),
                    *("dataloader_num_workers", "ddp_find_unused_parameters", "logging_first_step"),
                ),
                f"{NOT_NEEDED}done by itself",
            ),
        },
    )
    if row.key not in OF_ADAPTERS
)


def _build(sheet: GivenKeys, draft: Draft) -> None:
    build_run(sheet, draft)
    _model(sheet, draft)
    _data(sheet, draft)
    _objective(sheet, draft)
    if half := sheet.get("dtype") in ("bfloat16", "float16"):
        draft.put("precision.compute", "bf16", sheet.name("dtype"))
    build_training(sheet, draft, replace(KEYS, full=not half))
    if sheet.get("gradient_checkpointing"):
        draft.put("memory.recompute.kind", "full", sheet.name("gradient_checkpointing"))
    build_tracking(sheet, draft, "huggingface")


def _model(sheet: GivenKeys, draft: Draft) -> None:
    """Weights to go on from, or a configuration to begin with; and the tokenizer."""
    key = next((key for key in ("model_name_or_path", "config_name") if sheet.has(key)), None)
    if key is None:
        raise WrongInput(
            f"{sheet.files[0].path} has neither --model_name_or_path nor --config_name; add one"
        )
    draft.put("model.source", source(sheet.get(key)), sheet.name(key), sheet.where(key))
    if key == "config_name":
        draft.put("model.init", "random", "no weights are named there")
    name = sheet.get("tokenizer_name")
    if name and name != sheet.get(key):
        draft.put("tokenizer.source", source(name), sheet.name("tokenizer_name"))


def _data(sheet: GivenKeys, draft: Draft) -> None:
    config = sheet.get("dataset_config_name")
    key = next((key for key in ("train_file", "dataset_name") if sheet.has(key)), None)
    if key is None:
        raise WrongInput(f"{sheet.files[0].path} has neither --train_file nor --dataset_name")
    found = sheet.get(key) if key == "train_file" else source(sheet.get(key))
    if key == "dataset_name" and config:
        found += f":{config}"
    draft.put("data.train", [{"source": found}], sheet.name(key), sheet.where(key))
    if sheet.has("validation_file"):
        held_out = [{"source": sheet.get("validation_file")}]
        draft.put("data.validation", held_out, sheet.name("validation_file"))
    else:
        share = sheet.get("validation_split_percentage") / 100
        about = sheet.name("validation_split_percentage")
        draft.put("data.validation", {"fraction": share}, about)
    if sheet.has("max_seq_length"):
        draft.put_from(sheet, "max_seq_length", "data.seq_len")
    else:
        draft.put("data.seq_len", 512, "the tokenizer's own there")
        draft.note("fill", "data.seq_len", "no --max_seq_length is given; 512 stands for it")


def _objective(sheet: GivenKeys, draft: Draft) -> None:
    names = ("model_type", "model_name_or_path", "config_name", "tokenizer_name")
    named_t5 = any("t5" in str(sheet.get(name) or "").lower() for name in names)
    if not (sheet.has(SPAN) or named_t5):
        draft.put("objective.kind", "mlm", "what run_mlm.py trains")
        draft.put_from(sheet, "mlm_probability", "objective.mlm_probability")
        return
    draft.put("objective.kind", "span_corruption", "what run_t5_mlm_flax.py trains")
    draft.put_from(sheet, "mlm_probability", "objective.noise_density")
    if sheet.has(SPAN):
        draft.put_from(sheet, SPAN, f"objective.{SPAN}")
    if not (sheet.has("max_grad_norm") or sheet.get("adafactor")):
        draft.put("train.clip_norm", None, "run_t5_mlm_flax.py does not clip")


class _Flags(Project):
    """Told by a command line alone: the keys themselves are those of every user of the Trainer."""

    def knows(self, file: File) -> int:
        return super().knows(file) if file.form == "flags" else 0


PROJECT = _Flags(
    "transformers' run_mlm.py or run_t5_mlm_flax.py",
    "flags such as --model_name_or_path, --train_file, --mlm_probability",
    ROWS,
    _build,
)
