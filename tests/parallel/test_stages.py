"""The cut into stages: even, complete, under the names of the whole model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ingot.config.layout import Parallel
from ingot.config.work import Lora
from ingot.models.architecture import DecoderConfig
from ingot.models.blueprint import Blueprint, draft_model
from ingot.models.decoder import Decoder
from ingot.models.lora import add_lora, lora_layers
from ingot.parallel.apply import Wrapping, apply_wrappers
from ingot.parallel.mesh import running_mesh
from ingot.parallel.pipeline import whole_size
from ingot.parallel.stages import cut_stages, deal_layers
from tests.parallel.wrapped_run import MODEL
from tests.ranks import run_ranks

TIED = {**MODEL, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("layers", "count", "dealt"),
    [
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (8, 4, [1, 3, 3, 1]),
        (4, 4, [1, 1, 1, 1]),
        (9, 3, [3, 4, 2]),
        (32, 4, [7, 9, 9, 7]),
    ],
)
def test_layers_are_dealt_evenly(layers: int, count: int, dealt: list[int]) -> None:
    assert deal_layers(layers, count) == dealt


def test_every_layer_is_dealt_once_and_no_stage_is_without() -> None:
    for layers in range(1, 30):
        for count in range(1, layers + 1):
            dealt = deal_layers(layers, count)
            assert sum(dealt) == layers
            assert min(dealt) == 1 if count == layers else min(dealt) >= 1
            work = [dealt[0] + 1, *dealt[1:-1], dealt[-1] + 1] if count > 1 else [layers + 2]
            assert max(work) <= max(math.ceil((layers + 2) / count), 2)


@pytest.mark.parametrize("config", [MODEL, TIED])
@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_hold_the_whole_model_under_its_own_names(
    config: dict[str, Any], virtual: int
) -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf(config))
    add_lora(model, Lora(rank=2), 0)
    names = [
        name
        for rank in range(2)
        for stage in cut_stages(model, rank, 2, virtual)
        for name, _ in stage.named_parameters()
    ]
    twice = ["model.embed_tokens.weight"] if config is TIED else []
    assert sorted(names) == sorted([*(name for name, _ in model.named_parameters()), *twice])
    ends = [stage.stage for rank in range(2) for stage in cut_stages(model, rank, 2, virtual)]
    assert (ends[0].first, ends[0].last, ends[-1].first, ends[-1].last) == (
        True,
        False,
        False,
        True,
    )


def sizes_of(config: dict[str, Any]) -> tuple[tuple[int, int], int, list[str]]:
    parallel = Parallel(pipeline=2, virtual=2)
    with running_mesh(parallel) as mesh:
        model = draft_model(Blueprint("decoder", DecoderConfig.from_hf(config), None, True), 0)
        add_lora(model, Lora(rank=2), 0)
        model = apply_wrappers(model, mesh, Wrapping(parallel))
        return (
            whole_size(model, mesh),
            sum(parameter.numel() for parameter in model.parameters()),
            list(lora_layers(model)),
        )


@pytest.mark.parametrize("config", [MODEL, TIED])
def test_the_whole_is_counted_once(config: dict[str, Any]) -> None:
    model = draft_model(Blueprint("decoder", DecoderConfig.from_hf(config), None, True), 0)
    add_lora(model, Lora(rank=2), 0)
    sizes = [
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    ]
    found = run_ranks(2, sizes_of, config)
    for whole, mine, _ in found:
        assert list(whole) == sizes
        assert mine < sizes[0]
    assert sorted(name for _, _, names in found for name in names) == sorted(lora_layers(model))
