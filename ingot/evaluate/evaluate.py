"""`ingot evaluate`: measures a model folder on the recipe's tasks; writes `reports/evaluate.json`
and the score of every item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput, differing
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.reports import (
    EvaluationReport,
    VerbOutcome,
    examples_file,
    file_sizes,
    write_report,
)
from ingot.base.storage import sha256_file, stamp
from ingot.config.models.lineage import model_again
from ingot.config.models.source import (
    CONFIG,
    model_config,
    named_folder,
    source_folder,
    starts_random,
)
from ingot.config.models.weights import model_hash
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import Baseline
from ingot.config.sections.objective import CHAT_TEMPLATED
from ingot.data.columns.manifest import prepared_for
from ingot.data.splits import check_held_out
from ingot.evaluate.baselines import baselines, check_baselines
from ingot.evaluate.generation import check_prompts, complete_prompts
from ingot.evaluate.report import write_examples
from ingot.evaluate.subject import EvalModel, TaskResult
from ingot.evaluate.tasks import measure_all, open_task
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.device import device_name, resolve_compute
from ingot.models.generation.generator import eos_ids
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.folder import check_template
from ingot.models.kinds import base_folder, kind_of_folder, open_model
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.tokenizers.chats.encode import stop_tokens
from ingot.tokenizers.chats.templates import with_template
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

REPORT, EXAMPLES = "evaluate.json", "examples"
_READ = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Suffixes of the files that a model and its tokenizer are read from."""


@dataclass(frozen=True)
class EvaluationResults:
    """The results of all tasks by name, those of the base model, and the completions of the
    prompts, each with the base model's beside it.
    """

    folder: Path
    tasks: dict[str, TaskResult]
    base: dict[str, TaskResult]
    samples: list[dict[str, str]]


def evaluate(recipe: Recipe) -> VerbOutcome:
    """Measure the model on all tasks and write the report. Every rank calls it; rank 0 writes.

    The model is `evaluate.model`, else the run's own `model/`, else `model.source` if that has
    weights.

    Raises:
        WrongInput: there is no model or no prepared data, the two do not belong together, or a task
            cannot be measured.
        Failed: the model gives numbers that are not finite, data on the hub cannot be reached, or
            another model came into its folder meanwhile.
    """
    check_held_out(recipe, "evaluate")
    with running_mesh(start_s=recipe.launch.start_s) as mesh:
        folder = model_folder(recipe)
        # An adapter's folder has neither tokenizer nor generation settings: it uses those of its
        # base.
        files_folder = base_folder(folder) if is_adapter(folder) else folder
        stamps = mesh.from_main(lambda: _stamps(folder, files_folder))
        tokenizer = load_tokenizer(files_folder)
        _check_belongs(recipe, files_folder, tokenizer)
        ends_turn = stop_tokens(tokenizer) if recipe.documents in CHAT_TEMPLATED else []
        eos = eos_ids(files_folder, tokenizer.special.eos).union(ends_turn)
        base = _base_folder(recipe, folder, mesh)
        if other := _label_mismatch(recipe, files_folder, adapted=is_adapter(folder)):
            raise WrongInput(other)
        tasks, samples = _measure_model(
            recipe, folder, tokenizer, eos, recipe.evaluate.prompts, mesh
        )
        # With the tuned model's tokenizer, as at the start of training.
        base_tasks, base_samples = (
            _measure_model(
                recipe,
                base,
                tokenizer,
                eos,
                recipe.evaluate.prompts,
                mesh,
                changed=recipe.model.config,
            )
            if base is not None
            else ({}, [])
        )
        for sample, before in zip(samples, base_samples, strict=base is not None):
            sample["base"] = before["completion"]
        found = EvaluationResults(folder, tasks, base_tasks, samples)

        def written() -> VerbOutcome:
            report = _report(recipe, found, tokenizer)
            if _stamps(folder, files_folder) != stamps:
                raise Failed(
                    f"{folder} was changed while it was measured, so that these figures may not be"
                    " of the model that it holds now; run `ingot evaluate` again"
                )
            return _write(recipe, found, report)

        return mesh.from_main(written)


def _stamps(*folders: Path) -> list[dict[str, Any]]:
    """Size and time of all that is read of these folders. Another run may export into one
    meanwhile; hashes would tell, too, and read weights that others exported a second time.
    """
    return [
        stamp(str(file))
        for folder in folders
        for file in sorted(folder.glob("*"))
        if file.suffix in _READ and file.name != REPORT and file.is_file()
    ]


