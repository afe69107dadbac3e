"""Whether a model folder holds what was written there: a hash of each tensor, made at export, is
compared while the model is read.

It guards against damage and mistakes, not against somebody who changes the record as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ingot.base.errors import WrongInput

CONTENT = "content"
"""The record's key in `ingot.json`. Folders that older versions wrote have none."""


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's bytes, at the speed of memory (17 GB/s a core; SHA-256 takes 13 times as
    long).
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128(flat.view(torch.uint8).numpy().data).hexdigest()


@dataclass(frozen=True)
class Share:
    """The tensors that one of `world` readers of the same folder compares: each `world`th."""

    rank: int = 0
    world: int = 1


ALL = Share()


@dataclass
class ContentCheck:
    """Compares what is read of `folder` with its record.

    `wants` says whether to hand a tensor to `compare`; `finish` raises when any of them differed.
    """

    folder: Path
    digests: Mapping[str, str]
    share: Share = ALL
    changed: dict[str, list[str]] = field(default_factory=dict)
    """What differs, by file."""

    def __post_init__(self) -> None:
        names = list(self.digests)
        self._mine = frozenset(names[self.share.rank :: self.share.world])

    def wants(self, name: str) -> bool:
        """Whether this reader compares a tensor; all compare one that the record does not know."""
        return bool(self.digests) and (name in self._mine or name not in self.digests)

    def compare(self, file: Path, name: str, tensor: Tensor) -> None:
        """Compare a whole tensor with its record, if this reader is to."""
        if self.wants(name) and digest(tensor) != self.digests.get(name):
            self.changed.setdefault(file.name, []).append(name)

    def problem(self) -> str | None:
        """What differs, in words."""
        if not self.changed:
            return None
        what = "; ".join(
            f"{file}{f' ({_some(names)})' if names else ''}" for file, names in self.changed.items()
        )
        return f"{self.folder} does not hold what was exported there: {what} changed since"

    def finish(self) -> None:
        """Raises WrongInput when something differed."""
        if problem := self.problem():
            raise WrongInput(
                f"{problem}; export or fetch the model again, or, if that was on purpose, accept it"
                f" with `ingot import {self.folder} NEW`"
            )


def tensor_digests(lineage: Mapping[str, Any] | None) -> dict[str, str]:
    """The hashes of a folder's tensors from its `ingot.json`; none where it has no record."""
    content = (lineage or {}).get(CONTENT)
    tensors = content.get("tensors") if isinstance(content, dict) else None
    return dict(tensors) if isinstance(tensors, dict) else {}


def compared(
    check: ContentCheck, tensors: Iterable[tuple[Path, str, Tensor]]
) -> Iterable[tuple[str, Tensor]]:
    """Tensors as they come, each compared on its way; raises as `finish` after the last one."""
    for file, name, tensor in tensors:
        check.compare(file, name, tensor)
        yield name, tensor
    check.finish()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
