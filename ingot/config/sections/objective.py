"""The knobs of `objective`: one section for each way of training."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from ingot.config.doors import OBJECTIVES
from ingot.config.section import ByKind, KindSettings, Share

Documents = Literal["text", "chat", "preference", "pair", "labelled"]
"""What kind of document an objective trains on."""


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
    needs_teacher: ClassVar[bool] = False
    """Whether it reads a second model beside the trained one; the knob `teacher` then names it."""

    @property
    def training_documents(self) -> Documents:
        """What kind of document is trained on, with these settings."""
        return self.document_kind

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
    def class_names(self) -> list[str]:
        """The names of a classifier's classes; none for anything else."""
        return []


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


class DPOSettings(ObjectiveSettings):
    """Direct preference optimisation (Rafailov et al. 2023): of two answers, the preferred one is
    to gain on the other, relative to a reference.
    """

    implementation = "ingot.objectives.dpo:DPO.from_settings"
    document_kind = "preference"
    pipeline_parallel = False  # the loss needs all tokens of a row at once
    needs_reference = True
    kind: Literal["dpo"]
    """The way of training."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is held to the reference: the larger, the closer it stays."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs that are thought to be labelled the wrong way round (conservative DPO); 0
    trusts all.
    """
    reference: str | None = None
    """Model that the policy is measured against: a Hugging Face folder, a run folder, or
    `hf:ORG/NAME`. Empty: the model that training starts from, under LoRA without its adapter. Its
    log-probabilities are computed once, before the first step.
    """


class DistillSettings(ObjectiveSettings):
    """Knowledge distillation (Hinton et al. 2015): cross-entropy on the data and, beside it, the
    divergence from a teacher's distribution.
    """

    implementation = "ingot.objectives.distill:Distill.from_settings"
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
    """Names of the classes. A document gives its label by name, or by its number in this list, from
    0.
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
