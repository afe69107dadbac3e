"""The model card of a run: Markdown with the hub's header, made from what the run's steps recorded.
A pure function of these records, so that pushing twice gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ingot.base.masking import MASK, masked
from ingot.base.reports import EvaluationReport
from ingot.config.models.lineage import started_from

LICENSES = {
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "isc", "unlicense"),
    *("gpl-2.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "openrail", "bigscience-openrail-m"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0"),
    *("llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "gemma", "odc-by", "pddl"),
}
"""Licences that the hub has an identifier for; any other is `other` with a name."""
PIPELINES = {
    "decoder": "text-generation",
    "encoder": "text-classification",
    "masked": "fill-mask",
}
BUILT_IN_LICENSES = {"builtin:stdlib": "psf-2.0"}
_KEPT = ("objective", "model", "train", "data", "precision", "checkpoint", "seed")
_PLACES = (
    *("source", "adapter", "teacher", "reference", "start_from", "checkpoint"),
    *("function", "model", "file"),
)
"""Knobs that name a folder, a file or a name on the hub."""
_TEXTS = ("pattern", "after", "prefix", "labels", "name", "field", "group")
"""Knobs whose value may look like a path and is none."""
_PATHS = ("/", "~/", "./", "../", "file://")
"""How a path begins in a knob that only its owner knows, such as a function's arguments."""
_OWN_LINES = ("data.train.weight", "model.source", "model.revision", "seed")


@dataclass(frozen=True)
class DataSource:
    """A source of training documents: what was kept of it after cleaning."""

    source: str
    split: str
    documents: int
    bytes: int
    tokens: int
    license: str | None


@dataclass(frozen=True)
class CardFacts:
    """What a card is made of. `made` is the `ingot.json` of what is pushed, `knobs` what decided
    the training, by dotted names; `evaluation` is of this very model, or None; `gate` its decision
    with the reason; `base` its configuration's kind.
    """

    name: str
    made: Mapping[str, Any]
    kind: str
    knobs: Mapping[str, Any]
    sources: Sequence[DataSource] | None
    evaluation: EvaluationReport | None
    gate: tuple[str, str] | None
    license: str | None
    adapter_of: str | None = None
    steps: Mapping[str, str] = field(default_factory=dict)


def model_card(facts: CardFacts) -> str:
    """The card. What is not known is said to be not known."""
    parts = [
        f"---\n{_yaml(_header(facts))}---\n",
        f"# {facts.name.partition('/')[2]}\n",
        _about(facts),
        "## Evaluation\n",
        _evaluation(facts),
        "## Data\n",
        _data(facts.sources),
        "## Method\n",
        _method(facts),
        "## Lineage\n",
        _lineage(facts),
        "## Licence\n",
        _license(facts),
    ]
    return "\n".join(parts)


def _header(facts: CardFacts) -> dict[str, Any]:
    header: dict[str, Any] = {}
    if facts.license is not None:
        known = facts.license.lower() in LICENSES
        header["license"] = facts.license.lower() if known else "other"
        if not known:
            header["license_name"] = facts.license
    base = _base_name(facts)
    if base is not None:
        header["base_model"] = base
        header["base_model_relation"] = "adapter" if facts.adapter_of else "finetune"
    datasets = [
        each.source.split(":")[1] for each in facts.sources or () if each.source.startswith("hf:")
    ]
    if datasets:
        header["datasets"] = list(dict.fromkeys(datasets))
    header["library_name"] = "peft" if facts.adapter_of else "transformers"
    if facts.kind in PIPELINES:
        header["pipeline_tag"] = PIPELINES[facts.kind]
    header["tags"] = ["ingot", str(facts.made.get("objective", ""))]
    return header


def _base_name(facts: CardFacts) -> str | None:
    """The name on the hub of the model that training started from, if it has one."""
    source = str((facts.made.get("base") or {}).get("source", ""))
    return facts.adapter_of or (source.removeprefix("hf:") if source.startswith("hf:") else None)


def _about(facts: CardFacts) -> str:
    made = facts.made
    base = made.get("base") or {}
    start = f"from {_base_name(facts) or shown_source(base['source'])}" if base else None
    if origin := started_from(made):
        start = f"on from {origin}"
    what = (
        "A LoRA adapter" if facts.adapter_of else f"A model with {made['parameters']:,} parameters"
    )
    loaded = (
        f"`peft.AutoPeftModelForCausalLM.from_pretrained({facts.name!r})`"
        if facts.adapter_of
        else f"`transformers`, vLLM, or `ingot import hf:{facts.name} FOLDER`"
    )
    return (
        f"{what}, trained {start or 'from random weights'} by ingot {made.get('ingot', '')}"
        f" (objective `{made.get('objective')}`, {made.get('step'):,} steps)."
        f" Open it with {loaded}.\n"
    )


