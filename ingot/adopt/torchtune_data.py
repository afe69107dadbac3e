"""What a torchtune YAML, or the pipeline around it, trains on: objective, data set, cleaning."""

from __future__ import annotations

import re
from typing import Any

from ingot.adopt.splits import Sources, put_sources
from ingot.adopt.table import Draft, GivenKeys, hub_source, text
from ingot.adopt.torchtune_keys import (
    CLOUD,
    FEWEST,
    MOST,
    PIPELINE,
    last_name,
    last_part,
)
from ingot.adopt.tuning import BUILDERS, named
from ingot.base.errors import WrongInput

READS = {
    "dpo": re.compile(r"preference|paired|hh_rlhf"),
    "pretrain": re.compile(r"text_completion|cnn_dailymail|wikitext"),
    "sft": re.compile(r"alpaca|chat|instruct|slimorca|grammar|samsum"),
}
"""What a builder of data sets is called -> the objective that reads its rows."""
SOURCES = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
"""Builders of data sets that a source of a recipe reads as they do."""
CROSS_ENTROPY = re.compile(r"CE|(Linear)?cross_?entropy", re.IGNORECASE)


def build_data(sheet: GivenKeys, draft: Draft) -> None:
    kind = _objective(sheet, draft)
    _source(sheet, draft, kind)
    if sheet.has("dataset._component_") and not sheet.has("dataset.packed"):
        draft.put("data.pack", "none", "dataset.packed, its default there")
    if sheet.has(*(row.key for row in (*CLOUD, *PIPELINE))):
        _clean(sheet, draft)
    elif not sheet.has("tokenizer.max_seq_len") and "tokenizer.max_seq_len" not in sheet.nulls:
        draft.note("fill", "data.seq_len", "no row is cut there; here those beyond 4096 tokens are")
    config = sheet.get("train_config")
    if config and not any(file.path.endswith(last_part(config)) for file in sheet.files):
        draft.note(
            "fill",
            "train_config",
            f"names {config}; give that file too (`ingot adopt FILE {last_part(config)}`)",
        )


def _objective(sheet: GivenKeys, draft: Draft) -> str:
    """By what the rows are, and the loss."""
    loss, reads = last_name(sheet, "loss._component_"), last_name(sheet, "dataset._component_")
    kind = next((kind for kind, names in READS.items() if names.search(reads)), None)
    key = "dataset._component_"
    if loss == "DPOLoss":
        kind, key = "dpo", "loss._component_"
    elif loss and not CROSS_ENTROPY.match(loss):
        raise WrongInput(
            f"{sheet.where('loss._component_')}: loss {loss} is not offered; those that are:"
            " cross-entropy and DPOLoss (docs/guides/ways.md)"
        )
    if reads and kind is None:
        draft.note("fill", "objective.kind", f"what {reads} reads is not known; pretrain is taken")
    if kind is not None:
        draft.put("objective.kind", kind, key)
    if kind == "dpo":
        draft.put("objective.beta", sheet.get("loss.beta"), "loss.beta, 0.1 unless given")
    return kind or "pretrain"


def _source(sheet: GivenKeys, draft: Draft, kind: str) -> None:
    query, reads = sheet.get("source_query"), last_name(sheet, "dataset._component_")
    given = sheet.get("dataset.source") or SOURCES.get(reads)
    files = sheet.get("dataset.data_files") or []
    if query:
        places = [f"bigquery:{query}"]
    elif files and given in BUILDERS:
        places = files
    elif given:
        places = [hub_source(given).source + (f":{sheet.get('dataset.name') or ''}".rstrip(":"))]
    else:
        places = ["data/my.jsonl"]
    rows: dict[str, Any] = {"split": sheet.get("dataset.split")}
    if kind == "pretrain":
        rows["text"] = sheet.get("dataset.column") or "text"
    elif kind == "sft" and "alpaca" in reads:
        rows["layout"] = "alpaca"
    sources = [named({"source": place, **rows}) for place in places]
    remark = "source_query" if query or not reads else "dataset._component_"
    put_sources(draft, Sources(sources, "dataset.split", remark))
    if places == ["data/my.jsonl"]:
        draft.note(
            "fill",
            "data.train",
            "no file has source_query, the SQL that gives id and text; data/my.jsonl stands for it",
        )
    if files and given and given not in BUILDERS:
        draft.note("lost", "dataset.data_files", f"all files of {given} are read")
    if reads and not query:
        draft.note(
            "fill",
            "dataset._component_",
            f"{reads}: what it read, and how it wrote rows, is not carried over; say it by"
            " data.train, its layout and columns, and tokenizer.template",
        )
    asked = sheet.get("dataset.train_on_input")
    if asked or (asked is None and kind == "sft" and "alpaca" in reads):
        draft.note(
            "changed",
            "dataset.train_on_input",
            "is true, or not given to a builder that takes it so: what is asked is trained there,"
            " and here only what the assistant says",
        )


def _clean(sheet: GivenKeys, draft: Draft) -> None:
    """Duplicates are removed by the pipeline, not by torchtune."""
    draft.fixed(data__clean__exact=True)
    alike = sheet.get("sim_threshold")
    draft.put(
        "data.clean.fuzzy.similarity", alike, "1 - sim_threshold", sheet.where("sim_threshold")
    )
    draft.note(
        "changed",
        "sim_threshold",
        f"was a distance there, in spite of its name ({round(1 - alike, 12):g}; 0.2 unless given);"
        f" here the similarity 1 - x = {alike:g}, from which on documents are duplicates",
    )
    ngram = sheet.name("ngram_len") + ("" if sheet.has("ngram_len") else ", its default there")
    draft.put("data.clean.fuzzy.ngram", sheet.get("ngram_len"), ngram, sheet.where("ngram_len"))
    count = sheet.get("minhash_perm")
    if FEWEST <= count <= MOST:
        draft.put("data.clean.fuzzy.permutations", count, "minhash_perm")
    else:
        draft.put("data.clean.fuzzy.permutations", 128, f"in place of minhash_perm {count}")
        draft.note(
            "changed",
            "minhash_perm",
            f"{count} is not within {FEWEST} to {MOST}; 128 finds candidates more surely, and the"
            " exact sets decide",
        )
    if (form := sheet.get("normal_form")) and text(
        sheet.given["normal_form"].value
    ).lower().endswith("d"):
        draft.note(
            "changed",
            "normal_form",
            f"the decomposed forms are not offered; {form} is the same text, composed",
        )
