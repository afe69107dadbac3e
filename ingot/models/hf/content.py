"""Compares the tensors of a model folder with the record of its export (`config/models/content.py`)
while they are loaded, so that no second pass is needed and each rank compares a share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ingot.config.models.content import changed_files, refuse_changed, tensor_digests
from ingot.config.models.lineage import read_lineage
from ingot.models.hf.compressed import CompressedMatrix


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's bytes, at memory speed (17 GB/s per core; SHA-256 takes 13 times as
    long).
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128(flat.view(torch.uint8).numpy().data).hexdigest()


@dataclass(frozen=True)
class Share:
    """The tensors compared by one of `world` readers of the same folder: every `world`th one."""

    rank: int = 0
    world: int = 1


ALL = Share()


@dataclass
class ContentCheck:
    """Compares what is read of `folder` with its record.

    `wants` says whether to pass a tensor to `compare`; `finish` raises if any of them differed.
    """

    folder: Path
    digests: Mapping[str, str]
    share: Share = ALL
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Names of tensors that differ, by file."""

    def __post_init__(self) -> None:
        names = list(self.digests)
        self._mine = frozenset(names[self.share.rank :: self.share.world])

    def wants(self, name: str) -> bool:
        """Whether this reader compares a tensor; a tensor without a record is compared by all
        readers.
        """
        return bool(self.digests) and (name in self._mine or name not in self.digests)

    def compare(self, file: Path, name: str, tensor: Tensor) -> None:
        """Compare a whole tensor with its record, if it is in this reader's share."""
        if self.wants(name) and digest(tensor) != self.digests.get(name):
            self.changed.setdefault(file.name, []).append(name)

    def checked(self, file: Path, name: str, stored: Any) -> Any:
        """Compare what this reader wants of a stored tensor, given as a slice of its file, or of
        the tensors that it is made of; returns it, in memory if it was read for that.
        """
        if isinstance(stored, CompressedMatrix):
            for part, (its_file, there) in stored.parts.items():
                if self.wants(part):
                    self.compare(its_file, part, there[:])
            return stored
        if not self.wants(name):
            return stored
        tensor: Tensor = stored[:]
        self.compare(file, name, tensor)
        return tensor

    def finish(self) -> None:
        """Raises WrongInput if something differed."""
        if self.changed:
            refuse_changed(self.folder, self.changed)


def content_check(folder: Path, share: Share = ALL) -> ContentCheck:
    """A check for the tensors of a folder; its other files are compared here."""
    lineage = read_lineage(folder)
    check = ContentCheck(folder, tensor_digests(lineage), share)
    check.changed |= {name: [] for name in changed_files(folder, lineage)}
    return check


def compared(
    check: ContentCheck, tensors: Iterable[tuple[Path, str, Tensor]]
) -> Iterable[tuple[str, Tensor]]:
    """Pass the tensors on, comparing each; raises as `finish` after the last one."""
    for file, name, tensor in tensors:
        check.compare(file, name, tensor)
        yield name, tensor
    check.finish()
