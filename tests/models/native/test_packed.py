"""Packed weights: the same numbers in half the bytes, or nothing at all."""

from __future__ import annotations

import copy
import mmap
import platform
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.malloc import OWN_BYTES
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.models.native import fbgemm, packed
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.fbgemm import Float16Matrix
from ingot.models.native.onednn import multiplies_bfloat16
from ingot.models.native.packed import pack_weights
from ingot.models.parameters import init_weights
from ingot.serve.native.compute import serving_compute
from ingot.serve.native.model import LoadedModel, load, load_in_a_thread
from tests import tolerances
from tests.forks import start_call
from tests.patience import PATIENCE_S
from tests.serve.tiny import make_folder

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], list(range(40)), [7] * 33]

pytestmark = pytest.mark.skipif(
    not packed._has_kernel(), reason="this processor has no products with packed weights"
)


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0},
    "olmo2": {},
}
"""Model types with what their layers differ in. OLMo 2's are not computed in two parts."""


def decoder(
    kind: str = "llama", *, tied: bool = True, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> Decoder:
    """A random model in float32 whose weights are numbers of `dtype`."""
    config = {
        "model_type": kind,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "initializer_range": 0.3,
        **KINDS[kind],
        **more,
    }
    model = Decoder(DecoderConfig.from_hf(config)).eval()
    init_weights(model, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
            parameter.copy_(parameter.to(dtype))
    return model


def answers(model: Decoder) -> list[list[int]]:
    requests = [Request(prompt, 24) for prompt in PROMPTS]
    generator = Generator(model, decode=lambda ids: " ".join(map(str, ids)))
    return [[token.id for token in done.tokens] for done in generator.run(requests)]


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), *((kind, True) for kind in KINDS)])
def test_numbers_and_answers_stay(kind: str, tied: bool) -> None:
    model, tokens = decoder(kind, tied=tied), torch.arange(60).view(2, 30)
    positions = torch.arange(30).expand(2, 30)
    with torch.inference_mode():
        before = model.logits(model.hidden(tokens, positions))
        said = answers(model)
        assert pack_weights(model)
        after = model.logits(model.hidden(tokens, positions))
    torch.testing.assert_close(after, before, rtol=0, atol=tolerances.LOGITS_FP32)
    assert after.dtype == torch.float32
    assert answers(model) == said
    halves = [type(part).__name__ for part in model.modules()].count("RecursiveScriptModule")
    assert (halves == 0) == (kind == "olmo2"), "its layers run without Python"


@pytest.mark.drawn("packed weights")
def test_where_torchscript_is_gone_the_same_runs_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, positions = torch.arange(60).view(2, 30), torch.arange(30).expand(2, 30)
    models = [decoder("qwen3")]
    models.append(copy.deepcopy(models[0]))
    assert pack_weights(models[0])
    monkeypatch.delattr(torch.jit, "script")
    assert pack_weights(models[1])
    with torch.inference_mode():
        one, other = (model.logits(model.hidden(tokens, positions)) for model in models)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_float32_weights_are_given_back(tied: bool) -> None:
    model = decoder(tied=tied)
    assert pack_weights(model)
    left = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    assert {name: p.dtype for name, p in left.items() if p.numel()} == {
        "model.embed_tokens.weight": torch.float16
    }


def resident_bytes(first: int, end: int) -> int:
    """The memory that the pages between two addresses of this process take."""
    page = mmap.PAGESIZE
    numbers = range(first // page, -(-end // page))
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * numbers.start)
        entries = memoryview(pages.read(8 * len(numbers))).cast("Q")
    return page * sum(entry >> 63 for entry in entries)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc maps blocks alone where it is told to"
)
def test_packed_weights_take_the_memory_of_bf16_and_a_tied_embedding_none() -> None:
    """In a process of its own: in this one memory that earlier tests have freed may be large enough
    for a matrix.
    """
    process = start_call(_packed_weights_take_little, stderr=subprocess.PIPE)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 0, said


