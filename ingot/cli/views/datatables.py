"""`ingot show data`: what was read, dropped and prepared, with lengths and samples. Reads manifests
and columns, never the whole corpus.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.console import console
from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.base.runfolder import RunFolder
from ingot.cli.console import run_folder
from ingot.cli.output import print_json
from ingot.data.cleaning.clean import MARKER
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.columns.column import Column, column_prefix
from ingot.data.columns.manifest import (
    LABEL,
    VERDICTS,
    PreparedData,
    is_mask,
    read_prepared,
    token_columns,
)
from ingot.data.packing.tables import ONE_PER_ROW, markers_of
from ingot.tokenizers.load import load_tokenizer

MEASURED_PARTS = 64
SAMPLES = 3
SAMPLE_TOKENS = 60


def show_data(*target: str, as_json: bool = False) -> int:
    """Print counts, lengths, sources, dropped documents and samples of a run, given as to
    `run_folder`.
    """
    run, out = run_folder(*target), console()
    raw = read_marker(run.raw, "manifest.json")
    if raw is None:
        raise WrongInput(f"{run.raw} holds no ingested documents; run `ingot ingest` first")
    if as_json:
        print_json("show data", **_as_json(run, raw))
        return 0
    out.print(_sources("ingested documents", raw["splits"], ("documents", "bytes")))
    for source in (source for sources in raw["splits"].values() for source in sources):
        if bad := source.get("bad"):
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in bad.items())
            out.print(
                f"{source['source']}: skipped {reasons}, such as {source['examples'][0]}",
                soft_wrap=True,
            )
    columns = read_marker(run.columns, "manifest.json")
    if columns is None:
        _dropped(run, {name: step["documents"] for name, step in _cleaning_steps(run).items()}, out)
        out.print("nothing is prepared yet; `ingot prepare` does it")
        return 0
    prepared = read_prepared(run.columns)
    _dropped(run, columns["dropped"], out)
    for name in _not_cleaned(raw, columns):
        out.print(f"{name}: not cleaned, its documents are tokens", soft_wrap=True)
    out.print(_sources("prepared columns", columns["splits"], ("documents", "tokens", "bytes")))
    out.print(_lengths(run, prepared))
    _rows(run, out)
    _samples(run, prepared, out)
    out.print(
        f"tokenizer {prepared.tokenizer}, template {prepared.template or 'none'}, vocabulary"
        f" {prepared.vocab_size:,}, data {prepared.identity}"
    )
    return 0


def _as_json(run: RunFolder, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the tables tell. What `prepare` has not made yet is null."""
    ingested = {
        split: [
            {
                **{name: source[name] for name in ("source", "documents", "bytes")},
                "skipped": source.get("bad") or {},
                "skipped_examples": source.get("examples", []) if source.get("bad") else [],
            }
            for source in sources
        ]
        for split, sources in raw["splits"].items()
    }
    told: dict[str, Any] = {"run": run.root, "ingested": ingested, "prepared": None}
    columns = read_marker(run.columns, "manifest.json")
    if columns is None:
        return told
    prepared, steps = read_prepared(run.columns), _cleaning_steps(run)
    figures = ("source", "documents", "tokens", "bytes")
    told["prepared"] = {
        "splits": {
            split: [{name: source[name] for name in figures} for source in sources]
            for split, sources in columns["splits"].items()
        },
        "left_out": {
            step: {"documents": count, "examples": steps.get(step, {}).get("examples", [])}
            for step, count in columns["dropped"].items()
        },
        "not_cleaned": _not_cleaned(raw, columns),
        "lengths": list(_measured(run, prepared)),
        "rows": [read_marker(run.columns, name) for name in markers_of(run.columns)],
        "samples": [
            {"part": part, "column": name, "text": text}
            for part, name, text in _beginnings(run, prepared)
        ],
        "tokenizer": prepared.tokenizer,
        "template": prepared.template,
        "vocab_size": prepared.vocab_size,
        "data": prepared.identity,
    }
    return told


def _cleaning_steps(run: RunFolder) -> dict[str, dict[str, Any]]:
    marker = read_marker(run.data / "clean", MARKER) or {}
    return {step["step"]: step for step in marker.get("report", {}).get("steps", [])}


def _not_cleaned(raw: Mapping[str, Any], columns: Mapping[str, Any]) -> list[str]:
    """The sources that hold tokens, which cleaning left as they are, if it was asked for."""
    if columns["cleaned"] == CleaningResult.nothing().identity:
        return []
    sources = (source for sources in raw["splits"].values() for source in sources)
    return [source["source"] for source in sources if source.get("kind") == "tokens"]


