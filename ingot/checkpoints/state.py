"""A training state as named tensors, and back; names do not depend on layout, wrappers or the optimizer's numbering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MODEL, OPTIMIZER = "model.", "optimizer."


def training_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """`model.NAME` for every parameter that is trained, `optimizer.NAME.KEY` for its state (`exp_avg`, ...). Tensors are shared, not copied.

    What is frozen (the base under an adapter) is not training's to save: it comes from where the run started.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in trained(model):
        tensors[MODEL + name] = parameter.detach()
        for key, value in sorted(optimizer.state.get(parameter, {}).items()) if optimizer is not None else ():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}.{key}"] = value
    return tensors


def make_room(model: nn.Module, optimizer: Optimizer, stored: Iterable[str]) -> None:
    """Give a fresh optimizer empty state of the stored kinds, so that `training_tensors` has a place for each."""
    stored = set(stored)
    for name, parameter in trained(model):
        prefix = f"{OPTIMIZER}{name}."
        for key in sorted(full.removeprefix(prefix) for full in stored if full.startswith(prefix) and "." not in full.removeprefix(prefix)):
            # Adam's step counter is one number a parameter, and fused kernels want it beside the parameter.
            room = torch.zeros((), dtype=torch.float32, device=parameter.device) if key == "step" else torch.zeros_like(parameter)
            optimizer.state[parameter][key] = room


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that training changes, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
