"""The knobs of `evaluate`: one section for each task."""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ingot.config.doors import TASKS
from ingot.config.section import ByKind, KindSettings, Positive, Section
from ingot.config.sections.objective import Documents, ObjectiveSettings

Baseline = Literal["gzip", "xz", "bigram"]
"""What a loss is compared with: two general compressors, and a bigram of the same tokens."""


class TaskSettings(KindSettings):
    """What every evaluation says of itself beside its knobs.

    `implementation(task, info, max_documents)` reads and checks what the task needs and returns an
    `ingot.evaluate.subject.OpenTask`: `info` is an `EvalModelInfo`, and `max_documents` limits how
    many validation documents are used while training (None: all).
    """

    needs_rows: ClassVar[bool] = False
    """Whether it is measured on the prepared validation rows."""
    model_kinds: ClassVar[tuple[Literal["decoder", "seq2seq", "encoder", "masked"], ...]] = ()
    """The kinds of model (`decoder`, `seq2seq`, `encoder`, `masked`) that it can measure; empty:
    all.
    """
    item_columns: ClassVar[tuple[str, ...]] = ()
    """The columns that the records of `sources` must have; empty: that is not known beforehand."""
    document_kinds: ClassVar[tuple[Documents, ...]] = ()
    """The kinds of held-out document that it can be measured on; empty: all."""
    metric_names: ClassVar[tuple[str, ...]] = ()
    """What its metrics are called after `NAME/`, all that there may be; empty: that is not known
    beforehand, or not without the objective (`metrics_with`).
    """
    package: ClassVar[tuple[str, str] | None] = None
    """The module that it needs, and the command that installs it."""
    kind: str
    """Which evaluation."""
    name: str
    """The name that its metrics carry in the report."""

    @property
    def baseline_names(self) -> list[Baseline]:
        """Baselines to report beside the task."""
        return []

    @property
    def sources(self) -> list[str]:
        """Where its items come from: paths, or `SCHEME:...` as for `data.train[].source`."""
        source: str | None = getattr(self, "source", None)
        return [source] if source else []

    @property
    def needs_held_out(self) -> bool:
        """Whether it measures on the held-out documents, rather than on items of its own."""
        return self.needs_rows

    @property
    def metric_beginnings(self) -> tuple[str, ...]:
        """What its metrics may begin with after `NAME/`, where no more is known beforehand."""
        return ()

    def resolved(self, objective: ObjectiveSettings) -> Self:
        """The same task with what stands for knobs that were left empty."""
        return self

    def metrics_with(self, objective: ObjectiveSettings) -> tuple[str, ...]:
        """What its metrics are called in a recipe with this objective, as `metric_names`."""
        return self.metric_names

    def source_metrics(self, objective: ObjectiveSettings) -> tuple[str, ...]:
        """Which of `metrics_with` are also told of each of several sources, as `METRIC/SOURCE`."""
        return ()

    def why_not(self, objective: ObjectiveSettings, kind: str | None) -> str | None:
        """Why it cannot be measured on documents of this objective and a model of this kind (None:
        not known), in words.
        """
        if self.model_kinds and kind is not None and kind not in self.model_kinds:
            return (
                f"{self.kind} is for {' or '.join(self.model_kinds)} models, and objective.kind"
                f" {objective.kind} trains one of kind {kind}; remove the task"
            )
        held_out = objective.training_documents
        if self.needs_held_out and self.document_kinds and held_out not in self.document_kinds:
            instead = ", or give it a `source`" if "source" in type(self).model_fields else ""
            return (
                f"{self.kind} is measured on {' or '.join(self.document_kinds)} documents, and"
                f" objective.kind {objective.kind} has {held_out} documents; remove the"
                f" task{instead}"
            )
        return None


_LIKELIHOOD = ("loss", "perplexity", "bits_per_byte")
LOSS_METRICS: dict[Documents, tuple[str, ...]] = {
    **dict.fromkeys(("text", "chat", "pair"), _LIKELIHOOD),
    "preference": (*_LIKELIHOOD, "accuracy", "margin"),
    "rated": (*_LIKELIHOOD, "accuracy"),
    "labelled": ("loss",),
    "masked": ("loss", "perplexity"),
}
"""The metrics of `loss` on each kind of document, all that there may be."""
LOSS_OF_SOURCES: dict[Documents, tuple[str, ...]] = {
    **dict.fromkeys(("text", "chat", "pair", "rated"), ("bits_per_byte",)),
    "preference": ("bits_per_byte", "accuracy"),
    "labelled": ("loss",),
    "masked": (),
}
"""Those of them that are told of each source, too."""


