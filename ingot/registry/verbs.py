"""`ingot gate` and `ingot register`: compare a run's model with the live one, record the decision,
and add the model to the registry.

`register` also makes the version live in the local registry. With Vertex AI a version is live once
an endpoint serves it, which `ingot deploy` does (`deploy.py`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ingot.base.errors import EXIT_DONE, EXIT_KEEP, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.reports import EvaluationReport, VerbOutcome, file_sizes, read_report
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import record_event
from ingot.base.storage import write_atomic
from ingot.config.models.content import check_content, tensor_digests
from ingot.config.models.lineage import read_lineage
from ingot.config.models.weights import hash_model
from ingot.config.recipe import Recipe
from ingot.registry.decision import (
    GATE,
    decision_record,
    evaluation_identity,
    is_about,
    measured,
    model_identity,
    read_decision,
)
from ingot.registry.gate import decide
from ingot.registry.local import LocalRegistry
from ingot.registry.versions import (
    ModelRegistry,
    RegisteredVersion,
    newest_version,
    unchanged_since_now,
)
from ingot.registry.vertexai.registry import VertexRegistry

SCHEMA = 1
EVALUATION, REGISTERED = "evaluate.json", "registered.json"
BY_GATE = "gate: "
"""How the reason of a change begins that `register` made."""


def gate(recipe: Recipe) -> VerbOutcome:
    """Compare the run's model with the live one and write the decision to `reports/gate.json` and
    `events.jsonl`. The exit code is 0 for deploy, 3 for keep.

    Raises:
        WrongInput: no report, a report about another model, or no local model folder to register;
            see also `decide`.
    """
    run = recipe.folder
    report = _evaluation_report(recipe)
    _folder(recipe)
    live = registry_of(recipe).live(recipe.registry_name)
    decision = decide(
        report,
        None if live is None else live.report,
        recipe.gate.resolved(recipe.objective.judged),
    )
    written = decision_record(decision, report, live) | {
        "registry": _registry_identity(recipe),
        "live": _compared_live(recipe, report, live),
    }
    path = run.reports / GATE
    write_atomic(path, json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    record_event(
        run.events, "gate", cause=decision.reason, decision=decision.decision, live=written["live"]
    )
    outputs = fingerprint({key: written[key] for key in ("decision", "candidate", "metrics")})
    code = EXIT_DONE if decision.decision == "deploy" else EXIT_KEEP
    return VerbOutcome(
        f"{decision.decision}: {decision.reason}",
        str(path),
        outputs,
        file_sizes(run.root, [path]),
        code,
    )


def gate_stamp(recipe: Recipe) -> dict[str, Any] | None:
    """The registry and live model that the gate would compare with; the gate runs again when this
    changes.

    Once the run's own model is live, this is still the model it was compared with: registering a
    model must not make its own decision outdated.
    """
    try:
        report = _evaluation_report(recipe)
    except WrongInput:
        return None  # no report yet; the gate itself reports that
    # Includes the registry, because a decision made against another registry does not count.
    return {
        "registry": _registry_identity(recipe),
        "live": _compared_live(recipe, report, registry_of(recipe).live(recipe.registry_name)),
    }


def _compared_live(
    recipe: Recipe, report: EvaluationReport, live: RegisteredVersion | None
) -> dict[str, Any] | None:
    """The live model to compare `report` with, or the one it was compared with when it was
    decided.
    """
    decided = _read_decision(recipe)
    if live is None:
        return None
    if (
        decided is not None
        and measured(report, decided["candidate"])
        and measured(report, model_identity(live.report))
    ):
        before: dict[str, Any] | None = decided["live"]
        return before
    return {"version": live.number, **evaluation_identity(live.report)}


def register(recipe: Recipe) -> VerbOutcome:
    """Register the run's model as a version, and make it live if the gate decided so. The same
    model again makes no new version.

    A version that was live before and is not now was replaced or rolled back on purpose, and is not
    made live again.

    Raises:
        WrongInput: no report or decision about this model and its numbers, no local model folder,
            one that changed since its export, or another model went live after the decision.
        Failed: another model came into that folder meanwhile.
    """
    run, name, registry = recipe.folder, recipe.registry_name, registry_of(recipe)
    unchanged = unchanged_since_now(_evaluated_folder(recipe))
    report = _evaluation_report(recipe)
    _check_is_measured(recipe, report)
    known = registry.find(name, report)
    decided = _decision_about(recipe, report)
    if known is None and decided is None:
        raise _no_decision(recipe)
    given = (name, _folder(recipe), report, _lineage(recipe), unchanged)
    if isinstance(registry, VertexRegistry):  # where it goes live later, without the run's word
        version = registry.add(*given, decided)
    else:
        version = registry.add(*given)
    was_live = any(turn.version == version.number for turn in registry.history(name))
    says_deploy = decided is not None and decided["decision"] == "deploy" and not was_live
    if decided is not None and says_deploy and recipe.registry.kind == "local":
        registry.point(
            name,
            version.number,
            f"{BY_GATE}{decided['reason']}",
            instead_of=expected_live_version(registry, name, decided),
        )
    live = registry.live(name)
    is_live = live is not None and live.number == version.number
    state = (
        "live"
        if is_live
        else f"v{live.number} stays live"
        if live is not None
        else "nothing is live"
    )
    if says_deploy and recipe.registry.kind == "vertex":
        state += " until `ingot deploy`"
    record_event(
        run.events, "register", cause=f"{name} v{version.number}, {state}", version=version.number
    )
    outputs = fingerprint([name, version.number, model_identity(report), is_live])
    return VerbOutcome(
        f"{name} v{version.number}, {state}",
        version.where,
        outputs,
        _registered_files(recipe, version),
    )


def register_stamp(recipe: Recipe) -> int | None:
    """The version that went live after what `register` says of the run's model; None where nothing
    did, or this model never was live. Registering does not change it. With Vertex AI none is asked
    for: there `ingot deploy` makes versions live.
    """
    if recipe.registry.kind == "vertex":
        return None
    try:
        report = _evaluation_report(recipe)
    except WrongInput:
        return None  # no report yet; `register` itself reports that
    registry, name = registry_of(recipe), recipe.registry_name
    version, changes = registry.find(name, report), registry.history(name)
    if version is None or all(change.version != version.number for change in changes):
        return None
    last = changes[-1]
    by_register = last.version == version.number and last.reason.startswith(BY_GATE)
    return None if by_register else last.version


def registered_version(
    registry: ModelRegistry[Any], name: str, number: int | None
) -> RegisteredVersion:
    """Version `number` of `name`, or the live one.

    Raises:
        WrongInput: no such name or version, or nothing is live.
    """
    version: RegisteredVersion | None = (
        registry.live(name) if number is None else registry.version(name, number)
    )
    if version is None:
        number = newest_version(registry, name).number
        raise WrongInput(
            f"nothing is live as {name} in {registry.place}; `ingot deploy {name} --version"
            f" {number}{registry.knob}` makes the newest version live"
        )
    return version


def approved_report(recipe: Recipe) -> tuple[EvaluationReport, dict[str, Any]]:
    """The run's report and the gate's decision to deploy its model. Raises WrongInput where the
    gate decided nothing about this report, or to keep the live model.
    """
    report = _evaluation_report(recipe)
    decided = _decision_about(recipe, report)
    if decided is None:
        raise _no_decision(recipe)
    if decided["decision"] != "deploy":
        raise WrongInput(
            f"the gate says keep ({decided['reason']}); `--version V` deploys a version all the"
            " same"
        )
    return report, decided


def expected_live_version(
    registry: ModelRegistry[Any], name: str, decided: dict[str, Any]
) -> int | None:
    """The version that must still be live for a decision to hold (None: none), for
    `point(instead_of=...)`.

    Raises:
        WrongInput: another model has that number, as after a run folder was copied to another
            registry.
    """
    before: dict[str, Any] | None = decided["live"]
    if before is None:
        return None
    live = registry.live(name)
    if live is not None and live.number == before["version"] and not measured(live.report, before):
        raise WrongInput(
            f"{name} v{live.number} in {registry.place} is not the model that the gate compared"
            " with; run `ingot gate` again"
        )
    return int(before["version"])


def local_model_folder(recipe: Recipe, model_hash: str) -> Path | None:
    """The local folder of the model with this hash, if it is the run's; else None."""
    made = read_lineage(_evaluated_folder(recipe)) or {}
    return _evaluated_folder(recipe) if made.get("model_hash") == model_hash else None


