"""The knobs of `objective`: one section for each way of training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from ingot.config.section import Section, Share

Documents = Literal["text", "chat", "preference", "pair", "labelled"]
"""What kind of document an objective trains on."""


class Pretrain(Section):
    """Next-token prediction on documents; continued pretraining is the same with loaded weights."""

    kind: Literal["pretrain"] = "pretrain"
    """The way of training."""


class SFT(Section):
    """Supervised fine-tuning on chats: loss on what the assistant says and on its end-of-turn
    token, on nothing else.
    """

    kind: Literal["sft"]
    """The way of training."""


class DPO(Section):
    """Direct preference optimisation (Rafailov et al. 2023): of two answers, the preferred one is
    to gain on the other, relative to a reference.
    """

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


class Distill(Section):
    """Knowledge distillation (Hinton et al. 2015): cross-entropy on the data and, beside it, the
    divergence from a teacher's distribution.
    """

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


class Seq2Seq(Section):
    """An encoder reads the source, a decoder learns to write the target: T5, mT5, BART, Marian."""

    kind: Literal["seq2seq"]
    """The way of training."""
    prefix: str = ""
    """Put before every source, in training, evaluation and serving alike, such as T5's `summarize:
    `.
    """


class Classify(Section):
    """An encoder learns which label a text has: BERT, RoBERTa and their kin."""

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


def _kind(value: Any) -> str:
    return (
        str(value.get("kind", "pretrain"))
        if isinstance(value, dict)
        else str(getattr(value, "kind", value))
    )


Objective = Annotated[
    Annotated[Pretrain, Tag("pretrain")]
    | Annotated[SFT, Tag("sft")]
    | Annotated[DPO, Tag("dpo")]
    | Annotated[Distill, Tag("distill")]
    | Annotated[Seq2Seq, Tag("seq2seq")]
    | Annotated[Classify, Tag("classify")],
    Discriminator(_kind),
]

_DOCUMENTS: dict[str, Documents] = {
    "pretrain": "text",
    "sft": "chat",
    "dpo": "preference",
    "seq2seq": "pair",
    "classify": "labelled",
}


def documents_of(objective: Objective) -> Documents:
    """The kind of document that an objective trains on."""
    return objective.documents if isinstance(objective, Distill) else _DOCUMENTS[objective.kind]