def _evaluation(facts: CardFacts) -> str:
    if facts.evaluation is None:
        return "It has not been evaluated.\n"
    report = facts.evaluation
    base = ["base"] if report.base else []
    rows = []
    for key, metric in report.metrics.items():
        old = report.base.get(key)
        rows.append(
            [
                f"`{key}`",
                metric.direction,
                f"{metric.value:.4f}",
                metric.interval_words("{:.4f}".format),
                f"{metric.n:,}",
                *(["" if old is None else f"{old.value:.4f}"] if report.base else []),
            ]
        )
    text = _table(["metric", "better", "value", "95 % interval", "n", *base], rows)
    if report.baselines:
        others = ", ".join(f"{name} {value:.4f}" for name, value in report.baselines.items())
        text += f"\nBaselines on the same items: {others}.\n"
    text += f"\nMeasured on model `{report.model_hash}`"
    sets = sorted({metric.set_fingerprint for metric in report.metrics.values()})
    text += f"; evaluation sets {', '.join(f'`{each}`' for each in sets)}.\n"
    if facts.gate is not None:
        text += f"\nThe gate decided to {facts.gate[0]} it: {facts.gate[1]}.\n"
    return text


def _data(sources: Sequence[DataSource] | None) -> str:
    if sources is None:
        return "The data was prepared anew since this training; its numbers are not known.\n"
    rows = [
        [
            f"`{each.source}`",
            each.split,
            f"{each.documents:,}",
            f"{each.bytes / 1e6:,.1f}",
            f"{each.tokens:,}",
            each.license or "not stated",
        ]
        for each in sources
    ]
    return _table(["source", "split", "documents", "MB", "tokens", "licence"], rows)


def _method(facts: CardFacts) -> str:
    tree: dict[str, Any] = {}
    for path, value in sorted(facts.knobs.items()):
        if path.partition(".")[0] not in _KEPT or path in _OWN_LINES:
            continue
        place = tree
        *above, last = path.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[last] = _without_paths(last, value)
    said = "".join(f"- {verb}: {result}\n" for verb, result in facts.steps.items())
    return (
        f"{said}\nWhat decided the numbers of the training:\n\n```yaml\n{_yaml(masked(tree))}```\n"
        if tree
        else said
    )


def _without_paths(name: str, value: Any) -> Any:
    """The value of a knob without the folders of the machine that it was trained on."""
    if isinstance(value, Mapping):
        return {key: _without_paths(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(name, item) for item in value]
    if not isinstance(value, str) or name in _TEXTS:
        return value
    return shown_source(value) if name in _PLACES or value.startswith(_PATHS) else value


def _lineage(facts: CardFacts) -> str:
    made = facts.made
    base = made.get("base") or {}
    rows: list[tuple[str, Any]] = [
        ("model", made.get("model_hash")),
        ("tokenizer", made.get("tokenizer")),
        ("chat template", made.get("template")),
        ("data", made.get("data")),
        ("step", str(made.get("step"))),
        ("seed", str(made.get("seed"))),
        ("weights stored as", made.get("export_type")),
        ("base", base and shown_source(base["source"])),
        ("base's weights", base.get("model_hash")),
        *[
            (name, _without_paths(name, made.get(name)))
            for name in ("teacher", "reference", "average", "start_from")
        ],
        ("ingot", made.get("ingot")),
    ]
    told = [[name, f"`{value}`"] for name, value in rows if value]
    return _table(["what", "fingerprint"], told) + (
        "\n`ingot.json` has the hash of every tensor; `ingot import` compares them.\n"
    )


def _license(facts: CardFacts) -> str:
    if facts.license is None:
        return "None is stated; that of the data and of the base model may bind.\n"
    return f"{facts.license}. That of the data and of the base model may bind beside it.\n"


def shown_source(source: str) -> str:
    """A source as others may read it: of a path its last part, of an address no login or key."""
    source = source.removeprefix("file://")
    if "://" in source or re.match(r"[a-z][a-z0-9_]*:", source):
        return str(masked(source)).replace(f"://{MASK}@", "://")
    return Path(source).name


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
