"""The loss task: loss, perplexity and bits per byte on the validation documents of any kind."""

from __future__ import annotations

import math
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
from ingot.data.batches.samples import Samples, alike_ratings
from ingot.data.batches.spans import hiding_of
from ingot.data.columns.manifest import PreparedData, prepared_for
from ingot.evaluate.corpus import (
    document_bytes,
    open_columns,
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
from ingot.evaluate.metrics import (
    likelier_metric,
    loss_metrics,
    mean_metric,
    ratio_interval,
    sum_metrics,
    tokens_identity,
)
from ingot.evaluate.sources import (
    Chosen,
    of_each_source,
    source_of_documents,
    source_of_rows,
)
from ingot.evaluate.subject import EvalModel, EvalModelInfo, TaskResult
from ingot.tokenizers.tokenizer import Tokenizer


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
        WrongInput: they do not exist, were prepared with another tokenizer, are for another kind of
            model, or so many of them hold no whole text.
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
        if recipe.documents == "text" and count < len(rows):
            _check_ends(recipe, prepared, count)
        return OpenRowLossTask(task, rows, prepared, info.tokenizer, count)
    return OpenSampleLossTask(task, rows, prepared, info.tokenizer, count)


def _check_ends(recipe: Recipe, prepared: PreparedData, count: int) -> None:
    """Raises WrongInput if no text with anything to predict ends in the first `count` rows."""
    column = open_columns(recipe.folder.columns, prepared, "validation")[0]
    lengths, seq_len = column.lengths(0, len(column)), recipe.data.seq_len
    ends = np.cumsum(lengths, dtype=np.int64)[lengths > 1]
    if len(ends) and ends[0] > count * seq_len:
        raise WrongInput(
            f"train.evaluate_rows {count}: no held-out document ends in so many rows of"
            f" {seq_len:,} tokens; set it to {-(-int(ends[0]) // seq_len):,} or more"
        )


def comparison_set(
    identity: str, rows: Rows | Samples, recipe: Recipe, count: int, *, windows: bool = False
) -> str:
    """The identity of the set that is measured: that of the documents, the maximum lengths if some
    were left out or cut for their length, and the number of rows if not all are used. What remains
    of one that is cut is up to the tokenizer too, and is what is predicted; not so of a labelled
    text, unless it is dropped. `windows`: texts go on in a next row, which begins without what was
    before.
    """
    cut: dict[str, int | str] = {"seq_len": recipe.data.seq_len} if windows else {}
    if rows.left_out:
        cut = {"seq_len": recipe.data.seq_len, "target_len": recipe.data.target_len}
        if recipe.documents != "labelled" or recipe.data.truncate == "drop":
            cut |= {"tokenizer": rows.tokenizer}
        if recipe.data.truncate != "right":
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
        return subject.everyone.from_main(lambda: self._report(losses, subject.recipe))

    def _report(self, losses: SegmentLosses, recipe: Recipe) -> TaskResult:
        prepared, all_of_them = self.prepared, self.count == len(self.rows)
        windows = False
        if recipe.documents == "text":
            losses = losses.whole()
            windows = not losses.ends_document.all()
            columns = open_columns(recipe.folder.columns, prepared, "validation")
            total = prepared.total("validation", "bytes") if all_of_them else None
            count = int(losses.ends_document.sum())
            sizes = document_bytes(columns, self.tokenizer, total, count)
            of = source_of_documents(columns, prepared.splits["validation"])[:count]
        else:
            # Rows hold whole documents: each segment is one.
            losses = replace(losses, ends_document=np.ones_like(losses.ends_document))
            sizes, of = target_bytes(self.rows, self.tokenizer, self.count)
        documents = prepared.sets["validation"]
        on = comparison_set(documents, self.rows, recipe, self.count, windows=windows)
        # Without a token that begins each text nothing predicts the first one of its own.
        whole = recipe.documents != "text" or bool(self.tokenizer.frame[0])
        metrics = loss_metrics(
            self.task.name, losses, sizes, documents=on, tokenizer=prepared.tokenizer, whole=whole
        )
        nats, targets = (
            np.bincount(losses.documents, values, len(sizes)).astype(np.float64)
            for values in (losses.nll, losses.targets)
        )

        def measure(chosen: Chosen, identity: str) -> dict[str, Metric]:
            same = comparison_set(identity, self.rows, recipe, self.count, windows=windows)
            same = same if whole else tokens_identity(same, prepared.tokenizer)
            return _bits_per_byte(self.task.name, nats[chosen], sizes[chosen], same)

        if all_of_them:
            metrics |= of_each_source(prepared.splits["validation"], of, measure)
        return TaskResult(metrics, _examples(nats, targets, sizes))


def _bits_per_byte(name: str, nats: Floats, sizes: Floats, on: str) -> dict[str, Metric]:
    """`NAME/bits_per_byte`; nothing where nothing is predicted."""
    if not sizes.sum():
        return {}
    bits = nats / math.log(2)
    value, interval = float(bits.sum() / sizes.sum()), ratio_interval(bits, sizes)
    metric = Metric(value, *interval, direction="lower", n=len(sizes), set_fingerprint=on)
    return {f"{name}/bits_per_byte": metric}


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
        found = self._report(sums, subject.recipe)
        if self.count == len(self.rows):
            found.metrics.update(self._of_sources(sums, subject.recipe))
        return found

    def _report(self, sums: SampleLosses, recipe: Recipe) -> TaskResult:
        name, identity = self.task.name, self.prepared.sets["validation"]
        on = comparison_set(identity, self.rows, recipe, self.count)
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

    def _of_sources(self, sums: SampleLosses, recipe: Recipe) -> dict[str, Metric]:
        """What is told of each source: bits per byte of what is written, of rated answers of the
        good ones; how often a chosen answer is likelier; the loss of labels.
        """
        name = self.task.name

        def measure(chosen: Chosen, identity: str) -> dict[str, Metric]:
            on = comparison_set(identity, self.rows, recipe, self.count)
            if recipe.documents == "labelled":
                return {f"{name}/loss": mean_metric(sums.nats[chosen], direction="lower", on=on)}
            told = chosen & (sums.ratings > 0) if recipe.documents == "rated" else chosen
            found = _bits_per_byte(name, sums.nats[told], sums.bytes[told], on)
            if recipe.documents == "preference":
                found |= {f"{name}/accuracy": _accuracy(sums.margins[chosen], on)}
            return found

        of = source_of_rows(self.rows, self.count)
        return of_each_source(self.prepared.splits["validation"], of, measure)

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
        (the area under the ROC curve; ties count half). What one kind of answers does not tell is
        left out.
        """
        good, name = sums.ratings > 0, self.task.name
        metrics: dict[str, Metric] = {}
        if good.any():
            metrics |= sum_metrics(
                name,
                *(values[good] for values in (sums.nats, sums.targets, sums.bytes)),
                documents=on,
                tokenizer=self.prepared.tokenizer,
            )
        if good.any() and not good.all():
            mean = -sums.nats / sums.targets
            metrics[f"{name}/accuracy"] = likelier_metric(mean[good], mean[~good], on=on)
        examples = _examples(sums.nats, sums.targets, sums.bytes)
        alike = alike_ratings(good, len(self.rows))
        return TaskResult(
            metrics,
            [one | {"good": bool(rated)} for one, rated in zip(examples, good, strict=True)],
            missing={f"{name}/{metric}": alike.why for metric in alike.untold} if alike else {},
        )


def _preference_metrics(name: str, sums: SampleLosses, on: str) -> dict[str, Metric]:
    """How often the chosen answer is the more likely one (not if both are equally likely), and the
    mean margin in nats.
    """
    margins = sums.margins
    return {
        f"{name}/accuracy": _accuracy(margins, on),
        f"{name}/margin": mean_metric(margins, direction="higher", on=on),
    }


def _accuracy(margins: Floats, on: str) -> Metric:
    return mean_metric((margins > 0).astype(np.float64), direction="higher", on=on)


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
