"""The knobs of `objective`: one section for each way of training."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ingot.config.doors import OBJECTIVES
from ingot.config.section import ByKind, KindSettings, Share
from ingot.config.spans import SpanLengths

Documents = Literal["text", "chat", "preference", "rated", "pair", "labelled", "masked"]
"""What kind of document an objective trains on. `masked`: texts as `text` has them, of which the
model is asked for the tokens that are hidden from it: by an encoder each in its place, by an
encoder-decoder in spans.
"""
PLAIN: tuple[Documents, ...] = ("text", "masked")
"""Kinds of documents that are texts and nothing else."""
CHAT_TEMPLATED: tuple[Documents, ...] = ("chat", "preference", "rated")
"""Kinds of documents that are messages, which a chat template writes down."""
TWO_ROWS: tuple[Documents, ...] = ("preference", "rated")
"""Kinds of documents of which each sample is two rows of a batch: a preference is its two answers,
a rated answer is itself and, for the KL of `kto`, its prompt with the answer to another one.
"""
Judged = Documents | Literal["answers", "scores"]
"""What a gate looks at: how likely documents are to a model, its own answers, or how it scores
those of others.
"""


Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
Weight = Annotated[float, Field(ge=0)]


class ObjectiveSettings(KindSettings):
    """What every way of training says of itself beside its knobs.

    `implementation` is called as `implementation(settings, inputs)` with an
    `ingot.objectives.protocol.ObjectiveInputs` and returns an `Objective`.
    """

    document_kind: ClassVar[Documents]
    """What kind of document it trains on."""
    pipeline_parallel: ClassVar[bool] = True
    """Whether the loss can be computed where only the last layers are: a token's value must not
    need the other tokens of its row.
    """
    needs_reference: ClassVar[bool] = False
    """Whether it wants log-probabilities of a reference model, which are computed before training;
    the knob `reference` then names the model.
    """
    samples_answers: ClassVar[bool] = False
    """Whether it trains on answers that the model in training gives to the prompts of chats; it
    is then a `GRPOSettings`.
    """
    scores_chats: ClassVar[bool] = False
    """Whether the model learns to give a chat one number, read at its last token; it is then a
    sequence classifier of transformers' with one output, not a decoder.
    """
    needs_teacher: ClassVar[bool] = False
    """Whether it reads a second model beside the trained one; the knob `teacher` then names it."""
    forward_only: ClassVar[float] = 0.0
    """The share of the tokens of a batch that only a first pass reads, which has no backward."""

    @property
    def training_documents(self) -> Documents:
        """What kind of document is trained on, with these settings."""
        return self.document_kind

    @property
    def native(self) -> bool:
        """Whether a native decoder is trained; else it is a model of transformers'."""
        return self.training_documents not in ("pair", "labelled", "masked") and not (
            self.scores_chats
        )

    @property
    def writes(self) -> bool:
        """Whether the model that is trained writes texts, as no encoder does."""
        return self.native or self.training_documents == "pair" or self.spans is not None

    @property
    def judged(self) -> Judged:
        """What a gate looks at unless the recipe says so."""
        if self.scores_chats:
            return "scores"
        return "answers" if self.samples_answers else self.training_documents

    @property
    def reference_source(self) -> str | None:
        """The model that a reference is computed with; None for the one that training starts
        from.
        """
        return getattr(self, "reference", None)

    @property
    def teacher_source(self) -> str | None:
        """The model that is learnt from, None without `needs_teacher`."""
        return getattr(self, "teacher", None) if self.needs_teacher else None

    @property
    def source_prefix(self) -> str:
        """What stands before the source of every pair."""
        return ""

    @property
    def spans(self) -> SpanLengths | None:
        """How much is hidden of texts whose hidden spans an encoder-decoder learns to write; None
        for all else.
        """
        return None

    @property
    def class_names(self) -> list[str]:
        """The names of a classifier's classes; none for anything else."""
        return []

    def check_recipe(self, recipe: Any) -> None:
        """Raises ValueError for what this way of training cannot be combined with; `recipe` is an
        `ingot.config.recipe.Recipe`.
        """

    @property
    def reads_reference(self) -> bool:
        """Whether it asks a reference model about the answers of the model in training."""
        return False

    @property
    def answers_per_row(self) -> int:
        """How many samples of `train.global_batch` come from one row of the data."""
        return 1

    @property
    def samples_per_row(self) -> Fraction:
        """How many samples of all steps come from one row in a pass over the data: a row may serve
        several steps, or be passed over.
        """
        return Fraction(self.answers_per_row)

    def rows_of(self, global_batch: int) -> int:
        """How many rows of the data a step takes."""
        return global_batch // self.answers_per_row


