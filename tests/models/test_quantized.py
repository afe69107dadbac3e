"""Matrices in few bits: the bytes that bitsandbytes makes, products and gradients as of the numbers
that they stand for, and what is kept meanwhile.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ingot.base.errors import WrongInput
from ingot.config.sections.lora import Lora
from ingot.config.sections.quantize import Quantize
from ingot.models import quantized
from ingot.models.adapters.lora import add_lora
from ingot.models.adapters.quantized import quantize_base
from ingot.models.device import planning_for
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.quantized import PackedMatrix, Quantization, compiled_blocks, packed_matrices
from ingot.models.quantized_experts import ExpertMatrices
from ingot.plan.tracing.meter import Meter
from ingot.plan.tracing.stand_ins import without_contents
from tests import tolerances

KINDS = {
    "nf4": Quantization("nf4"),
    "double": Quantization("nf4", double=True),
    "int8": Quantization("int8"),
}
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def held(how: Quantization, data: Tensor, rows: int, columns: int) -> dict[str, Tensor]:
    """The parts of a matrix's bytes."""
    parts = how.parts(rows, columns)
    sizes = [kind.itemsize * count for kind, count in parts.values()]
    pieces = data.split(sizes)
    return {name: piece.view(parts[name][0]) for name, piece in zip(parts, pieces, strict=True)}


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("nf4", "584d1347c4c1676b"),
        ("double", "f339d2782fc5df56"),
        ("int8", "c314eb926813cee7"),
    ],
)
def test_the_bytes_are_the_same_for_ever(kind: str, digest: str) -> None:
    """Those of nf4 were bitsandbytes 0.50.2's; 33 x 50 weights end within a block of 64."""
    data = KINDS[kind].pack(matrix(33, 50))
    assert hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16] == digest
    assert torch.equal(KINDS[kind].pack(matrix(33, 50).to(torch.float64)), data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 576), (33, 50)])
