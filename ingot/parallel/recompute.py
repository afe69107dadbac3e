"""Activation checkpointing: activations are recomputed in backward instead of kept (Chen et al.
2016).

A layer keeps its place and names: its class is replaced by a subclass with a checkpointed forward,
which lies inside the compiled region and FSDP's hooks. Only runs of several layers are grouped from
outside, through the decoder's `run_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ingot.base.errors import WrongInput
from ingot.config.models.source import ModelKind
from ingot.config.sections.layout import Recompute
from ingot.models.adapters.layer import LoRAState
from ingot.models.adapters.lora import lora_state
from ingot.models.hf.models import Seq2Seq, TextReader
from ingot.models.native.decoder import Decoder, run_in_order
from ingot.parallel.shard import stacks

Checkpoint = Callable[..., Any]
"""Calls a function with its arguments, now and again in backward."""

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
    "ingot::cpu_relative_attention",
    "flex_attention",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
)
"""Operators whose results `selective` keeps: matrix products with their sums over ranks, and
attention, by their names on CPUs and accelerators. Not attention that drops weights itself: torch
sets its generator back to where the layer began, and if a kernel did not draw from it again, all
masks behind it in the layer would be others than in forward.
"""
CHOOSING = "aten::topk"
"""The operator that chooses experts. Always kept: scores that are computed again may differ in
their last bits, and a token between two near ones would go another way in backward.
"""

_NAMES_OF_SPANS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
"""What `record_function` calls, which computes nothing. FSDP names other spans where it recomputes
experts that are a unit of their own than in forward, and torch, which counts operators where some
are kept, would take that for another computation.
"""


def recompute_layers(model: nn.Module, knobs: Recompute) -> None:
    """Apply activation checkpointing to the layers of a model, or of a pipeline stage, in place.
    Results are bit-identical.

    Raises:
        WrongInput: runs of several layers in a model whose layers pass on more than one tensor.
    """
    if knobs.kind == "none":
        return
    if knobs.kind not in ("full", "selective"):
        raise ValueError(f"memory.recompute.kind {knobs.kind!r} is not none, selective or full")
    # The native decoder's layers need no generator state: dropout masks of adapters are a hash of
    # the sample.
    checkpoint_fn: Checkpoint = partial(
        _checkpoint,
        lora_state(model),
        use_reentrant=False,
        preserve_rng_state=not isinstance(model, Decoder),
    )
    runs = knobs.method == "uniform" and knobs.layers > 1
    mixture = isinstance(model, Decoder) and model.config.experts is not None
    if mixture or (knobs.kind == "selective" and not runs):
        policy = keep_choices if knobs.kind == "full" else keep_matmuls
        SAC_IGNORED_OPS.update(_NAMES_OF_SPANS)
        checkpoint_fn = partial(
            checkpoint_fn, context_fn=partial(create_selective_checkpoint_contexts, policy)
        )
    if runs:
        check_runs(
            model.config.kind if isinstance(model, Seq2Seq | TextReader) else "decoder",
            knobs,
        )
        assert isinstance(model, Decoder)
        model.run_layers = partial(checkpoint_in_runs, checkpoint_fn, knobs.layers)
        return
    made: dict[type, type] = {}
    for stack in stacks(model):
        for layer in stack[: knobs.layers if knobs.method == "block" else None]:
            kind = type(layer)
            layer.__class__ = made.setdefault(kind, _recomputed(kind, checkpoint_fn))


def check_runs(kind: ModelKind, knobs: Recompute) -> None:
    """Raises WrongInput if several layers of this kind of model cannot be recomputed as one run."""
    if knobs.method == "uniform" and knobs.layers > 1 and kind != "decoder":
        raise WrongInput(
            f"memory.recompute.layers {knobs.layers} with method=uniform is for decoders: the"
            f" layers of a model of kind {kind} hand on more than one tensor; set it to 1, or"
            " method to block"
        )


def checkpoint_in_runs(
    checkpoint_fn: Checkpoint, size: int, x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Checkpoint `size` layers at a time, keeping only the input of each run. x `[B, T, D]`."""
    for first in range(0, len(layers), size):
        x = checkpoint_fn(run_in_order, x, layers[first : first + size])
    return x


def _checkpoint(
    state: LoRAState | None, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """torch's `checkpoint` with the batch's rows remembered for adapter dropout: in a pipeline
    another micro-batch has started before this one's backward.
    """
    if state is None or not state.dropout or torch.compiler.is_compiling():
        return checkpoint(function, *args, **kwargs)
    rows = state.rows

    def with_saved_rows(*inputs: Any, **named: Any) -> Any:
        with state.with_rows(rows):
            return function(*inputs, **named)

    return checkpoint(with_saved_rows, *args, **kwargs)


def keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `selective`: save the operators in `KEPT` that draw nothing, recompute the
    others.
    """
    return _policy(operator, () if _drops(operator, args, kwargs) else (*KEPT, CHOOSING))


def keep_choices(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `full` for a mixture of experts: save nothing but which were chosen."""
    return _policy(operator, (CHOOSING,))


def _policy(operator: Any, kept: Sequence[str]) -> CheckpointPolicy:
    name = operator.name() if isinstance(operator, torch._ops.OperatorBase) else ""
    return (
        CheckpointPolicy.MUST_SAVE
        if name.partition(".")[0] in kept
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _drops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel of attention is asked to draw a mask of dropout."""
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    named = dict(zip((one.name for one in operator._schema.arguments), args, strict=False))
    share: float = (named | dict(kwargs)).get("dropout_p", 0.0)
    return share > 0


def _recomputed(kind: type, checkpoint_fn: Checkpoint) -> type:
    """A subclass with a checkpointed forward. A subclass rather than a wrapper around each layer,
    so that equal layers are compiled once.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint_fn(partial(kind.forward, self), *args, **kwargs)  # type: ignore[attr-defined]

    return type(
        f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__}
    )
