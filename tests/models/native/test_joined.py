"""Layers in fewer operations, for a GPU: the same numbers, on a CPU as well."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from ingot.models.native.decoder import Block, RMSNorm
from ingot.models.native.joined import _normed, join_layers
from ingot.models.native.packed import TwoPartBlock
from ingot.serve.native import model as served
from ingot.serve.native.model import load
from tests import tolerances
from tests.models.native.test_packed import KINDS, answers, decoder
from tests.serve.tiny import make_folder


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), *((kind, True) for kind in KINDS)])
def test_numbers_and_answers_stay(kind: str, tied: bool) -> None:
    model, tokens = decoder(kind, tied=tied), torch.arange(60).view(2, 30)
    positions = torch.arange(30).expand(2, 30)
    with torch.inference_mode():
        before = model.logits(model.hidden(tokens, positions))
        said = answers(model)
        join_layers(model)
        after = model.logits(model.hidden(tokens, positions))
    torch.testing.assert_close(after, before, rtol=0, atol=tolerances.LOGITS_FP32)
    assert answers(model) == said
    kinds = {type(layer) for layer in model.model.layers}
    assert kinds == {Block if kind == "olmo2" else TwoPartBlock}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_in_bf16_they_are_as_exact(kind: str) -> None:
    """Nothing more is rounded: beside float32 both forms are equally far off."""
    exact, tokens = decoder(kind), torch.arange(60).view(2, 30)
    positions, off = torch.arange(30).expand(2, 30), []
    with torch.inference_mode():
        wanted = exact.logits(exact.hidden(tokens, positions))
        half = copy.deepcopy(exact).bfloat16()
        for change in (lambda: None, lambda: join_layers(half)):
            change()
            off.append(float((half.logits(half.hidden(tokens, positions)) - wanted).norm()))
    assert off[1] < 1.2 * off[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_the_decoder(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(96, 1e-5).to(dtype), torch.randn(5, 96, dtype=dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    torch.testing.assert_close(_normed(norm, x), norm(x), rtol=0, atol=0)


def test_a_layer_whose_parts_have_two_types_stays() -> None:
    model = decoder()
    model.model.layers.get_submodule("1").input_layernorm.double()
    join_layers(model)
    assert [type(layer) for layer in model.model.layers] == [TwoPartBlock, Block]


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("pack", [True, False])
def test_only_a_server_on_a_gpu_joins(
    place: str, pack: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if there were one: where it would be opened, the model is opened here."""
    folder, joined, model = make_folder(tmp_path / "model"), list[object](), decoder(vocab_size=320)
    monkeypatch.setattr(served, "join_layers", joined.append)
    monkeypatch.setattr(served, "pick_device", lambda: torch.device(place))
    monkeypatch.setattr(served, "open_model", lambda folder, *, device, dtype: model)
    load(folder, pack=pack, compute="fp32")
    assert joined == ([model] if pack and place == "cuda" else [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_on_this_gpu(kind: str) -> None:
    """As on the CPU, in float32."""
    model, tokens = decoder(kind), torch.arange(60).view(2, 30)
    positions, there = torch.arange(30).expand(2, 30), copy.deepcopy(model).cuda()
    with torch.inference_mode():
        wanted = model.logits(model.hidden(tokens, positions))
        join_layers(there)
        found = there.logits(there.hidden(tokens.cuda(), positions.cuda()))
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=tolerances.LOGITS_FP32)
    assert answers(there) == answers(model)
