"""`ingot evaluate`: a model folder and the held-out documents in, `reports/evaluate.json` and a table out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ingot.base.errors import WrongInput
from ingot.base.evaluation import EvaluationReport, write_report
from ingot.base.fingerprint import fingerprint
from ingot.base.progress import Progress, say
from ingot.base.steprecord import Outcome, sizes
from ingot.config.recipe import Recipe
from ingot.data.manifest import Prepared, prepared_for
from ingot.data.rows import Rows, open_rows
from ingot.evaluate.baselines import Baseline, baselines, check_baselines
from ingot.evaluate.corpus import document_bytes, open_columns, target_bytes
from ingot.evaluate.figures import loss_metrics
from ingot.evaluate.loss import Stretches, gathered, score
from ingot.evaluate.samples import check_prompts, complete
from ingot.models.decoder import Decoder
from ingot.models.device import Compute, device_name, resolve_compute
from ingot.models.folder import CONFIG, check_template, load_model, model_hash
from ingot.models.source import source_folder, starts_random
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.templates import with_template
from ingot.tokenizers.tokenizer import Tokenizer

REPORT = "evaluate.json"


@dataclass(frozen=True)
class Subject:
    """What is evaluated on what: all that is settled before the first number."""

    recipe: Recipe
    folder: Path
    tokenizer: Tokenizer
    prepared: Prepared
    rows: Rows
    compute: Compute
    baselines: list[Baseline]


def evaluate(recipe: Recipe) -> Outcome:
    """Score the model on the held-out documents and write the report. Every rank calls it; rank 0 writes.

    The model is `evaluate.model`, else the run's own `model/`, else `model.source` where that has weights.

    Raises:
        WrongInput: there is no model or no prepared data, or the two do not belong together.
        Failed: the model gives numbers that are not finite.
    """
    with running_mesh() as mesh:
        subject = _subject(recipe, mesh)
        model = load_model(subject.folder, device=mesh.device)
        _check(model, subject)
        losses = _score(model, subject, mesh)
        report = mesh.from_main(lambda: _report(model, subject, losses))
        return mesh.from_main(lambda: _write(recipe, subject, report))


def model_folder(recipe: Recipe) -> Path:
    """Where the model lies that `recipe` means to evaluate.

    Raises:
        WrongInput: there is none.
    """
    if recipe.evaluate.model:
        return Path(recipe.evaluate.model)
    own = recipe.folder.model
    if (own / CONFIG).exists():
        return own
    base = source_folder(recipe.model)
    if base is None or starts_random(recipe.model, base):
        raise WrongInput(f"{own} holds no model yet; run `ingot train` first, or set evaluate.model to a model folder")
    return base


def _subject(recipe: Recipe, mesh: Mesh) -> Subject:
    if not recipe.evaluate.tasks:
        raise WrongInput("evaluate.tasks is empty: there is nothing to evaluate; add `{kind: loss}`")
    columns = recipe.folder.columns
    prepared = prepared_for(recipe)
    folder = model_folder(recipe)
    tokenizer = load_tokenizer(folder)
    if not recipe.evaluate.any_template:
        check_template(folder, tokenizer.template_identity, "evaluate.any_template")
    if tokenizer.identity() != prepared.tokenizer and not (recipe.evaluate.any_template and _same_but_for_template(recipe, tokenizer)):
        raise WrongInput(
            f"the tokenizer of {folder} ({tokenizer.identity()}) is not the one that {columns} was prepared with ({prepared.tokenizer}); "
            f"set tokenizer.source to {folder} and run `ingot prepare` again, or evaluate a model of this run"
        )
    yardsticks = sorted({name for task in recipe.evaluate.tasks for name in task.baselines})
    check_baselines(recipe, yardsticks)
    rows = open_rows(columns, "validation", recipe.data.seq_len, pack=recipe.pack_held_out, pad_last=True)
    return Subject(recipe, folder, tokenizer, prepared, rows, resolve_compute(recipe.precision.compute, mesh.device), yardsticks)


def _same_but_for_template(recipe: Recipe, tokenizer: Tokenizer) -> bool:
    own = load_tokenizer(recipe.folder.tokenizer)
    return with_template(own, "").identity() == with_template(tokenizer, "").identity()


def _check(model: Decoder, subject: Subject) -> None:
    seq_len, ids = subject.recipe.data.seq_len, subject.tokenizer.vocab_size
    if seq_len > model.config.max_position_embeddings:
        raise WrongInput(f"data.seq_len {seq_len} exceeds the {model.config.max_position_embeddings} positions of {subject.folder}; lower data.seq_len")
    if ids > model.config.vocab_size:
        raise WrongInput(f"the tokenizer of {subject.folder} has {ids} ids, its model only {model.config.vocab_size}; use the tokenizer that it was made with")
    check_prompts(subject.recipe.evaluate.prompts, subject.recipe.evaluate.sample_tokens, model, subject.tokenizer)


def _score(model: Decoder, subject: Subject, mesh: Mesh) -> Stretches:
    rows, recipe = subject.rows, subject.recipe
    if mesh.is_main:
        ranks = f"{mesh.world} x " if mesh.world > 1 else ""
        say(f"evaluate: {subject.folder}, {len(rows):,} rows of {recipe.data.seq_len} tokens, {subject.compute} on {ranks}{device_name(mesh.device)}")
    with Progress("evaluate", len(rows), "rows", quiet=not mesh.is_main) as progress:
        # Rank 0 speaks for all: the shares are equal.
        tell: Callable[[int], None] = lambda done: progress.update(min(done * mesh.world, len(rows)))  # noqa: E731
        mine = score(model, rows, len(rows), recipe.evaluate.micro_batch, subject.compute, mesh, tell)
    return gathered(mine, mesh)


def _report(model: Decoder, subject: Subject, losses: Stretches) -> EvaluationReport:
    recipe, prepared, tokenizer = subject.recipe, subject.prepared, subject.tokenizer
    if recipe.pack_held_out == "cut":
        held_out = open_columns(recipe.folder.columns, prepared, "validation")
        of_bytes = document_bytes(held_out, tokenizer, prepared.total("validation", "bytes"))
    else:
        # Whole documents side by side: each stretch is one.
        losses, of_bytes = replace(losses, ends_document=np.ones_like(losses.ends_document)), target_bytes(subject.rows, tokenizer)
    metrics = {}
    for task in recipe.evaluate.tasks:
        metrics.update(loss_metrics(task.name, losses, of_bytes, documents=prepared.sets["validation"], tokenizer=prepared.tokenizer))
    samples = complete(model, subject.folder, tokenizer, recipe.evaluate.prompts, recipe.evaluate.sample_tokens, subject.compute)
    return EvaluationReport(model_hash(subject.folder), tokenizer.identity(), metrics, baselines(recipe, prepared, subject.baselines), samples)


def _write(recipe: Recipe, subject: Subject, report: EvaluationReport) -> Outcome:
    """The report into the run folder, and beside the model where the model is this run's own."""
    run = recipe.folder
    written = [run.reports / REPORT]
    if subject.folder == run.model:
        written.append(run.model / REPORT)
    for path in written:
        write_report(path, report)
    _show(report)
    task = recipe.evaluate.tasks[0].name
    phrase = f"{report.metrics[f'{task}/bits_per_byte'].value:.2f} bits per byte, perplexity {report.metrics[f'{task}/perplexity'].value:.1f}"
    return Outcome(phrase, str(written[0]), fingerprint(asdict(report)), sizes(run.root, written))


def _show(report: EvaluationReport) -> None:
    """The table on stdout: metrics, then the same bytes under other hands."""
    table = Table("metric", "value", "95 % interval", "n", caption="lower is better")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, metric in report.metrics.items():
        table.add_row(key, f"{metric.value:.4f}", f"{metric.ci_low:.4f} to {metric.ci_high:.4f}", f"{metric.n:,}")
    if report.baselines:
        table.add_section()
    for name, value in sorted(report.baselines.items(), key=lambda item: item[1]):
        table.add_row(f"bits per byte of {name}", f"{value:.4f}")
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    for sample in report.samples:
        console.print(f"{sample['prompt']!r} goes on {sample['completion']!r}", markup=False, soft_wrap=True)
