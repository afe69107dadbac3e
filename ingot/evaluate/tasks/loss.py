"""The loss task: loss, perplexity and bits per byte on the validation documents of any kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.reports import Metric
from ingot.config.models.source import kind_that_reads
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import LossTask
from ingot.data.batches.hiding import Hiding
from ingot.data.batches.rows import Rows, open_rows
from ingot.data.batches.samples import Samples
from ingot.data.batches.spans import hiding_of
from ingot.data.columns.column import Column
from ingot.data.columns.manifest import PreparedData, PreparedSource, prepared_for, set_identity
from ingot.evaluate.corpus import (
    document_bytes,
    open_columns,
    source_of_documents,
    target_bytes,
)
from ingot.evaluate.distribute import Floats
from ingot.evaluate.loss import (
    SampleLosses,
    SegmentLosses,
    gather_segments,
    sample_losses,
    score_rows,
)
from ingot.evaluate.metrics import loss_metrics, mean_metric, ratio_interval, sum_metrics
from ingot.evaluate.subject import EvalModel, EvalModelInfo, TaskResult
from ingot.tokenizers.tokenizer import Tokenizer

MAX_NAME = 40
"""Characters of a source's name in a metric."""


def open_held_out(
    recipe: Recipe, where: str, positions: int, hiding: Hiding | None = None
) -> tuple[PreparedData, Rows | Samples]:
    """Open the prepared validation rows; `hiding`: what is hidden of masked texts.

    Raises:
        WrongInput: they do not exist, or are longer than the model's positions.
    """
    prepared = prepared_for(recipe)
    if recipe.data.seq_len > positions:
        raise WrongInput(
            f"data.seq_len {recipe.data.seq_len} exceeds the {positions} positions of {where};"
            " lower data.seq_len"
        )
    data = recipe.data
    rows = open_rows(
        recipe.folder.columns,
        "validation",
        data.seq_len,
        pack=recipe.held_out_row_plan,
        pad_last=True,
        target_len=data.target_len,
        hiding=hiding,
    )
    return prepared, rows


def open_loss(
    task: LossTask, info: EvalModelInfo, max_documents: int | None = None
) -> OpenRowLossTask | OpenSampleLossTask:
    """Open the validation rows, or the first `max_documents` of them.

    Raises:
        WrongInput: they do not exist, were prepared with another tokenizer, or are for another kind
            of model.
    """
    recipe = info.recipe
    info.require_kind(
        f"evaluate.tasks, {task.name}: the loss of {recipe.documents} documents",
        kind_that_reads(recipe),
    )
    hiding = hiding_of(recipe, info.tokenizer)
    prepared, rows = open_held_out(recipe, info.where, info.positions, hiding)
    count = min(len(rows), max_documents or len(rows))
    if isinstance(rows, Rows):
        return OpenRowLossTask(task, rows, prepared, info.tokenizer, count)
    return OpenSampleLossTask(task, rows, prepared, info.tokenizer, count)


def comparison_set(prepared: PreparedData, rows: Rows | Samples, recipe: Recipe, count: int) -> str:
    """The identity of the set that is measured: the documents, the maximum lengths if some were
    left out for their length, and the number of rows if not all are used.
    """
    identity = prepared.sets["validation"]
    cut: dict[str, int | str] = (
        {"seq_len": recipe.data.seq_len, "target_len": recipe.data.target_len}
        if not isinstance(rows, Rows) and rows.left_out
        else {}
    )
    if recipe.data.truncate != "right" and rows.left_out:
        cut |= {"truncate": recipe.data.truncate}
    first = {"rows": count} if count < len(rows) else {}
    return fingerprint({"documents": identity, **cut, **first}) if cut or first else identity