def _measure_model(
    recipe: Recipe,
    folder: Path,
    tokenizer: Tokenizer,
    eos: frozenset[int],
    prompts: Sequence[str],
    mesh: Mesh,
    changed: Mapping[str, Any] | None = None,
) -> tuple[dict[str, TaskResult], list[dict[str, str]]]:
    """Measure all tasks on the model in `folder` and complete the prompts. Everything is checked
    before anything is measured. `changed`: as of `open_model`.
    """
    model = open_model(folder, device=mesh.device, changed=changed)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise WrongInput(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} ids, its model only"
            f" {model.config.vocab_size}; use the tokenizer that it was made with"
        )
    compute = resolve_compute(recipe.precision.compute, mesh.device)
    subject = EvalModel(
        recipe, model, kind_of_folder(folder), tokenizer, eos, compute, mesh, str(folder)
    )
    check_prompts(prompts, recipe.evaluate.sample_tokens, subject.info, model.config)
    opened = {task.name: open_task(task, subject.info) for task in recipe.tasks}
    if mesh.is_main:
        ranks = f"{mesh.world} x " if mesh.world > 1 else ""
        say(
            f"evaluate: {folder}, {', '.join(opened)}, {compute} on"
            f" {ranks}{device_name(mesh.device)}"
        )
    tasks = measure_all(opened, subject)
    return tasks, mesh.from_main(lambda: complete_prompts(subject, prompts))


def model_folder(recipe: Recipe) -> Path:
    """The folder of the model that `recipe` evaluates.

    Raises:
        WrongInput: there is none, or not the whole of it.
    """
    if recipe.evaluate.model:
        return named_folder(recipe.evaluate.model, "evaluate.model")
    own = recipe.folder.model
    if own.exists():  # what is left of it is not taken for none: the base would be told as its own
        if not (own / CONFIG).exists():
            again = model_again(own, "run `ingot train` again")
            raise WrongInput(f"{own} is not as it was exported ({CONFIG} is missing); {again}")
        return own
    base = source_folder(recipe.model)
    if base is None or starts_random(recipe.model, base):
        raise WrongInput(
            f"{own} holds no model yet; run `ingot train` first, or set evaluate.model to a model"
            " folder"
        )
    return base


def _check_belongs(recipe: Recipe, folder: Path, tokenizer: Tokenizer) -> None:
    """Raises WrongInput when a task uses the prepared rows and the model's tokenizer is not
    theirs.
    """
    if not recipe.evaluate.any_template:
        check_template(folder, tokenizer.template_identity, "evaluate.any_template")
    check_baselines(recipe, _requested_baselines(recipe))
    if not any(task.needs_rows for task in recipe.tasks):
        return
    prepared, columns = prepared_for(recipe), recipe.folder.columns
    if tokenizer.identity() != prepared.tokenizer and not (
        recipe.evaluate.any_template and _same_but_for_template(recipe, tokenizer)
    ):
        raise WrongInput(
            f"the tokenizer of {folder} ({tokenizer.identity()}) is not the one that {columns} was"
            f" prepared with ({prepared.tokenizer}); set tokenizer.source to {folder} and run"
            " `ingot prepare` again, or evaluate a model of this run"
        )