def _folder(recipe: Recipe) -> Path:
    """The model folder that is registered: `evaluate.model`, else the run's own."""
    folder = _evaluated_folder(recipe)
    if not (folder / "config.json").is_file():
        action = (
            "set evaluate.model to a local model folder"
            if recipe.evaluate.model
            else "run `ingot train` first"
        )
        raise WrongInput(f"{folder} is not a model folder (it has no config.json); {action}")
    return folder


def _evaluated_folder(recipe: Recipe) -> Path:
    """The folder that was evaluated; for another run's folder the model it exported, as in `ingot
    evaluate`.
    """
    if not recipe.evaluate.model:
        return recipe.folder.model
    given = Path(recipe.evaluate.model)
    exported = RunFolder(given).model
    return (
        exported
        if not (given / "config.json").exists() and (exported / "config.json").exists()
        else given
    )


def _evaluation_report(recipe: Recipe) -> EvaluationReport:
    """The run's evaluation report. Raises WrongInput where it is about another model than the one
    in the model folder.
    """
    report = read_report(recipe.folder.reports / EVALUATION)
    made = read_lineage(_evaluated_folder(recipe)) or {}
    if made.get("model_hash", report.model_hash) != report.model_hash:
        raise _about_another(recipe, report, made["model_hash"])
    return report


