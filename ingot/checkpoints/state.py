"""A training state as named tensors, and back; names do not depend on layout, wrappers or the
optimizer's numbering.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.models.parameters import local
from ingot.parallel.masters import Master, Masters
from ingot.parallel.mesh import Mesh

MODEL, OPTIMIZER = "model.", "optimizer."


def training_tensors(masters: Masters, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """`model.NAME` for every parameter that is trained, `optimizer.NAME.KEY` for its state
    (`exp_avg`, ...).

    Each is spread over ranks as the parameter is. Memory is shared, not copied, but where it is on
    the host and the parameter is not: `settle` brings what was loaded there. What is frozen (the
    base under an adapter) is not training's to save: it comes from where the run started.
    """
    return {
        name: tensor if master is None else master.spread(tensor)
        for name, tensor, master in _mine(masters, optimizer)
    }


def settle(masters: Masters, optimizer: Optimizer | None, tensors: Mapping[str, Tensor]) -> None:
    """After loading into what `training_tensors` gave."""
    for name, tensor, _ in _mine(masters, optimizer):
        loaded = local(tensors[name])
        if loaded.device != tensor.device or loaded.data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded)


def _mine(
    masters: Masters, optimizer: Optimizer | None
) -> Iterator[tuple[str, Tensor, Master | None]]:
    """This rank's tensors by their names, each with the master that it is spread as; None for one
    number for all of a parameter.
    """
    for master in masters:
        yield MODEL + master.name, master.tensor.detach(), master
        for key, value in (
            sorted(optimizer.state.get(master.tensor, {}).items()) if optimizer is not None else ()
        ):
            if isinstance(value, Tensor):
                yield (
                    f"{OPTIMIZER}{master.name}.{key}",
                    value,
                    master if value.ndim or not master.tensor.ndim else None,
                )


def make_room(masters: Masters, optimizer: Optimizer, stored: Iterable[str]) -> None:
    """Give a fresh optimizer empty state of the stored kinds, so that `training_tensors` has a
    place for each.
    """
    stored = set(stored)
    for master in masters:
        prefix = f"{OPTIMIZER}{master.name}."
        for key in sorted(
            full.removeprefix(prefix)
            for full in stored
            if full.startswith(prefix) and "." not in full.removeprefix(prefix)
        ):
            # Adam's step counter is one number a parameter, and fused kernels want it beside the
            # parameter. State is float32, whatever weights are.
            tensor = master.tensor
            shape = () if key == "step" else tensor.shape
            optimizer.state[tensor][key] = torch.zeros(
                shape, dtype=torch.float32, device=tensor.device
            )


def misfits(tensors: Mapping[str, Tensor], there: Mapping[str, Any], mesh: Mesh) -> list[str]:
    """What differs between the tensors of this rank and the stored ones, which all stages of a
    pipeline together must have.
    """
    names = sorted(there)
    wrong = [f"{name} is missing" for name in sorted(tensors.keys() - there.keys())]
    wrong += [
        f"{name} is {list(size)}, {list(tensors[name].shape)} is wanted"
        for name in names
        if name in tensors
        and (size := getattr(there[name], "size", None)) is not None
        and size != tensors[name].shape
    ]
    elsewhere, *holders = mesh.pipeline.agree(
        len(wrong), *(float(name in tensors) for name in names)
    )
    unknown = [
        f"{name} is not part of this model"
        for name, count in zip(names, holders, strict=True)
        if not count
    ]
    # Where only another stage has something to tell, this one stops with it.
    return [*wrong, *unknown] or ["another stage of the pipeline says what"] * bool(elsewhere)
