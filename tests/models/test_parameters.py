"""Initial weights: normal, the same whoever makes which rows, and different for each name and
seed.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.config.models.presets import preset
from ingot.models import parameters as initial
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import fill_normal, init_weights, is_dtensor, normal_rows
from ingot.parallel.shard import is_fsdp


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 40), columns=st.integers(1, 50), data=st.data())
def test_any_rank_makes_the_same_rows(rows: int, columns: int, data: st.DataObject) -> None:
    whole = normal_rows(7, "w", 0, rows, columns)
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    assert np.array_equal(normal_rows(7, "w", first, count, columns), whole[first : first + count])


def test_values_are_standard_normal_and_independent() -> None:
    values = normal_rows(0, "w", 0, 1000, 501)
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 1) < 0.005
    assert abs((values**4).mean() - 3) < 0.05
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.005
    assert (
        abs(np.corrcoef(values[:, 0], values[:, 252])[0, 1]) < 0.15
    )  # the two halves of Box-Muller


@pytest.mark.parametrize("other", [(1, "w"), (0, "v")])
def test_seed_and_name_change_everything(other: tuple[int, str]) -> None:
    assert (
        abs(
            np.corrcoef(
                normal_rows(0, "w", 0, 50, 50).ravel(), normal_rows(*other, 0, 50, 50).ravel()
            )[0, 1]
        )
        < 0.1
    )


def test_filling_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.empty(33, 10), torch.empty(33, 10)
    fill_normal(one, 3, "w", 0.02)
    monkeypatch.setattr(initial, "BLOCK_ELEMENTS", 40)
    monkeypatch.setattr(initial.torch, "get_num_threads", lambda: 3)
    fill_normal(other, 3, "w", 0.02)
    assert torch.equal(one, other)


@pytest.mark.parametrize("quick", [False, True])
def test_every_parameter_of_a_model_is_set(quick: bool) -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf({**preset("llama-3m"), "attention_bias": True}))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    init_weights(model, 0, quick=quick)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
    assert (
        abs(
            float(model.model.embed_tokens.weight.detach().std()) / model.config.initializer_range
            - 1
        )
        < 0.02
    )
    assert (model.model.norm.weight == 1).all()
    assert (model.model.layers[0].self_attn.q_proj.bias == 0).all()


def test_what_another_thread_is_importing_shards_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp"):
        monkeypatch.setitem(sys.modules, name, ModuleType("partly imported"))
    assert not is_dtensor(torch.ones(1))
    assert not is_fsdp(torch.nn.Linear(1, 1))