def _check_is_measured(recipe: Recipe, report: EvaluationReport) -> None:
    """Raises WrongInput where the weights are not those that were measured. A folder of another
    tool has no record of them, and is hashed again.
    """
    folder = _folder(recipe)
    check_content(folder)
    made = read_lineage(folder) or {}
    recorded = "model_hash" in made or tensor_digests(made)
    if not recorded and (found := hash_model(folder)) != report.model_hash:
        raise _about_another(recipe, report, found)


def _about_another(recipe: Recipe, report: EvaluationReport, found: str) -> WrongInput:
    return WrongInput(
        f"{recipe.folder.reports / EVALUATION} is about model {report.model_hash}, {found} lies in"
        f" {_evaluated_folder(recipe)} now; run `ingot evaluate` again"
    )


def _lineage(recipe: Recipe) -> dict[str, Any]:
    return {
        **(read_lineage(_folder(recipe)) or {}),
        "registered_from": str(_folder(recipe)),
    }


def _registry_identity(recipe: Recipe) -> dict[str, Any]:
    """The registry and name a decision is about. A registry file is given relative to the run
    folder, so that both may be moved together.
    """
    if recipe.registry.kind == "vertex":
        return {
            "name": recipe.registry_name,
            "place": registry_of(recipe).place,
            "bucket": recipe.cloud.bucket,
        }
    return {
        "name": recipe.registry_name,
        "place": os.path.relpath(recipe.registry_path, recipe.folder.root),
    }


def _read_decision(recipe: Recipe) -> dict[str, Any] | None:
    """The gate's decision from `reports/gate.json`; None where there is none that this version can
    read, or it is about another name or registry.
    """
    value = read_decision(recipe.folder.reports / GATE)
    if value is None or not {"live", "registry"} <= value.keys():
        return None
    return value if value["registry"] == _registry_identity(recipe) else None


def _decision_about(recipe: Recipe, report: EvaluationReport) -> dict[str, Any] | None:
    """The gate's decision about these numbers of this model, if there is one."""
    decided = _read_decision(recipe)
    return decided if decided is not None and is_about(decided, report) else None


def _no_decision(recipe: Recipe) -> WrongInput:
    run, place = recipe.folder, registry_of(recipe).place
    return WrongInput(
        f"{run.reports / GATE} holds no decision about the model of {run.root}, as it is measured"
        f" now, for {recipe.registry_name} in {place}; run `ingot gate` first"
    )


def _registered_files(recipe: Recipe, version: Any) -> dict[str, int]:
    """The files that must remain for the step to count as done: the version's files relative to the
    run folder, or for Vertex AI a note about the version.
    """
    root = recipe.folder.root
    if recipe.registry.kind == "local":
        return {
            os.path.relpath(path, root): path.stat().st_size
            for path in sorted(version.folder.rglob("*"))
            if path.is_file()
        }
    note = recipe.folder.reports / REGISTERED
    about = {
        "schema": SCHEMA,
        "name": version.name,
        "version": version.number,
        "resource": version.resource,
        "where": version.where,
    }
    write_atomic(note, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return file_sizes(root, [note])


def registry_of(recipe: Recipe) -> ModelRegistry[Any]:
    """The registry that `registry.kind` names. Nothing is asked of it yet."""
    return (
        VertexRegistry(recipe)
        if recipe.registry.kind == "vertex"
        else LocalRegistry(recipe.registry_path)
    )
