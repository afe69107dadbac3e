"""Weights of a model that is spread: each rank draws or reads its own part, the same numbers as one
process has, and never holds more.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.base.errors import WrongInput
from ingot.config.sections.layout import Parallel
from ingot.config.sections.lora import Lora
from ingot.models.adapters.lora import add_lora, init_adapter, lora_layers
from ingot.models.adapters.peft import load_adapter, save_adapter
from ingot.models.hf import folder as folders
from ingot.models.kinds import AnyModel
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import fill_normal, local_tensor, shard_slices
from ingot.models.spec import ModelSpec, build_model, create_model, materialize_model
from ingot.parallel.apply import WrapSettings, apply_wrappers
from ingot.parallel.mesh import Mesh, running_mesh
from tests.exhaustive import EXHAUSTIVE, some_of
from tests.models.tiny import make_member, make_reference
from tests.ranks import run_ranks

CPU = torch.device("cpu")
OTHERS: list[dict[str, int]] = [{"shard": 4}, {"pipeline": 2, "virtual": 2, "shard": 2}]
LAYOUTS: list[dict[str, int]] = [
    {"tensor": 2, "shard": 2},
    *some_of(OTHERS, 1, "weights"),
]
"""What `tensor` and `shard` both cut, and one that the commit draws."""
if EXHAUSTIVE:
    LAYOUTS += [{"tensor": 4}, {"pipeline": 2, "tensor": 2}]
FOLDERS = ("tied", "untied", "large")
SIZES = {"num_key_value_heads": 4, "num_hidden_layers": 4}
ADAPTERS = {
    "tied": Lora(rank=3, alpha=6.0),
    "untied": Lora(rank=3, alpha=6.0, kind="dora"),  # its file has norms of the rows of all ranks
}


class Largest(TorchDispatchMode):
    """Notes the most elements that a float tensor with memory of its own ever had. A window on a
    file that is mapped has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self._mapped: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if func is torch.ops.aten.set_.source_Storage:
                self._mapped.add(storage.data_ptr())
            elif tensor.is_floating_point() and storage.data_ptr() not in self._mapped:
                self.elements = max(self.elements, storage.nbytes() // tensor.element_size())
        return out


class Counted:
    """A reader of a safetensors file that counts the bytes of the slices that are read through
    it.
    """

    def __init__(self, reader: Any, count: list[int]) -> None:
        self._reader, self._count = reader, count

    def __enter__(self) -> Counted:
        self._reader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reader.__exit__(*error)

    def keys(self) -> Any:
        return self._reader.keys()

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self._reader.get_slice(name), self._count)


class CountedSlice:
    def __init__(self, stored: Any, count: list[int]) -> None:
        self._stored, self._count = stored, count

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def __getitem__(self, wanted: Any) -> Tensor:
        part: Tensor = self._stored[wanted]
        self._count[0] += part.numel() * part.element_size()
        return part


def wrapped(
    model_spec: ModelSpec, layout: dict[str, int], mesh: Mesh, lora: Lora | None = None
) -> AnyModel:
    """On `meta`, spread."""
    model = create_model(model_spec, 0)
    if lora is not None:
        add_lora(model, lora, 0)
    return apply_wrappers(model, mesh, WrapSettings(Parallel(**layout)))


def parts_of(model: nn.Module, whole: nn.Module) -> int:
    """See that a model has its part of another one's parameters, bit for bit; how many numbers that
    is.
    """
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(
            local_tensor(parameter.detach()), wanted[name].detach()[shard_slices(parameter)]
        ), name
    return sum(local_tensor(parameter.detach()).numel() for parameter in model.parameters())


def drawing_of(folder: Path, *, random: bool = False) -> ModelSpec:
    return ModelSpec(
        "decoder",
        DecoderConfig.from_hf(json.loads((folder / "config.json").read_bytes())),
        None if random else folder,
        random,
    )


def on_ranks(root: Path) -> dict[str, list[Any]]:
    """All layouts: drawn, read, read under an adapter, adapters read."""
    told: dict[str, list[Any]] = {}
    original = folders._opened
    with running_mesh():
        for layout in LAYOUTS:
            rows = told.setdefault(str(layout), [])
            with running_mesh(Parallel(**layout)) as mesh:
                for name in FOLDERS:
                    random, stored = drawing_of(root / name, random=True), drawing_of(root / name)
                    model = wrapped(random, layout, mesh)
                    materialize_model(model, random, 3, mesh.device, filled=True)
                    parts_of(model, build_model(random, 3, filled=True))
                    model, count, largest = wrapped(stored, layout, mesh), [0], Largest()
                    folders._opened = lambda file, count=count: Counted(original(file), count)  # type: ignore[misc]
                    try:
                        with largest:
                            materialize_model(model, stored, 0, mesh.device, filled=True)
                    finally:
                        folders._opened = original
                    whole = build_model(stored, 0, filled=True)
                    share = parts_of(model, whole)
                    parts = max(
                        local_tensor(parameter.detach()).numel() for parameter in model.parameters()
                    )
                    rows.append(
                        (
                            name,
                            count[0],
                            share,
                            largest.elements,
                            parts,
                            sum(parameter.numel() for parameter in whole.parameters()),
                        )
                    )
                _adapters(root, layout, mesh)
    return told


