"""The knobs that say what is done: model, tokenizer, training, checkpoints, tracking."""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from ingot.config.doors import OPTIMIZERS, SCHEDULES
from ingot.config.section import ByKind, KindSettings, Positive, Section


class Lora(Section):
    """Low-rank adaptation (Hu et al. 2021): the weights stay, a small product of two matrices is
    learnt beside each of some.
    """

    rank: Positive = 16
    """Inner size of the products."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The products are scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of the products that is dropped while training."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Which linear layers: `all-linear` for every one but the head, or names such as `[q_proj,
    v_proj]`; Meta's names (`wq`, `w1`) are understood.
    """
    adapter: str | None = None
    """Folder of an adapter in PEFT's layout to go on from; rank, alpha and targets must be its own.
    Empty: a new one, which changes nothing yet.
    """


class Model(Section):
    """Which model is trained, and what it starts from."""

    source: str = "preset:llama-3m"
    """`preset:NAME` (see `ingot show models`), `hf:ORG/NAME`, or a Hugging Face folder."""
    init: Literal["auto", "weights", "random"] = "auto"
    """What training starts from: the source's `weights`, or `random` ones drawn from `seed`.
    `auto`: weights where the source has them.
    """
    config: dict[str, JsonValue] = {}
    """Overrides of the model's configuration by Hugging Face's names, such as `{num_hidden_layers:
    4}`. Only with random weights, or for names that change no shape.
    """
    revision: str | None = None
    """Branch, tag or commit on the hub; the default branch when empty."""
    unproved: bool = False
    """Train also a model type of transformers that `ingot show models` does not name as proved:
    nothing has shown that its loss, its answers and its export are transformers' own. Types that
    are known to go wrong, and those that are not for text, stay refused.
    """
    lora: Lora | None = None
    """Train an adapter and leave the weights as they are; `{}` for the defaults. Null trains all
    weights.
    """


class TokenizerSettings(Section):
    """How text becomes ids."""

    source: str | None = None
    """`train` (a byte-level BPE learnt from the training documents), a Hugging Face folder,
    `hf:ORG/NAME`, or a `tokenizer.model` file (Llama 3's tiktoken ranks, or SentencePiece). Empty:
    the model's own, or `train` for a preset.
    """
    vocab_size: Annotated[int, Field(ge=260)] = 4096
    """Size of a trained vocabulary, special tokens included. Ignored, and refused when set, for a
    tokenizer that is not trained.
    """
    template: str | None = None
    """Chat template: a built-in name (`chatml`, `llama3`, `llama2`, `mistral`, `zephyr`, `alpaca`),
    or the path of a Jinja file. Empty: the tokenizer's own.
    """
    source_language: str | None = None
    """For models that mark a text with its language (NLLB, mBART): the token of the language that
    sources are in, such as `eng_Latn`. Empty: the tokenizer's own.
    """
    target_language: str | None = None
    """The same for targets, which a model that is trained or asked then writes."""
    encoder: Literal["auto", "reference"] = "auto"
    """What `prepare` encodes with. `auto`: the fastest library whose ids equal the reference's on a
    sample of your documents, one document
    in a thousand compared throughout. `reference`: the tokenizer's own library alone. The ids are
    the same.
    """
    sample_bytes: Positive = 50_000_000
    """How many bytes of the training documents a trained vocabulary is learnt from; an even sample
    of all of them.
    """


class OptimizerSettings(KindSettings):
    """What every optimizer says of itself beside its knobs.

    `implementation` is called as `implementation(settings, groups, masters, seed)` and returns a
    `torch.optim.Optimizer`. Where its attribute `found_inf` holds a tensor of 1, a step must change
    nothing: so a harmful step is left out without waiting for the device.
    """

    kind: str
    """Which optimizer."""
    lr: float
    """Peak learning rate."""

    @property
    def matrix_decay(self) -> float:
        """Weight decay of matrices; vectors (norms, biases) never decay."""
        return float(getattr(self, "weight_decay", 0.0))


class AdamW(OptimizerSettings):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), the fused kernel."""

    implementation = "ingot.train.optimizers:adamw"
    kind: Literal["adamw"] = "adamw"
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay; applied to matrices, never to norms and biases."""


class SGD(OptimizerSettings):
    """Plain stochastic gradient descent; for proofs, since it shows a wrong gradient scale that
    Adam hides.
    """

    implementation = "ingot.train.optimizers:sgd"
    kind: Literal["sgd"]
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum; 0 for none."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay added to the gradient of matrices."""


Optimizer = Annotated[OptimizerSettings, ByKind(OPTIMIZERS, "adamw")]


class ScheduleSettings(KindSettings):
    """The learning rate over the steps: a linear warm-up, then the curve of its kind.

    `implementation` is called as `implementation(settings, share)` with the share of the steps
    after the warm-up that are done, above 0 and at most 1. It returns the learning rate as a share
    of the peak.
    """

    kind: str
    """Shape after the warm-up."""
    warmup: Annotated[float, Field(ge=0)] = 0.02
    """Warm-up: below 1 a share of all steps, from 1 on a number of steps."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end, as a share of the peak."""


class CosineSchedule(ScheduleSettings):
    """Half a cosine from the peak to `min_ratio` (Loshchilov and Hutter 2017)."""

    implementation = "ingot.train.schedules:cosine"
    kind: Literal["cosine"] = "cosine"
    """Shape after the warm-up."""


class LinearSchedule(ScheduleSettings):
    """A straight line from the peak to `min_ratio`."""

    implementation = "ingot.train.schedules:linear"
    kind: Literal["linear"]
    """Shape after the warm-up."""


