"""Muon (Jordan 2024): the momentum of each matrix of the layers, made orthogonal, is its update;
all other parameters are left to AdamW.

Momentum and weights are sharded as AdamW's are. Each matrix is whole on one rank while that makes
it orthogonal (`ingot.parallel.whole`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from ingot.base.errors import WrongInput
from ingot.config.sections.training import Muon
from ingot.models.device import fast_compute
from ingot.models.native.experts import Experts
from ingot.parallel.apply import TYPES
from ingot.parallel.masters import Masters
from ingot.parallel.pipeline import local_stages
from ingot.parallel.shard import layers
from ingot.parallel.whole import Matrix, Place, WholeMatrices
from ingot.train.optim.eager import EagerOptimizer
from ingot.train.optim.optimizers import adamw, noise_of, round_to_bf16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, chosen for a steep slope at zero; singular values end near 1, between
0.7 and 1.2.
"""
SMALLEST_NORM = 1e-7
UPDATE_RMS = 0.2
"""Root mean square of AdamW's update over its learning rate, which the update is scaled to."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of the linear layers that choose among experts."""
FUSED = re.compile(r"qkv|query_key_value|gate_up|in_proj|Wi$")
"""Names of linear layers whose matrix is several, one above the other."""
EXPERTS = "experts"


def orthogonalise(matrix: Tensor, iterations: int) -> Tensor:
    """The nearest orthogonal matrix, roughly: all singular values near 1. `[A, B]` -> `[A, B]`,
    computed in the type of the matrix by Newton-Schulz iterations.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def update_scale(rows: int, columns: int) -> float:
    """The factor that gives an orthogonal matrix the size of AdamW's updates."""
    return UPDATE_RMS * math.sqrt(max(rows, columns))


def layer_matrices(masters: Masters) -> list[Place]:
    """The matrices that Muon updates: each trained weight of a linear layer inside the model's
    layers, routers excepted, and each expert of a stack `[E, A, B]`; `gates_and_ups` are two each.

    Raises:
        WrongInput: a matrix consists of several, or there is none.
    """
    by_parameter = {master.parameter: master for master in masters}
    found: list[Place] = []
    for name, module in _modules_of_layers(masters):
        last = name.rpartition(".")[2]
        linear = isinstance(module, nn.Linear) and last not in ROUTERS
        for parameter in module.parameters(recurse=False):
            master = by_parameter.get(parameter)
            if master is None:
                continue
            if linear and parameter is module.weight:
                if FUSED.search(last):
                    raise WrongInput(
                        f"train.optimizer.kind muon cannot tell the matrices that {master.name}"
                        " consists of; use adamw"
                    )
                found.append((master, slice(0, parameter.shape[0])))
            elif parameter.ndim == 3 and EXPERTS in master.name.split("."):
                found += [(master, slice(one, one + 1)) for one in range(parameter.shape[0])]
    if not found:
        raise WrongInput(
            "train.optimizer.kind muon finds no matrix of a linear layer in the model's layers; use"
            " adamw"
        )
    return found


def gates_and_ups(masters: Masters) -> dict[nn.Parameter, tuple[slice, slice]]:
    """The stacks of experts that hold gate and up in one matrix, and the rows of each. Together
    orthogonalised, the one with the smaller gradient would hardly move.
    """
    return {
        module.gate_up_proj: module.gate_and_up
        for _, module in _modules_of_layers(masters)
        if isinstance(module, Experts)
    }


def _modules_of_layers(masters: Masters) -> Iterator[tuple[str, nn.Module]]:
    for stage in local_stages(masters.model):
        for layer in layers(stage):
            yield from layer.named_modules()