def _adapters(root: Path, layout: dict[str, int], mesh: Mesh) -> None:
    """A new adapter is drawn in parts, one in a folder is read in parts; the base beneath it
    too.
    """
    for name in ADAPTERS:
        stored = drawing_of(root / name)
        model, whole = (
            wrapped(stored, layout, mesh, ADAPTERS[name]),
            build_model(stored, 0, filled=True),
        )
        add_lora(whole, ADAPTERS[name], 0)
        materialize_model(model, stored, 0, mesh.device, filled=True)
        init_adapter(model, 0)
        parts_of(model, whole)
        load_adapter(model, root / f"{name}-adapter")
        load_adapter(whole, root / f"{name}-adapter")
        assert all(bool((layer.lora_B != 0).any()) for layer in lora_layers(whole).values())
        parts_of(model, whole)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weights")
    make_member(made / "tied", "qwen3-tied", vocab_size=61, **SIZES)
    make_reference(made / "untied", vocab_size=257, **SIZES)
    # Large enough that a chunk of drawn rows, or a norm, is small beside a matrix.
    make_reference(
        made / "large",
        vocab_size=509,
        hidden_size=128,
        intermediate_size=256,
        dtype=torch.bfloat16,
        **SIZES,
    )
    for name, knobs in ADAPTERS.items():
        model = build_model(drawing_of(made / name), 0, filled=True)
        add_lora(model, knobs, 0)
        with torch.no_grad():
            for key, layer in lora_layers(model).items():
                fill_normal(layer.lora_B, 1, key, 0.1)
                if layer.is_dora:
                    layer.lora_magnitude.add_(0.1)
        save_adapter(model, made / f"{name}-adapter", base=str(made / name), kind="decoder")
    return made


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, list[Any]]]:
    return run_ranks(4, on_ranks, root, timeout_s=200)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_reads_its_part_and_never_holds_more(
    layout: dict[str, int], ranks: list[dict[str, list[Any]]]
) -> None:
    """That it is the right part was seen on the ranks."""
    for rows in zip(*(rank[str(layout)] for rank in ranks), strict=True):
        # The last ranks have room for as many rows as the first ones, whether there are so many or
        # not.
        most = max(part for _, _, _, _, part, _ in rows)
        for name, read, share, largest, _, whole in rows:
            assert read == share * (2 if name == "large" else 4), name
            assert largest <= most, name
            # Stages are whole layers, and the embedding and the head lie on one each.
            assert share < whole * (0.4 if "pipeline" not in layout else 0.48), name
        assert sum(share for _, _, share, _, _, _ in rows) >= rows[0][5]


def twin_that_differs(root: Path) -> str:
    with running_mesh(Parallel(shard=2)) as mesh:
        stored = drawing_of(root)
        model = wrapped(stored, {"shard": 2}, mesh)
        try:
            materialize_model(model, stored, 0, mesh.device, filled=True)
        except WrongInput as error:
            return str(error)
        return ""


def test_the_stored_twin_of_a_tied_head_is_compared_by_parts(root: Path, tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    for folder, last in ((same, 0.0), (other, 1.0)):
        folder.mkdir()
        (folder / "config.json").write_text((root / "tied" / "config.json").read_text())
        tensors = load_file(root / "tied" / "model.safetensors")
        tensors[folders.HEAD] = tensors[folders.EMBEDDING].clone()
        tensors[folders.HEAD][-1] += last
        save_file(tensors, folder / "model.safetensors")
    assert run_ranks(2, twin_that_differs, same) == ["", ""]
    first, second = run_ranks(2, twin_that_differs, other)
    assert first == ""
    assert "ties lm_head.weight to model.embed_tokens.weight, but the two differ" in second


def test_a_rank_without_rows_asks_for_nothing(tmp_path: Path) -> None:
    save_file({"norm": torch.arange(3.0)}, tmp_path / "one.safetensors")
    with folders._opened(tmp_path / "one.safetensors") as reader:
        assert folders._part(reader.get_slice("norm"), (slice(3, 3),)).shape == (0,)
        assert torch.equal(
            folders._part(reader.get_slice("norm"), (slice(1, 3),)), torch.tensor([1.0, 2.0])
        )


def real_parts(folder: Path) -> tuple[int, int]:
    layout = {"shard": 2, "tensor": 3}
    with running_mesh(Parallel(**layout)) as mesh:
        stored = drawing_of(folder)
        model = wrapped(stored, layout, mesh)
        materialize_model(model, stored, 0, mesh.device, filled=True)
        whole = build_model(stored, 0, filled=True)
        return parts_of(model, whole), sum(parameter.numel() for parameter in whole.parameters())


@pytest.mark.slow
def test_a_real_model_is_read_in_parts(smollm2: Path) -> None:
    for share, whole in run_ranks(6, real_parts, smollm2, timeout_s=200):
        assert share < whole / 5


def test_the_draft_has_no_memory(root: Path) -> None:
    model = create_model(drawing_of(root / "large"), 0)
    assert isinstance(model, Decoder)
    assert all(parameter.is_meta for parameter in model.parameters())