class LossTask(TaskSettings):
    """Loss, perplexity and bits per byte on the validation documents, of texts also for each of
    several sources; for preference pairs also how often the chosen answer is the likelier one.

    Where a tokenizer begins texts with no token, nothing predicts their first one: its bytes do not
    count, and bits per byte are compared with those of the same tokenizer alone.
    """

    implementation = "ingot.evaluate.tasks.loss:open_loss"
    needs_rows = True

    kind: Literal["loss"] = "loss"
    """Which evaluation."""
    name: str = "loss"
    """The name that its metrics carry in the report."""
    baselines: list[Baseline] = []
    """Compressors and models to stand beside the result, on the same bytes: `gzip` -9, `xz` -9, and
    a smoothed `bigram` of the same tokens counted on the training split. Compressors want texts,
    so nothing held out may come from a `megatron:` source.
    """

    @property
    def baseline_names(self) -> list[Baseline]:
        return list(self.baselines)

    def metrics_with(self, objective: ObjectiveSettings) -> tuple[str, ...]:
        return self.metric_names or LOSS_METRICS[objective.training_documents]

    def source_metrics(self, objective: ObjectiveSettings) -> tuple[str, ...]:
        return self.metric_names or LOSS_OF_SOURCES[objective.training_documents]


class HellaSwagTask(TaskSettings):
    """HellaSwag (Zellers et al. 2019): which of four endings is the likeliest, per character. The
    same figure as lm-evaluation-harness' acc_norm.
    """

    implementation = "ingot.evaluate.tasks.choice:open_choice"
    model_kinds = ("decoder",)
    item_columns = ("ctx_a", "ctx_b", "activity_label", "endings", "label")
    metric_names = ("accuracy", "accuracy_norm")

    kind: Literal["hellaswag"]
    """Which evaluation."""
    name: str = "hellaswag"
    """The name that its metrics carry in the report."""
    source: str = "hf:Rowan/hellaswag"
    """JSONL or Parquet in HellaSwag's own columns (`ctx_a`, `ctx_b`, `activity_label`, `endings`,
    `label`), or `hf:NAME[:SUBSET]`.
    """
    split: str = "validation"
    """Which split of a Hugging Face data set; of files as of `data.train[].split`, and for
    `validation` all of them, where names do not tell splits apart.
    """
    limit: Positive | None = None
    """Use the first so many items; null for all."""


class ChoiceTask(TaskSettings):
    """Multiple choice: the likeliest of some continuations of a question, plain and per
    character.
    """

    implementation = "ingot.evaluate.tasks.choice:open_choice"
    model_kinds = ("decoder",)
    item_columns = ("question", "choices", "answer")
    metric_names = ("accuracy", "accuracy_norm")

    kind: Literal["choice"]
    """Which evaluation."""
    name: str = "choice"
    """The name that its metrics carry in the report."""
    source: str
    """JSONL, Parquet or CSV, one question a record, or `hf:NAME[:SUBSET]`."""
    split: str = "validation"
    """Which split of a Hugging Face data set; of files as of `data.train[].split`, and for
    `validation` all of them, where names do not tell splits apart.
    """
    columns: dict[str, str] = {}
    """Names of the columns where they differ from `question`, `choices` (a list of texts) and
    `answer` (its number from 0, a letter, or its text).
    """
    limit: Positive | None = None
    """Use the first so many items; null for all."""


class RougeTask(TaskSettings):
    """Texts generated from sources against reference texts: ROUGE-1, 2, L and Lsum (Lin 2004), by
    the package rouge-score; needs `ingot[rouge]`.
    """

    implementation = "ingot.evaluate.tasks.rouge:open_rouge"
    model_kinds = ("decoder", "seq2seq")
    document_kinds = ("pair", "chat")
    item_columns = ("source", "target")
    package = ("rouge_score", "pip install 'ingot[rouge]'")
    metric_names = ("rouge1", "rouge2", "rougeL", "rougeLsum")

    kind: Literal["rouge"]
    """Which evaluation."""
    name: str = "rouge"
    """The name that its metrics carry in the report."""
    source: str | None = None
    """JSONL, Parquet or CSV with sources and references; empty: the validation documents (pairs, or
    chats, whose last answer is the reference).
    """
    split: str = "validation"
    """Which split of a Hugging Face data set; of files as of `data.train[].split`, and for
    `validation` all of them, where names do not tell splits apart.
    """
    columns: dict[str, str] = {}
    """Names of the columns where they differ from `source` and `target`."""
    limit: Positive | None = 200
    """Use the first so many items; null for all."""
    beams: Positive = 1
    """Width of the beam search; 1 is greedy. Wider ones for sequence-to-sequence models only."""
    max_tokens: Positive = 128
    """Most tokens that are generated for each source."""
    stemmer: bool = True
    """Compare stems rather than words, as is usual."""

    @model_validator(mode="after")
    def _of_a_source(self) -> RougeTask:
        if self.columns and self.source is None:
            raise ValueError(
                "columns names those of source, and there is none: the validation documents have"
                " none to name; give source, or remove columns"
            )
        if self.split != "validation" and self.source is None:
            raise ValueError(
                f"split={self.split} is one of source, and there is none: the validation documents"
                " are measured; give source, or remove split"
            )
        return self

    @property
    def needs_held_out(self) -> bool:
        return self.source is None

    def why_not(self, objective: ObjectiveSettings, kind: str | None) -> str | None:
        if self.beams > 1 and kind == "decoder":
            return (
                f"beams {self.beams} is for seq2seq models, and objective.kind {objective.kind}"
                " trains a decoder; set it to 1"
            )
        return super().why_not(objective, kind)


