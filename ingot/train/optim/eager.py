"""torch's optimizers without torch's compiler, which they import when they are made and stepped
though nothing is compiled: 1.5 of the 5 CPU seconds from a command to the first step of a training.

The decorators that do so keep a compiler from tracing into an optimizer; no step is compiled here.
What they decorate is used as it is, so that updates are torch's own, bit for bit.

On a CPU the memory of AdamW's state is taken before the first step (`reserve_state`). torch makes
the state with a weight's first gradient, in the holes that the activations of the first step have
left. It stays there, and later activations no longer fit between: glibc's heap grows by more than
the state.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, optim

MOMENTS = "exp_avg", "exp_avg_sq"
"""Names of AdamW's state of the shape of a weight."""
MOMENTUM = "momentum_buffer"
"""Name of SGD's."""


class EagerOptimizer(optim.Optimizer):
    """The base of an optimizer whose step is never compiled."""

    add_param_group = inspect.unwrap(optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(optim.Optimizer.zero_grad)


class EagerAdamW(EagerOptimizer, optim.AdamW):
    """`torch.optim.AdamW`."""

    step = torch.no_grad()(inspect.unwrap(optim.AdamW.step))


class EagerSGD(EagerOptimizer, optim.SGD):
    """`torch.optim.SGD`, whose momentum begins as 0. torch's fused kernel would write it with the
    first gradient, and leave it as the memory was found where that first step is not taken.
    """

    def __init__(self, *given: Any, **knobs: Any) -> None:
        super().__init__(*given, **knobs)
        self.register_step_pre_hook(_begin_momentum)

    step = torch.no_grad()(inspect.unwrap(optim.SGD.step))


def _begin_momentum(optimizer: optim.Optimizer, *given: Any) -> None:
    for group in optimizer.param_groups:
        if group["momentum"]:
            for weight in group["params"]:
                if weight.grad is not None and optimizer.state[weight].get(MOMENTUM) is None:
                    optimizer.state[weight][MOMENTUM] = torch.zeros_like(weight).detach()


def reserve_state(optimizer: optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
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
