"""Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an interpolated momentum is the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ingot.base.errors import WrongInput
from ingot.base.lazy import lazy_import
from ingot.config.sections.training import OptimizerSettings

if TYPE_CHECKING:
    import torch

    from ingot.parallel.masters import Masters
else:
    torch = lazy_import("torch")

Decay = Annotated[float, Field(ge=0, lt=1)]


class Lion(OptimizerSettings):
    """Evolved sign momentum; its learning rate is three to ten times smaller than AdamW's."""

    implementation = "make_lion"
    kind: Literal["lion"] = "lion"
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Interpolation of the update, and decay rate of the momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay; applied to matrices, never to norms and biases."""


def make_lion(
    settings: Lion, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> torch.optim.Optimizer:
    """Called by ingot.train.optim.optimizers; `groups` bring their weight decay."""
    if masters.stochastic:
        raise WrongInput("train.optimizer.kind lion needs float32 masters; set precision.master")

    class LionOptimizer(torch.optim.Optimizer):
        found_inf: torch.Tensor | None = None

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for weight in group["params"]:
                    self._step(weight, group)

        def _step(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            (first, second), lr = group["betas"], group["lr"]
            gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
            update = torch.lerp(gradient, momentum, first).sign()
            new_weight = weight * (1 - lr * group["weight_decay"]) - lr * update
            new_momentum = torch.lerp(gradient, momentum, second)
            # A step that must not be taken changes nothing, and nothing waits for the device.
            bad = torch.zeros_like(weight[..., :1]) if self.found_inf is None else self.found_inf
            weight.copy_(torch.where(bad > 0, weight, new_weight))
            momentum.copy_(torch.where(bad > 0, momentum, new_momentum))

    return LionOptimizer(groups, {"lr": settings.lr, "betas": settings.betas})