@dataclass(frozen=True)
class OpenRowLossTask:
    """The loss on rows of texts and chats, which may hold several documents or a part of one."""

    task: LossTask
    rows: Rows
    prepared: PreparedData
    tokenizer: Tokenizer
    count: int

    def measure(self, subject: EvalModel) -> TaskResult:
        with subject.progress(self.task.name, self.count, "rows") as progress:

            def on_progress(done: int) -> None:
                progress.update(min(done * subject.mesh.world, self.count))

            micro_batch = subject.recipe.evaluate.micro_batch
            mine = score_rows(
                subject.model,
                self.rows,
                self.count,
                micro_batch,
                subject.compute,
                subject.mesh,
                on_progress,
                subject.until_stopped,
            )
        losses = gather_segments(mine, subject.mesh)
        return subject.mesh.from_main(lambda: self._report(losses, subject.recipe))

    def _report(self, losses: SegmentLosses, recipe: Recipe) -> TaskResult:
        columns, all_of_them = list[Column](), self.count == len(self.rows)
        if recipe.documents == "text":
            losses = losses.whole()
            columns = open_columns(recipe.folder.columns, self.prepared, "validation")
            total = self.prepared.total("validation", "bytes") if all_of_them else None
            sizes = document_bytes(columns, self.tokenizer, total, int(losses.ends_document.sum()))
        else:
            # Rows hold whole documents: each segment is one.
            losses = replace(losses, ends_document=np.ones_like(losses.ends_document))
            sizes = target_bytes(self.rows, self.tokenizer, self.count)
        on = comparison_set(self.prepared, self.rows, recipe, self.count)
        metrics = loss_metrics(
            self.task.name, losses, sizes, documents=on, tokenizer=self.prepared.tokenizer
        )
        nats, targets = (
            np.bincount(losses.documents, values, len(sizes)).astype(np.float64)
            for values in (losses.nll, losses.targets)
        )
        if columns and all_of_them:
            metrics |= _of_each_source(self.task.name, self.prepared, columns, nats, sizes)
        return TaskResult(metrics, _examples(nats, targets, sizes))


def _of_each_source(
    name: str, prepared: PreparedData, columns: Sequence[Column], nats: Floats, sizes: Floats
) -> dict[str, Metric]:
    """`NAME/bits_per_byte/SOURCE` of each source of texts, where there are several: what is learnt
    of one may be forgotten of another, which their sum does not show.
    """
    sources = prepared.splits["validation"]
    of, found = source_of_documents(columns, sources), dict[str, Metric]()
    for number, (source, called) in enumerate(zip(sources, source_names(sources), strict=True)):
        bits, size = nats[of == number] / math.log(2), sizes[of == number]
        if len(sources) > 1 and size.sum():
            found[f"{name}/bits_per_byte/{called}"] = Metric(
                float(bits.sum() / size.sum()),
                *ratio_interval(bits, size),
                direction="lower",
                n=len(size),
                set_fingerprint=set_identity([source]),
            )
    return found


def source_names(sources: Sequence[PreparedSource]) -> list[str]:
    """How metrics call sources: by the last part of what a recipe says, or by their numbers, from
    1, where that is long or not of one source alone.
    """
    last = [source.source.rstrip("/").rpartition("/")[2] for source in sources]
    return [
        name if len(name) <= MAX_NAME and last.count(name) == 1 else str(number)
        for number, name in enumerate(last, start=1)
    ]


def _examples(nats: Floats, targets: Floats, sizes: Floats) -> list[dict[str, Any]]:
    """One example per document, numbered in the order of the columns."""
    return [
        {"document": number, "nats": float(nll), "targets": int(count), "bytes": float(size)}
        for number, (nll, count, size) in enumerate(zip(nats, targets, sizes, strict=True))
    ]


