"""Knobs of the training loop beside its length, optimizer and schedule: how often something is
done, which steps are not taken, when training ends early, what is traced, what is averaged.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ingot.config.section import Positive, Section

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
    """Only an improvement by more than this, in the metric's units, counts."""
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

    @model_validator(mode="after")
    def _goes_back(self) -> Skip:
        if self.then == "stop" and self.rollbacks != type(self).model_fields["rollbacks"].default:
            raise ValueError(
                f"rollbacks {self.rollbacks} counts how often a training goes back, and then stop"
                " goes back never; set then to roll_back, or remove it"
            )
        return self


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


class RouterSettings(Section):
    """How the routers of a mixture of experts learn, and what balances the load of its experts.
    From random weights set `bias_rate` or `aux_loss`, or few experts may come to take all tokens.
    """

    aux_loss: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of a loss that is least where a sequence spreads over all experts (DeepSeek-V3;
    0.0001 there, more without `bias_rate`), the sum over layers of the mean over tokens. A
    sequence is a document, or the piece of one, in a row, so that neither packing nor the layout
    changes it. There is none over a batch: it would be another one with every `micro_batch`.
    """
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of a loss that keeps the router's logits small (Zoph et al. 2022; 0.001 there),
    the sum over layers of the mean over tokens.
    """
    bias_rate: Annotated[float, Field(ge=0)] = 0.0
    """Balance without a loss (Wang et al. 2024; 0.001 there): after each step the correction bias
    of an expert, which counts in the choice alone, moves by so much, up where it had less than
    the mean load, down where more. Only for model types whose files hold such a bias.
    """
    frozen: bool = False
    """Leave the routers as they are, also on export: tokens keep going to the experts that the
    model was trained with.
    """

    @model_validator(mode="before")
    @classmethod
    def _no_batch(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if "batch" in str(name):
                raise ValueError(
                    f"train.experts.{name}: a loss over the load of a batch is another one for each"
                    " train.micro_batch and number of ranks; take aux_loss, which is over sequences"
                )
        return values

    @model_validator(mode="after")
    def _learns(self) -> RouterSettings:
        given = [name for name in ("aux_loss", "z_loss", "bias_rate") if getattr(self, name)]
        if self.frozen and given:
            raise ValueError(
                f"train.experts.frozen leaves routers as they are, and train.experts.{given[0]}"
                " changes them; remove one of the two"
            )
        return self


class Average(Section):
    """An average of the weights over the last part of training, which is often better than the last
    weights (Izmailov et al. 2018). Training itself does not change.
    """

    kind: Literal["ema", "last"] = "ema"
    """`ema`: an exponentially decaying mean, moved on with each step that is taken and saved in
    every checkpoint; 4 more bytes a trained weight. `last`: the mean of the newest `checkpoints`,
    made at the end: the last one and those before it that `checkpoint.every` has made, not those
    that a signal has. With `checkpoint.every` as a time, which ones there are depends on the clock.
    """
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Of `ema`: share of the mean that is kept in a step; 0.999 is about the last thousand. A
    mean of n steps keeps at most (n + 1) / (n + 10), or the first weights would stay for long.
    """
    checkpoints: Annotated[int, Field(ge=2)] = 5
    """Of `last`: how many checkpoints; `checkpoint.keep` must keep as many."""
    evaluate: bool = False
    """Evaluate the average while training in place of the weights, also for `early_stop` and
    `checkpoint.best`; of `ema` only.
    """
    export: bool = True
    """Export the average as the model, which `evaluate` and the gate then measure."""

    @property
    def needs_kept(self) -> int:
        """How many of the newest checkpoints that were due the export may read."""
        return self.checkpoints if self.kind == "last" else 0

    @model_validator(mode="after")
    def _measurable(self) -> Average:
        if self.kind == "last" and self.evaluate:
            raise ValueError(
                "train.average.evaluate needs an average at each evaluation, and kind last makes"
                " one at the end; set kind to ema"
            )
        if self.kind == "last" and not self.export:
            raise ValueError(
                "train.average.export false leaves kind last without effect: that mean is made for"
                " the export alone; remove it, or train.average"
            )
        return self