def _same_but_for_template(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    own = load_tokenizer(recipe.folder.tokenizer)
    return with_template(own, "").identity() == with_template(tokenizer, "").identity()


def _requested_baselines(recipe: Recipe) -> list[Baseline]:
    return sorted({name for task in recipe.tasks for name in task.baseline_names})


def _label_mismatch(recipe: Recipe, folder: Path, *, adapted: bool = False) -> str:
    """Why a classifier's classes differ from the recipe's, which would silently mix them up; empty
    if they agree or have no names. `adapted`: an adapter brings the head, whatever that in the
    folder is for.

    Raises:
        WrongInput: the model's outputs are not one class for each text.
    """
    if not recipe.labels or kind_of_folder(folder) != "encoder":
        return ""
    values = model_config(folder) | ({"problem_type": None} if adapted else {})
    names = read_hf_config(values, "encoder", str(folder), unproved=True).labels
    nameless = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    same = [name.casefold() for name in names] == [name.casefold() for name in recipe.labels]
    if len(names) == len(recipe.labels) and (same or nameless):
        return ""
    theirs, asked = differing(list(names), recipe.labels, ", ".join)
    return (
        f"{folder} tells {theirs} apart, objective.labels are {asked}; give them in the model's"
        " order, or another model"
    )


def _base_folder(recipe: Recipe, folder: Path, mesh: Mesh) -> Path | None:
    """The folder of the model that training started from, an adapter's if it went on from one, if
    the recipe asks for it; if it cannot be compared, rank 0 prints why.
    """
    if not recipe.evaluate.base:
        return None
    base, why = _start_folder(recipe)
    if base is not None:
        try:
            why = _incomparable(recipe, base, folder)
        except WrongInput as error:
            why = str(error)
    if why and mesh.is_main:
        say(f"evaluate: no base model beside: {why}")
    return None if why else base


def _start_folder(recipe: Recipe) -> tuple[Path | None, str]:
    """The folder of the model that training started from; or None, and why there is none."""
    origin, lora = recipe.train.start_from, recipe.model.lora
    if origin is not None:
        return None, (
            f"training started from the weights of {origin} (train.start_from), which is no model"
            " folder; evaluate the run that they are of on the same data, and compare the reports"
        )
    base = source_folder(recipe.model)
    if base is None or starts_random(recipe.model, base):
        return None, "training started from random weights"
    return (base if lora is None or lora.adapter is None else Path(lora.adapter)), ""


def _incomparable(recipe: Recipe, base: Path, folder: Path) -> str:
    """Why the model in `base` cannot stand beside that in `folder`; empty if it can.

    Raises:
        WrongInput: it is not a model, or its outputs are not one class for each text.
    """
    if base.resolve() == folder.resolve():
        return "it is the model that is evaluated"
    if kind_of_folder(base) != kind_of_folder(folder):
        return (
            f"{base} is a {kind_of_folder(base)} and has no head for what a"
            f" {kind_of_folder(folder)} does"
        )
    if not is_adapter(base):
        return _label_mismatch(recipe, base)
    under, source = base_folder(base), source_folder(recipe.model)
    is_other = source is not None and under.resolve() != source.resolve()
    if source is not None and is_other and model_hash(under) != model_hash(source):
        return (
            f"the adapter {base} names {under} as its model, which is not model.source"
            f" {recipe.model.source}; name that in its adapter_config.json"
        )
    return _label_mismatch(recipe, under, adapted=True)


def _report(recipe: Recipe, found: EvaluationResults, tokenizer: Tokenizer) -> EvaluationReport:
    baseline_values = {
        key: value for measured in found.tasks.values() for key, value in measured.baselines.items()
    }
    if names := _requested_baselines(recipe):
        baseline_values = {**baselines(recipe, prepared_for(recipe), names), **baseline_values}
    metrics, base = (
        {key: metric for measured in tasks.values() for key, metric in measured.metrics.items()}
        for tasks in (found.tasks, found.base)
    )
    return EvaluationReport(
        _model_identity(found.folder),
        tokenizer.identity(),
        metrics,
        baseline_values,
        found.samples,
        base,
        missing={
            key: why for measured in found.tasks.values() for key, why in measured.missing.items()
        },
    )


def _model_identity(folder: Path) -> str:
    """The identity of the model; for an adapter, of its base and its own files together."""
    if not is_adapter(folder):
        return model_hash(folder)
    files = {path.name: sha256_file(path) for path in sorted(folder.glob("adapter_*"))}
    return fingerprint({"base": model_hash(base_folder(folder)), "adapter": files})


def _write(recipe: Recipe, found: EvaluationResults, report: EvaluationReport) -> VerbOutcome:
    """Write the report and the examples into the run folder, and the report beside the model too if
    it is this run's own.
    """
    run = recipe.folder
    reports = [run.reports / REPORT, *([run.model / REPORT] if found.folder == run.model else [])]
    for path in reports:
        write_report(path, report)
    examples = [run.reports / EXAMPLES / examples_file(name) for name in found.tasks]
    for path, (name, measured) in zip(examples, found.tasks.items(), strict=True):
        write_examples(path, measured.examples, found.base[name].examples if found.base else ())
    of_another = f"{recipe.evaluate.model}: " if recipe.evaluate.model else ""
    return VerbOutcome(
        f"{of_another}{_summary(report, recipe)}",
        str(reports[0]),
        fingerprint(asdict(report)),
        file_sizes(run.root, [*reports, *examples]),
    )


def _summary(report: EvaluationReport, recipe: Recipe) -> str:
    """The result in a few words: bits per byte and perplexity if the first task has them, and the
    gated metrics, or else the first two.
    """
    bits, perplexity = (
        report.metrics.get(f"{recipe.tasks[0].name}/{name}")
        for name in ("bits_per_byte", "perplexity")
    )
    parts = (
        [f"{bits.value:.2f} bits per byte, perplexity {perplexity.value:.1f}"]
        if bits is not None and perplexity is not None
        else []
    )
    gated = recipe.gate.metrics(recipe.objective.judged)
    others = [key for key in gated if key in report.metrics and not key.endswith("/bits_per_byte")]
    if not parts and not others:
        others = list(report.metrics)[:2]
    if not report.metrics:
        return "; ".join(dict.fromkeys(report.missing.values()))
    return ", ".join([*parts, *(f"{key} {report.metrics[key].value:.4f}" for key in others)])