@dataclass(frozen=True)
class OpenSampleLossTask:
    """The loss on preferences, rated answers, pairs and labelled texts, each of which is a sample,
    and on masked texts, whose pieces are.
    """

    task: LossTask
    rows: Samples
    prepared: PreparedData
    tokenizer: Tokenizer
    count: int

    def measure(self, subject: EvalModel) -> TaskResult:
        sums = sample_losses(subject, self.rows, self.count, self.task.name)
        name, recipe = self.task.name, subject.recipe
        on = comparison_set(self.prepared, self.rows, recipe, self.count)
        if recipe.documents == "labelled":
            return TaskResult(
                {f"{name}/loss": mean_metric(sums.nats, direction="lower", on=on)},
                _label_examples(sums),
            )
        if recipe.documents == "masked":
            return self._masked(sums, on, recipe)
        if recipe.documents == "rated":
            return self._rated(sums, on)
        metrics = sum_metrics(
            name,
            sums.nats,
            sums.targets,
            sums.bytes,
            documents=on,
            tokenizer=self.prepared.tokenizer,
        )
        if recipe.documents == "pair":
            return TaskResult(metrics, _examples(sums.nats, sums.targets, sums.bytes))
        return TaskResult(
            {**metrics, **_preference_metrics(name, sums, on)}, _preference_examples(sums)
        )

    def _masked(self, sums: SampleLosses, on: str, recipe: Recipe) -> TaskResult:
        """The loss of hidden tokens and its exponential, comparable where the same are hidden in
        the same pieces. There are no bits per byte: nothing is told of the tokens that are seen.
        """
        of = self.rows.documents_of(self.count)
        nats, targets = (
            np.bincount(of, values).astype(np.float64) for values in (sums.nats, sums.targets)
        )
        knobs = recipe.objective.model_dump(mode="json")
        same = fingerprint({"documents": on, "seq_len": recipe.data.seq_len, "objective": knobs})
        metrics = sum_metrics(
            self.task.name, nats, targets, None, documents=same, tokenizer=self.prepared.tokenizer
        )
        examples = [
            {"document": number, "nats": float(nll), "targets": int(count)}
            for number, (nll, count) in enumerate(zip(nats, targets, strict=True))
        ]
        return TaskResult(metrics, examples)

    def _rated(self, sums: SampleLosses, on: str) -> TaskResult:
        """The loss of good answers, and how often one of them is likelier per token than a bad one
        (the area under the ROC curve; ties count half). This is left out where all are alike.
        """
        good, name = sums.ratings > 0, self.task.name
        if not good.any():
            raise WrongInput(
                f"none of the {len(good):,} held-out rated answers is a good one; set"
                " data.validation to more documents"
            )
        metrics = sum_metrics(
            name,
            *(values[good] for values in (sums.nats, sums.targets, sums.bytes)),
            documents=on,
            tokenizer=self.prepared.tokenizer,
        )
        mean = -sums.nats / sums.targets
        bad = np.sort(mean[~good])
        if len(bad):
            below, up_to = (np.searchsorted(bad, mean[good], side) for side in ("left", "right"))
            share = (below + up_to) / (2 * len(bad))
            metrics |= {f"{name}/accuracy": mean_metric(share, direction="higher", on=on)}
        examples = _examples(sums.nats, sums.targets, sums.bytes)
        return TaskResult(
            metrics,
            [one | {"good": bool(rated)} for one, rated in zip(examples, good, strict=True)],
        )


def _preference_metrics(name: str, sums: SampleLosses, on: str) -> dict[str, Metric]:
    """How often the chosen answer is the more likely one (not if both are equally likely), and the
    mean margin in nats.
    """
    margins = sums.margins
    return {
        f"{name}/accuracy": mean_metric(
            (margins > 0).astype(np.float64), direction="higher", on=on
        ),
        f"{name}/margin": mean_metric(margins, direction="higher", on=on),
    }


def _preference_examples(sums: SampleLosses) -> list[dict[str, Any]]:
    answers = _examples(sums.nats, sums.targets, sums.bytes)
    return [
        {
            **answer,
            "rejected_nats": float(nats),
            "rejected_targets": int(targets),
            "margin": float(margin),
            "correct": bool(margin > 0),
        }
        for answer, nats, targets, margin in zip(
            answers, sums.rejected_nats, sums.rejected_targets, sums.margins, strict=True
        )
    ]


def _label_examples(sums: SampleLosses) -> list[dict[str, Any]]:
    return [{"document": number, "nats": float(nats)} for number, nats in enumerate(sums.nats)]
