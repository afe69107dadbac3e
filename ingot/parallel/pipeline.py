"""Pipeline parallelism: the model of a rank that holds some of the stages. The order in which they
run is `ingot.parallel.schedules`'.

Every rank of a pipeline has the same micro-batches and only hidden states cross ranks, so a
schedule is handed numbers of micro-batches.
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
    """How many layers each stage gets: one to begin with, then one after the other to the stage
    that has the least work.

    The embedding counts as a layer of the first stage, the head as one of the last. Where several
    have equally little, a later one takes the layer, since it holds fewer micro-batches at a time,
    and the last one after all others, since heads are rather heavier.
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
    """The stages of rank `rank` of a pipeline: `virtual` decoders with the modules of `model` (on
    `meta`, adapters included) that are theirs.

    A head that is tied to the embedding keeps a copy of it, under the same name.
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
    """The modules of `model` that belong to the stage of layers `first` and up."""
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
    stage.stage = which
    return stage


class Pipeline(Decoder):
    """The stages of a decoder that one rank holds, in the order of the model, each a `Decoder` of
    its own; and how they run.

    Modules and parameters go by their names in the whole model, so that weights, checkpoints and
    adapters need no map. It is not called
    itself: `run` calls the stages.

    Args:
        model: the whole of it, on `meta`, adapters included; what does not belong to this rank is
            let go.
        hidden: type of the hidden states that go from stage to stage.
    """

    def __init__(self, model: Decoder, mesh: Mesh, parallel: Parallel, hidden: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.config, self._mesh, self._parallel, self._sent = model.config, mesh, parallel, hidden
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
        """Those of the stages as if they were this module's own; what holds the layers comes once
        for each stage.
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
        """All micro-batches forward, and backward too: gradients are left with the parameters,
        summed over them (and over ranks by FSDP).
        """
        key = (work.shape, backward)
        if key not in self._made:
            from ingot.parallel.schedules import make_schedule  # and with it torch's pipelining

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
    """What wrappers are put around: the stages that this rank holds, or the model itself where it
    is not cut.
    """
    return list(model) if isinstance(model, Pipeline) else [model]


def tied_across_stages(model: nn.Module) -> frozenset[str]:
    """Names of parameters that the first and the last stage both hold: a tied embedding. Their
    gradients are summed, and counted once.
    """
    return (
        frozenset({EMBEDDING})
        if isinstance(model, Pipeline) and model.config.tie_word_embeddings
        else frozenset()
    )


def parameter_counts(model: nn.Module, mesh: Mesh) -> tuple[int, int]:
    """Parameters of the whole model, and how many of them are trained. Collective where the model
    is cut.
    """
    elsewhere = frozenset() if mesh.ends.is_main else tied_across_stages(model)
    here = [parameter for name, parameter in model.named_parameters() if name not in elsewhere]
    total, trained = mesh.pipeline.agree(
        sum(one.numel() for one in here), sum(one.numel() for one in here if one.requires_grad)
    )
    return int(total), int(trained)