class ConstantSchedule(ScheduleSettings):
    """The peak until the end; `min_ratio` is not used."""

    implementation = "ingot.train.schedules:constant"
    kind: Literal["constant"]
    """Shape after the warm-up."""


Schedule = Annotated[ScheduleSettings, ByKind(SCHEDULES, "cosine")]


Every = Positive | Annotated[str, Field(pattern=r"^(epoch|[1-9]\d*[smh])$")]
"""How often: after so many steps, once an `epoch`, or after a time such as `30m`."""


def seconds_of(every: Every | None) -> float | None:
    """The time that `every` gives; None where it counts steps or epochs."""
    if not isinstance(every, str) or every == "epoch":
        return None
    return int(every[:-1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[every[-1]]


class EarlyStop(Section):
    """Stop when the model no longer gets better on the validation rows; all ranks together."""

    patience: Positive = 3
    """Evaluations in a row without improvement before training stops."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """An improvement smaller than this, in the metric's units, does not count."""
    metric: str = "loss"
    """What must improve: `loss`, the objective's own on the validation rows, or a metric of
    `train.evaluate_tasks`, such as `hellaswag/accuracy_norm`.
    """


class Skip(Section):
    """Steps that would do harm are not taken: those whose loss or gradient is not finite, and
    spikes.
    """

    spike: Annotated[float, Field(gt=1)] | None = None
    """A step whose gradient norm is more than this many times its running mean is not taken either;
    null for non-finite ones only.
    """
    in_row: Positive = 10
    """Steps not taken, one after the other, that are too many."""
    then: Literal["stop", "roll_back"] = "stop"
    """What too many lead to: training ends and says so, or goes back to the newest checkpoint and
    leaves out the data of those steps.
    """
    rollbacks: Positive = 3
    """How often a training goes back; then it ends."""


class Profile(Section):
    """Which steps are traced with torch's profiler; open the file at https://ui.perfetto.dev or
    chrome://tracing.
    """

    begin: Positive = 3
    """First step that is traced, counted from 1."""
    end: Positive = 5
    """Last step that is traced."""

    @model_validator(mode="after")
    def _in_order(self) -> Profile:
        if self.end < self.begin:
            raise ValueError(
                f"train.profile ends with step {self.end}, before it begins with step {self.begin};"
                " raise train.profile.end"
            )
        return self


class Train(Section):
    """The loop: how long, how large a batch, which optimizer."""

    steps: Positive | None = None
    """Optimizer steps. Give one of steps, epochs, tokens; one epoch when none is given."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows."""
    tokens: Positive | None = None
    """Training tokens, rounded up to whole steps."""
    global_batch: Positive = 32
    """Sequences in one optimizer step, over all ranks and micro-batches."""
    micro_batch: Positive | Literal["auto"] = 8
    """Sequences that one rank computes at once; changes memory and speed, never the result. `auto`:
    the most that fit, found by trying.
    """
    optimizer: Optimizer = AdamW()
    """How weights follow gradients."""
    schedule: Schedule = CosineSchedule()
    """Learning rate over the steps."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the whole gradient; null for no clipping."""
    skip: Skip = Skip()
    """Which steps are not taken, and what too many of them lead to."""
    early_stop: EarlyStop | None = None
    """Stop early; needs `evaluate_every`."""
    evaluate_every: Every | None = None
    """Steps between evaluations of the loss on the validation rows; `epoch`: one after each pass
    over the training rows; `30m` (or `90s`, `2h`): one after so much time. Null for none while
    training.
    """
    evaluate_rows: Positive = 64
    """Validation rows used by each evaluation while training; the first ones, always the same."""
    evaluate_tasks: list[str] = []
    """Names of `evaluate.tasks` that each evaluation while training does too, dealt over the ranks.
    """
    sample_every: Positive | None = None
    """Steps between samples: the completions of `evaluate.prompts`, logged as text; null for none
    while training.
    """
    start_from: str | None = None
    """Checkpoint of another run to start from: its run folder (the newest is taken) or one
    checkpoint folder. Weights, optimizer and the step that the schedule stands at are taken over.
    """
    reset_optimizer: bool = False
    """With `start_from`: take the weights only; the optimizer starts anew, and so does the
    schedule.
    """
    start_step: Annotated[int, Field(ge=0)] | None = None
    """Step that training starts at, for schedule and data order; empty: 0, or that of `start_from`.
    """
    compile: bool = False
    """Compile the model's layers with torch.compile: slower to start, faster per step on most
    devices.
    """
    profile: Profile | None = None
    """Write a trace of a few steps to `profile/` in the run folder; null for none."""

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        given = [name for name in ("steps", "epochs", "tokens") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"train.{' and train.'.join(given)} both say how long to train; keep one of them"
            )
        if self.early_stop is not None and self.evaluate_every is None:
            raise ValueError(
                "train.early_stop needs train.evaluate_every; set it to a number of steps"
            )
        if self.early_stop is not None and seconds_of(self.evaluate_every) is not None:
            raise ValueError(
                f"train.early_stop with train.evaluate_every={self.evaluate_every} would end"
                " training by the clock, at another step each time; set evaluate_every to steps or"
                " epoch"
            )
        if self.evaluate_tasks and self.evaluate_every is None:
            raise ValueError(
                "train.evaluate_tasks needs train.evaluate_every; set it to a number of steps"
            )
        if self.reset_optimizer and self.start_from is None:
            raise ValueError(
                "train.reset_optimizer is about train.start_from; give the run to start from, or"
                " remove it"
            )
        return self
