"""A training state as named tensors, and back; names do not depend on layout, wrappers or the optimizer's numbering."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.parallel.masters import Masters

MODEL, OPTIMIZER = "model.", "optimizer."


def training_tensors(masters: Masters, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """`model.NAME` for every parameter that is trained, `optimizer.NAME.KEY` for its state (`exp_avg`, ...). Memory is shared, not copied.

    Each is spread over ranks as the parameter is. What is frozen (the base under an adapter) is not training's to save: it comes
    from where the run started.
    """
    tensors: dict[str, Tensor] = {}
    for master in masters:
        tensors[MODEL + master.name] = master.spread(master.tensor.detach())
        for key, value in sorted(optimizer.state.get(master.tensor, {}).items()) if optimizer is not None else ():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{master.name}.{key}"] = master.spread(value) if value.ndim or not master.tensor.ndim else value
    return tensors


def make_room(masters: Masters, optimizer: Optimizer, stored: Iterable[str]) -> None:
    """Give a fresh optimizer empty state of the stored kinds, so that `training_tensors` has a place for each."""
    stored = set(stored)
    for master in masters:
        prefix = f"{OPTIMIZER}{master.name}."
        for key in sorted(full.removeprefix(prefix) for full in stored if full.startswith(prefix) and "." not in full.removeprefix(prefix)):
            # Adam's step counter is one number a parameter, and fused kernels want it beside the parameter.
            tensor = master.tensor
            optimizer.state[tensor][key] = torch.zeros((), dtype=torch.float32, device=tensor.device) if key == "step" else torch.zeros_like(tensor.detach())
