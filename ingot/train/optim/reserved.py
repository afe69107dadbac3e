"""The memory of Adam's state on a CPU, taken before the first step.

torch makes the state with a weight's first gradient, in the holes that the activations of the first
step have left. It stays there, and later activations no longer fit between: glibc's heap grows by
more than the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.train.optim.eager import EagerAdamW

MOMENTS = "exp_avg", "exp_avg_sq"


def reserve_state(optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """Take memory for the moments of each weight on a CPU that has none, without touching it; other
    optimizers than AdamW are left alone. The state itself is made when torch makes it, with the
    weight's first gradient, so that a checkpoint has no more of it.

    Returns what is still reserved, by weight.
    """
    reserved: dict[Tensor, dict[str, Tensor]] = {}
    if not isinstance(optimizer, EagerAdamW):
        return reserved
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.device.type == "cpu" and not optimizer.state.get(weight):
                reserved[weight] = {name: torch.empty_like(weight) for name in MOMENTS}

    def hand_over(*given: Any) -> None:
        for weight in [weight for weight in reserved if weight.grad is not None]:
            moments = reserved.pop(weight)
            count = torch.zeros((), dtype=torch.float32)
            zeros = {name: moment.detach().zero_() for name, moment in moments.items()}
            optimizer.state[weight] = {"step": count, **zeros}

    optimizer.register_step_pre_hook(hand_over)
    return reserved
