"""Activations that are made again in backward rather than kept (activation checkpointing, Chen et
al. 2016).

A layer stays where it is and keeps its names: its class is replaced by a subclass whose forward is
recomputed. That lies inside of what is compiled and of what gathers weights. Only runs of several
layers are put together from outside, by the decoder's `run_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ingot.base.errors import WrongInput
from ingot.config.model_source import ModelKind
from ingot.config.sections.layout import Recompute
from ingot.models.adapters.lora import LoRAState, lora_state
from ingot.models.hf.models import Seq2Seq
from ingot.models.native.decoder import Decoder, run_in_order
from ingot.parallel.shard import stacks

Checkpoint = Callable[..., Any]
"""A function and what it is given -> what it makes of that, now and again in backward."""

KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "ingot::cpu_attention",
    "flex_attention",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
)
"""What `selective` keeps: matrix products, with their sums over ranks, and attention, by the names
that they have on CPUs and accelerators.
"""


def recompute_layers(model: nn.Module, knobs: Recompute) -> None:
    """Let the layers of a model, or of a stage of it, keep as little as asked, in place. Results
    stay what they are, to the last bit.

    Raises:
        WrongInput: runs of several layers, in a model whose layers hand on more than one tensor.
    """
    if knobs.kind == "none":
        return
    if knobs.kind not in ("full", "selective"):
        raise ValueError(f"memory.recompute.kind {knobs.kind!r} is not none, selective or full")
    # The native decoder draws nothing at random in its layers: masks of adapters are a hash of the
    # sample.
    again: Checkpoint = partial(
        _checkpoint,
        lora_state(model),
        use_reentrant=False,
        preserve_rng_state=not isinstance(model, Decoder),
    )
    if knobs.method == "uniform" and knobs.layers > 1:
        check_runs(
            (
                "decoder"
                if isinstance(model, Decoder)
                else "seq2seq"
                if isinstance(model, Seq2Seq)
                else "encoder"
            ),
            knobs,
        )
        assert isinstance(model, Decoder)
        model.run_layers = partial(checkpoint_in_runs, again, knobs.layers)
        return
    if knobs.kind == "selective":
        again = partial(
            again, context_fn=partial(create_selective_checkpoint_contexts, keep_matmuls)
        )
    made: dict[type, type] = {}
    for stack in stacks(model):
        for layer in stack[: knobs.layers if knobs.method == "block" else None]:
            kind = type(layer)
            layer.__class__ = made.setdefault(kind, _recomputed(kind, again))


def check_runs(kind: ModelKind, knobs: Recompute) -> None:
    """Raises WrongInput where runs of several layers of this kind of model cannot be recomputed as
    one.
    """
    if knobs.method == "uniform" and knobs.layers > 1 and kind != "decoder":
        raise WrongInput(
            f"memory.recompute.layers {knobs.layers} with method=uniform is for decoders: the"
            f" layers of a model of kind {kind} hand on more than one tensor; set it to 1, or"
            " method to block"
        )


def checkpoint_in_runs(
    again: Checkpoint, size: int, x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """`size` layers at a time, of which only the first one's input is kept."""
    for first in range(0, len(layers), size):
        x = again(run_in_order, x, layers[first : first + size])
    return x


def _checkpoint(
    state: LoRAState | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """torch's, of a batch that is remembered: in a pipeline another one has begun before backward
    comes.
    """
    if state is None or not state.dropout or torch.compiler.is_compiling():
        return checkpoint(function, *args, **kwargs)
    rows = state.rows

    def on_the_same_rows(*inputs: Any, **named: Any) -> Any:
        with state.back_at(rows):
            return function(*inputs, **named)

    return checkpoint(on_the_same_rows, *args, **kwargs)


def keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What `selective` does with the result of an operator."""
    name = operator.name() if isinstance(operator, torch._ops.OperatorBase) else ""
    return (
        CheckpointPolicy.MUST_SAVE
        if name.partition(".")[0] in KEPT
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _recomputed(kind: type, again: Checkpoint) -> type:
    """A subclass that recomputes. A subclass and not a wrapper of each layer: equal layers then are
    compiled once.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return again(partial(kind.forward, self), *args, **kwargs)  # type: ignore[attr-defined]

    return type(
        f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__}
    )