class PretrainSettings(ObjectiveSettings):
    """Next-token prediction on documents; continued pretraining is the same with loaded weights."""

    implementation = "ingot.objectives.cross_entropy:CrossEntropy.from_settings"
    document_kind = "text"
    kind: Literal["pretrain"] = "pretrain"
    """The way of training."""


class SFTSettings(ObjectiveSettings):
    """Supervised fine-tuning on chats: loss on what the assistant says and on its end-of-turn
    token, on nothing else.
    """

    implementation = "ingot.objectives.cross_entropy:CrossEntropy.from_settings"
    document_kind = "chat"
    kind: Literal["sft"]
    """The way of training."""


class PreferenceSettings(ObjectiveSettings):
    """What all ways of training on pairs of answers share."""

    document_kind = "preference"
    pipeline_parallel = False  # the loss needs all tokens of a row at once


class DPOSettings(PreferenceSettings):
    """Direct preference optimisation (Rafailov et al. 2023): of two answers, the preferred one is
    to gain on the other, relative to a reference.
    """

    implementation = "ingot.objectives.preferences:DPO"
    needs_reference = True
    kind: Literal["dpo"]
    """The way of training."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is held to the reference: the larger, the closer it stays."""
    label_smoothing: Smoothing = 0.0
    """The share of pairs that are thought to be labelled the wrong way round (conservative DPO); 0
    trusts all.
    """
    reference: str | None = None
    """Model that the policy is measured against: a Hugging Face folder, a run folder, or
    `hf:ORG/NAME`. Empty: the model that training starts from, under LoRA without its adapter. Its
    log-probabilities are computed once, before the first step.
    """
    normalize_length: bool = False
    """Whether answers are compared by their log-ratio per token rather than as a whole, so that a
    long answer is not better or worse for its length. Rewards are smaller then by about the length
    of an answer, and `beta` is chosen larger by as much: 5 is usual.
    """
    sft_weight: Weight = 0.0
    """Weight of a second term, the cross-entropy of the chosen answer per token, which keeps its
    probability from falling (Pang et al. 2024, iterative RPO); 1 is usual, 0 leaves it out.
    """


class IPOSettings(PreferenceSettings):
    """Identity preference optimisation (Azar et al. 2023): as DPO, but the gain of the preferred
    answer on the other is driven to a fixed value, 1 / (2 beta), and not beyond it.
    """

    implementation = "ingot.objectives.preferences:IPO"
    needs_reference = True
    kind: Literal["ipo"]
    """The way of training."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """The paper's tau: the larger, the smaller the gain that is aimed at."""
    normalize_length: bool = True
    """Whether gains are per token, as the paper's results were made and as TRL computes them; false
    compares whole answers.
    """
    reference: str | None = None
    """Model that the policy is measured against, as for `dpo`. Empty: the model that training
    starts from.
    """


class SimPOSettings(PreferenceSettings):
    """Simple preference optimisation (Meng et al. 2024): of two answers, the preferred one is to be
    likelier per token by a margin. There is no reference model.
    """

    implementation = "ingot.objectives.preferences:SimPO"
    kind: Literal["simpo"]
    """The way of training."""
    beta: Annotated[float, Field(gt=0)] = 2.0
    """Scale of the rewards, which are log-probabilities per token; 2 to 10 is usual."""
    margin: Annotated[float, Field(ge=0)] = 1.0
    """The paper's gamma: by how much the reward of the preferred answer is to be larger; 0.3 to 0.5
    times `beta` is usual.
    """
    label_smoothing: Smoothing = 0.0
    """The share of pairs that are thought to be labelled the wrong way round; 0 trusts all."""
    sft_weight: Weight = 0.0
    """Weight of a second term, the cross-entropy of the chosen answer per token; 0 leaves it
    out.
    """