def _sources(
    title: str, splits: dict[str, list[dict[str, Any]]], figures: tuple[str, ...]
) -> Table:
    table = Table("split", "source", *figures, title=title, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for split, sources in splits.items():
        for source in sources:
            table.add_row(split, Text(source["source"]), *(f"{source[name]:,}" for name in figures))
    return table


def _dropped(run: RunFolder, dropped: dict[str, int], out: Console) -> None:
    """Print the number of documents dropped by each step, with examples if they were kept."""
    table = Table("step", "documents", "such as", title="left out", title_justify="left")
    table.columns[1].justify = "right"
    steps = _cleaning_steps(run)
    for step, count in dropped.items():
        if count:
            examples = steps.get(step, {}).get("examples", [])
            table.add_row(step, f"{count:,}", Text("\n".join(map(_example, examples[:SAMPLES]))))
    if table.rows:
        out.print(table)


def _example(example: dict[str, Any]) -> str:
    survivor = f", like {example['survivor']}" if example.get("survivor") else ""
    similarity = f" ({example['similarity']:.2f})" if example.get("similarity") is not None else ""
    return f"{example['doc_id']}{survivor}{similarity}: {example['text']}"


def _lengths(run: RunFolder, prepared: PreparedData) -> Table:
    """Tokens per document."""
    figures = ("mean", "10 %", "median", "90 %", "longest")
    table = Table("split", "column", *figures, title="tokens of a document", title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for each in _measured(run, prepared):
        rounded = (f"{each[name]:,.0f}" for name in ("p10", "median", "p90", "longest"))
        table.add_row(each["split"], each["column"], f"{each['mean']:,.1f}", *rounded)
    return table


def _measured(run: RunFolder, prepared: PreparedData) -> Iterator[dict[str, Any]]:
    """Lengths by split and column; of very many parts, a few evenly spread ones are read."""
    for split, sources in prepared.splits.items():
        parts = [part for source in sources for part in source.parts]
        looked_at = parts[:: max(1, len(parts) // MEASURED_PARTS)]
        if not looked_at:
            continue
        for name in token_columns(prepared.names):
            measured = [
                Column(column_prefix(run.columns, split, name, part.number)) for part in looked_at
            ]
            lengths = np.concatenate([column.lengths(0, len(column)) for column in measured])
            low, middle, high = np.percentile(lengths, (10, 50, 90))
            yield {
                "split": split,
                "column": name,
                "mean": float(lengths.mean()),
                "p10": float(low),
                "median": float(middle),
                "p90": float(high),
                "longest": int(lengths.max()),
            }


def _rows(run: RunFolder, out: Console) -> None:
    for name in markers_of(run.columns):
        marker = read_marker(run.columns, name) or {}
        counts = {
            split: f"{count['rows']:,} {split} rows" for split, count in marker["counts"].items()
        }
        cut, lost, too_long, untrained = (
            sum(count.get(what, 0) for count in marker["counts"].values())
            for what in ("truncated", "lost", "too_long", "untrained")
        )
        told = (
            f"; {cut:,} documents truncated, {lost:,} left out since nothing trained remained of"
            " them"
            if cut or lost
            else ""
        )
        told += f"; {too_long:,} left out since they are longer" if too_long else ""
        told += f"; {untrained:,} left out since nothing is trained in them" if untrained else ""
        targets = (
            f", targets of {marker['target_len']:,}" if marker.get("target_len") is not None else ""
        )
        padding = (
            "" if marker.get("documents") in ONE_PER_ROW else f", {marker['padding']:.2%} padding"
        )
        out.print(
            f"rows of {marker['seq_len']:,} tokens{targets} ({marker['pack']}):"
            f" {', '.join(counts.values())}{padding}{told}"
        )


def _samples(run: RunFolder, prepared: PreparedData, out: Console) -> None:
    """The beginnings of some training documents as the tokenizer spells them."""
    for part, name, text in _beginnings(run, prepared):
        of = "" if len(prepared.names) == 1 or name == "tokens" else f", {name}"
        says = text if name == LABEL else repr(text)
        out.print(f"a document of part {part}{of}: {says}", soft_wrap=True)


def _beginnings(run: RunFolder, prepared: PreparedData) -> Iterator[tuple[int, str, str]]:
    """Part, column, and text or label of the first document of some parts."""
    tokenizer = load_tokenizer(run.tokenizer)
    parts = [
        part for source in prepared.splits["train"] for part in source.parts if part.documents
    ][:SAMPLES]
    labels = prepared.labels or VERDICTS
    for part in parts:
        for name in prepared.names:
            values = Column(column_prefix(run.columns, "train", name, part.number))[0][
                :SAMPLE_TOKENS
            ]
            if name == LABEL:
                yield part.number, name, labels[int(values[0])]
            elif not is_mask(name):
                yield part.number, name, tokenizer.decode(values, skip_special=False)
