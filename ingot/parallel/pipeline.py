"""Pipeline parallelism: the part of the model that a rank holds, as stages.
`ingot.parallel.schedules` decides the order in which they run.

Every rank of a pipeline has the same micro-batches, and only hidden states cross ranks, so a
schedule is given the numbers of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ingot.config.sections.layout import Parallel
from ingot.models.hf.tensor_names import EMBEDDING
from ingot.models.native.decoder import Decoder, StageEnds
from ingot.parallel.mesh import Mesh

if TYPE_CHECKING:
    from ingot.parallel.schedules import NumberedStage, PipelineWork, Schedule


def assign_layers(layers: int, stages: int) -> list[int]:
    """The number of layers in each stage: one each, then one at a time to the stage with the least
    work.

    The embedding counts as a layer of the first stage, the head as one of the last. Ties go to the
    later stage, since it holds fewer micro-batches at a time, and to the last stage only after all
    others, since a head tends to cost more than a layer.
    """
    counts = [1] * stages
    for _ in range(layers - stages):
        work = [
            count + (number == 0) + (number == stages - 1) for number, count in enumerate(counts)
        ]
        counts[
            min(range(stages), key=lambda number: (work[number], (stages - 2 - number) % stages))
        ] += 1
    return counts


def split_stages(model: Decoder, rank: int, degree: int, virtual: int) -> list[Decoder]:
    """The stages of rank `rank` of a pipeline: `virtual` decoders with their modules of `model` (on
    `meta`, adapters included).

    The stage with a head tied to the embedding keeps a copy of it under the same name.
    """
    total = degree * virtual
    counts = assign_layers(model.config.num_hidden_layers, total)
    return [
        _stage(
            model, StageEnds(number == 0, number == total - 1), sum(counts[:number]), counts[number]
        )
        for number in range(rank, total, degree)
    ]


def _stage(model: Decoder, which: StageEnds, first: int, count: int) -> Decoder:
    """The stage with `count` layers of `model` from layer `first` on."""
    with torch.device("meta"):
        stage = Decoder(model.config)
    whole, trunk = model.model, stage.model
    layers = dict(whole.layers.named_children())
    trunk.layers = nn.ModuleDict(
        {str(number): layers[str(number)] for number in range(first, first + count)}
    )  # type: ignore[assignment]
    tied = which.last and model.lm_head is None
    trunk.embed_tokens = whole.embed_tokens if which.first or tied else None
    trunk.norm = whole.norm if which.last else None  # type: ignore[assignment]
    stage.lm_head = model.lm_head if which.last else None
    stage.stage, stage.noise = which, model.noise
    return stage


class Pipeline(Decoder):
    """The stages of a decoder that one rank holds, in model order, each a `Decoder` of its own, and
    how they run.

    Modules and parameters have their names of the whole model, so that weights, checkpoints and
    adapters need no mapping. It is not callable; use `run`.

    Args:
        model: the whole model on `meta`, adapters included; modules of other ranks are dropped.
        hidden: dtype of the hidden states passed from stage to stage.
    """

    def __init__(self, model: Decoder, mesh: Mesh, parallel: Parallel, hidden: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.config, self._mesh, self._parallel, self._sent = model.config, mesh, parallel, hidden
        self.noise = model.noise
        self.degree, self.total = mesh.pipeline.world, mesh.pipeline.world * parallel.virtual
        self.stages = nn.ModuleList(
            split_stages(model, mesh.pipeline.rank, self.degree, parallel.virtual)
        )
        self._made: dict[
            tuple[tuple[int, int, int], bool], tuple[Schedule, list[NumberedStage]]
        ] = {}

    def __iter__(self) -> Iterator[Decoder]:
        for stage in self.stages:
            assert isinstance(stage, Decoder)
            yield stage

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of the stages as if they were this module's own; the container of the layers
        appears once per stage.
        """
        seen: set[nn.Module] = set() if memo is None else memo
        if self not in seen:
            seen.add(self)
            yield prefix, self
            for stage in self:
                yield from stage.named_modules(seen, prefix, remove_duplicate)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise TypeError("a rank of a pipeline has no model to call; use `run`")

    def run(self, work: PipelineWork, *, backward: bool) -> None:
        """Run all micro-batches forward, and backward if asked: gradients accumulate in the
        parameters, summed over micro-batches (and over ranks by FSDP).
        """
        key = (work.shape, backward)
        if key not in self._made:
            from ingot.parallel.schedules import make_schedule  # imports torch's pipelining, slow

            self._made[key] = make_schedule(
                list(self), self._mesh, self._parallel, self._sent, work.shape
            )
        schedule, stages = self._made[key]
        for stage in stages:
            stage.work = work
        numbers = torch.arange(work.shape[0])
        call: Callable[..., Any] = schedule.step if backward else schedule.eval
        call(numbers, number=numbers, target=numbers, return_outputs=False)


def local_stages(model: nn.Module) -> list[nn.Module]:
    """The modules to wrap: the stages that this rank holds, or the model itself without pipeline
    parallelism.
    """
    return list(model) if isinstance(model, Pipeline) else [model]


def tied_across_stages(model: nn.Module) -> frozenset[str]:
    """Names of parameters that both the first and the last stage hold: a tied embedding. Their
    gradients are summed, and counted once in the norm.
    """
    return (
        frozenset({EMBEDDING})
        if isinstance(model, Pipeline) and model.config.tie_word_embeddings
        else frozenset()
    )


def parameter_counts(model: nn.Module, mesh: Mesh) -> tuple[int, int]:
    """The number of parameters of the whole model, and of the trained ones. Collective over the
    pipeline axis.
    """
    elsewhere = frozenset() if mesh.ends.is_main else tied_across_stages(model)
    here = [parameter for name, parameter in model.named_parameters() if name not in elsewhere]
    total, trained = mesh.pipeline.agree(
        sum(one.numel() for one in here), sum(one.numel() for one in here if one.requires_grad)
    )
    return int(total), int(trained)
