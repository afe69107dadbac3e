"""Files of gpt-oss in MXFP4: read as transformers dequantises them, in whole and in parts, and
written again as what was read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.checkpoints.export import export_model
from ingot.config.models.experts import DOWN, GATE_UP
from ingot.config.models.weights import weight_files
from ingot.models.hf.folder import load_model, named_tensors
from ingot.models.hf.mxfp4 import PackedStack, dequantised
from tests.models.hf.tiny import CPU
from tests.models.native.test_family import assert_equal, needs_reference, reference
from tests.models.tiny import make_member
from tests.tokenizers.small import chatty

QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def packed(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random numbers in MXFP4 of a stack `[N, A, B]`."""
    generator = torch.Generator().manual_seed(seed)
    *rows, columns = shape
    blocks = torch.randint(0, 256, (*rows, columns // 32, 16), generator=generator)
    scales = torch.randint(118, 126, (*rows, columns // 32), generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def make_packed(folder: Path, *, apart: bool = False) -> Path:
    """A tiny gpt-oss whose experts are in MXFP4, with blocks and scales in one file or `apart`."""
    make_member(folder, "gpt_oss", vocab_size=331)
    file = folder / "model.safetensors"
    tensors, scaled = load_file(file), dict[str, Tensor]()
    for number, name in enumerate(sorted(tensors)):
        if name.endswith((GATE_UP, DOWN)):
            count, columns, rows = tensors.pop(name).shape
            blocks, scales = packed((count, rows, columns), number)
            tensors[f"{name}_blocks"], scaled[f"{name}_scales"] = blocks, scales
    if apart:
        file.unlink()
        for number, part in enumerate((tensors, scaled), 1):
            name = f"model-{number:05d}-of-00002.safetensors"
            save_file(part, folder / name, metadata={"format": "pt"})
    else:
        save_file(tensors | scaled, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZED}))
    return folder


def test_every_number_is_what_transformers_reads() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 2, 16, 16)
    scales = torch.tensor([0, 1, 7, 100, 126, 127, 128, 140, 200, 247, 248, 249, 250, 251, 252, 2])
    scales = scales.to(torch.uint8).expand(1, 2, 16)
    wanted = convert_moe_packed_tensors(blocks, scales)
    found = dequantised(blocks, scales).mT
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(found, wanted)


def test_a_part_is_that_of_the_whole() -> None:
    blocks, scales = packed((3, 10, 96))
    stack = PackedStack(_Slice(blocks), _Slice(scales))
    whole = dequantised(blocks, scales).mT
    assert stack.get_shape() == list(whole.shape) == [3, 96, 10]
    assert torch.equal(stack[:], whole)
    for part in (
        (slice(1, 2), slice(0, 96), slice(0, 10)),
        (slice(0, 3), slice(5, 70), slice(2, 9)),
        (slice(2, 3), slice(32, 64), slice(9, 10)),
    ):
        assert torch.equal(stack[part], whole[part])


class _Slice:
    """A tensor as a slice of a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor:
        return self._tensor[wanted]


@pytest.mark.parametrize("apart", [False, True])
def test_a_model_is_read_and_written_as_bf16(apart: bool, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    needs_reference("gpt_oss")
    folder = make_packed(tmp_path / "packed", apart=apart)
    ours = load_model(folder, device=CPU)
    export_model(ours, chatty(), tmp_path / "out", export_type="bf16", lineage={})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    written = load_file(tmp_path / "out" / "model.safetensors")
    given: dict[str, Tensor] = {}
    for file in weight_files(folder):
        given |= load_file(file)
    stacks = [name for name in written if name.endswith((GATE_UP, DOWN))]
    assert len(stacks) == 2 * 4
    for name in stacks:
        wanted = convert_moe_packed_tensors(given[f"{name}_blocks"], given[f"{name}_scales"])
        assert torch.equal(written[name], wanted), name
    assert_equal(load_model(tmp_path / "out", device=CPU), reference(tmp_path / "out"))
    shapes = {name: tuple(one.shape) for name, one in ours.named_parameters()}
    for name, tensor in named_tensors(folder, shapes, ours.config):
        assert torch.equal(tensor.float(), ours.get_parameter(name)), name


def test_what_lacks_its_scales_is_refused(tmp_path: Path) -> None:
    folder = make_packed(tmp_path / "packed")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.1.mlp.{DOWN}_scales"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WrongInput, match=rf"model\.layers\.1\.mlp\.{DOWN} is missing"):
        load_model(folder, device=CPU)
