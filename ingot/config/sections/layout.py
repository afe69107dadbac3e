"""The knobs that say how the work is spread over devices, what is held in memory, and in which
number formats.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ingot.config.section import Positive, Section

PipelineSchedule = Literal["auto", "gpipe", "1f1b", "interleaved", "zero_bubble"]
DEGREES = ("replicate", "shard", "tensor", "pipeline", "virtual", "context", "expert")


class Parallel(Section):
    """Degrees of the device mesh; their product is the number of processes (`expert` is of none).
    Whatever they are, training gives the same numbers, but for dropout within transformers' models,
    which each rank draws for itself. `parallel: auto` lets ingot choose them.
    """

    degrees: Literal["given", "auto"] = "given"
    """`auto`: what `ingot plan --search` finds fastest on the devices that training starts on, with
    the recipe's own recomputation. Rank 0 decides; it is kept in the run folder, and searched anew
    only on other devices. `parallel: auto` is short for it.
    """
    replicate: Positive | Literal["auto"] = "auto"
    """Groups of ranks that each hold all weights and take a share of the batch (DDP; HSDP together
    with `shard`); `auto`: what the other degrees leave.
    """
    shard: Positive | Literal["auto"] = 1
    """Ranks that share the weights, gradients and optimizer state, and take a share of the batch
    each (FSDP, ZeRO); `auto`: what the other degrees leave, with one copy.
    """
    reshard: bool = True
    """With `shard`: give the gathered weights of a layer back after its forward pass (ZeRO-3);
    false keeps them until backward (ZeRO-2).
    """
    tensor: Positive = 1
    """Ranks that share each matrix (Megatron's tensor parallelism), the vocabulary included. Must
    divide the heads and the key/value heads.
    """
    sequence: bool = True
    """With `tensor`: what lies between the matrices is shared along the sequence (sequence
    parallelism): less memory, the same traffic.
    """
    pipeline: Positive = 1
    """Ranks that share the layers, one after the other."""
    virtual: Positive = 1
    """With `pipeline`: stages that each rank holds, dealt in turns; more than one makes the idle
    share smaller, and sends more often.
    """
    schedule: PipelineSchedule = "auto"
    """With `pipeline`: the order of the micro-batches. `auto`: `1f1b`, or `interleaved` where
    `virtual` is above 1. `zero_bubble` fills the gaps with gradients of weights; it needs torch
    2.13.
    """
    context: Positive = 1
    """Ranks that share each sequence; for very long ones."""
    context_by: Literal["ring", "ulysses"] = "ring"
    """With `context`: `ring` hands keys and values around; `ulysses` trades sequence for heads, and
    needs heads that divide.
    """
    expert: Positive = 1
    """Ranks that share the experts of a mixture, for which tokens travel to the ranks of the
    experts that they chose (expert parallelism). They are ranks of `replicate`, `shard`, `context`
    and `tensor`, and no further processes. Must divide their number and that of the experts, and
    be a multiple of `tensor`.
    """

    @model_validator(mode="before")
    @classmethod
    def _word(cls, given: Any) -> Any:
        """`parallel: auto` stands for the section in which `degrees` is `auto`."""
        if not isinstance(given, str):
            return given
        if given != "auto":
            raise ValueError(f"is {given!r:.80}; it should be `auto`, or a section of degrees")
        return {"degrees": given}

    @model_validator(mode="after")
    def _consistent(self) -> Parallel:
        usual = {name: type(self).model_fields[name].default for name in DEGREES}
        given = [name for name, value in usual.items() if getattr(self, name) != value]
        if self.degrees == "auto" and given:
            raise ValueError(
                f"parallel.{given[0]} {getattr(self, given[0])} beside parallel.degrees auto, which"
                " chooses it; set parallel.degrees to given, or remove it"
            )
        if self.pipeline == 1 and self.virtual > 1:
            raise ValueError(
                f"parallel.virtual {self.virtual} is about parallel.pipeline, which is 1; set"
                " virtual to 1, or raise pipeline"
            )
        if self.virtual > 1 and self.schedule in ("gpipe", "1f1b"):
            raise ValueError(
                f"parallel.schedule {self.schedule} has one stage a rank, parallel.virtual is"
                f" {self.virtual}; set schedule to interleaved"
            )
        if (
            self.pipeline > 1
            and self.virtual == 1
            and self.schedule in ("interleaved", "zero_bubble")
        ):
            raise ValueError(
                f"parallel.schedule {self.schedule} needs several stages a rank; set"
                " parallel.virtual to 2, or schedule to 1f1b"
            )
        return self


class Recompute(Section):
    """Activations that are computed a second time in backward rather than kept (activation
    checkpointing, Chen et al. 2016).
    """

    kind: Literal["none", "selective", "full"] = "none"
    """`full`: of a layer only its input is kept. `selective`: the results of matrix products and
    attention are kept too, the rest is made again.
    """
    method: Literal["uniform", "block"] = "uniform"
    """With `full`: `uniform` keeps the input of every `layers`-th layer; `block` recomputes the
    first `layers` layers of each stage and keeps the others whole.
    """
    layers: Positive = 1
    """See `method`."""


class Offload(Section):
    """What waits in the host's memory while it is not needed."""

    activations: bool = False
    """What backward needs of each layer."""
    weights: bool = False
    """Weights, gradients and optimizer state; needs `parallel.shard` above 1."""
    optimizer: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the optimizer's state that stays on the host, where its part of the update is
    computed. An embedding that both ends of a pipeline hold is there with 1 alone.
    """


class MemorySettings(Section):
    """Ways to make a model fit, at the price of time."""

    recompute: Recompute = Recompute()
    """Compute again rather than keep."""
    offload: Offload = Offload()
    """Keep in the host's memory."""

    @model_validator(mode="after")
    def _possible(self) -> MemorySettings:
        if self.offload.activations and self.recompute.kind != "none":
            raise ValueError(
                f"memory.offload.activations keeps what memory.recompute.kind={self.recompute.kind}"
                " would not keep; choose one of the two"
            )
        if self.offload.weights and self.offload.optimizer:
            raise ValueError(
                "memory.offload.weights takes the whole optimizer along; set"
                " memory.offload.optimizer to 0"
            )
        if self.recompute.kind != "full" and (
            self.recompute.method != "uniform" or self.recompute.layers != 1
        ):
            raise ValueError(
                f"memory.recompute.method and .layers are for kind=full, not {self.recompute.kind};"
                " remove them, or set kind=full"
            )
        return self


class Precision(Section):
    """Number formats. The optimizer's state is always float32."""

    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """Format of matrix products in forward and backward; `auto`: bf16 on an accelerator that has
    it, fp32 on a CPU.
    """
    master: Literal["fp32", "stochastic"] = "fp32"
    """What the optimizer changes: weights in `fp32`; or bf16 weights, rounded up or down at random
    in proportion, so that small updates are not lost (`stochastic`; half the memory, no bit-for-bit
    equality with fp32).
    """
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed over ranks."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Matrix products of the layers in float8 through torchao, one scale a matrix or one a row; for
    GPUs that have it (Hopper and newer).
    """
    export: Literal["bf16", "fp32"] = "bf16"
    """Format of the weights in the exported model folder."""
