"""The cut of a decoder into the stages of a pipeline: which layers a rank holds, and the model that
they make.

Stage s of S lies on rank s modulo the degree (looped), so that with several stages a rank a
micro-batch goes round several times. Schedules are `ingot.parallel.pipeline`'s.
"""

from __future__ import annotations

import torch
from torch import nn

from ingot.models.decoder import Decoder, Stage


def deal_layers(layers: int, stages: int) -> list[int]:
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


def cut_stages(model: Decoder, rank: int, degree: int, virtual: int) -> list[Decoder]:
    """The stages of rank `rank` of a pipeline: `virtual` decoders with the modules of `model` (on
    `meta`, adapters included) that are theirs.

    A head that is tied to the embedding keeps a copy of it, under the same name.
    """
    total = degree * virtual
    counts = deal_layers(model.config.num_hidden_layers, total)
    return [
        _stage(model, Stage(number == 0, number == total - 1), sum(counts[:number]), counts[number])
        for number in range(rank, total, degree)
    ]


def _stage(model: Decoder, which: Stage, first: int, count: int) -> Decoder:
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
