"""What a torchtune YAML, or the pipeline around it, trains on: objective, data set, cleaning."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ingot.adopt.read import Given, GivenEntry
from ingot.adopt.splits import Sources, put_sources
from ingot.adopt.table import Draft, GivenKeys, hub_source, shown, text, texts, truth
from ingot.adopt.torchtune_keys import (
    CLOUD,
    FEWEST,
    MOST,
    PIPELINE,
    last_name,
    last_part,
)
from ingot.adopt.tuning import BUILDERS, listed, named
from ingot.base.errors import WrongInput

READS = {
    "dpo": re.compile(r"preference|paired|hh_rlhf"),
    "pretrain": re.compile(r"text_completion|cnn_dailymail|wikitext"),
    "sft": re.compile(r"alpaca|chat|instruct|slimorca|grammar|samsum"),
}
"""What a builder of data sets is called -> the objective that reads its rows."""
SOURCES = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
"""Builders of data sets that a source of a recipe reads as they do."""
MINE = "data/my.jsonl"
"""What stands for a data set that is not named."""
READ = (
    "_component_",
    "source",
    "name",
    "data_files",
    "split",
    "column",
    "train_on_input",
    "packed",
)
"""What of a data set is read."""
LOSSES = {"DPOLoss": "dpo", "IPOLoss": "ipo", "SimPOLoss": "simpo"}
OF_LOSSES = {
    "dpo": (
        ("loss.beta", 0.1, "objective.beta"),
        ("loss.label_smoothing", 0.0, "objective.label_smoothing"),
    ),
    "ipo": (("loss.tau", 0.1, "objective.beta"),),
    "simpo": (
        ("loss.beta", 2.0, "objective.beta"),
        ("loss.gamma", 0.5, "objective.margin"),
        ("loss.label_smoothing", 0.0, "objective.label_smoothing"),
    ),
}
"""Of each kind the keys of its loss with torchtune's defaults, and the knobs that they set."""
CROSS_ENTROPY = re.compile(r"CE|(Linear)?cross_?entropy", re.IGNORECASE)


def build_data(sheet: GivenKeys, draft: Draft) -> None:
    items = [
        {name: sheet.given.get(entry.key, entry) for name, entry in item.items()}
        for item in listed(sheet, "dataset")
    ]
    kind = _objective(sheet, items, draft)
    _read(sheet, items, kind, draft)
    if any("_component_" in item for item in items) and not sheet.has("dataset.packed"):
        packed = all(_value(item, "packed", truth) for item in items)
        given = "dataset[].packed" if packed else "dataset.packed, its default there"
        draft.put("data.pack", "best_fit" if packed else "none", given)
        if packed:
            draft.note("changed", "dataset[].packed", sheet.rows["dataset.packed"].changed)
    if _has_pipeline(sheet):
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


def _has_pipeline(sheet: GivenKeys) -> bool:
    return sheet.has(*(row.key for row in (*CLOUD, *PIPELINE)))


def _value(item: dict[str, GivenEntry], name: str, read: Callable[[Given], Any] = text) -> Any:
    """What a data set has under this name; None if it is not given."""
    if (entry := item.get(name)) is None:
        return None
    try:
        return read(entry.value)
    except ValueError as error:
        raise WrongInput(
            f"{entry.where}: {entry.key} is {shown(entry.value)}; it should be {error}"
        ) from None


def _builder(item: dict[str, GivenEntry]) -> str:
    """What builds a data set, without its modules; empty if it is not given."""
    return str(_value(item, "_component_") or "").rpartition(".")[2]


