"""Files written a tensor at a time are those that the format's own library writes, byte for
byte.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ingot.models.hf.tensorfile import TensorSpec, save_weights, stream_weights, write_tensors


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (3, 5), "b": (7,), "c.empty": (0, 4), "d.number": (), "e": (2, 3, 4)}
    return {
        name: torch.randn(shape, generator=generator).mul(9).to(dtype)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
)
def test_the_bytes_are_the_librarys(dtype: torch.dtype, tmp_path: Path) -> None:
    made = tensors(dtype)
    save_file(made, tmp_path / "theirs", metadata={"format": "pt"})
    write_tensors(
        tmp_path / "ours",
        {name: TensorSpec(tuple(tensor.shape), dtype) for name, tensor in made.items()},
        iter(made.items()),
    )
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_types_of_any_size_lie_where_they_may(tmp_path: Path) -> None:
    made = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "whole": torch.arange(3.0),
        "long": torch.arange(3),
    }
    (file,) = save_weights(made, tmp_path)
    found = load_file(file)
    assert found.keys() == made.keys()
    assert all(torch.equal(found[name], made[name]) for name in made)
    with pytest.raises(ValueError, match=r"whole, torch.float32, would lie at byte 3"):
        write_tensors(
            tmp_path / "bad",
            {name: TensorSpec((3,), made[name].dtype) for name in ("flags", "whole")},
            iter(made.items()),
        )


def test_tensors_are_turned_into_the_type_that_was_told_and_views_are_laid_out(
    tmp_path: Path,
) -> None:
    matrix = torch.randn(4, 6)
    (file,) = stream_weights({"t": TensorSpec((6, 4), torch.bfloat16)}, [("t", matrix.T)], tmp_path)
    assert torch.equal(load_file(file)["t"], matrix.T.bfloat16())


def test_one_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def coming() -> Iterator[tuple[str, Tensor]]:
        for number in range(6):
            assert sum(one() is not None for one in alive) <= 1, "the one before the last is gone"
            tensor = torch.full((10,), float(number))
            alive.append(weakref.ref(tensor))
            yield f"t{number}", tensor

    files = list(
        stream_weights(
            {f"t{number}": TensorSpec((10,), torch.float32) for number in range(6)},
            coming(),
            tmp_path,
            shard_bytes=80,
        )
    )
    assert len(files) == 3
    assert all(
        bool((load_file(files[number // 2])[f"t{number}"] == number).all()) for number in range(6)
    )


@pytest.mark.parametrize("came", [("other", torch.zeros(2)), ("t", torch.zeros(3))])
def test_what_was_not_told_is_refused(came: tuple[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"came where t \[2\] was told"):
        stream_weights({"t": TensorSpec((2,), torch.float32)}, [came], tmp_path)
