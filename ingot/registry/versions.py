"""The two kinds of registry behind one face: a file and folders on this disk, or the Model Registry
of Vertex AI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ingot.base.reports import EvaluationReport
from ingot.config.recipe import Recipe
from ingot.registry.store import Registry, Turn
from ingot.registry.vertex import VertexRegistry


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