def _objective(sheet: GivenKeys, items: list[dict[str, GivenEntry]], draft: Draft) -> str:
    """By what the rows are, and the loss."""
    loss, key = last_name(sheet, "loss._component_"), "dataset._component_"
    builders = dict.fromkeys(filter(None, map(_builder, items)))
    kinds = {
        builder: next((kind for kind, names in READS.items() if names.search(builder)), None)
        for builder in builders
    }
    kind = next(filter(None, kinds.values()), None)
    if loss in LOSSES:
        kind, key = LOSSES[loss], "loss._component_"
    elif loss and not CROSS_ENTROPY.match(loss):
        raise WrongInput(
            f"{sheet.where('loss._component_')}: loss {loss} is not offered; those that are:"
            f" cross-entropy, {', '.join(LOSSES)} (docs/guides/ways.md)"
        )
    else:
        for builder in (builder for builder, found in kinds.items() if found is None):
            about = f"what {builder} reads is not known; {kind or 'pretrain'} is taken"
            draft.note("fill", "objective.kind", about)
        if len(set(filter(None, kinds.values()))) > 1:
            draft.note(
                "fill",
                "objective.kind",
                f"{' and '.join(builders)} read rows of different kinds, and one objective is for"
                f" all: {kind} is taken; leave out the data sets that are none of it",
            )
    if kind is not None:
        draft.put("objective.kind", kind, key)
        _preferences(sheet, kind, draft)
    return kind or "pretrain"


def _preferences(sheet: GivenKeys, kind: str, draft: Draft) -> None:
    """What the losses of preferences have, with torchtune's defaults."""
    for key, usual, knob in OF_LOSSES.get(kind, ()):
        given = sheet.get(key)
        if given is not None or usual:
            draft.put(knob, usual if given is None else given, f"{key}, {usual:g} unless given")
    if kind == "ipo":
        draft.put("objective.normalize_length", False, "whole answers there")


def _read(sheet: GivenKeys, items: list[dict[str, GivenEntry]], kind: str, draft: Draft) -> None:
    """The sources, of which a pipeline has one, by its query."""
    if query := sheet.get("source_query"):
        items = items[:1] or [{}]
        sources = _sources({**items[0], "source": sheet.given["source_query"]}, kind, draft, query)
    else:
        sources = [one for item in items or [{}] for one in _sources(item, kind, draft)]
    named_there = not query and any(map(_builder, items))
    remark = "dataset._component_" if named_there else "source_query"
    if not query and any(one["source"] == MINE for one in sources):
        draft.note(
            "fill",
            "data.train",
            f"no file has source_query, the SQL that gives id and text; {MINE} stands for it"
            if _has_pipeline(sheet)
            else f"no file names all that is read; {MINE} stands for it",
        )
    put_sources(draft, Sources(sources, "dataset.split", remark))


def _sources(
    item: dict[str, GivenEntry], kind: str, draft: Draft, query: str | None = None
) -> list[dict[str, Any]]:
    """The sources of one data set."""
    reads = _builder(item)
    given = _value(item, "source") or SOURCES.get(reads)
    files = _value(item, "data_files", texts) or []
    if query:
        places = [f"bigquery:{query}"]
    elif files and given in BUILDERS:
        places = files
    elif given:
        places = [hub_source(given).source + (f":{_value(item, 'name') or ''}".rstrip(":"))]
    else:
        places = [MINE]
    rows: dict[str, Any] = {"split": _value(item, "split")}
    if kind == "pretrain":
        rows["text"] = _value(item, "column") or "text"
    elif kind == "sft" and "alpaca" in reads:
        rows["layout"] = "alpaca"
    if files and given and given not in BUILDERS:
        draft.note("lost", "dataset.data_files", f"all files of {given} are read")
    if reads and not query:
        draft.note(
            "fill",
            "dataset._component_",
            f"{reads}: what it read, and how it wrote rows, is not carried over; say it by"
            " data.train, its layout and columns, and tokenizer.template",
        )
    for name in sorted(item.keys() - set(READ)):
        draft.note("lost", item[name].key, "is not read")
    asked = _value(item, "train_on_input", truth)
    if asked or (asked is None and kind == "sft" and "alpaca" in reads):
        draft.note(
            "changed",
            "dataset.train_on_input",
            "is true, or not given to a builder that takes it so: what is asked is trained there,"
            " and here only what the assistant says",
        )
    return [named({"source": place, **rows}) for place in places]


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
