"""The knobs of training on rewards."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ingot.config.section import Positive, Section
from ingot.config.sections.objective import ObjectiveSettings
from ingot.config.sections.rewards import Reward


class VLLMSampler(Section):
    """A vLLM server that samples in place of ingot's own decoder. You start it, in an environment
    and on devices of its own, on the same machine or one that sees the run's folder; a training
    that finds none tells the command. Before each rollout it gets the weights through the run's
    folder `sampler/`, and what it holds is compared.

    Its sums are rounded otherwise than the trainer's, and depend on what it computes at the same
    time: a training that was killed goes on with the same weights and seeds, but answers need not
    be the same ones. Only a training of one process has it.
    """

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+$")]
    """The server's address, such as `http://127.0.0.1:8001`. Its interface for weights lets anybody
    who reaches it change them: let it listen where nobody else does.
    """
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for the server to be started, and for each of its answers."""
    tolerance: Annotated[float, Field(gt=0)] = 0.05
    """By how much the log-probabilities of its answers may differ from those that the same weights
    have here, in the mean over the tokens of some answers of each rollout; more ends the training.
    In float32 it is about 1e-5, in bfloat16 about 0.01.
    """


class GRPOSettings(ObjectiveSettings):
    """Training on rewards (group relative policy optimisation, Shao et al. 2024): the model answers
    each prompt several times, reward functions judge the answers, and those that are better than
    the mean of their group become likelier.

    A chat's prompt is all that stands before its last assistant turn; that turn is the reference,
    which rewards may compare with and which is not trained on. `train.global_batch` counts answers,
    so that a step has `train.global_batch` / `group` prompts. Answers are drawn from the whole
    distribution: there is no top_p or top_k, as the policy that is trained must be the one that is
    sampled from.

    In every layout each rank samples its share of the answers from a whole copy of the policy,
    gathered before and freed after; with `parallel.replicate` alone it needs none.
    """

    implementation = "ingot.objectives.grpo:GRPO"
    document_kind = "chat"
    samples_answers = True
    kind: Literal["grpo"]
    """The way of training."""
    rewards: Annotated[list[Reward], Field(min_length=1)]
    """What judges an answer: the weighted sum of these."""
    group: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt."""
    max_answer_tokens: Positive = 256
    """Tokens of an answer, its end included. A prompt may have as many as this leaves of
    `data.seq_len`.
    """
    sample_again: Annotated[int, Field(ge=0)] = 0
    """How many more sets of prompts a step may draw in place of groups whose rewards are equal and
    teach nothing, until it has `train.global_batch` answers of other groups (dynamic sampling of
    DAPO); 0: equal groups stay, without a gradient. That is biased: a prompt counts by how seldom
    its answers are all right or all wrong. Every step passes over all sets that it may draw, so
    that its prompts do not depend on earlier answers; an epoch counts them all.
    """
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it, in sampling and in training alike: it is part of the policy."""
    updates: Positive = 1
    """Optimizer steps on the same answers before new ones are drawn. With 1, and `staleness` 0,
    each answer is used by the policy that gave it, and the ratio is 1, to rounding. An epoch has so
    many times the steps.
    """
    staleness: Annotated[int, Field(ge=0)] = 0
    """How many rollouts the weights that answers are sampled from are behind: with N, rollout n
    (step n where `updates` is 1) is sampled from the weights that training on rollout n - N began
    with, in a thread while training goes on, and the first N + 1 from those that all training began
    with. That is always so, not only where sampling is slow, so that a training that was killed
    goes on with the same answers; a checkpoint waits for what is being sampled, and holds it. 0
    samples and trains in turn. The gradient is that of an older policy, which the ratio corrects
    within `clip`, or importance weights do (`old_logprobs`); `train/policy/moved` or `sampler/kl`
    say how far it is. Each rollout that waits may need a copy of the policy in memory.
    """
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """A ratio below 1 - `clip` gives no gradient to a worse answer, and one above 1 + `clip` none
    to a better one.
    """
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """The distance above 1 where it differs from `clip` (clip-higher of DAPO, Yu et al. 2025),
    such as 0.28; empty: the same.
    """
    old_logprobs: Literal["sampler", "recomputed"] = "sampler"
    """What the ratio is measured from. `sampler`: the log-probabilities that the sampler had when
    it drew the answers; the ratio then shows whatever lies between sampler and trainer, and
    `clip` bounds it together with the updates. `recomputed`: those of the trainer, computed once
    more when training on the answers begins, in one more forward pass. That hides the sampler: the
    ratio is 1 in the first update even if answers came from other weights, another temperature or
    in less precision, and `clip` no longer keeps the policy near the one that was sampled from.
    So what lies between is measured and logged by itself (`sampler/ratio_error`, its largest value,
    `sampler/kl`, `sampler/truncated`), and corrected by importance weights up to `importance_cap`.
    """
    importance_cap: Annotated[float, Field(ge=1)] = 2.0
    """With `old_logprobs` recomputed: each token counts times p_old / p_sampled, but not more than
    this. A lower cap has less variance and more bias: what lies beyond it is not corrected. With
    `old_logprobs` sampler both are the same numbers, and the weight is exactly 1.
    """
    scale: Literal["none", "deviation"] = "none"
    """What an advantage (reward less the mean of its group) is divided by. `none` is unbiased up to
    the constant 1 - 1/G. `deviation`, that of the group, is GRPO's as published: prompts that are
    nearly always or nearly never solved count for more than others, and the gradient is that of
    another objective than the expected reward.
    """
    normalise: Literal["fixed", "tokens", "answers"] = "fixed"
    """What the sum over answer tokens is divided by. `fixed`: `train.global_batch` times
    `max_answer_tokens`, whatever the answers, which is unbiased. `tokens`: the number of tokens of
    all answers of the step (DAPO), but of those that `overlong: mask` leaves out; steps of short
    answers count for more, and as the number depends on the answers the gradient is biased.
    `answers`: each answer's mean over its own tokens, then
    the mean over answers (GRPO as published); in a long answer each token counts for less, so that
    wrong answers grow longer.
    """
    overlong: Literal["keep", "mask"] = "keep"
    """What becomes of an answer that was cut off by `max_answer_tokens`. `mask` leaves it out of
    the loss (DAPO); its reward still counts in the mean of its group. That is biased: nothing tells
    the model to end.
    """
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the penalty for leaving the reference model; 0: there is none, and no reference
    model is held in memory.
    """
    kl_estimator: Literal["k2", "k3"] = "k2"
    """How the penalty is estimated from a token. `k2`, half the squared log-ratio: its gradient is
    that of KL(policy || reference) at each sampled prefix. `k3`, as DeepSeek and TRL have it: its
    gradient is that of KL(reference || policy), which punishes what the reference would do and the
    policy no longer does.
    """
    reference: str | None = None
    """Model that `kl` is measured against: a Hugging Face folder, a run folder, or `hf:ORG/NAME`.
    Empty: the model that training starts from, under LoRA without its adapter.
    """
    sampler: VLLMSampler | None = None
    """A server that samples; empty: ingot's own decoder, in the process that trains."""
    sample_rows: Positive = 64
    """Answers that are sampled at once on a rank. It changes speed and memory, and nothing else but
    rounding.
    """

    @model_validator(mode="after")
    def _consistent(self) -> GRPOSettings:
        if not any(reward.weight for reward in self.rewards):
            raise ValueError(
                "rewards all have weight 0, so that every answer is worth the same and nothing is"
                " learnt; give one of them another weight"
            )
        if self.reference is not None and not self.kl:
            raise ValueError(
                f"reference {self.reference} is never asked while kl is 0; set kl above 0, or"
                " remove it"
            )
        if self.kl_estimator != "k2" and not self.kl:
            raise ValueError(
                f"kl_estimator {self.kl_estimator} estimates nothing while kl is 0; set kl above 0,"
                " or remove it"
            )
        usual = type(self).model_fields["importance_cap"].default
        if self.importance_cap != usual and self.old_logprobs == "sampler":
            raise ValueError(
                "importance_cap truncates nothing while old_logprobs are the sampler's own; set"
                " old_logprobs to recomputed, or remove it"
            )
        return self

    def check_recipe(self, recipe: Any) -> None:
        train, lora, parallel = recipe.train, recipe.model.lora, recipe.parallel
        refused = (
            (
                train.global_batch % self.group > 0,
                f"train.global_batch {train.global_batch} counts answers, in groups of"
                f" objective.group {self.group}; set it to a multiple",
            ),
            (
                parallel.degrees == "auto",
                "parallel auto weighs layouts by steps of rows of one length, and knows nothing of"
                " sampling; give the degrees",
            ),
            (
                self.sampler is not None and self.old_logprobs == "sampler",
                "objective.sampler computes other numbers than the trainer, which are measured and"
                " corrected with objective.old_logprobs recomputed; set that",
            ),
            (
                self.sampler is not None and recipe.model.quantize is not None,
                "objective.sampler has no packed weights (model.quantize); remove one of them",
            ),
            (
                self.sample_again > 0 and self.staleness > 0,
                "objective.sample_again asks all ranks whether to draw another set, and with"
                " objective.staleness sampling is on its own; set one of them to 0",
            ),
            (
                lora is not None and lora.dropout > 0,
                "model.lora.dropout: answers are sampled without it, and the policy that is trained"
                " must be the one that is sampled from; set it to 0",
            ),
            (
                train.compile,
                "train.compile would compile for every length of an answer; set it to false",
            ),
            (
                recipe.precision.float8 != "none",
                "precision.float8 is for batches of one size, and answers have any length; set it"
                " to none",
            ),
            (
                train.skip.then == "roll_back",
                "train.skip.then roll_back leaves out rows of the data, not answers; set it to"
                " stop",
            ),
            (
                recipe.data.window is not None,
                "data.window fetches parts as rows are trained on, not as they are answered; remove"
                " it",
            ),
        )
        for is_so, reason in refused:
            if is_so:
                raise ValueError(f"{reason} (objective.kind grpo)")

    @property
    def reads_reference(self) -> bool:
        return self.kl > 0

    @property
    def answers_per_row(self) -> int:
        return self.group

    @property
    def samples_per_row(self) -> Fraction:
        return Fraction(self.group * self.updates, 1 + self.sample_again)

    @property
    def upper_clip(self) -> float:
        return self.clip if self.clip_high is None else self.clip_high
