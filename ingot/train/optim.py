"""Optimizers over the masters of a model: which weights decay, and the fused kernels."""

from __future__ import annotations

from typing import Any

from torch import optim

from ingot.config.sections.training import SGD, AdamW, OptimizerSettings
from ingot.parallel.masters import Masters
from ingot.train.stochastic import StochasticAdamW, StochasticSGD


def make_optimizer(settings: OptimizerSettings, masters: Masters, seed: int = 0) -> optim.Optimizer:
    """The optimizer that the settings name as their implementation. Matrices decay, vectors (norms,
    biases) do not.
    """
    trained = [master.tensor for master in masters]
    matrices = [tensor for tensor in trained if tensor.ndim >= 2]
    vectors = [tensor for tensor in trained if tensor.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.matrix_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # A stage whose layers are all kept as they are has one empty group.
    groups = [group for group in groups if group["params"]] or groups[:1]
    optimizer: optim.Optimizer = settings.load_implementation()(settings, groups, masters, seed)
    return optimizer


def adamw(
    settings: AdamW, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> optim.Optimizer:
    """Fused, so that a non-finite step can be skipped on the device. Masters that are bf16 are
    rounded stochastically, by `seed`.
    """
    lr, betas, eps = settings.lr, settings.betas, settings.eps
    if masters.stochastic:
        return StochasticAdamW(groups, {"lr": lr, "betas": betas, "eps": eps}, masters, seed)
    return optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def sgd(
    settings: SGD, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> optim.Optimizer:
    """Fused, and rounded, as `adamw` is."""
    lr, momentum = settings.lr, settings.momentum
    if masters.stochastic:
        return StochasticSGD(groups, {"lr": lr, "momentum": momentum}, masters, seed)
    return optim.SGD(groups, lr=lr, momentum=momentum, fused=True)


def set_learning_rate(optimizer: optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
