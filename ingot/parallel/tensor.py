"""Tensor parallelism (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022) of
the native decoder, as a plan of torch's own styles.

Queries, keys, values, gate and up are cut by columns, so that a rank has whole heads; the two
products behind them by rows. Between them, activations lie along the sequence. Embedding and head
are cut by the vocabulary.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from ingot.models.decoder import Block, Decoder
from ingot.parallel.vocabulary import SharedVocabulary

HEADS = 1
"""Dimension of the heads in queries and keys `[B, H, T, E]`."""


def spread(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Put parameters of a module on the mesh; names that it does not have are passed over."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            spread_out = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(spread_out, requires_grad=parameter.requires_grad)
            )


class Columns(ColwiseParallel):
    """A linear layer, adapted or not, each rank with a share of the outputs."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        spread(
            module, device_mesh, weight=Shard(0), bias=Shard(0), lora_A=Replicate(), lora_B=Shard(0)
        )


class Rows(RowwiseParallel):
    """A linear layer, adapted or not, each rank with a share of the inputs; the outputs are
    summed.
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        spread(
            module,
            device_mesh,
            weight=Shard(1),
            bias=Replicate(),
            lora_A=Shard(1),
            lora_B=Replicate(),
        )


class Along(SequenceParallel):
    """A norm over activations that are cut along one dimension."""

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        spread(module, device_mesh, weight=Replicate())


def share_tensors(model: Decoder, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Spread the decoder (on `meta`), or a stage of it, over the ranks of `mesh`."""
    between: Placement = Shard(1) if sequence else Replicate()
    trunk = model.model
    for layer in trunk.layers.children():
        assert isinstance(layer, Block)
        parallelize_module(layer, mesh, _plan_of(layer, between, sequence=sequence))
    ends: dict[str, ParallelStyle] = {}
    if trunk.embed_tokens is not None:
        ends["model.embed_tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    if trunk.norm is not None and sequence:
        ends["model.norm"] = Along()
    parallelize_module(model, mesh, ends)
    if model.lm_head is not None:
        spread(model.lm_head, mesh, weight=Shard(0))
    model.vocabulary = SharedVocabulary(mesh, model.config.vocab_size)


def _plan_of(layer: Block, between: Placement, *, sequence: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}": Columns() for name in ("q_proj", "k_proj", "v_proj")},
        "self_attn.o_proj": Rows(output_layouts=between),
        "mlp.gate_proj": Columns(),
        "mlp.up_proj": Columns(),
        "mlp.down_proj": Rows(output_layouts=between),
    }
    if layer.self_attn.q_norm is not None:
        # Its one weight serves the heads of all ranks.
        plan |= {
            f"self_attn.{name}": Along(sequence_dim=HEADS, use_local_output=True)
            for name in ("q_norm", "k_norm")
        }
    if sequence:
        inputs = {"self_attn": 5, "mlp": 1}
        plan |= {"input_layernorm": Along(), "post_attention_layernorm": Along()}
        plan |= {
            name: PrepareModuleInput(
                input_layouts=(between, *[None] * (count - 1)),
                desired_input_layouts=(Replicate(), *[None] * (count - 1)),
            )
            for name, count in inputs.items()
        }
    return plan