def _packed_weights_take_little() -> None:
    """FBGEMM itself takes 512 columns for these 32; the head is in three parts."""
    made: list[Float16Matrix] = []

    class Noted(Float16Matrix):
        def __init__(self, *weights: Any) -> None:
            super().__init__(*weights)
            made.append(self)

    # Nothing else runs in this process.
    packed.Float16Matrix, packed.PART_WEIGHTS = Noted, 1500 * 32  # type: ignore[misc]
    model = decoder(vocab_size=4000, intermediate_size=2048)
    tokens = torch.arange(0, 3960, 66).view(2, 30)
    positions = torch.arange(30).expand(2, 30)
    with torch.inference_mode():
        before = model.logits(model.hidden(tokens, positions))
        assert pack_weights(model)
        after = model.logits(model.hidden(tokens, positions))
    torch.testing.assert_close(after, before, rtol=0, atol=tolerances.LOGITS_FP32)
    left = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert (left, len(made)) == (0, 3 + 4 * 2)
    large = [matrix for matrix in made if matrix.lines * matrix.lanes * 512 * 2 > OWN_BYTES]
    assert len(large) == 3 + 2, "the parts of the head, gate and up of each layer"
    for matrix in large:
        assert matrix.numbers is not None
        first, weights = matrix.numbers.data_ptr(), matrix.shape.numel()
        taken = resident_bytes(first, first + 2 * 512 * matrix.lanes * matrix.lines)
        # Two pages are used in part; the rows are a multiple of the lanes.
        assert 2 * weights <= taken <= 2 * (weights + matrix.lanes * 32) + 2 * mmap.PAGESIZE


@pytest.mark.drawn("packed weights")
@pytest.mark.parametrize("corner_is_alike", [False, True])
def test_another_order_in_memory_is_not_read(
    corner_is_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if corner_is_alike:
        monkeypatch.setattr(fbgemm, "_begins_with", lambda *_: True)
    monkeypatch.setattr(fbgemm, "LANES", (8,))
    model = decoder(vocab_size=4000, intermediate_size=2048)
    said = answers(model)
    assert pack_weights(model)
    assert type(model.model.embed_tokens) is packed.HalfEmbedding
    assert answers(model) == said


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("value", [1 + 2**-12, 70_000.0, -1e30, torch.nan])
def test_a_weight_that_float16_has_not_leaves_the_model_as_it_is(name: str, value: float) -> None:
    model = decoder()
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = value
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert not pack_weights(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=0, atol=0, equal_nan=True)


def test_numbers_below_float16_are_told_from_rounding() -> None:
    model = decoder()
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] = 2.0**-40
    assert pack_weights(model), "a difference of 1e-12 is nobody's"


def test_without_the_kernel_nothing_changes() -> None:
    model, engine = decoder(), torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"
    try:
        assert not pack_weights(model)
    finally:
        torch.backends.quantized.engine = engine
    assert model.model.embed_tokens.weight.dtype == torch.float32


needs_amx = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor does not multiply blocks of bfloat16 numbers"
)