class ORPOSettings(PreferenceSettings):
    """Odds ratio preference optimisation (Hong et al. 2024): cross-entropy of the preferred answer,
    and beside it the ratio of the odds of both answers. There is no reference model, and it can
    follow pretraining directly, without an SFT before it.
    """

    implementation = "ingot.objectives.preferences:ORPO"
    kind: Literal["orpo"]
    """The way of training."""
    beta: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the odds ratio, the paper's lambda; the cross-entropy of the preferred answer, per
    token, has weight 1.
    """


class RewardModelSettings(PreferenceSettings):
    """Reward modelling: a model learns to give a chat a number, so that of two answers the
    preferred one has the higher (Bradley and Terry 1952; Ouyang et al. 2022). There is no reference
    model. The number is read at the last token of the chat.
    """

    implementation = "ingot.objectives.reward:RewardModel"
    scores_chats = True
    kind: Literal["reward"]
    """The way of training."""
    margin: Annotated[float, Field(ge=0)] = 0.0
    """By how much the preferred answer's score is to be the higher one: it is subtracted from the
    difference inside of the sigmoid.
    """
    center: Weight = 0.0
    """Weight of a second term, the square of the sum of both scores, which keeps scores around 0
    (Eisenstein et al. 2023): the loss alone leaves them free up to a constant. 0.01 is usual, 0
    leaves it out.
    """

    def check_recipe(self, recipe: Any) -> None:
        """Raises ValueError for what needs a model that gives probabilities."""
        for task in recipe.evaluate.tasks:
            if task.kind == "loss":
                raise ValueError(
                    f"evaluate.tasks, {task.name}: a reward model gives scores, not probabilities,"
                    " and has no loss of documents; take kind preference, which is its accuracy"
                )


class KTOSettings(ObjectiveSettings):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024): single answers, each of which is
    known to be good or bad, are made likelier or less likely, relative to a reference.
    """

    implementation = "ingot.objectives.kto:KTO"
    document_kind = "rated"
    forward_only = 0.5  # each sample's prompt with another answer
    pipeline_parallel = False  # the loss needs all tokens of a row at once
    needs_reference = True
    kind: Literal["kto"]
    """The way of training."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is held to the reference: the larger, the closer it stays."""
    desirable_weight: Weight = 1.0
    """Weight of good answers. Where one kind is rarer, its weight is raised, so that weight times
    number is alike for both: the paper advises 1 to 4/3 as much for good answers as for bad ones.
    """
    undesirable_weight: Weight = 1.0
    """Weight of bad answers."""
    reference: str | None = None
    """Model that the policy is measured against, as for `dpo`. Empty: the model that training
    starts from.
    """

    @model_validator(mode="after")
    def _some_answers_count(self) -> KTOSettings:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError(
                "desirable_weight and undesirable_weight are both 0, so that no answer counts and"
                " nothing is learnt; raise one of them"
            )
        return self


class DistillSettings(ObjectiveSettings):
    """Knowledge distillation (Hinton et al. 2015): cross-entropy on the data and, beside it, the
    divergence from a teacher's distribution.
    """

    implementation = "ingot.objectives.distill:Distill"
    document_kind = "text"
    needs_teacher = True
    kind: Literal["distill"]
    """The way of training."""
    teacher: str
    """Model that is learnt from: `hf:ORG/NAME`, a Hugging Face folder, or a run folder. Its
    vocabulary must be the student's.
    """
    temperature: Annotated[float, Field(gt=0)] = 2.0
    """Both distributions are softened by it; the divergence is multiplied by its square, so that
    gradients keep their size.
    """
    alpha: Share = 0.5
    """Weight of the divergence; the cross-entropy has the rest."""
    documents: Literal["text", "chat"] = "text"
    """What is trained on: texts, every token of them, or chats, what the assistant says."""

    @property
    def training_documents(self) -> Documents:
        return self.documents


class Seq2SeqSettings(ObjectiveSettings):
    """An encoder reads the source, a decoder learns to write the target: T5, mT5, BART, Marian."""

    implementation = "ingot.objectives.cross_entropy:CrossEntropy.from_settings"
    document_kind = "pair"
    kind: Literal["seq2seq"]
    """The way of training."""
    prefix: str = ""
    """Put before every source, in training, evaluation and serving alike, such as T5's `summarize:
    `.
    """

    @property
    def source_prefix(self) -> str:
        return self.prefix


class ClassifySettings(ObjectiveSettings):
    """An encoder learns which label a text has: BERT, RoBERTa and their kin."""

    implementation = "ingot.objectives.cross_entropy:CrossEntropy.from_settings"
    document_kind = "labelled"
    kind: Literal["classify"]
    """The way of training."""
    labels: Annotated[list[str], Field(min_length=2)]
    """Names of the classes. A document gives its label by name, or by the number that the data set
    itself has for a name, or, where it tells none, by its place in this list, from 0; but of
    classes such as 1 to 5, numbers are names.
    """

    @field_validator("labels")
    @classmethod
    def _distinct(cls, labels: list[str]) -> list[str]:
        if len(set(labels)) < len(labels):
            raise ValueError(f"names a label twice: {', '.join(labels)}; each class has one name")
        return labels

    @property
    def class_names(self) -> list[str]:
        return self.labels


Objective = Annotated[ObjectiveSettings, ByKind(OBJECTIVES, "pretrain")]
