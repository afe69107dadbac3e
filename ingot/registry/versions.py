"""The two kinds of registry behind one face: a file and folders on this disk, or the Model Registry
of Vertex AI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ingot.base.reports import EvaluationReport


@dataclass(frozen=True)
class Turn:
    """One move of the live pointer."""

    version: int
    time: float
    reason: str


@dataclass(frozen=True)
class Version:
    """One registered model. `folder` is the registry's own copy of the model folder."""

    name: str
    number: int
    model_hash: str
    tokenizer_hash: str
    folder: Path
    report: EvaluationReport
    lineage: dict[str, Any]
    created: float

    @property
    def where(self) -> str:
        return str(self.folder)


@dataclass(frozen=True)
class VertexVersion:
    """One registered model in one container, which says how it is served; the same files in another
    container are another version.

    `where` is the folder in the bucket, `resource` the service's name for it, `classifies` whether
    it gives labels, `container` tells its container from others.
    """

    name: str
    number: int
    model_hash: str
    tokenizer_hash: str
    report: EvaluationReport
    lineage: dict[str, Any]
    created: float
    where: str
    resource: str
    classifies: bool
    engine: str
    container: str


class Registered(Protocol):
    """One registered model, wherever it lies: `where` is a folder, or an address in a bucket."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def model_hash(self) -> str: ...
    @property
    def tokenizer_hash(self) -> str: ...
    @property
    def report(self) -> EvaluationReport: ...
    @property
    def lineage(self) -> dict[str, Any]: ...
    @property
    def created(self) -> float: ...
    @property
    def where(self) -> str: ...


AnyVersion = TypeVar("AnyVersion", bound=Registered)


class VersionStore(Protocol[AnyVersion]):
    """Versions of models by name, their reports, and which is live. The methods mean and raise what
    those of `store.Registry` do.
    """

    @property
    def place(self) -> str:
        """Where the registry is, for messages."""

    def names(self) -> list[str]: ...
    def versions(self, name: str) -> list[AnyVersion]: ...
    def version(self, name: str, number: int) -> AnyVersion: ...
    def live(self, name: str) -> AnyVersion | None: ...
    def find(self, name: str, report: EvaluationReport) -> AnyVersion | None: ...
    def history(self, name: str) -> Sequence[Turn]: ...
    def add(
        self, name: str, folder: Path, report: EvaluationReport, lineage: Mapping[str, Any]
    ) -> AnyVersion: ...
    def point(
        self, name: str, number: int, reason: str, *, instead_of: int | None = -1
    ) -> None: ...
    def rollback(self, name: str, reason: str) -> AnyVersion: ...
    def check(self, version: AnyVersion, *, checksums: bool = False) -> None: ...
    def fetch(self, version: AnyVersion) -> Path:
        """The version's files as a folder of this disk."""
