"""The knobs that say what is done: model, tokenizer, training, checkpoints, tracking."""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ingot.config.doors import OPTIMIZERS, SCHEDULES
from ingot.config.section import ByKind, FreeValues, KindSettings, Positive, Section
from ingot.config.sections.loop import (
    Average,
    EarlyStop,
    Every,
    Profile,
    RouterSettings,
    Skip,
    seconds_of,
)
from ingot.config.sections.lora import Lora
from ingot.config.sections.quantize import Quantize


class ModelSettings(Section):
    """Which model is trained, and what it starts from."""

    source: str = "preset:llama-3m"
    """`preset:NAME` (see `ingot show models`), `hf:ORG/NAME`, or a Hugging Face folder."""
    init: Literal["auto", "weights", "random"] = "auto"
    """What training starts from: the source's `weights`, or `random` ones drawn from `seed`.
    `auto`: weights where the source has them.
    """
    config: FreeValues = {}
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
    quantize: Quantize | None = None
    """With `lora`: keep the frozen matrices in few bits, `nf4` or `int8`. Null leaves them as they
    are.
    """
    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """NEFTune (Jain et al. 2023): in training, and nowhere else, add noise to the embedding of each
    token, uniform within alpha / sqrt(L * D), L the tokens of the token's own document in its row
    and D the width of the model. The paper takes 5 to 15. Null for none.
    """

    @model_validator(mode="after")
    def _frozen(self) -> ModelSettings:
        if self.quantize is not None and self.lora is None:
            raise ValueError(
                "model.quantize keeps frozen weights in few bits, and without model.lora all are"
                " trained; set model.lora={}, or model.quantize=null"
            )
        if self.quantize is not None and self.lora is not None and self.lora.kind == "dora":
            raise ValueError(
                "model.lora.kind dora needs the norms of the frozen rows in each step, which"
                " model.quantize keeps in few bits; set kind to lora or rslora"
            )
        return self

    def check_recipe(self, recipe: Any) -> None:
        """Raises ValueError for what does not fit the rest of the recipe, an
        `ingot.config.recipe.Recipe`.
        """
        if self.quantize is not None:
            self.quantize.check_recipe(recipe)
        if self.lora is not None:
            self.lora.check_recipe(recipe)
        if self.neftune_alpha is None:
            return
        if not recipe.objective.native:
            raise ValueError(
                "model.neftune_alpha is for decoders, not for the models of objective.kind"
                f" {recipe.objective.kind}; set it to null"
            )
        if recipe.objective.samples_answers:
            raise ValueError(
                "model.neftune_alpha: answers are sampled without noise, and the policy that is"
                " trained must be the one that is sampled from; set it to null (objective.kind"
                f" {recipe.objective.kind})"
            )


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
    """Chat template: a built-in name (`chatml`, `llama3`, `llama2`, `mistral`, `zephyr`, `alpaca`;
    `hermes` is ChatML with tools), or the path of a Jinja file. Empty: the tokenizer's own.
    """
    template_kwargs: FreeValues = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`, in training and for every
    server of the exported model, where a request can give others (`chat_template_kwargs`).
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


class ParameterGroup(Section):
    """Parameters that are trained at another rate."""

    match: str
    """Pattern of whole parameter names, such as `*embed_tokens*` or `model.layers.[01].*`. A
    parameter belongs to the first group that matches it.
    """
    lr_factor: Annotated[float, Field(ge=0)] = 1.0
    """Learning rate as a multiple of the optimizer's, throughout the schedule; 0 leaves the
    parameters as they are.
    """
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay of all of them, norms and biases too; null for the optimizer's."""


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


class AdamSettings(OptimizerSettings):
    """The knobs of AdamW, and of what is used together with it."""

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
    groups: list[ParameterGroup] = []
    """Parameters with a rate or weight decay of their own, by name."""


class AdamW(AdamSettings):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), the fused kernel."""

    implementation = "ingot.train.optim.optimizers:adamw"
    kind: Literal["adamw"] = "adamw"
    """Which optimizer."""


class SGD(OptimizerSettings):
    """Plain stochastic gradient descent; for proofs, since it shows a wrong gradient scale that
    Adam hides.
    """

    implementation = "ingot.train.optim.optimizers:sgd"
    kind: Literal["sgd"]
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Momentum; 0 for none."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay added to the gradient of matrices."""


class Muon(AdamSettings):
    """Momentum whose direction is made orthogonal by a Newton-Schulz iteration, for each matrix of
    the layers (Jordan 2024); AdamW for embeddings, head, norms, biases and routers. Updates have
    AdamW's size (Liu et al. 2025, arXiv 2502.16982), so `lr` and `weight_decay` are AdamW's.
    """

    implementation = "ingot.train.optim.muon:muon"
    kind: Literal["muon"]
    """Which optimizer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the mean gradient of a matrix; Nesterov's form."""
    iterations: Annotated[int, Field(ge=1, le=20)] = 5
    """Steps of the Newton-Schulz iteration."""
    compute: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of the iteration's products. `auto`: bf16 where the device has instructions for it
    (every recent GPU, CPUs with AVX-512 BF16 or AMX), else fp32.
    """


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

    def over(self, total: int) -> ScheduleSettings:
        """The settings for a training of `total` steps: numbers of steps as shares."""
        return self


class CosineSchedule(ScheduleSettings):
    """Half a cosine from the peak to `min_ratio` (Loshchilov and Hutter 2017)."""

    implementation = "ingot.train.optim.schedules:cosine"
    kind: Literal["cosine"] = "cosine"
    """Shape after the warm-up."""


class LinearSchedule(ScheduleSettings):
    """A straight line from the peak to `min_ratio`."""

    implementation = "ingot.train.optim.schedules:linear"
    kind: Literal["linear"]
    """Shape after the warm-up."""


class ConstantSchedule(ScheduleSettings):
    """The peak until the end; `min_ratio` is not used."""

    implementation = "ingot.train.optim.schedules:constant"
    kind: Literal["constant"]
    """Shape after the warm-up."""


class WSDSchedule(ScheduleSettings):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395): the peak until the last steps,
    then down to `min_ratio`. Any checkpoint of the stable phase can be decayed: start a new run
    from it, or resume it, with fewer or more `train.steps`.
    """

    implementation = "ingot.train.optim.schedules:wsd"
    kind: Literal["wsd"]
    """Shape after the warm-up."""
    decay: Annotated[float, Field(gt=0)] = 0.2
    """Decay: below 1 a share of all steps, from 1 on a number of steps."""
    curve: Literal["linear", "sqrt"] = "linear"
    """Shape of the decay: a straight line, or 1 less the square root, which falls faster first."""

    def over(self, total: int) -> WSDSchedule:
        warm = self.warmup * total if self.warmup < 1 else self.warmup
        after = max(1, total - round(warm))
        steps = round(self.decay * total if self.decay < 1 else self.decay)
        return self.model_copy(update={"decay": min(1.0, max(1, steps) / after)})


Schedule = Annotated[ScheduleSettings, ByKind(SCHEDULES, "cosine")]


class Train(Section):
    """The loop: how long, how large a batch, which optimizer."""

    steps: Positive | None = None
    """Optimizer steps. Give one of steps, epochs, tokens; one epoch when none is given."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows, without those of `data.skip`; with `start_from` those of the
    other run count, too, if it read the same data in the same order.
    """
    tokens: Positive | None = None
    """Training tokens, rounded up to whole steps. Each sequence of `global_batch` counts as
    `data.seq_len` of them, however much of it is text.
    """
    global_batch: Positive = 32
    """Sequences in one optimizer step, over all ranks and micro-batches."""
    micro_batch: Positive | Literal["auto"] = 8
    """Sequences that one rank computes at once; changes memory and speed, never the result, but
    for dropout within transformers' models, which is drawn for each micro-batch. `auto`: the most
    that fit, found by trying.
    """
    optimizer: Optimizer = AdamW()
    """How weights follow gradients."""
    schedule: Schedule = CosineSchedule()
    """Learning rate over the steps."""
    experts: RouterSettings = RouterSettings()
    """How the routers of a mixture of experts learn, and what balances the load."""
    average: Average | None = None
    """Average the weights too, and export that; `{}` for the defaults. Null for none."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the whole gradient; null for no clipping."""
    skip: Skip = Skip()
    """Which steps are not taken, and what too many of them lead to."""
    early_stop: EarlyStop | None = None
    """Stop early; needs `evaluate_every`."""
    evaluate_every: Every | None = None
    """Steps between evaluations of the loss on the validation rows; `epoch`: one after each pass
    over the training rows; `30m` (or `90s`, `2h`): one after so much time. One that is due at a
    skipped step waits for the next that is not. Null for none while training.
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
    checkpoint folder. Weights, optimizer and the step that the schedule stands at are taken over;
    the order of the data goes on from there if it is the same (the same training data,
    `data.seq_len` and packing, weights, window, `global_batch` and `seed`), and begins anew if not.
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
    deterministic: bool = False
    """On a GPU: the same bits in every run and after every resume. Attention and a few other
    kernels then add up in a fixed order, which takes longer. On a CPU it is so anyway.
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
