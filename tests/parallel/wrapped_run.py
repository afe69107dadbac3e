"""A few training steps of a tiny model in any layout, memory and precision, to be held against
those of a plain one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ingot.config.sections.layout import MemorySettings, Parallel, Precision
from ingot.config.sections.lora import Lora
from ingot.config.sections.training import SGD, AdamW
from ingot.models.adapters.lora import add_lora, init_adapter, lora_state
from ingot.models.device import Compute
from ingot.models.native.config import DecoderConfig
from ingot.models.native.noise import EmbeddingNoise
from ingot.models.parameters import fill_normal
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.apply import WrapSettings, apply_wrappers, finish_wrapping, make_masters
from ingot.parallel.mesh import running_mesh
from ingot.train.optim.optimizers import make_optimizer
from tests.train.stepping import one_step
from tests.train.test_step import CONFIG, ROWS, global_batch, rows_of

MODEL = {**CONFIG, "num_hidden_layers": 5, "num_key_value_heads": 4}


@dataclass(frozen=True)
class AdapterMasks:
    """Seeds the masks of an adapter and the noise of embeddings by the place of each row in its
    global batch.
    """

    state: Any
    noise: EmbeddingNoise | None
    first: int
    micro_batch: int

    def begin_micro_batch(self, step: int, index: int, batch: Any) -> None:
        rows = self.first + index * self.micro_batch + torch.arange(len(batch.tokens))
        if self.state is not None:
            self.state.begin_batch(step, rows)
        if self.noise is not None:
            self.noise.begin_batch(step, rows, batch.segments)


@dataclass(frozen=True)
class Case:
    """What a run differs in; sections of a recipe as mappings."""

    parallel: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: MODEL)
    compute: Compute = "fp32"
    compiled: bool = False
    lora: bool = False
    dropout: float = 0.3
    """Of the adapter; 0 with `tensor`, which training refuses with it."""
    noise: float | None = None
    adam: bool = False
    micro_batch: int = 2
    steps: int = 3

    @property
    def how(self) -> WrapSettings:
        return WrapSettings(
            Parallel(**self.parallel),
            MemorySettings(**self.memory),
            Precision(**self.precision),
            self.compute,
            self.compiled,
        )


@dataclass(frozen=True)
class Result:
    """Of one rank; the weights are whole."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    types: set[torch.dtype]
    """Of the model's own parameters."""
    names: list[str]


def run_case(case: Case) -> Result:
    """Every rank calls it."""
    torch.manual_seed(0)
    with running_mesh(Parallel(**case.parallel)) as mesh:
        spec = ModelSpec("decoder", DecoderConfig.from_hf(case.model), None, True)
        model = create_model(spec, 0)
        if case.lora:
            add_lora(model, Lora(rank=4, dropout=case.dropout), 0)
        if case.noise is not None:
            model.noise = EmbeddingNoise(case.noise, 0)  # type: ignore[assignment, union-attr]
        model = apply_wrappers(model, mesh, case.how)
        materialize_model(model, spec, 0, mesh.device, filled=True)
        init_adapter(model, 0)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                with torch.no_grad():
                    fill_normal(
                        parameter, 1, name, 0.1
                    )  # as it starts, half of the gradients would be 0
        masters = make_masters(model, mesh, case.how)
        optimizer = make_optimizer(
            AdamW(lr=1e-2) if case.adam else SGD(kind="sgd", lr=1.0), masters
        )
        module = finish_wrapping(model.train(), mesh)
        objective, share, state = CrossEntropy(), ROWS // mesh.data.world, lora_state(model)
        losses, norms = [], []
        for step in range(case.steps):
            whole, first = global_batch(step % 2), mesh.data.rank * share
            masks = AdapterMasks(state, model.noise, first, case.micro_batch)  # type: ignore[arg-type]
            outcome = one_step(
                module,
                objective,
                rows_of(whole, first, share, case.micro_batch),
                masters,
                optimizer,
                mesh,
                compute=case.compute,
                clip_norm=0.5,
                step=step,
                dropout=masks,
            )
            losses.append(float(outcome.loss))
            norms.append(float(outcome.grad_norm))
        weights = {master.name: _whole(master.spread(master.tensor.detach())) for master in masters}
        return Result(
            losses,
            norms,
            weights,
            {parameter.dtype for parameter in model.parameters()},
            [name for name, _ in model.named_parameters()],
        )


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def run_cases(cases: list[Case]) -> list[Result]:
    """Several, in processes that are started, and meet, once."""
    with running_mesh():
        return [run_case(case) for case in cases]
