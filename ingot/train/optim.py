"""Optimizers over the parameters of a model: which weights decay, and the fused kernels."""

from __future__ import annotations

from torch import nn, optim

from ingot.config.work import SGD, AdamW


def make_optimizer(knobs: AdamW | SGD, model: nn.Module) -> optim.Optimizer:
    """Matrices decay, vectors (norms, biases) do not. Fused, so that a non-finite step can be skipped on the device."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": knobs.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if isinstance(knobs, AdamW):
        return optim.AdamW(groups, lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, fused=True)
    return optim.SGD(groups, lr=knobs.lr, momentum=knobs.momentum, fused=True)


def set_learning_rate(optimizer: optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
