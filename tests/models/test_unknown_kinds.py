"""A kind that nobody registered is an error where it is used, and not only at the recipe's gate: a
default taken in silence would train another model than the one that was asked for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from ingot.base.errors import WrongInput
from ingot.config.models.family import sizes
from ingot.config.models.presets import preset
from ingot.config.models.source import check_model_type
from ingot.config.sections.layout import Recompute
from ingot.models.device import computing_in
from ingot.models.native.config import DecoderConfig
from ingot.models.native.rope import SCALINGS, Rope, inverse_frequencies, read_rope
from ingot.parallel.context import context_attention
from ingot.parallel.recompute import recompute_layers

CPU = torch.device("cpu")


def test_an_unknown_rotary_scaling_gives_no_frequencies() -> None:
    with pytest.raises(WrongInput, match="rope_type `dynamic` is not supported, only default, lin"):
        inverse_frequencies(Rope(kind="dynamic", factor=2.0), 8)


def test_an_unknown_rotary_scaling_is_not_read() -> None:
    values = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(WrongInput, match="rope_type `dynamic` is not supported"):
        read_rope({"max_position_embeddings": 128}, values, "config.json")


@pytest.mark.parametrize("kind", sorted(set(SCALINGS) - {"default"}))
def test_every_known_rotary_scaling_changes_the_frequencies(kind: str) -> None:
    plain = inverse_frequencies(Rope(original_positions=64), 16)
    rope = Rope(kind=kind, factor=4.0, original_positions=64, divisors=(2.0,) * 8)
    scaled = inverse_frequencies(rope, 16)
    assert not torch.equal(plain, scaled)


def test_an_unknown_model_type_is_not_read_as_a_llama() -> None:
    config = {**preset("llama-135m"), "model_type": "gemma"}
    with pytest.raises(
        WrongInput, match=r"`gemma` is not supported \(nearest: `.*`ingot show models`"
    ):
        sizes(config)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"model_type": "nomic_bert"},
            "`nomic_bert` is an encoder, which writes no text; train it",
        ),
        (
            {"model_type": "new", "auto_map": {"AutoModel": "org/new-impl--modeling.NewModel"}},
            r"code of its own \(org/new-impl--modeling.NewModel\), which ingot does not run; take",
        ),
    ],
)
def test_an_embedding_model_is_told_as_one(values: dict[str, Any], told: str) -> None:
    for read in (sizes, DecoderConfig.from_hf):
        with pytest.raises(WrongInput, match=told):
            read(values)
    if "auto_map" in values:
        with pytest.raises(WrongInput, match=told):
            check_model_type(values, "encoder", "config.json")


def test_an_unknown_type_of_computation_is_not_bf16() -> None:
    unknown: Any = "fp16"
    with pytest.raises(ValueError, match="'fp16' is not fp32 or bf16"), computing_in(unknown, CPU):
        pass


def test_an_unknown_context_attention_is_not_ulysses() -> None:
    unknown: Any = "tree"
    with pytest.raises(ValueError, match="'tree' is not ring or ulysses"):
        context_attention(unknown, ProcessGroup(0, 2), 0, 2)


def test_an_unknown_recomputation_is_not_a_full_one() -> None:
    unknown = Recompute.model_construct(kind="some", method="block", layers=1)
    with pytest.raises(ValueError, match="'some' is not none, selective or full"):
        recompute_layers(nn.Linear(2, 2), unknown)


def test_an_unknown_pipeline_schedule_is_not_zero_bubble() -> None:
    from ingot.parallel.schedules import _schedule_class  # torch's pipelining is slow to import

    with pytest.raises(ValueError, match="'spiral' is not gpipe, 1f1b, interleaved or zero_bubble"):
        _schedule_class("spiral")