class ClassificationTask(TaskSettings):
    """Accuracy and F1 of a classifier on labelled documents."""

    implementation = "ingot.evaluate.tasks.classification:open_classification"
    model_kinds = ("encoder",)
    document_kinds = ("labelled",)
    needs_rows = True
    most_classes: ClassVar[int] = 20
    """Of more classes none has a metric of its own."""

    kind: Literal["classification"]
    """Which evaluation."""
    name: str = "classification"
    """The name that its metrics carry in the report."""

    def metrics_with(self, objective: ObjectiveSettings) -> tuple[str, ...]:
        names = objective.class_names if len(objective.class_names) <= self.most_classes else []
        return self.metric_names or ("accuracy", "f1", *(f"f1_{name}" for name in names))


class PreferenceTask(TaskSettings):
    """Accuracy of a reward model on held-out preferences: how often it scores the preferred answer
    higher.
    """

    implementation = "ingot.evaluate.tasks.preference:open_preference"
    model_kinds = ("encoder",)
    document_kinds = ("preference",)
    needs_rows = True
    metric_names = ("accuracy", "margin", "loss")

    kind: Literal["preference"]
    """Which evaluation."""
    name: str = "preference"
    """The name that its metrics carry in the report."""


class LMEvalTask(TaskSettings):
    """Tasks of EleutherAI's lm-evaluation-harness, by name; needs `ingot[lm-eval]`."""

    implementation = "ingot.evaluate.tasks.lm_eval:open_lm_eval"
    model_kinds = ("decoder",)
    package = ("lm_eval", "pip install 'ingot[lm-eval]'")

    kind: Literal["lm_eval"]
    """Which evaluation."""
    name: str = "lm_eval"
    """The name that its metrics carry in the report."""
    tasks: Annotated[list[str], Field(min_length=1)]
    """Names of tasks, as `lm_eval ls tasks` lists them."""
    include: str | None = None
    """Folder with task definitions of your own."""
    shots: Annotated[int, Field(ge=0)] | None = None
    """Examples put before each item; null for what the task says."""
    limit: Positive | None = None
    """Use the first so many items of each task; null for all."""

    @property
    def sources(self) -> list[str]:
        return [self.include] if self.include else []

    @property
    def metric_beginnings(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name in self.tasks)


Task = Annotated[TaskSettings, ByKind(TASKS, "loss")]


class Evaluate(Section):
    """How good the model is."""

    tasks: list[Task] = []
    """The evaluations, in order. Empty: `loss`, for classifiers `classification` as well, and for
    training on rewards `reward`; for reward models `preference` alone.
    """
    model: str | None = None
    """Model folder to evaluate; the run's own exported model when empty."""
    base: bool = False
    """Evaluate the model that training started from, too, and show it beside: its metrics, and its
    answers to `prompts`. That is `model.source` with `model.config` and `model.lora.adapter`; with
    `train.start_from` there is none, which is said.
    """
    any_template: bool = False
    """Evaluate a model although its chat template is not the one that it was trained with, or that
    the data were prepared with.
    """
    micro_batch: Positive = 8
    """Sequences computed at once; changes speed, never the result."""
    prompts: list[str] = []
    """Texts to complete, or what a user says to a model that learns chats, shown in the report and,
    with `train.sample_every`, while training runs.
    """
    sample_tokens: Positive = 64
    """Tokens generated for each of `prompts`."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """What the logits are divided by when tokens are drawn for `prompts`, from the recipe's `seed`,
    the same ones each time; 0 always takes the likeliest token.
    """
