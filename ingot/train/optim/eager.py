"""torch's optimizers without torch's compiler, which they import when they are made and stepped
though nothing is compiled: 1.5 of the 5 CPU seconds from a command to the first step of a training.

The decorators that do so keep a compiler from tracing into an optimizer; no step is compiled here.
What they decorate is used as it is, so that updates are torch's own, bit for bit.
"""

from __future__ import annotations

import inspect

import torch
from torch import optim


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
    """`torch.optim.SGD`."""

    step = torch.no_grad()(inspect.unwrap(optim.SGD.step))