def muon(
    settings: Muon, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> optim.Optimizer:
    """Muon for the matrices of the layers and AdamW for the rest, in one optimizer."""
    matrices = layer_matrices(masters)
    mine = {master.tensor for master, _ in matrices}
    orthogonal, others = (
        [
            {**group, "params": [one for one in group["params"] if (one in mine) == chosen]}
            for group in groups
        ]
        for chosen in (True, False)
    )
    rest = [group for group in others if group["params"]] or others[:1]
    return MuonOptimizer(
        [group for group in orthogonal if group["params"]],
        adamw(settings, rest, masters, seed),
        matrices,
        settings,
        masters,
        seed,
    )


class MuonOptimizer(EagerOptimizer):
    """Muon and AdamW in one. State is float32; a step with `found_inf` 1 changes neither weights
    nor state. A matrix without a gradient has one of zeros, since all ranks that share it must take
    part.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rest: optim.Optimizer,
        places: Sequence[Place],
        settings: Muon,
        masters: Masters,
        seed: int,
    ) -> None:
        super().__init__([*groups, *rest.param_groups], {"lr": settings.lr})
        self._rest, self.state = rest, rest.state
        self._settings, self._seed, self._stochastic = settings, seed, masters.stochastic
        ranks = masters.mesh.stage
        self._matrices = WholeMatrices(
            places, ranks, TYPES[fast_compute(settings.compute, ranks.device)]
        )
        self._group_of = {weight: group for group in groups for weight in group["params"]}
        self._gate_and_up = gates_and_ups(masters)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for weight in self._group_of:
            self._make_state(weight)
        self._rest.grad_scale, self._rest.found_inf = None, self.found_inf  # type: ignore[attr-defined]
        self._matrices.apply(self._moved, self._orthogonal, self._update, self._rest.step)
        if self._stochastic:
            for weight in self._group_of:
                self.state[weight]["step"] += 1 - self._skipped(weight).float()

    def _make_state(self, weight: Tensor) -> None:
        shapes = {"momentum_buffer": weight.shape} | ({"step": ()} if self._stochastic else {})
        for name, shape in shapes.items():
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros(
                    shape, dtype=torch.float32, device=weight.device
                )

    def _skipped(self, weight: Tensor) -> Tensor:
        if self.found_inf is None:
            return torch.zeros((), dtype=torch.bool, device=weight.device)
        return self.found_inf.to(weight.device) != 0

    def _moved(self, matrix: Matrix) -> Tensor:
        """This rank's part of the update before it is orthogonal; moves the momentum on."""
        weight, momentum = matrix.master.tensor, self._settings.momentum
        buffer = self.state[weight]["momentum_buffer"][matrix.rows]
        gradient = torch.zeros_like(buffer) if weight.grad is None else weight.grad[matrix.rows]
        moved = buffer.lerp(gradient, 1 - momentum)
        buffer.copy_(torch.where(self._skipped(weight), buffer, moved))
        return gradient.lerp(moved, momentum)

    def _orthogonal(self, matrix: Matrix, whole: Tensor) -> Tensor:
        flat = whole.view(whole.shape[-2:])  # an expert's is [1, A, B]
        direction = torch.empty_like(flat)
        for rows in self._alone(matrix):
            direction[rows] = orthogonalise(flat[rows], self._settings.iterations)
        return direction.view(whole.shape)

    def _alone(self, matrix: Matrix) -> Sequence[slice]:
        """The rows of each of the matrices that are one above the other in `matrix`."""
        return self._gate_and_up.get(matrix.master.parameter, (slice(None),))

    def _update(self, matrix: Matrix, direction: Tensor) -> None:
        weight = matrix.master.tensor
        group, old = self._group_of[weight], weight[matrix.rows]
        new = old.float() * (1 - group["lr"] * group["weight_decay"])
        rows, columns = matrix.shape[-2:]
        rate = group["lr"] * update_scale(rows // len(self._alone(matrix)), columns)
        new = new.add_(direction.to(weight.device), alpha=-rate)
        if self._stochastic:
            count = self.state[weight]["step"] + 1
            # Counted, since of a matrix that is on other ranks the part is empty.
            flat = new.view(len(new), math.prod(new.shape[1:]))
            noise = noise_of(self._seed, matrix.master.name, matrix.master.parameter)
            new = round_to_bf16(flat, noise.bits(count, matrix.rows, flat.shape[1])).view_as(new)
        old.copy_(torch.where(self._skipped(weight), old, new))