@needs_amx
@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_logits_are_rounded_and_no_more(kind: str) -> None:
    """Also where queries are many enough to be rounded, and over earlier keys."""
    model = decoder(kind, max_position_embeddings=256)
    prompt = torch.randint(97, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    request = Request(prompt, 4, prompt_logprobs=0)

    def scored() -> Tensor:
        generator = Generator(model, decode=str, prefill_tokens=120)
        (done,) = generator.run([request])
        return torch.tensor([token.logprob for token in done.prompt[1:]])

    def read_whole() -> Tensor:
        with torch.inference_mode():
            hidden = model.hidden(torch.tensor([prompt]), torch.arange(len(prompt))[None])
            return model.logits(hidden).log_softmax(-1)

    exact = scored(), read_whole()
    assert pack_weights(model, compute="bf16")
    for one, other in zip((scored(), read_whole()), exact, strict=True):
        off = ((one - other).norm() / other.norm()).item()
        assert 0 < off < tolerances.COMPUTED_BF16


def test_a_server_computes_in_bf16_where_that_is_sooner_and_rounds_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cpu = make_folder(tmp_path / "model"), torch.device("cpu")
    weights = next(folder.glob("*.safetensors"))
    monkeypatch.setattr("ingot.serve.native.compute.multiplies_bfloat16", lambda: True)
    monkeypatch.setattr("ingot.serve.native.compute.ONE_THREAD_WEIGHTS", 1)
    assert serving_compute("auto", folder, cpu, pack=True) == "fp32", "it is stored in float32"
    save_file({name: one.bfloat16() for name, one in load_file(weights).items()}, weights)
    assert serving_compute("auto", folder, cpu, pack=True) == "bf16"
    assert serving_compute("auto", folder, cpu, pack=False) == "fp32", "a single answer"
    assert serving_compute("fp32", folder, cpu, pack=True) == "fp32"
    monkeypatch.undo()
    assert serving_compute("auto", folder, cpu, pack=True) == "fp32", "small, it waits for nothing"
    assert serving_compute("bf16", folder, cpu, pack=False) == "bf16"


@needs_amx
def test_a_server_computes_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "model")
    weights = next(folder.glob("*.safetensors"))
    save_file({name: one.bfloat16() for name, one in load_file(weights).items()}, weights)
    tokens, positions = torch.arange(8)[None], torch.arange(8)[None]
    found = {}
    for asked in ("fp32", "bf16"):
        loaded = load(folder, compute=asked, pack=True)
        assert (loaded.compute, loaded.packed) == (asked, True)
        assert isinstance(loaded.model, Decoder)
        with torch.inference_mode():
            found[asked] = loaded.model.logits(loaded.model.hidden(tokens, positions))
    assert not torch.equal(found["fp32"], found["bf16"])
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert not load(folder, compute="bf16", pack=True).packed


@pytest.mark.drawn("packed weights")
def test_a_server_packs_and_a_single_answer_does_not(tmp_path: Path) -> None:
    rounded = make_folder(tmp_path / "rounded")
    assert not load(rounded, pack=True).packed, "its weights are float32 numbers"
    weights = next(rounded.glob("*.safetensors"))
    save_file({name: one.bfloat16() for name, one in load_file(weights).items()}, weights)
    assert load(rounded, pack=True).packed
    assert not load(rounded).packed


def test_weights_read_in_bf16_are_those_read_in_float32(tmp_path: Path) -> None:
    """Also where they are not packed after all."""
    folder = make_folder(tmp_path / "model")
    file = next(folder.glob("*.safetensors"))
    kept = {name: one.bfloat16() for name, one in load_file(file).items()}
    tokens, positions = torch.arange(8)[None], torch.arange(8)[None]
    for whole in (True, False):
        if not whole:
            kept["model.embed_tokens.weight"][3, 5] = 1e5
        save_file(kept, file)
        read = [load(folder, pack=pack) for pack in (True, False)]
        assert [one.packed for one in read] == [whole, False]
        found = []
        for one in read:
            assert isinstance(one.model, Decoder)
            with torch.inference_mode():
                found.append(one.model.logits(one.model.hidden(tokens, positions)))
        made, expected = found
        torch.testing.assert_close(made, expected, rtol=0, atol=tolerances.LOGITS_FP32)
        assert made.dtype == torch.float32


def test_the_thread_that_loads_ends_and_what_it_raises_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep OpenMP's helpers, with which the engine's are too many to wait actively."""
    threads = []

    def noted(folder: Path, **options: Any) -> LoadedModel:
        threads.append(threading.current_thread())
        return load(folder, **options)

    monkeypatch.setattr("ingot.serve.native.model.load", noted)
    folder = make_folder(tmp_path / "model")
    assert load_in_a_thread(folder, pack=False).kind == "decoder"
    with pytest.raises(WrongInput, match="config"):
        load_in_a_thread(tmp_path / "nowhere")
    assert len(threads) == 2
    assert not any(one is threading.main_thread() or one.is_alive() for one in threads)