def test_blocks_and_scales_are_those_of_bitsandbytes(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    theirs = pytest.importorskip("bitsandbytes.functional", reason="pip install bitsandbytes")
    weight = matrix(*shape).to(dtype)
    packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    data = KINDS["nf4"].pack(weight)
    ours = held(KINDS["nf4"], data, *shape)
    assert torch.equal(ours["codes"][: packed.numel()], packed.view(-1))
    assert torch.equal(ours["scales"], state.absmax)
    for state.dtype in (torch.float32, torch.bfloat16):
        found = KINDS["nf4"].unpack(data, *shape, state.dtype)
        assert torch.equal(found, theirs.dequantize_4bit(packed, state))
    # Its kernel for CPUs takes a neighbour of the nearest code for 2 scales of 1,000; the rule of
    # its other devices is the nearest.
    _, nested = theirs.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    double = held(KINDS["double"], KINDS["double"].pack(weight), *shape)
    # Its mean is summed in float32, ours in float64.
    last = tolerances.LOSS_FP32 * float(nested.offset)
    assert float(double["mean"][0]) == pytest.approx(float(nested.offset), abs=last)
    assert float((double["scales_of_scales"] - nested.state2.absmax).abs().max()) <= last
    apart = (double["scales"].int() - nested.absmax.view(-1).int()).abs()
    assert int(apart.max()) <= 1
    assert float(apart.float().mean()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_and_its_gradients_are_those_of_the_numbers(kind: str, dtype: Any) -> None:
    weight, bias = matrix(33, 50), matrix(33, seed=1)
    auto = dtype == "autocast"
    inner = torch.bfloat16 if auto else dtype
    packed = PackedMatrix(33, 50, KINDS[kind], torch.device("cpu"))
    packed.fill(weight, "it")
    whole = KINDS[kind].unpack(packed.packed, 33, 50, torch.float32)
    assert 0 < float((whole - weight).norm() / weight.norm()) < (0.02 if kind == "int8" else 0.12)

    def products(apply: Any) -> tuple[Tensor, Tensor, list[torch.dtype]]:
        x = matrix(2, 7, 50, seed=2).to(torch.float32 if auto else dtype).requires_grad_()
        kept: list[torch.dtype] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.dtype)
            return tensor

        with (
            torch.autocast("cpu", torch.bfloat16, enabled=auto),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            out = apply(x)
        out.square().sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad, kept

    out, grad, kept = products(lambda x: packed(x, bias.to(inner)))
    wanted = products(lambda x: functional.linear(x, whole.to(inner), bias.to(inner)))
    assert torch.equal(out, wanted[0])
    assert torch.equal(grad, wanted[1])
    assert kept == [torch.uint8]


def test_bytes_of_the_matrices_of_a_model() -> None:
    """Shares of bf16; embeddings, norms and head are counted apart, and stay as they are."""
    shares: dict[str, float] = {}
    for name, knobs in (("nf4", "nf4"), ("double", {"double": True}), ("int8", "int8")):
        with torch.device("meta"):
            model = Decoder(DecoderConfig.from_hf(SMOLLM2))
        whole = {name: one.numel() for name, one in model.named_parameters() if "_proj" in name}
        others = {name for name, _ in model.named_parameters()} - whole.keys()
        add_lora(model, Lora(), 0)
        quantize_base(model, Quantize.model_validate(knobs))
        packed = packed_matrices(model)
        assert packed.keys() == whole.keys()
        shares[name] = sum(one.packed.numel() for one in packed.values()) / sum(whole.values()) / 2
        left = dict(model.named_parameters())
        assert all(left[other].dtype == torch.float32 for other in others)
    assert shares["nf4"] == pytest.approx(0.28125)
    assert 0.25 < shares["double"] < 0.26
    assert 0.5 < shares["int8"] < 0.503


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_any_size(kind: str) -> None:
    """Also where the bytes of one are no whole number of floats, with which the next one begins."""
    how, weights = KINDS[kind], torch.randn(3, 5, 13)
    stack = ExpertMatrices((3, 5, 13), how, torch.device("cpu"))
    for number, weight in enumerate(weights):
        stack.fill(number, weight, "experts")
    for number, weight in enumerate(weights):
        assert torch.equal(stack.unpacked(number, torch.float32), how.rounded(weight))


def test_what_cannot_be_quantised_is_refused() -> None:
    packed = PackedMatrix(2, 64, KINDS["nf4"], torch.device("cpu"))
    with pytest.raises(
        WrongInput, match=r"the_layer\.weight cannot be quantised, a weight is not f"
    ):
        packed.fill(torch.full((2, 64), torch.nan), "the_layer.weight")
    model = nn.Sequential(nn.Bilinear(2, 2, 2), type("Own", (nn.Linear,), {})(2, 2))
    with pytest.raises(WrongInput, match="1 is a Own, which is not quantised"):
        quantize_base(model, Quantize())


def test_a_block_of_zeros_stays_zero() -> None:
    for how in KINDS.values():
        data = how.pack(torch.zeros(4, 64))
        assert torch.equal(how.unpack(data, 4, 64, torch.float32), torch.zeros(4, 64)), how


def bytes_and_scales() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (70, 32), dtype=torch.uint8, generator=generator)
    return codes, torch.rand(70, generator=generator)


def test_one_kernel_gives_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled for a CPU here, as for a GPU there."""
    compiled = compiled_blocks(torch.device("cpu"))
    assert compiled is not None
    assert not capsys.readouterr().err
    codes, scales = bytes_and_scales()
    for dtype in (torch.float32, torch.bfloat16):
        found = compiled(codes, scales, quantized._nf4_pairs(codes.device), dtype)
        assert torch.equal(found, quantized._in_chunks(codes, scales, dtype))


def _cannot(*given: Any) -> Tensor:
    raise OSError("no compiler\nis here")


@pytest.mark.parametrize(
    ("compiled", "told"),
    [
        (lambda *given: quantized._blocks(*given) * 1.01, "it gives other numbers"),
        (_cannot, "no compiler is here"),
    ],
)
def test_one_kernel_that_is_wrong_is_not_used(
    compiled: Any, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled)
    assert compiled_blocks.__wrapped__(torch.device("cpu")) is None
    assert f"nf4 matrices cannot be turned into numbers by one kernel here ({told})" in (
        capsys.readouterr().err
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["nf4", "double"])
def test_one_kernel_of_this_gpu_gives_the_same_numbers(kind: str) -> None:
    assert compiled_blocks(torch.device("cuda", 0)) is not None
    weight = torch.randn(300, 130, generator=torch.Generator().manual_seed(0))
    data = KINDS[kind].pack(weight)
    for dtype in (torch.float32, torch.bfloat16):
        here, there = (KINDS[kind].unpack(each, 300, 130, dtype) for each in (data, data.cuda()))
        assert torch.equal(here, there.cpu())


def test_a_plan_for_a_gpu_counts_one_kernel() -> None:
    codes, scales = bytes_and_scales()
    with planning_for("cuda"):
        made = quantized._in_one_kernel(codes, scales, torch.bfloat16)
    assert (made.shape, made.dtype) == ((70, 64), torch.bfloat16)


def test_a_plan_leaves_no_table_without_contents() -> None:
    for table in (quantized._nf4_values, quantized._nf4_pairs, quantized.dynamic_values):
        table.cache_clear()
    double = Quantization("nf4", double=True)
    packed = double.pack(torch.ones(4, 64))
    quantized._nf4_pairs.cache_clear()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with without_contents(Meter(rounded=False, gloo=True), 1.0), fake:
        double.unpack(torch.empty(packed.shape, dtype=torch.uint8), 4, 64, torch.float32)
    assert torch.equal(double.unpack(packed, 4, 64, torch.float32), torch.ones(4, 64))
