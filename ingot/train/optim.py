"""Optimizers over the masters of a model: which weights decay, and the fused kernels."""

from __future__ import annotations

from torch import optim

from ingot.config.work import SGD, AdamW
from ingot.parallel.masters import Masters
from ingot.train.stochastic import StochasticAdamW, StochasticSGD


def make_optimizer(knobs: AdamW | SGD, masters: Masters, seed: int = 0) -> optim.Optimizer:
    """Matrices decay, vectors (norms, biases) do not. Fused, so that a non-finite step can be
    skipped on the device.

    Masters that are bf16 are rounded stochastically, by `seed`.
    """
    trained = [master.tensor for master in masters]
    matrices = [tensor for tensor in trained if tensor.ndim >= 2]
    vectors = [tensor for tensor in trained if tensor.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": knobs.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # A stage whose layers are all kept as they are has one empty group.
    groups = [group for group in groups if group["params"]] or groups[:1]
    if masters.stochastic and isinstance(knobs, AdamW):
        return StochasticAdamW(
            groups, {"lr": knobs.lr, "betas": knobs.betas, "eps": knobs.eps}, masters, seed
        )
    if masters.stochastic:
        return StochasticSGD(groups, {"lr": knobs.lr, "momentum": knobs.momentum}, masters, seed)  # type: ignore[union-attr]
    if isinstance(knobs, AdamW):
        return optim.AdamW(groups, lr=knobs.lr, betas=knobs.betas, eps=knobs.eps, fused=True)
    return optim.SGD(groups, lr=knobs.lr, momentum=knobs.momentum, fused=True)


def set_learning_rate(optimizer: optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
