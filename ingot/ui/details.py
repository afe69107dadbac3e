"""One run, several beside each other, examples of prepared data and the registry, as JSON for the
browser.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.masking import masked
from ingot.base.progress import duration
from ingot.base.reports import Metric
from ingot.base.runfolder import RunFolder
from ingot.data.columns.column import Column, bin_path, column_prefix
from ingot.data.columns.manifest import PreparedData, read_prepared, token_columns
from ingot.data.splits import Split
from ingot.registry.local import LocalRegistry
from ingot.registry.versions import LocalVersion
from ingot.report.chosen import flatten, non_default_knobs
from ingot.report.failures import last_failure
from ingot.report.goodput import TIME_PARTS, Goodput
from ingot.report.headline import headline, headline_figures
from ingot.report.incidents import incident_ranks, incident_steps
from ingot.report.metrics import MetricsFile
from ingot.report.planned import beside_plan, decisions
from ingot.report.run_view import RunView
from ingot.report.tables import comparable, figures
from ingot.report.timeline import PART_NAMES, goodput_sentence
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.ui.runs import row

MOST_TOKENS = 4000
"""Tokens of an example that are shown."""
ARROW = " -> "
MOST_EVENTS, MOST_SAMPLES, MOST_INCIDENTS = 200, 400, 50


def details(name: str, view: RunView, metrics: MetricsFile) -> dict[str, Any]:
    """All that is known of a run, but its curves."""
    top, failure, plan = headline(view), last_failure(view), beside_plan(view)
    return {
        **row(name, view),
        "root": str(view.root),
        "sentence": top.sentence.striptags(),
        "tiles": headline_figures(view),
        "failure": asdict(failure) if failure else None,
        "goodput_account": _account(view.goodput) if view.goodput else None,
        "evaluation": _evaluation(view),
        "gate_report": view.gate,
        "answer": view.answer,
        "steps": [
            {
                "step": record.step,
                "seconds": record.seconds,
                "result": record.result,
                "where": view.within(record.where),
            }
            for record in view.records
        ],
        "events": view.events[-MOST_EVENTS:],
        "events_before": max(len(view.events) - MOST_EVENTS, 0),
        "samples": samples(view, metrics),
        "knobs": non_default_knobs(view),
        "recipe": view.recipe_text,
        "lineage": flatten(view.lineage),
        "decisions": decisions(view),
        "plan": asdict(plan) | {"remark": plan.remark} if plan else None,
        "notes": view.notes,
    }


def samples(view: RunView, metrics: MetricsFile) -> list[dict[str, Any]]:
    """Samples of the training by step, then those of the evaluation (step None), each as its prompt
    and what was written.
    """
    found = [
        _sample(step, key, *_split(text, _prompt(view, key)))
        for step, key, text in metrics.texts[-MOST_SAMPLES:]
        if key.startswith("samples/")
    ]
    for number, sample in enumerate(view.evaluation.samples if view.evaluation else ()):
        parts = (sample.get("prompt", ""), sample.get("completion", ""))
        found.append(_sample(None, f"samples/{number}", *parts))
    return found


def _sample(step: float | None, key: str, prompt: str, completion: str) -> dict[str, Any]:
    return {"step": step, "key": key, "prompt": prompt, "completion": completion}


def _prompt(view: RunView, key: str) -> str:
    """The prompt of the recipe that `samples/NUMBER` of its training answers; empty if unknown."""
    evaluation, number = view.recipe.get("evaluate"), key.removeprefix("samples/")
    prompts = evaluation.get("prompts") if isinstance(evaluation, dict) else None
    if not isinstance(prompts, list) or not number.isdecimal() or int(number) >= len(prompts):
        return ""
    return str(prompts[int(number)])


def _split(text: str, prompt: str) -> tuple[str, str]:
    """Prompt and completion, which a line of metrics joins by an arrow; both may hold others."""
    if not (prompt and text.startswith(prompt + ARROW)):
        prompt, arrow, _ = text.partition(ARROW)
        if not arrow:
            return "", text
    return prompt, text[len(prompt + ARROW) :]


def _account(account: Goodput) -> dict[str, Any]:
    return {
        "sentence": goodput_sentence(account),
        "share": account.share(),
        "wall_s": account.wall_s,
        "parts": [
            {"part": part, "name": PART_NAMES[part], "seconds": account.seconds[part]}
            for part in TIME_PARTS
            if account.seconds[part] > 0
        ],
        "attempts": [asdict(span) for span in account.attempts],
        "incidents": [
            {
                "kind": incident.kind,
                "wall": incident.wall,
                "ranks": incident_ranks(incident),
                "steps": incident_steps(incident),
                "cost": duration(incident.cost_s) if incident.cost_s else "",
                "cause": incident.cause,
            }
            for incident in account.costliest[:MOST_INCIDENTS]
        ],
    }


def _evaluation(view: RunView) -> dict[str, Any] | None:
    report = view.evaluation
    if report is None:
        return None
    return {
        "metrics": [
            {
                "key": key,
                **asdict(metric),
                "base": asdict(report.base[key]) if key in report.base else None,
                "baselines": report.baselines_of(key),
            }
            for key, metric in sorted(report.metrics.items())
        ],
        "model_hash": report.model_hash,
    }


def compared(views: dict[str, RunView], files: dict[str, MetricsFile]) -> dict[str, Any]:
    """Runs beside each other: knobs that are not the same in all, figures, metrics and samples."""
    recipes = {name: flatten(view.recipe) for name, view in views.items()}
    knobs = dict.fromkeys(knob for values in recipes.values() for knob in values)
    found = {name: figures(view) for name, view in views.items()}
    names = dict.fromkeys(figure for values in found.values() for figure in values)
    return {
        "runs": [row(name, view) for name, view in views.items()],
        "knobs": [
            {"knob": knob, "values": values}
            for knob in knobs
            if len(set(values := [recipes[name].get(knob) for name in views])) > 1
        ],
        "figures": [
            {
                "figure": figure,
                "values": (told := [found[name].get(figure) for name in views]),
                "not_finite": [value is not None and math.isnan(value) for value in told],
                "intervals": [_interval(view, figure) for view in views.values()],
                "comparable": comparable(views.values(), figure),
            }
            for figure in names
        ],
        "samples": [samples(views[name], files[name]) for name in views],
    }


def _interval(view: RunView, figure: str) -> tuple[float, float] | None:
    metric: Metric | None = view.evaluation.metrics.get(figure) if view.evaluation else None
    return None if metric is None else metric.interval


def registry_state(registry: LocalRegistry) -> list[dict[str, Any]]:
    """Every name with its versions, the newest first, and the changes of its live pointer."""
    if not registry.path.is_file():
        return []
    found = []
    for name in registry.names():
        try:
            live = registry.live(name)
        except WrongInput:
            live = None
        found.append(
            {
                "name": name,
                "live": live.number if live else None,
                "versions": [_version(one) for one in reversed(registry.versions(name))],
                "history": [asdict(turn) for turn in reversed(registry.history(name))],
            }
        )
    return found


def _version(version: LocalVersion) -> dict[str, Any]:
    return {
        "number": version.number,
        "created": version.created,
        "model_hash": version.model_hash,
        "run": version.lineage.get("run"),
        "metrics": {key: asdict(metric) for key, metric in version.report.metrics.items()},
    }


def examples(run: RunFolder, split: Split, first: int, count: int, root: Path) -> dict[str, Any]:
    """`count` records of a split from number `first` on, in the order in which they were prepared.
    `root`: the folder that every file must lie in.

    Raises:
        WrongInput: there is no prepared data or no tokenizer, or they lie outside of `root`.
    """
    for folder in (run.data, run.columns, run.tokenizer):
        if not folder.resolve().is_relative_to(root):
            raise WrongInput(f"{folder} is a link out of {root}; nothing outside is shown")
    prepared = read_prepared(run.columns)
    for file in (*run.columns.iterdir(), *run.tokenizer.iterdir()):
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise WrongInput(f"{file} is a link out of {root}; nothing outside is shown")
    tokenizer = load_tokenizer(run.tokenizer)
    found = [
        {"number": number, "source": source, "parts": list(_parts(prepared, record, tokenizer))}
        for number, source, record in _records(run, prepared, split, first, count)
    ]
    return {
        "kind": prepared.documents,
        "splits": {name: prepared.total(name, "documents") for name in prepared.splits},
        "tokens": {name: prepared.total(name, "tokens") for name in prepared.splits},
        "examples": found,
    }


Record = dict[str, npt.NDArray[Any]]


def _records(
    run: RunFolder, prepared: PreparedData, split: Split, first: int, count: int
) -> Iterator[tuple[int, str, Record]]:
    passed = 0
    for source in prepared.splits.get(split, ()):
        for part in source.parts:
            inside = range(max(first - passed, 0), min(first + count - passed, part.documents))
            if inside:
                prefixes = {
                    name: column_prefix(run.columns, split, name, part.number)
                    for name in prepared.names
                }
                if not all(bin_path(prefix).is_file() for prefix in prefixes.values()):
                    raise WrongInput(
                        f"part {part.number} of {run.columns} is not on this machine; `ingot run`"
                        " fetches it"
                    )
                columns = {name: Column(prefix) for name, prefix in prefixes.items()}
                for number in inside:
                    record = {name: column[number] for name, column in columns.items()}
                    yield passed + number, masked(source.source), record
            passed += part.documents


def _parts(prepared: PreparedData, record: Record, tokenizer: Tokenizer) -> Iterator[Any]:
    """The texts of a record: name, tokens in all, tokens trained, and pieces."""
    for name in token_columns(prepared.names):
        mask = record.get("mask" if name == "tokens" else f"{name}_mask")
        if mask is None:
            trained = prepared.documents == "text" or name == "target"
            mask = np.full(len(record[name]), trained, np.uint8)
        yield {
            "name": name,
            "tokens": len(record[name]),
            "trained": int(mask.sum()),
            "pieces": _pieces(tokenizer, record[name][:MOST_TOKENS], mask[:MOST_TOKENS]),
            "label": _label(prepared, record),
        }


def _label(prepared: PreparedData, record: Record) -> str:
    return prepared.labels[int(record["label"][0])] if "label" in record else ""


def _pieces(
    tokenizer: Tokenizer, ids: Sequence[int] | npt.NDArray[Any], mask: npt.NDArray[Any]
) -> list[tuple[str, bool, bool]]:
    """(text, trained, special) of neighbouring tokens that are alike."""
    special = set(tokenizer.special_ids.values())
    tokens = [(int(one), bool(on), int(one) in special) for one, on in zip(ids, mask, strict=True)]
    return [
        (tokenizer.decode([token for token, _, _ in alike], skip_special=False), *kind)
        for kind, group in groupby(tokens, key=lambda each: (each[1], each[2]))
        if (alike := list(group))
    ]
