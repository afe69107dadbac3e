"""`ingot push`: a run's model or adapter on the Hugging Face hub, with a card made from the run.
Nothing is sent that the run cannot vouch for: files as they were exported, and the records and the
report of this very model.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.exact_json import read_object
from ingot.base.hub import HubCommit, push_files
from ingot.base.masking import keys_hidden
from ingot.base.reports import EvaluationReport, read_record, read_report
from ingot.base.runfolder import RunFolder, check_no_other_run, folder_lock
from ingot.base.storage import stamp
from ingot.config.models.content import CONTENT, check_content
from ingot.config.models.lineage import LINEAGE, is_of_another, read_lineage
from ingot.config.models.source import kind_of, model_config
from ingot.registry.card import (
    BUILT_IN_LICENSES,
    CardFacts,
    DataSource,
    model_card,
    shown_source,
)
from ingot.registry.decision import GATE, is_about, read_decision

CARD, ADAPTER_CONFIG = "README.md", "adapter_config.json"
_NOT_SENT = (CARD, "evaluate.json")
"""Files of a model folder that the card stands for."""


@dataclass(frozen=True)
class PushOptions:
    """What is pushed and how. `license` of the model and `data_licenses` by source are as the user
    states them; `despite_gate` pushes a model that the gate refused, or decided about when it had
    other numbers.
    """

    adapter: bool = False
    public: bool = False
    license: str | None = None
    data_licenses: Mapping[str, str] = field(default_factory=dict)
    despite_gate: bool = False


@dataclass(frozen=True)
class PushPlan:
    """What would go where; `stamps` of the files as they were when they were checked."""

    run: RunFolder
    name: str
    public: bool
    files: dict[str, Path | bytes]
    stamps: dict[str, Any]

    @property
    def card(self) -> str:
        card = self.files[CARD]
        assert isinstance(card, bytes)
        return card.decode()

    @property
    def sizes(self) -> dict[str, int]:
        return {
            path: len(content) if isinstance(content, bytes) else content.stat().st_size
            for path, content in self.files.items()
        }


def plan_push(run: RunFolder, target: str, options: PushOptions) -> PushPlan:
    """What `ingot push` sends to `target`, hf:ORG/NAME; asks no network.

    Raises:
        WrongInput: `target` is no name on the hub; the run has no model or adapter, or one that is
            not as it was exported; its records or report are of another model; the gate refused it,
            or decided about other numbers of it, and `despite_gate` is not set.
    """
    name = target.removeprefix("hf:")
    if not target.startswith("hf:") or not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        raise WrongInput(f"{target} is not a name on the hub; write it as hf:ORG/NAME")
    folder = run.adapter if options.adapter else run.model
    files: dict[str, Path | bytes] = {
        path.name: path
        for path in sorted(folder.glob("*"))
        if path.is_file() and path.name not in _NOT_SENT and not path.name.startswith(".")
    }
    stamps = _stamps(files)
    made = _exported(run, folder, options)
    evaluation = _evaluation(run, made["model_hash"])
    gate = _gate(run, made["model_hash"], evaluation, options)
    if gate is not None and gate[0] != "deploy" and not options.despite_gate:
        raise WrongInput(
            f"{run.root}: the gate says {gate[0]} ({gate[1]}); --despite-gate pushes it all the"
            " same"
        )
    sources = _sources(run, made, options)
    record = read_record(run.steps, "train")
    assert record is not None  # _exported has read it
    card = model_card(
        CardFacts(
            name,
            made,
            kind_of(model_config(run.model)),
            record.knobs.get("knobs", {}),
            sources,
            evaluation,
            gate,
            options.license,
            _adapter_base(run) if options.adapter else None,
            {"train": record.result},
        )
    )
    return PushPlan(run, name, options.public, {**files, CARD: card.encode()}, stamps)


def push(plan: PushPlan) -> HubCommit:
    """Send what was planned, while no other process writes into the run's folder: a training may
    export another model there, which would be sent with the card of this one.

    Raises:
        WrongInput: as `push_files`.
        Failed: as `push_files`; or another process is at work in the folder; or the files are not
            those that were checked, or no longer where the folder cannot be locked.
    """
    root = plan.run.root
    check_no_other_run(root)
    # Somebody else's folder may be readable only.
    with folder_lock(root) if os.access(root, os.W_OK) else contextlib.nullcontext():
        _check_as_planned(plan, "since it was checked, and nothing was sent")
        made = push_files(plan.name, plan.files, public=plan.public)
        _check_as_planned(plan, f"while it was sent, and {made.url} may hold parts of both")
    return made


def _check_as_planned(plan: PushPlan, when: str) -> None:
    if _stamps(plan.files) != plan.stamps:
        raise Failed(f"what {plan.run.root} exported was changed {when}; push it again")


def _stamps(files: Mapping[str, Path | bytes]) -> dict[str, Any]:
    return {
        name: stamp(str(file))
        for name, file in files.items()
        if isinstance(file, Path) and file.exists()
    }


def _exported(run: RunFolder, folder: Path, options: PushOptions) -> dict[str, Any]:
    """The lineage of what is pushed, after a comparison of every tensor with its export, and of the
    training's record with it. An adapter has the model's hash: that of the model with it merged.
    """
    model = read_lineage(run.model)
    if model is None or not model.get(CONTENT):
        raise WrongInput(
            f"{run.model} has no record of an export to compare with ({LINEAGE}); train with `ingot"
            " train`, or push a folder of `ingot import`'s by other means"
        )
    made: Mapping[str, Any] = model
    if options.adapter:
        adapter = read_lineage(folder)
        if adapter is None or not adapter.get(CONTENT):
            raise WrongInput(f"{run.root} has no adapter; push the model, without --adapter")
        same = ("run", "step", "seed", "data", "base", "objective")
        differ = any(adapter.get(key) != model.get(key) for key in same)
        if differ or is_of_another(folder, run.model):
            raise WrongInput(
                f"{folder} is not the adapter of {run.model}: they are of two trainings; run `ingot"
                " train` again"
            )
        made = {**model, **adapter, "export_type": None}
    check_content(folder)
    record = read_record(run.steps, "train")
    if record is None or record.outputs != model["model_hash"]:
        raise WrongInput(
            f"{run.steps / 'train.json'} is not the record of the model in {run.model}, so that the"
            " card would tell of another training; run `ingot train` again"
        )
    return dict(made)


def _evaluation(run: RunFolder, model_hash: str) -> EvaluationReport | None:
    path = run.reports / "evaluate.json"
    if not path.exists():
        return None
    report = read_report(path)
    if report.model_hash != model_hash:
        raise WrongInput(
            f"{path} is about model {report.model_hash}, {model_hash} would be pushed; run `ingot"
            " evaluate` again"
        )
    return report


def _gate(
    run: RunFolder, model_hash: str, evaluation: EvaluationReport | None, options: PushOptions
) -> tuple[str, str] | None:
    """Decision and reason, if the gate decided about this model and these numbers of it."""
    path = run.reports / GATE
    decided = read_decision(path)
    if decided is None or decided["candidate"].get("model_hash") != model_hash:
        return None
    if evaluation is not None and not is_about(decided, evaluation):
        if options.despite_gate:
            return None
        raise WrongInput(
            f"{path} is about an earlier evaluation of this model; run `ingot gate` again, or push"
            " it all the same with --despite-gate"
        )
    return str(decided["decision"]), str(decided["reason"])


def _sources(
    run: RunFolder, made: Mapping[str, Any], options: PushOptions
) -> list[DataSource] | None:
    """The sources of the columns that were trained on; None if those are gone."""
    record = read_record(run.steps, "prepare")
    manifest = keys_hidden(read_object(run.columns / "manifest.json") or {})
    known = (
        record is not None
        and record.parts.get("train") == made.get("data")
        and "splits" in manifest
    )
    licenses = {keys_hidden(source): name for source, name in options.data_licenses.items()}
    found = [
        DataSource(
            shown_source(each["source"]),
            split,
            each["documents"],
            each["bytes"],
            each["tokens"],
            licenses.get(each["source"]) or BUILT_IN_LICENSES.get(each["source"]),
        )
        for split, sources in (manifest["splits"].items() if known else ())
        for each in sources
    ]
    given = {each["source"] for sources in manifest.get("splits", {}).values() for each in sources}
    if unknown := [source for source in licenses if source not in given]:
        raise WrongInput(
            f"--data-license {unknown[0]}: no such source in {run.root} (it has"
            f" {', '.join(sorted(given)) or 'none'})"
        )
    return found if known else None


def _adapter_base(run: RunFolder) -> str:
    base = str((read_object(run.adapter / ADAPTER_CONFIG) or {}).get("base_model_name_or_path", ""))
    if Path(base).is_absolute() or base.count("/") != 1:
        raise WrongInput(
            f"the adapter's base is the folder {base}, which nobody else has; push the merged"
            " model, without --adapter"
        )
    return base
