"""Frozen weights in the dtype that they are computed in: the same numbers as from float32 copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.parallel import apply
from ingot.parallel.apply import narrow_frozen
from ingot.train.balance import freeze_routers
from tests.checkpoints.test_layouts import MIXTURE
from tests.parallel.wrapped_run import Case, Result, run_case, run_cases
from tests.ranks import run_ranks

LAYOUTS: dict[str, Case] = {
    "shard": Case({"shard": 2}),
    "gathered once": Case({"shard": 2, "reshard": False}),
    "tensor": Case({"tensor": 2}),
    "context": Case({"context": 2}),
    "pipeline": Case({"pipeline": 2}),
    "recomputed": Case({"shard": 2}, {"recompute": {"kind": "selective"}}),
    "on the host": Case({"shard": 2}, {"offload": {"weights": True, "activations": True}}),
    "replicas": Case({}),
    "experts": Case({"shard": 2, "expert": 2}, model=MIXTURE),
}


def narrow(case: Case) -> Case:
    dropout = 0.0 if "tensor" in case.parallel else 0.3
    return replace(case, compute="bf16", lora=True, adam=True, dropout=dropout)


def with_copies(cases: list[Case]) -> list[Result]:
    """With frozen weights as they were read, in float32, in which ranks cast what they gather."""
    apply.narrow_frozen = lambda model, dtype: None
    return run_cases(cases)


@pytest.mark.drawn
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_learn_the_same_beside_narrow_weights(layout: str) -> None:
    """Loss, gradient norm and adapters, bit for bit, and half of the memory."""
    case = narrow(LAYOUTS[layout])
    found, wanted = (run_ranks(2, how, [case], timeout_s=200) for how in (run_cases, with_copies))
    for [here], [before] in zip(found, wanted, strict=True):
        assert here.losses == before.losses
        assert here.norms == before.norms
        assert all(torch.equal(here.weights[name], before.weights[name]) for name in here.weights)
        assert here.types == {torch.bfloat16, torch.float32}, "frozen weights, and the adapter"
        assert before.types == {torch.float32}


def test_one_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = narrow(Case())
    here = run_case(case)
    monkeypatch.setattr(apply, "narrow_frozen", lambda model, dtype: None)
    before = run_case(case)
    assert (here.losses, here.norms) == (before.losses, before.norms)
    assert all(torch.equal(here.weights[name], before.weights[name]) for name in here.weights)


def test_what_checkpoints_hold_and_what_is_trained_stays_as_it_is() -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf(MIXTURE))
    freeze_routers(model)
    embedding: nn.Module = model.get_submodule("model.embed_tokens")
    embedding.requires_grad_(False)
    narrow_frozen(model, torch.bfloat16)
    types: dict[str, Any] = {name: one.dtype for name, one in model.named_parameters()}
    assert types.pop("model.embed_tokens.weight") == torch.bfloat16
    assert set(types.values()) == {torch.float32}
